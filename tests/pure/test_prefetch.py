"""Gathers start some units ahead, as early as the bytes in flight allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import ALONE, Use, in_flight_bytes, lines, model, with_policy, with_rank
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import MiB
from thunder_zero.schedule.bucket import bucket
from thunder_zero.schedule.ops import Gather, Launch
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.prefetch import ended_before, prefetch
from thunder_zero.schedule.regather import regather
from thunder_zero.schedule.timeline import ScheduleError, Timeline
from thunder_zero.schedule.verify import check_pass

NAMES = ("a.w", "b.w", "c.w", "d.w")
BYTES = 4  # of each parameter; on two ranks each rank sends and receives at most all of it
SECONDS = {"a.w": 3.0, "b.w": 1.0, "c.w": 1.0}  # so waits are at 0, 3, 4 and 5 s
NOTHING_AHEAD = "+a -a a +b -b b +c -c c +d -d d"  # in the notation of ``order``
ONE_AHEAD = "+a -a +b a -b +c b -c +d c -d d"
TWO_AHEAD = "+a -a +b +c a -b +d b -c c -d d"
ALL_AHEAD = "+a -a +b +c +d a -b b -c c -d d"  # a has the wire to itself: a second gather would delay it


def order(timeline: Timeline) -> str:
    """Return the order of a schedule: ``+a`` gathers parameter a, ``-a`` waits for it, and ``a`` computes with it."""
    marks = {"gather": "+", "wait": "-", "compute": ""}
    return " ".join(f"{marks[op.kind]}{(op.params or op.reads[1:])[0][0]}" for op in timeline.ops[:-1])


@pytest.mark.parametrize(("in_flight", "expected"), [(MiB, ALL_AHEAD), (8, TWO_AHEAD), (0, NOTHING_AHEAD)])
def test_as_many_units_are_gathered_ahead_as_the_bytes_allow(in_flight: int, expected: str) -> None:
    timeline = model(replace(ALONE, in_flight_bytes=in_flight, prefetch=99), *NAMES, training=False)
    assert order(prefetch(timeline)) == expected


@pytest.mark.parametrize(("units", "under_way"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_at_most_prefetch_units_are_in_flight(units: int, under_way: int) -> None:
    policy = replace(ALONE, in_flight_bytes=MiB, prefetch=units)
    after = prefetch(model(policy, *NAMES, "e.w", training=False))
    assert max(in_flight_bytes(after, Gather)) == 4 * under_way


def test_prefetch_keeps_the_gathers_of_backward_in_backward() -> None:
    after = bucketed(model(replace(ALONE, in_flight_bytes=MiB), "a.w", "b.w"))
    assert lines(after, backward=True)[:3] == ["gather b.w", "gw1 <- g y0", "wait b.w"]


def test_a_unit_begins_with_a_value_that_depends_on_several_units() -> None:
    # Backward first reads a value of c.v and a.w, so c computes while b is gathered ahead.
    once: dict[str, object] = {"kept_unsharded": True}
    uses = (Use("a.w", needed=False), "b.w", "c.w", Use("c.v", ("a.w",)))
    run(model(replace(ALONE, in_flight_bytes=16, prefetch=1), *uses, a_w=once, c_v=once))


def test_the_busiest_rank_decides() -> None:
    # Ranks differ in gathers and reduce-scatters of rows that do not divide. An all-reduce keeps them equally busy.
    for world_size in (1, 2, 3, 5):
        timeline = model(ALONE, "a.w", "a.scalar", a_w={"shape": (7, 3)}, a_scalar={"shape": ()})
        timeline = replace(timeline, plan=replace(timeline.plan, mesh=Mesh.of(world_size)))
        ranks = [with_rank(timeline, rank) for rank in range(world_size)]
        for op in (op for op in timeline.ops if isinstance(op, Launch)):
            busiest = max(seen.traffic(op).sent for seen in ranks)
            assert timeline.traffic(op).busiest >= busiest
            if isinstance(op, Gather) or op.params == ("a.scalar",):
                assert {seen.traffic(op).busiest for seen in ranks} == {busiest}


# Properties of all timelines


def bucketed(timeline: Timeline) -> Timeline:
    return prefetch(bucket(regather(timeline)))


@given(st.lists(st.integers(1, 20)), st.integers(0, 40))
def test_gathers_start_as_early_as_the_bound_allows(nbytes: list[int], bound: int) -> None:
    ended = ended_before(nbytes, bound)
    assert ended == sorted(ended)
    for number, before in enumerate(ended):
        assert 0 <= before <= number
        under_way = sum(nbytes[before : number + 1])
        assert under_way <= bound or before == number
        assert before == 0 or under_way + nbytes[before - 1] > bound  # one earlier would exceed it


def test_the_limit_of_units_in_flight_is_checked() -> None:
    lifted = model(replace(ALONE, in_flight_bytes=MiB, prefetch=9), *NAMES, training=False)
    timeline = prefetch(lifted)
    check_pass(timeline, lifted)
    with pytest.raises(ScheduleError, match="prefetch is 2"):
        check_pass(with_policy(timeline, prefetch=2), lifted)
