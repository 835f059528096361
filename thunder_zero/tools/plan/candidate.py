"""Evaluates a schedule of a program: each unit's bytes alive, bytes sent and recomputed work."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from thunder_zero.plan.amounts import itemsize
from thunder_zero.plan.params import ROOT
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.ops import Compute, Gather, Launch, Op
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.schedule.units import backward_ends, runs
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.recorder import Recorder

FLOPS_PER_BYTE = 1000.0  # about the ratio of FLOP/s to B/s, both for an H100 with NVLink and for a CPU on 1 Gbit/s
LAUNCH_BYTES = 128 << 10  # the price of a launch, in addition to its bytes: about a millisecond at 1 Gbit/s


class UnitCost(NamedTuple):
    """The bytes and the cost of a unit in both phases, of the loss, or of the end of backward."""

    left: int  # bytes that the unit holds from its forward to its backward
    peak: int  # the most bytes alive in it, without bytes that earlier units hold for backward
    cost: float  # the cost of its work, in bytes on the wire


@dataclass(frozen=True)
class Candidate:
    """A schedule of a program, the price of recomputed work, and bytes to add to the peak."""

    recorder: Recorder  # what the program's lines do to memory
    timeline: Timeline  # the operations that would run
    flops_per_byte: float = FLOPS_PER_BYTE
    reserve: int = 0

    @property
    def policy(self) -> Policy:
        return self.timeline.plan.policy

    @cached_property
    def fold(self) -> Fold:
        """The memory of the step."""
        return Fold(self.recorder, self.timeline).run()

    @property
    def peak(self) -> int:
        """The most bytes alive in forward, the loss and backward."""
        return self.fold.peak + self.reserve

    @cached_property
    def sent(self) -> int:
        """The bytes that the rank sends."""
        return sum(self.timeline.traffic(op).sent for op in self.timeline.ops)

    @cached_property
    def flops(self) -> int:
        """The FLOPs of recomputed work."""
        return sum(self._recomputed_flops(op) for op in self.timeline.ops)

    @cached_property
    def cost(self) -> int:
        """The cost of gathers, reductions and recomputed work, in bytes on the wire."""
        return round(sum(map(self._cost, self.timeline.ops)))

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units with gradients, in the order of forward, without the root."""
        return tuple(reversed(backward_ends(self.timeline)))

    @cached_property
    def kept(self) -> frozenset[str]:
        """The units, without the root, that stay gathered from forward to backward.

        ``Policy.keep_unsharded`` names units. With ``reshard_after_forward=None`` the schedule adds further units.
        """
        plan = self.timeline.plan
        return frozenset(plan.by_name[path].unit for path in plan.kept_unsharded) - {ROOT}

    @cached_property
    def parts(self) -> tuple[UnitCost, ...]:
        """The end of backward, each unit in the order of forward, and the loss.

        The beginnings of forward and of backward belong to the next unit, the end of forward to the last.
        """
        ops, start, ends = self.timeline.ops, self.timeline.backward_start, backward_ends(self.timeline)
        units, stops = (*ends, ROOT), [*ends.values()]
        runs_of_units = [run for run in runs(self.timeline) if run.unit in ends]
        ran, begins = [run.unit for run in runs_of_units] or [ROOT], [run.first for run in runs_of_units[1:]]
        unit_at = {id(op): ran[bisect_right(begins, index)] for index, op in enumerate(ops[:start])} | {
            id(op): units[bisect_left(stops, index)] for index, op in enumerate(ops[start:], start)
        }
        costs, peaks, left = Counter[str](), Counter[str](), Counter[str]()
        for op in ops[start:]:
            unit = self.timeline.params_of(op)[0].unit if isinstance(op, Gather) else unit_at[id(op)]
            costs[unit] += self._cost(op)  # type: ignore[assignment]
        lines, phases = self.fold.lines, [*(line.phase for line in self.fold.lines), ""]
        owners = [unit_at.get(id(line.op), units[0] if line.phase == "backward" else line.phase) for line in lines]
        for unit, line in zip(owners, lines, strict=True):
            peaks[unit] = max(peaks[unit], line.highest)
        for storage in self.fold.allocations:
            freed_by = storage.freed_by or 0
            if phases[storage.line] == "forward" and phases[freed_by] == "backward":
                left[owners[freed_by]] += storage.nbytes
        parts, earlier = [UnitCost(0, peaks[ROOT], 0.0)], 0
        for unit in self.units:
            parts.append(UnitCost(left[unit], peaks[unit] - earlier, costs[unit]))
            earlier += left[unit]
        return (*parts, UnitCost(0, peaks["loss"] - earlier, 0.0))

    def _cost(self, op: Op) -> float:
        launch = LAUNCH_BYTES * isinstance(op, Launch)
        return self.timeline.traffic(op).sent + launch + self._recomputed_flops(op) / self.flops_per_byte

    def _recomputed_flops(self, op: Op) -> int:
        return flops_to_repeat(op, self.timeline) if isinstance(op, Compute) and self.timeline.recomputes(op) else 0


def flops_to_repeat(op: Compute, timeline: Timeline) -> int:
    """Return the FLOPs to repeat an operation. If it has no FLOPs, return the number of written elements."""
    values = (timeline.values[name] for name in op.writes if name in timeline.values)
    return op.flops or max((value.nbytes // itemsize(value.dtype) for value in values), default=0)
