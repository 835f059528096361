"""needed while: Thunder's rematerialisation lets backward read parameters that forward gathered.

In: the timeline of a fused trace. Out: a timeline in which backward reads its own gathers only. A fuser may let
backward recompute a region of forward from the region's inputs, which may be gathered parameters. Here backward reads
its own gather: the wait of the gather moves up, or a new gather is added::

    wait    w  <- fut                      wait    w  <- fut
    ... backward ...                       ... backward ...
    compute gx <- gy, w             -->    wait    w_again <- fut_again
    wait    w_again <- fut_again           compute gx <- gy, w_again
    compute gz <- gx, w_again              compute gz <- gx, w_again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from thunder_zero.schedule.derived import regathered
from thunder_zero.schedule.timeline import Kind, Op, Timeline, Value


def repair_fusion(timeline: Timeline) -> Timeline:
    """Return a timeline in which backward reads its own gathers only, or the argument if nothing changes."""
    chain = regathered(timeline)
    if not any(name in chain for op in timeline.ops[:-1] if op.backward for name in op.reads):
        return timeline
    ends = (op for op in timeline.ops if op.backward and timeline.ends(op, Kind.GATHER))
    repair = _Repair(timeline, chain, {path: op for op in ends for path in op.params})
    for op in timeline.ops[:-1]:
        repair.add(op)
    return timeline.with_ops([*repair.ops, timeline.ops[-1]], repair.values)


@dataclass
class _Repair:
    """A repaired timeline under construction.

    Attributes:
        timeline: the timeline to repair.
        chain: a mapping from forward's values that derive from parameters to the positions of their writers.
        waits: a mapping from parameters to the waits of backward's own gathers.
        ops: the operations so far.
        done: the names that ``ops`` write.
        names: a mapping from the names of forward's values to the names of backward's copies.
        values: the new values.
    """

    timeline: Timeline
    chain: Mapping[str, int]
    waits: Mapping[str, Op]
    ops: list[Op] = field(default_factory=list)
    done: set[tuple[str, ...]] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """Add an operation that was not added early. In backward, replace forward's derived values by copies."""
        if op.writes and op.writes in self.done:
            return
        if op.backward:
            op = replace(op, reads=tuple(self.copy(name) if name in self.chain else name for name in op.reads))
        self.ops.append(op)
        self.done.add(op.writes)

    def copy(self, name: str) -> str:
        """Return the name of backward's copy of a derived value of forward. Add the copy at the first call."""
        if name not in self.names:
            op = self.timeline.ops[self.chain[name]]
            self.names[name] = self._gathered(name, op) if op.kind is Kind.WAIT else self._computed(name, op)
        return self.names[name]

    def _gathered(self, name: str, forward: Op) -> str:
        """Move backward's gather of a parameter up, or add a gather. Return the name of the gather's result."""
        index = forward.writes.index(name)
        path = forward.params[index]
        if path in self.waits:
            wait = self.waits[path]
            self.add(self.timeline.launches[wait.reads[0]])
            self.add(wait)
            return wait.writes[wait.params.index(path)]
        launch = self.timeline.launches[forward.reads[0]]
        handle = f"{launch.writes[0]}_{index}_repaired"
        self.values[handle] = self.values[f"{name}_repaired"] = self.timeline.values[name]
        alone = replace(launch, params=(path,), backward=True, repeated=True)
        self.add(replace(alone, reads=(launch.reads[index],), writes=(handle,)))
        self.add(replace(alone, kind=Kind.WAIT, reads=(handle,), writes=(f"{name}_repaired",)))
        return f"{name}_repaired"

    def _computed(self, name: str, op: Op) -> str:
        """Recompute a value of forward from backward's own gathers, and return the copy's name."""
        self.names.update((out, f"{out}_repaired") for out in op.writes)
        writes = tuple(f"{out}_repaired" for out in op.writes)
        self.add(replace(op, writes=writes, backward=True, repeated=True))
        self.values.update((f"{out}_repaired", self.timeline.values[out].copied(self.names)) for out in op.writes)
        return f"{name}_repaired"
