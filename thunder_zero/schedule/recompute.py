"""Computes values of forward again in backward instead of saving them: ``Policy.recompute``.

Backward reads values of forward. A value is not saved if it can be computed again from other saved values, or from
fewer bytes. Its operations are copied right before the first operation of backward that needs them::

    compute h  <- x, w                      compute h  <- x, w
    compute a  <- h                         compute a  <- h
    compute b  <- a                         compute b  <- a
    ... backward ...               -->      ... backward ...
                                            compute a_again <- h
                                            compute b_again <- a_again
    compute gw <- g, b                      compute gw <- g, b_again
    compute gh <- g, a                      compute gh <- g, a_again

The saved values are a minimum cut: the fewest bytes from which cheap operations can compute all other values. Views of
one memory count once. Saving a parameter costs 0 bytes, and so does saving an input that operations of backward read.
Saving any other input costs its bytes, since the caller may have dropped it.

A recomputed operation may read a gathered parameter only while backward holds it for other operations. So recomputing
adds no gather, starts no gather earlier, and frees no parameter later. The pass runs after all passes that place
collectives: its choice depends on the shapes of inputs, but launches must not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from thunder_zero.plan.params import ROOT
from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.lifetimes import last_reads
from thunder_zero.schedule.ops import Compute, Gather, Op, Return, Wait, ends, reading
from thunder_zero.schedule.regather import copy_chain, let_views_follow
from thunder_zero.schedule.timeline import Timeline, overwritten
from thunder_zero.schedule.units import RECOMPUTED, Segments, segments


def recompute(timeline: Timeline) -> Timeline:
    """Recompute in backward the values that the policy allows, so that forward saves the fewest bytes."""
    has_backward = timeline.backward_start < len(timeline.ops)
    if not has_backward or (timeline.plan.policy.recompute == "none" and not timeline.plan.recomputed):
        return timeline
    phases = _Phases(timeline)
    refused: set[int] = set()  # indices of operations that would read a parameter that backward does not have
    while True:
        placement = _Placement(phases, _chain(phases, refused))
        placement.run()
        if placement.refused <= refused:
            return timeline.with_ops(placement.ops, placement.values)
        refused |= placement.refused


@dataclass(frozen=True)
class _Phases:
    """A timeline of both phases, with cached properties for recomputing."""

    timeline: Timeline

    @cached_property
    def writer(self) -> dict[str, int]:
        """A mapping from values of forward to the index of their writer."""
        return {name: index for name, index in self.timeline.writer.items() if index < self.timeline.backward_start}

    @cached_property
    def segments(self) -> Segments:
        """The segments of forward; empty if no unit is recomputed whole."""
        if self.timeline.plan.recomputed:
            return segments(self.timeline)
        return Segments((), frozenset())

    @cached_property
    def gathered(self) -> dict[str, tuple[str, ...]]:
        """A mapping from derived values to the gathered parameters (values) that they are computed from."""
        return gathered_from(self.timeline)

    @cached_property
    def available(self) -> dict[str, range]:
        """A mapping from forward's gathered parameters to the indices where backward holds them without recomputing."""
        timeline = self.timeline
        last = last_reads(timeline, self.gathered)
        result: dict[str, range] = {}
        by_path: defaultdict[str, list[str]] = defaultdict(list)
        for index, name, param in timeline.gathered:
            may_stay = param.resident or timeline.plan.may_serve_copies(param)
            stop = len(timeline.ops) if may_stay else last[name] + 1
            if not timeline.ops[index].backward:
                by_path[param.path].append(name)
                result[name] = range(index, stop if param.kept_unsharded else 0)
            else:
                result.update(dict.fromkeys(by_path[param.path], range(index, stop)))
        return result

    @cached_property
    def first_reader(self) -> dict[str, int]:
        """A mapping from values of forward to the index of the first computation of backward that reads them."""
        result: dict[str, int] = {}
        for index, op in enumerate(self.timeline.ops):
            for name in op.reads if op.backward and isinstance(op, Compute) else ():
                if name in self.writer:
                    result.setdefault(name, index)
        return result

    @cached_property
    def overwritten(self) -> frozenset[str]:
        """The values whose memory is overwritten. They must be saved, and no recomputed operation may read them."""
        return overwritten(self.timeline)

    @cached_property
    def fixed(self) -> frozenset[str]:
        """The memory that backward's operations, other than computations, read."""
        ops = (op for op in self.timeline.ops if op.backward and not isinstance(op, Compute | Return))
        return frozenset(self.timeline.memory(name) for op in ops for name in op.reads)

    @cached_property
    def free_inputs(self) -> frozenset[str]:
        """The inputs that cost no saved bytes: parameters, and inputs that operations of backward read."""
        ops = (op for op in self.timeline.ops if op.backward and not isinstance(op, Return))
        read = {name for op in ops for name in op.reads}
        return frozenset(name for name, path in self.timeline.inputs.items() if path is not None or name in read)

    @cached_property
    def copied(self) -> frozenset[int]:
        """The numbers of forward's computations that earlier passes already copied into backward."""
        ops = (op for op in self.timeline.ops if isinstance(op, Compute))
        return frozenset(op.number for op in ops if op.backward and op.repeated)

    def may_repeat(self, index: int) -> bool:
        """Return whether backward may repeat the operation at ``index``, an index of forward."""
        op = self.timeline.ops[index]
        unit = self.segments.unit_at[index] if index < len(self.segments.unit_at) else ROOT
        return (
            isinstance(op, Compute)
            and op.repeatable
            and (
                (op.cheap and self.timeline.plan.policy.recompute != "none")
                or (unit != ROOT and op.work in RECOMPUTED)
                or op.number in self.copied
            )
            and self.overwritten.isdisjoint(op.reads)
            and all(self.may_read(name) for name in op.reads if name in self.gathered)
        )

    def may_read(self, name: str) -> bool:
        """Return whether backward holds, or may recompute, a derived value of forward."""
        index = self.writer[name]
        if any(self.available[full].stop <= self.timeline.backward_start for full in self.gathered[name]):
            return False
        return isinstance(self.timeline.ops[index], Wait) or name in self.first_reader or self.may_repeat(index)


def _chain(phases: _Phases, refused: set[int]) -> dict[str, int]:
    """Return the values of forward that backward computes again, mapped to the index of their writer."""
    nodes, made_from, wanted = _graph(phases, refused)
    node_of = {memory: index for index, memory in enumerate(nodes)}
    returns = (op for op in phases.timeline.ops if isinstance(op, Return))
    outputs = {phases.timeline.memory(name) for op in returns for name in op.reads}
    nbytes = [0 if memory in phases.free_inputs else phases.timeline.nbytes(memory) for memory in nodes]
    uncut = sum(nbytes) + 1
    for index, memory in enumerate(nodes):
        if memory in outputs and memory in phases.writer and memory not in wanted:
            nbytes[index] = uncut  # never save an output that backward does not read: the caller may overwrite it
    parents = [
        None if sources is None else {node_of[memory] for memory in sources} for sources in map(made_from.get, nodes)
    ]
    _, recomputed = cheapest_to_keep(nbytes, parents, {node_of[memory] for memory in wanted})
    computed = {nodes[index] for index in recomputed}
    return {name: index for name, index in phases.writer.items() if _is_computed(phases, name, computed, node_of)}


def _is_computed(phases: _Phases, name: str, computed: set[str], nodes: Mapping[str, int]) -> bool:
    if name in phases.gathered:  # derived: backward holds the value, or can compute it again
        return name not in phases.first_reader and isinstance(phases.timeline.ops[phases.writer[name]], Compute)
    memory = phases.timeline.memory(name)
    return memory in computed or (memory in nodes and memory != name)  # a view of saved memory costs nothing


def _graph(phases: _Phases, refused: set[int]) -> tuple[list[str], dict[str, set[str] | None], set[str]]:
    """Return three things: the memories that recomputing may need, in forward's order, their sources, and the memories
    that backward reads. The sources of a memory are the memories from which it can be computed again, or None."""
    wanted = {
        phases.timeline.memory(name)
        for name in phases.first_reader
        if name not in phases.gathered
        and name not in phases.overwritten
        and phases.timeline.memory(name) not in phases.gathered
    }
    made_from: dict[str, set[str] | None] = {}
    todo = list(wanted)
    while todo:
        memory = todo.pop()
        if memory in made_from:
            continue
        index = phases.writer.get(memory)
        made_from[memory] = None
        is_kept = memory in phases.segments.saved or memory in phases.fixed
        if not is_kept and index is not None and index not in refused and phases.may_repeat(index):
            reads = phases.timeline.ops[index].reads
            made_from[memory] = {phases.timeline.memory(read) for read in reads if read not in phases.gathered}
            todo += made_from[memory] or ()
    nodes = sorted(made_from, key=lambda memory: (phases.writer.get(memory, -1), memory))
    return nodes, made_from, wanted


def cheapest_to_keep(
    nbytes: Sequence[int], made_from: Sequence[Collection[int] | None], wanted: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the values to keep, and those to compute again, so that the fewest bytes are kept: a minimum cut.

    If there are several minimum cuts, choose the cut that recomputes least. It is unique, so all ranks choose it.
    ``made_from`` has, for each value, the values from which it can be computed again; None if that is impossible.

    >>> cheapest_to_keep([4, 8, 8], [None, {0}, {1}], wanted={1, 2})
    ({0}, {1, 2})
    """
    # Value n is an edge from node 2n to node 2n + 1, its bytes the capacity. Edges without a capacity are never cut.
    network = nx.DiGraph()
    network.add_nodes_from(("start", "end"))
    for value, (size, sources) in enumerate(zip(nbytes, made_from, strict=True)):
        network.add_edge("start" if sources is None else 2 * value, 2 * value + 1, capacity=size)
        network.add_edges_from((2 * source + 1, 2 * value) for source in sources or ())
    network.add_edges_from((2 * value + 1, "end") for value in wanted)
    # Networkx returns the minimum cut nearest to the end: all nodes that can still reach the end are behind the cut.
    _, (_, nodes_behind) = nx.minimum_cut(network, "start", "end", flow_func=boykov_kolmogorov)
    needed = {value for value in range(len(nbytes)) if 2 * value + 1 in nodes_behind}
    recomputed = {value for value in needed if 2 * value in nodes_behind}
    return needed - recomputed, recomputed


class _Placement:
    """The operations of a timeline, with recomputed operations where backward first needs them."""

    def __init__(self, phases: _Phases, chain: Mapping[str, int]) -> None:
        self.phases = phases
        self.chain = chain
        self.ops: list[Op] = []
        self.values = dict(phases.timeline.values)
        self.refused: set[int] = set()
        self.names: dict[str, str] = {}  # value of forward -> its copy in backward
        self.dropped: dict[str, str] = {}  # copy that regather inserted -> earlier copy that this pass inserted
        self.gathered: defaultdict[str, list[str]] = defaultdict(list)  # path -> its gathered values in forward
        self.written: dict[int, tuple[str, ...]] = {}  # number -> values that it writes in forward

    def run(self) -> None:
        """Insert the recomputed operations. Add to ``refused`` the operations that would read a freed parameter."""
        timeline = self.phases.timeline
        for index, op in enumerate(timeline.ops):
            if op.backward and not isinstance(op, Return):
                self._backward(index, op)
            else:
                self._forward(op)

    def _forward(self, op: Op) -> None:
        self.ops.append(op)
        if isinstance(op, Compute):
            self.written.setdefault(op.number, op.writes)
        elif ends(op, Gather):
            for path, name in zip(op.params, op.writes, strict=True):
                self.gathered[path].append(name)

    def _backward(self, index: int, op: Op) -> None:
        op = reading(op, self.dropped)
        let_views_follow(op, self.dropped, self.values)
        if ends(op, Gather):
            for path, name in zip(op.params, op.writes, strict=True):
                self.names.update(dict.fromkeys(self.gathered[path], name))
        elif isinstance(op, Compute) and op.repeated:
            originals = self.written[op.number]
            if originals[0] in self.names:
                self.dropped.update(
                    (name, self.names[original]) for original, name in zip(originals, op.writes, strict=True)
                )
                return
            self._copy_reads(index, op)
            op = reading(op, self.names)
            self.names.update(zip(originals, op.writes, strict=True))
        elif isinstance(op, Compute):
            self._copy_reads(index, op)
            op = reading(op, self.names)
        let_views_follow(op, self.names, self.values)
        self.ops.append(op)

    def _copy_reads(self, index: int, op: Op) -> None:
        phases = self.phases
        for name in op.reads:
            if name not in self.chain or name in self.names:
                continue
            new, positions = copy_chain(phases.timeline, name, self.chain, self.names, self.values, backward=True)
            self.ops += new
            for position in positions:
                reads = phases.timeline.ops[position].reads
                if any(index not in phases.available[full] for read in reads for full in phases.gathered.get(read, ())):
                    self.refused.add(position)
