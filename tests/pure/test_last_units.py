"""The last units of forward stay unsharded for both phases, without raising the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import Use, gathered, lines, model, split, timelines, with_policy
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.free import free
from thunder_zero.schedule.last_units import largest
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Free, Reduce, Return, ends
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Timeline

UNITS = "a.w b.w c.w d.w e.w"
UNREAD = Use("e.bias", needed=False)


@pytest.mark.parametrize(
    ("policy", "units", "kept"),
    [
        (Policy(prefetch=0), UNITS, "e.w"),  # one unit at a time is alive
        (Policy(prefetch=1), UNITS, "d.w e.w"),  # one unit computes, one is in flight
        (Policy(), UNITS, "c.w d.w e.w"),
        (Policy(), "a.w b.w c.w", "a.w b.w c.w"),
    ],
)
def test_the_last_units_are_kept_unsharded_as_far_as_the_peak_allows(policy: Policy, units: str, kept: str) -> None:
    # A unit has 4 bytes. One unit computes, and ``prefetch`` units are in flight.
    after = run(model(policy, *units.split()))
    assert after.plan.kept_unsharded == tuple(kept.split())
    assert gathered(after, backward=True) == dict.fromkeys(set(units.split()) - set(kept.split()), 1)
    freed = run(model(replace(policy, reshard_after_forward=True), *units.split()))
    assert freed.plan.kept_unsharded == ()
    assert gathered(freed, backward=True) == dict.fromkeys(units.split(), 1)
    assert max(gathered_bytes(free(after))) == max(gathered_bytes(free(freed)))


def test_a_unit_is_kept_unsharded_with_all_its_parameters() -> None:
    # Backward does not read the bias, but the unit's gather carries it, and forward frees it.
    after = free(run(model(Policy(prefetch=0), "d.w", "d.v", "e.w", UNREAD)))
    assert after.plan.kept_unsharded == ("e.w", "e.bias")
    assert gathered(after, backward=True) == {"d.w": 1, "d.v": 1}
    assert lines(after, Free) == split("free d.w; free d.v; free e.bias; free e.w; free d.v; free d.w")
    unread = run(model(Policy(), *UNITS.split(), Use("f.bias", needed=False)))
    assert unread.plan.kept_unsharded == ("d.w", "e.w"), "backward reads nothing of f"


def test_a_unit_kept_unsharded_counts_as_gathered_ahead() -> None:
    after = free(run(model(Policy(prefetch=2), *UNITS.split())))
    work = (op for op in after.ops if not isinstance(op, Reduce | Return) and not ends(op, Reduce))
    assert lines(after.with_ops(work), backward=True) == split("""
        gw4 <- g y3; gx4 <- g e.w; free e.w; g_e.w <- gw4  # d and c are gathered ahead already
        gw3 <- gx4 y2; gather b.w; gx3 <- gx4 d.w; free d.w; g_d.w <- gw3  # right before the first read of d
        gw2 <- gx3 y1; gather a.w; gx2 <- gx3 c.w; free c.w; g_c.w <- gw2  # right before the first read of c
        gw1 <- gx2 y0; wait b.w; gx1 <- gx2 b.w_again; free b.w; g_b.w <- gw1
        gw0 <- gx1 x; wait a.w; gx0 <- gx1 a.w_again; free a.w; g_a.w <- gw0
    """)


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_largest_number_that_fits_takes_few_tries(fitting: int, limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= fitting

    assert largest(fits, limit) == min(fitting, limit)
    assert len(tried) == len(set(tried)) <= 2 * (min(fitting, limit) + 1).bit_length()
    assert all(0 < number <= limit for number in tried)


@given(timelines())
def test_the_peak_does_not_rise(timeline: Timeline) -> None:
    timelines = (run(with_policy(timeline, reshard_after_forward=frees)) for frees in (None, True))
    kept, freed = (max(gathered_bytes(free(after))) for after in timelines)
    assert kept <= freed
