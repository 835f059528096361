"""needed while: Thunder's rematerialisation lets backward read what forward gathered.

Repairs a schedule after fusion, so that backward reads its own gathers only. A fuser may make backward recompute from
the inputs of a region of forward, and such an input may be a gathered parameter. Backward then reads its own copy
instead, with an earlier wait if necessary, or a copy that is gathered for this reader::

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
    """Makes backward read its own gathers; returns the same timeline if it already does."""
    chain = regathered(timeline)
    if not any(read in chain for op in timeline.ops[:-1] if op.backward for read in op.reads):
        return timeline
    ends = (op for op in timeline.ops if op.backward and timeline.ends(op, Kind.GATHER))
    repair = _Repair(timeline, chain, {path: op for op in ends for path in op.params})
    for op in timeline.ops[:-1]:
        repair.add(op)
    return timeline.with_ops([*repair.ops, timeline.ops[-1]], repair.values)


@dataclass
class _Repair:
    """The operations so far. ``names`` maps a derived value of forward to the copy that backward reads."""

    timeline: Timeline
    chain: Mapping[str, int]  # derived value of forward -> position of its writer
    waits: Mapping[str, Op]  # parameter -> the wait of backward's own gather
    ops: list[Op] = field(default_factory=list)
    done: set[tuple[str, ...]] = field(default_factory=set)  # by what they write
    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        if op.writes and op.writes in self.done:
            return
        if op.backward:
            op = replace(op, reads=tuple(self.copy(read) if read in self.chain else read for read in op.reads))
        self.ops.append(op)
        self.done.add(op.writes)

    def copy(self, name: str) -> str:
        """The name of backward's copy of a derived value of forward; adds the copy if there is none yet."""
        if name not in self.names:
            op = self.timeline.ops[self.chain[name]]
            self.names[name] = self._gathered(name, op) if op.kind is Kind.WAIT else self._computed(name, op)
        return self.names[name]

    def _gathered(self, name: str, forward: Op) -> str:
        at = forward.writes.index(name)
        path = forward.params[at]
        if path in self.waits:
            wait = self.waits[path]
            self.add(self.timeline.launches[wait.reads[0]])
            self.add(wait)
            return wait.writes[wait.params.index(path)]
        launch = self.timeline.launches[forward.reads[0]]
        handle = f"{launch.writes[0]}_{at}_repaired"
        self.values[handle] = self.values[f"{name}_repaired"] = self.timeline.values[name]
        alone = replace(launch, params=(path,), backward=True, repeated=True)
        self.add(replace(alone, reads=(launch.reads[at],), writes=(handle,)))
        self.add(replace(alone, kind=Kind.WAIT, reads=(handle,), writes=(f"{name}_repaired",)))
        return f"{name}_repaired"

    def _computed(self, name: str, op: Op) -> str:
        self.names.update((out, f"{out}_repaired") for out in op.writes)
        writes = tuple(f"{out}_repaired" for out in op.writes)
        self.add(replace(op, writes=writes, backward=True, repeated=True))
        self.values.update((f"{out}_repaired", self.timeline.values[out].copied(self.names)) for out in op.writes)
        return f"{name}_repaired"
