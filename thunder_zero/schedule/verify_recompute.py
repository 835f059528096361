"""Proves that computing again in backward, instead of saving, changed nothing else."""

from __future__ import annotations

from itertools import accumulate, zip_longest

from thunder_zero.plan.params import ROOT
from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.lifetimes import last_reads
from thunder_zero.schedule.timeline import Kind, Op, Timeline, fault, overwritten
from thunder_zero.schedule.units import NOT_RECOMPUTED, segments


def check_recompute(timeline: Timeline, before: Timeline) -> None:
    """Prove that computing again in backward, instead of saving, changed nothing else.

    All operations but copies must be those of before, in the same order: what is computed again depends on the shapes
    of inputs, and ranks whose inputs differ must launch the same.
    """
    _check_others_stay(timeline, before)
    _check_recomputed(timeline, before)
    _check_lives_no_longer(timeline, before)


def _is_recomputed(op: Op) -> bool:
    return op.kind is Kind.COMPUTE and op.backward and op.repeated


def _check_others_stay(timeline: Timeline, before: Timeline) -> None:
    """All operations but copies are those of before: what they do, with which parameters, and in which order."""

    def others(of: Timeline) -> list[tuple[int, Op]]:
        return [(at, op) for at, op in enumerate(of.ops) if not _is_recomputed(op)]

    for (at, op), (_, was) in zip_longest(others(timeline), others(before), fillvalue=(len(timeline.ops) - 1, None)):
        if op is None or was is None or (op.kind, op.params, op.source) != (was.kind, was.params, was.source):
            expected = "nothing" if was is None else " ".join((was.kind, *was.params))
            raise fault(timeline, at, f"stands where the order without recomputing has {expected}")


def _check_recomputed(timeline: Timeline, before: Timeline) -> None:
    """What backward computes again, but for derived values, is of a kind that the policy allows for its unit, and reads
    values that nothing overwrites."""
    policy = timeline.plan.policy.recompute
    unit_at = segments(before).unit_at
    whole = {op.source[0]: unit for op, unit in zip(before.ops, unit_at, strict=False) if unit != ROOT and op.source}
    gone = overwritten(timeline)
    for at, op in enumerate(timeline.ops):
        if not timeline.recomputes(op):
            continue
        if not ((op.cheap and policy != "none") or (op.source[0] in whole and op.work not in NOT_RECOMPUTED)):
            raise fault(timeline, at, f"does {op.work} work again, which recompute={policy!r} does not allow here")
        if changed := [name for name in op.reads if name in gone]:
            raise fault(timeline, at, f"is computed again from {changed[0]}, whose memory an operation overwrites")


def _check_lives_no_longer(timeline: Timeline, before: Timeline) -> None:
    """Backward reads no gathered parameter longer for the sake of what it computes again."""
    ends = _last_reads_by_others(before)
    for name, (at, until) in _last_reads_by_others(timeline).items():
        if until > ends[name][1]:
            raise fault(timeline, at, f"reads {name} for a copy, after all that read it without recomputing")


def _last_reads_by_others(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """For each gathered parameter that is not resident, the position of the last read, and the number of operations
    before it that are no copies. Without biases, if only the borders of units are saved."""
    last = last_reads(timeline, gathered_from(timeline))
    before = list(accumulate((not _is_recomputed(op) for op in timeline.ops), initial=0))
    return {
        name: (last[name], before[last[name]])
        for _, name, param in timeline.gathered
        if not param.resident and not timeline.plan.may_serve_copies(param)
    }
