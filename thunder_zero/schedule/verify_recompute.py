"""Proves that recomputing only added allowed, recomputed operations."""

from __future__ import annotations

from itertools import accumulate, zip_longest

from thunder_zero.plan.params import ROOT
from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.lifetimes import last_reads
from thunder_zero.schedule.ops import Compute, Op, identities
from thunder_zero.schedule.timeline import Timeline, fault, overwritten
from thunder_zero.schedule.units import RECOMPUTED, segments


def check_recompute(timeline: Timeline, before: Timeline) -> None:
    """Prove that recomputing only added recomputed operations to ``before``, and kept all other operations in order.
    Recomputing depends on input shapes, but ranks with different shapes must launch equal collectives."""
    _check_others_stay(timeline, before)
    _check_recomputed(timeline, before)
    _check_lives_no_longer(timeline, before)


def _is_recomputed(op: Op) -> bool:
    return isinstance(op, Compute) and op.backward and op.repeated


def _check_others_stay(timeline: Timeline, before: Timeline) -> None:
    """Check that operations that are not recomputed have the same kinds, parameters and order as in ``before``."""

    def not_recomputed(timeline: Timeline) -> list[tuple[int, Op]]:
        return [(index, op) for index, op in enumerate(timeline.ops) if not _is_recomputed(op)]

    for (index, op), (_, original) in zip_longest(
        not_recomputed(timeline), not_recomputed(before), fillvalue=(len(timeline.ops) - 1, None)
    ):
        if op is None or original is None or identities(op) != identities(original):
            expected = "nothing" if original is None else " ".join((original.kind, *original.params))
            raise fault(timeline, index, f"stands where the order without recomputing has {expected}")


def _check_recomputed(timeline: Timeline, before: Timeline) -> None:
    """Check that the policy allows each recomputed operation, and that nothing overwrites the values that it reads.
    Derived values are always allowed."""
    policy = timeline.plan.policy.recompute
    unit_at = segments(before).unit_at
    pairs = zip(before.ops, unit_at, strict=False)
    in_units = {op.number for op, unit in pairs if unit != ROOT and isinstance(op, Compute)}
    changed_values = overwritten(timeline)
    for index, op in enumerate(timeline.ops):
        if not isinstance(op, Compute) or not timeline.recomputes(op):
            continue
        if not ((op.cheap and policy != "none") or (op.number in in_units and op.work in RECOMPUTED)):
            raise fault(timeline, index, f"does {op.work} work again, which recompute={policy!r} does not allow here")
        if changed := [name for name in op.reads if name in changed_values]:
            raise fault(timeline, index, f"is computed again from {changed[0]}, whose memory an operation overwrites")


def _check_lives_no_longer(timeline: Timeline, before: Timeline) -> None:
    """Check that recomputed operations do not extend the life of a gathered parameter."""
    ends = _last_reads_by_others(before)
    for name, (index, end) in _last_reads_by_others(timeline).items():
        if end > ends[name][1]:
            raise fault(timeline, index, f"reads {name} for a copy, after all that read it without recomputing")


def _last_reads_by_others(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """Return a mapping from gathered parameters to the index of their last read, and the number of operations before
    that read. Reads by recomputed operations are ignored. Resident parameters, and biases of units that are recomputed
    whole, are left out."""
    last = last_reads(timeline, gathered_from(timeline))
    before = list(accumulate((not _is_recomputed(op) for op in timeline.ops), initial=0))
    return {
        name: (last[name], before[last[name]])
        for _, name, param in timeline.gathered
        if not param.resident and not timeline.plan.may_serve_copies(param)
    }
