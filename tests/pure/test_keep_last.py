"""What forward keeps at no cost in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from thunder_zero.passes import run
from thunder_zero.policy import Policy
from thunder_zero.timeline import Kind, Timeline, gathered_bytes

from .test_passes import gathered, model
from .timelines import Use, timelines

LAST = Policy(stage=3, keep_last=True)
UNITS = ("a.w", "b.w", "c.w", "d.w", "e.w")


@pytest.mark.parametrize(
    ("prefetch", "kept"),
    [
        (0, ("e.w",)),  # one at a time is alive: while e is used, or between the halves
        (1, ("e.w",)),  # one computes, one is under way: d, from the start of backward
        (2, ("d.w", "e.w")),
        (3, ("c.w", "d.w", "e.w")),  # and b
    ],
)
def test_as_many_of_the_last_units_are_kept_as_the_peak_has_room_for(prefetch: int, kept: tuple[str, ...]) -> None:
    timeline = run(model(replace(LAST, prefetch=prefetch), *UNITS))
    assert timeline.plan.kept == kept
    assert gathered(timeline, backward=True) == dict.fromkeys(set(UNITS) - set(kept), 1)


def test_nothing_is_kept_unless_asked_for() -> None:
    assert run(model(Policy(stage=3), *UNITS)).plan.kept == ()


def test_what_backward_does_not_read_is_not_kept() -> None:
    assert run(model(LAST, *UNITS, Use("f.bias", needed=False))).plan.kept == ("d.w", "e.w")


@given(timelines())
def test_the_peak_does_not_rise(timeline: Timeline) -> None:
    def peak(keep_last: bool) -> int:
        policy = replace(timeline.plan.policy, keep_last=keep_last)
        return max(gathered_bytes(run(replace(timeline, plan=replace(timeline.plan, policy=policy)))))

    assert peak(True) <= peak(False)


@given(timelines())
def test_the_same_units_are_kept_on_every_rank(timeline: Timeline) -> None:
    policy = replace(timeline.plan.policy, keep_last=True)
    plans = [replace(timeline.plan, policy=policy, rank=rank) for rank in range(timeline.plan.world_size)]
    assert len({run(replace(timeline, plan=plan)).plan.kept for plan in plans}) == 1
    ops = [[op for op in run(replace(timeline, plan=plan)).ops if op.kind is Kind.GATHER] for plan in plans]
    assert all(other == ops[0] for other in ops)
