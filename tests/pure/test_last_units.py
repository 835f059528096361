"""The last units of forward, gathered once for both halves without raising the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_timelines import gathered, lines, model
from tests.harness.timelines import Use, gpt, timelines
from thunder_zero.policy import Policy
from thunder_zero.schedule.last_units import largest
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Kind, Timeline, gathered_bytes

LAST = Policy(stage=3, gather_last_units_once=True)
UNITS = ("a.w", "b.w", "c.w", "d.w", "e.w")


@pytest.mark.parametrize(
    ("prefetch", "once"),
    [
        (0, ("e.w",)),  # one at a time is alive: while e is used, or between the halves
        (1, ("d.w", "e.w")),  # one computes, one is under way; c is gathered when backward has come to d
        (2, ("c.w", "d.w", "e.w")),
        (3, ("b.w", "c.w", "d.w", "e.w")),
    ],
)
def test_as_many_of_the_last_units_are_gathered_once_as_the_peak_has_room_for(
    prefetch: int, once: tuple[str, ...]
) -> None:
    timeline = run(model(replace(LAST, prefetch=prefetch), *UNITS))
    assert timeline.plan.gathered_once == once
    assert gathered(timeline, backward=True) == dict.fromkeys(set(UNITS) - set(once), 1)


@pytest.mark.parametrize("units", [1, 2, 3])
def test_zero3_gathers_small_models_once(units: int) -> None:
    """One unit computes and two are in flight: up to three units are gathered once, and of five the last three."""
    small, five = run(model(Policy(), *UNITS[:units])), run(model(Policy(), *UNITS))
    assert small.plan.gathered_once == UNITS[:units]
    assert gathered(small, backward=True) == {}
    assert five.plan.gathered_once == UNITS[2:]
    assert gathered(five, backward=True) == {"b.w": 1, "a.w": 1}


@pytest.mark.parametrize("units", range(1, 6))
def test_it_can_be_turned_off(units: int) -> None:
    after = run(model(replace(LAST, gather_last_units_once=False), *UNITS[:units]))
    assert after.plan.gathered_once == ()
    assert gathered(after, backward=True) == dict.fromkeys(UNITS[:units], 1)


def test_a_unit_is_gathered_once_with_all_its_parameters() -> None:
    """The bias too, although backward does not read it: the unit's gather carries it anyway, and forward frees it."""
    after = run(model(replace(LAST, prefetch=0), "d.w", "d.v", "e.w", Use("e.bias", needed=False)))
    assert after.plan.gathered_once == ("e.w", "e.bias")
    assert gathered(after, backward=True) == {"d.w": 1, "d.v": 1}
    assert lines(after, Kind.FREE) == ["free d.w", "free d.v", "free e.bias", "free e.w", "free d.v", "free d.w"]


BACKWARD = {
    1: [
        "g <- gy",
        "gw4 <- g y3",
        "gx4 <- g e.w",  # d is gathered ahead already
        "free e.w",
        "g_e.w <- gw4",
        "gw3 <- gx4 y2",
        "gather c.w",  # right before the first read of d
        "gx3 <- gx4 d.w",
        "free d.w",
        "g_d.w <- gw3",
        "gw2 <- gx3 y1",
        "wait c.w",
        "gather b.w",
        "gx2 <- gx3 c.w_again",
        "free c.w",
        "g_c.w <- gw2",
        "gw1 <- gx2 y0",
        "wait b.w",
        "gather a.w",
        "gx1 <- gx2 b.w_again",
        "free b.w",
        "g_b.w <- gw1",
        "gw0 <- gx1 x",
        "wait a.w",
        "gx0 <- gx1 a.w_again",
        "free a.w",
        "g_a.w <- gw0",
    ],
    2: [
        "g <- gy",
        "gw4 <- g y3",
        "gx4 <- g e.w",  # d and c are gathered ahead already
        "free e.w",
        "g_e.w <- gw4",
        "gw3 <- gx4 y2",
        "gather b.w",  # right before the first read of d
        "gx3 <- gx4 d.w",
        "free d.w",
        "g_d.w <- gw3",
        "gw2 <- gx3 y1",
        "gather a.w",  # right before the first read of c
        "gx2 <- gx3 c.w",
        "free c.w",
        "g_c.w <- gw2",
        "gw1 <- gx2 y0",
        "wait b.w",
        "gx1 <- gx2 b.w_again",
        "free b.w",
        "g_b.w <- gw1",
        "gw0 <- gx1 x",
        "wait a.w",
        "gx0 <- gx1 a.w_again",
        "free a.w",
        "g_a.w <- gw0",
    ],
}


@pytest.mark.parametrize("prefetch", BACKWARD)
def test_what_is_gathered_once_counts_as_gathered_ahead(prefetch: int) -> None:
    after = run(model(replace(LAST, prefetch=prefetch), *UNITS))
    others = (op for op in after.ops[:-1] if op.kind is not Kind.REDUCE and not after.ends(op, Kind.REDUCE))
    assert lines(after.with_ops(others), backward=True) == BACKWARD[prefetch]


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_largest_that_fits_takes_few_tries(fitting: int, limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= fitting

    assert largest(fits, limit) == min(fitting, limit)
    assert len(tried) == len(set(tried)) <= 2 * (min(fitting, limit) + 1).bit_length()
    assert all(0 < number <= limit for number in tried)


def test_the_peak_is_that_of_gathering_everything_again() -> None:
    """A unit has 4 bytes: one computes, ``prefetch`` are in flight. In a GPT those are blocks of 3,488 bytes, and
    the tied embedding's 2,048."""
    for gather_last_units_once in (True, False):
        policies = [
            replace(LAST, prefetch=prefetch, gather_last_units_once=gather_last_units_once) for prefetch in (0, 1, 2, 3)
        ]
        assert [max(gathered_bytes(run(model(policy, *UNITS)))) for policy in policies] == [4, 8, 12, 16]
        assert (
            max(gathered_bytes(run(gpt(9, Policy(gather_last_units_once=gather_last_units_once))))) == 2048 + 3 * 3488
        )


def test_what_backward_does_not_read_is_freed_in_forward() -> None:
    assert run(model(LAST, *UNITS, Use("f.bias", needed=False))).plan.gathered_once == ("d.w", "e.w")


@given(timelines())
def test_the_peak_does_not_rise(timeline: Timeline) -> None:
    def peak(gather_last_units_once: bool) -> int:
        policy = replace(timeline.plan.policy, gather_last_units_once=gather_last_units_once)
        return max(gathered_bytes(run(replace(timeline, plan=replace(timeline.plan, policy=policy)))))

    assert peak(True) <= peak(False)


@given(timelines())
def test_the_same_units_are_gathered_once_on_every_rank(timeline: Timeline) -> None:
    policy = replace(timeline.plan.policy, gather_last_units_once=True)
    plans = [replace(timeline.plan, policy=policy, rank=rank) for rank in range(timeline.plan.world_size)]
    assert len({run(replace(timeline, plan=plan)).plan.gathered_once for plan in plans}) == 1
    ops = [[op for op in run(replace(timeline, plan=plan)).ops if op.kind is Kind.GATHER] for plan in plans]
    assert all(other == ops[0] for other in ops)
