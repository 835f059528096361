"""The last units of forward, kept unsharded for both phases without raising the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import Use, gathered, lines, model, split, timelines, with_policy
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.last_units import largest
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Kind, Timeline

UNITS = "a.w b.w c.w d.w e.w"
UNREAD = Use("e.bias", needed=False)


@pytest.mark.parametrize(
    ("policy", "units", "once"),
    [
        (Policy(prefetch=0), UNITS, "e.w"),  # one at a time is alive: while e is used, or between the phases
        (Policy(prefetch=1), UNITS, "d.w e.w"),  # one computes, one is under way; c is gathered when backward is at d
        (Policy(), UNITS, "c.w d.w e.w"),
        (Policy(), "a.w b.w c.w", "a.w b.w c.w"),
    ],
)
def test_as_many_of_the_last_units_are_kept_unsharded_as_the_peak_has_room_for(
    policy: Policy, units: str, once: str
) -> None:
    """A unit has 4 bytes: one computes, ``prefetch`` are in flight."""
    after = run(model(policy, *units.split()))
    assert after.plan.kept_unsharded == tuple(once.split())
    assert gathered(after, backward=True) == dict.fromkeys(set(units.split()) - set(once.split()), 1)
    again = run(model(replace(policy, reshard_after_forward=True), *units.split()))
    assert again.plan.kept_unsharded == ()
    assert gathered(again, backward=True) == dict.fromkeys(units.split(), 1)
    assert max(gathered_bytes(after)) == max(gathered_bytes(again))


def test_a_unit_is_kept_unsharded_with_all_its_parameters() -> None:
    """The bias is kept, too, although backward does not read it: the unit's gather carries it, and forward frees it."""
    after = run(model(Policy(prefetch=0), "d.w", "d.v", "e.w", UNREAD))
    assert after.plan.kept_unsharded == ("e.w", "e.bias")
    assert gathered(after, backward=True) == {"d.w": 1, "d.v": 1}
    assert lines(after, Kind.FREE) == split("free d.w; free d.v; free e.bias; free e.w; free d.v; free d.w")
    alone = run(model(Policy(), *UNITS.split(), Use("f.bias", needed=False)))
    assert alone.plan.kept_unsharded == ("d.w", "e.w"), "nothing of f is alive in backward"


def test_what_is_kept_unsharded_counts_as_gathered_ahead() -> None:
    after = run(model(Policy(prefetch=2), *UNITS.split()))
    others = (op for op in after.ops[:-1] if op.kind is not Kind.REDUCE and not after.ends(op, Kind.REDUCE))
    assert lines(after.with_ops(others), backward=True) == split("""
        g <- gy; gw4 <- g y3; gx4 <- g e.w; free e.w; g_e.w <- gw4  # d and c are gathered ahead already
        gw3 <- gx4 y2; gather b.w; gx3 <- gx4 d.w; free d.w; g_d.w <- gw3  # right before the first read of d
        gw2 <- gx3 y1; gather a.w; gx2 <- gx3 c.w; free c.w; g_c.w <- gw2  # right before the first read of c
        gw1 <- gx2 y0; wait b.w; gx1 <- gx2 b.w_again; free b.w; g_b.w <- gw1
        gw0 <- gx1 x; wait a.w; gx0 <- gx1 a.w_again; free a.w; g_a.w <- gw0
    """)


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_largest_that_fits_takes_few_tries(fitting: int, limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= fitting

    assert largest(fits, limit) == min(fitting, limit)
    assert len(tried) == len(set(tried)) <= 2 * (min(fitting, limit) + 1).bit_length()
    assert all(0 < number <= limit for number in tried)


@given(timelines())
def test_the_peak_does_not_rise(timeline: Timeline) -> None:
    peaks = [max(gathered_bytes(run(with_policy(timeline, reshard_after_forward=frees)))) for frees in (None, True)]
    once, again = peaks
    assert once <= again
