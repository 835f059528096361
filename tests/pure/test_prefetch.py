"""Gathers start some units ahead; or, with times, as late as possible without longer waits of compute."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import ALONE, Use, in_flight_bytes, lines, model, timed, with_policy, with_rank
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import MiB, Policy, Times
from thunder_zero.schedule.bucket import bucket
from thunder_zero.schedule.ops import Compute, Gather, Launch, ends
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.prefetch import ended_before, ended_in_time, prefetch
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


def times(seconds: dict[str, float], bytes_per_second: float = BYTES) -> Times:
    return Times(seconds, {}, bytes_per_second)


@pytest.mark.parametrize(
    ("times", "in_flight", "rows_of_d", "expected"),
    [
        (times(SECONDS), MiB, 1, ONE_AHEAD),  # c and d take 1 s, all the time between two waits
        (times(SECONDS, BYTES * 0.99), MiB, 1, TWO_AHEAD),
        (times(SECONDS), MiB, 3, TWO_AHEAD),  # d takes 2 s and leaves at 3 s, with b's wait; c must end by 3 s
        (times(SECONDS), MiB, 5, ALL_AHEAD),  # d takes 3 s and leaves at 2 s, c at 1 s, b at 0 s
        (
            times({"a.w": 3.0, "b.w": 1.0}),
            MiB,
            1,
            TWO_AHEAD,
        ),  # without a time, c seems to take none: d is needed with it
        (times({}), MiB, 1, ALL_AHEAD),
        (times(SECONDS, 0.001), 8, 1, TWO_AHEAD),
        (times(SECONDS, 0.001), 0, 1, NOTHING_AHEAD),
        (None, MiB, 1, ALL_AHEAD),  # without times: as many units as the bytes allow
        (None, 8, 1, TWO_AHEAD),
        (None, 0, 1, NOTHING_AHEAD),
    ],
)
def test_a_gather_starts_at_the_last_wait_that_is_early_enough(
    times: Times | None, in_flight: int, rows_of_d: int, expected: str
) -> None:
    for units in (0, 1, 99) if times else (99,):  # with times ``policy.prefetch`` has no effect
        policy = replace(ALONE, in_flight_bytes=in_flight, prefetch=units, times=times)
        timeline = model(policy, *NAMES, training=False, d_w={"shape": (rows_of_d,)})
        assert order(prefetch(timeline)) == expected, units


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


def test_backward_has_its_own_times_and_its_reductions_use_the_wire() -> None:
    # Waits for d, c, b, a are at 0, 2, 4, 6 s. A gather takes 1 s or more, and so does the reduction before it.
    orders = {BYTES: "+d -d +c -c +b -b +a -a", BYTES * 0.9: "+d -d +c +b -c +a -b -a"}
    for bytes_per_second, expected in orders.items():
        wire = Times({}, {"d.w": 2.0, "c.w": 2.0, "b.w": 2.0}, bytes_per_second)
        after = bucketed(model(replace(ALONE, in_flight_bytes=MiB, times=wire), *NAMES))
        gathers = [op for op in after.ops if op.backward and (isinstance(op, Gather) or ends(op, Gather))]
        assert order(after.with_ops([*gathers, after.ops[-1]])) == expected


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


def moments(timeline: Timeline, times: Times, more: int) -> list[float]:
    """Return when the wait for each gather ends, on a wire that carries one gather at a time, in launch order.

    Computations between two waits take the seconds in ``times`` plus ``more``.
    """
    now, wire, phase = 0.0, 0.0, False
    arrival: dict[str, float] = {}
    waited: list[float] = []
    computing = 0.0  # until the next wait, unless that comes at once
    for op in timeline.ops:
        if op.backward is not phase:
            phase, computing = True, 0.0
        if isinstance(op, Gather):
            wire = max(wire, now) + timeline.traffic(op).busiest / times.bytes_per_second
            arrival[op.handle] = wire
        elif isinstance(op, Compute):
            now, computing = now + computing, 0.0
        elif ends(op, Gather):
            now = max(now + computing, arrival[op.launch.handle])
            waited.append(now)
            computing = (times.backward if phase else times.forward).get(op.params[0], 0.0) + more
    return waited


def bucketed(timeline: Timeline) -> Timeline:
    return prefetch(bucket(regather(timeline)))


@given(timed(), st.integers(0, 1))
def test_compute_waits_no_longer_than_if_all_gathers_started_early(timeline: Timeline, more: int) -> None:
    # This holds even if compute takes longer than measured. No gather starts earlier than without times.
    times = timeline.plan.policy.times
    assert times is not None
    after, eager = bucketed(timeline), bucketed(with_policy(timeline, times=None, prefetch=10**6))
    late, early = moments(after, times, more), moments(eager, times, more)
    assert len(late) == len(early)
    assert all(later <= earlier for later, earlier in zip(late, early, strict=True))
    most = [max(in_flight_bytes(schedule, Gather), default=0) for schedule in (after, eager)]
    assert most[0] <= most[1]


@given(st.lists(st.integers(1, 20)), st.integers(0, 40))
def test_gathers_start_as_early_as_the_bound_allows(nbytes: list[int], bound: int) -> None:
    ended = ended_before(nbytes, bound)
    assert ended == sorted(ended)
    for number, before in enumerate(ended):
        assert 0 <= before <= number
        under_way = sum(nbytes[before : number + 1])
        assert under_way <= bound or before == number
        assert before == 0 or under_way + nbytes[before - 1] > bound  # one earlier would exceed it


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_each_gather_starts_at_the_latest_wait_that_suffices(pairs: list[tuple[int, int]]) -> None:
    # By the definition: try all waits for each gather.
    computed, on_wire = [float(c) for c, _ in pairs], [float(w) for _, w in pairs]
    waits = [sum(computed[:number]) for number in range(len(pairs))]
    for number, ended in enumerate(ended_in_time(computed, on_wire)):

        def in_time(start: float, first: int = number) -> bool:
            return all(start + sum(on_wire[first : last + 1]) <= waits[last] for last in range(first, len(waits)))

        assert 0 <= ended <= number
        assert ended == 0 or in_time(waits[ended - 1])
        assert ended == number or not in_time(waits[ended])


def test_the_limit_of_units_in_flight_is_checked_only_without_times() -> None:
    lifted = model(replace(ALONE, in_flight_bytes=MiB, times=times({})), *NAMES, training=False)
    timeline = prefetch(lifted)
    check_pass(timeline, lifted)
    with pytest.raises(ScheduleError, match="prefetch is 2"):
        check_pass(with_policy(timeline, times=None), lifted)


# The data


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Times({"a": -1.0}, {}, 1.0), "forward of 'a' is -1.0; give seconds of compute, 0 or more"),
        (lambda: Times({}, {"a": math.nan}, 1.0), "backward of 'a' is nan; give seconds"),
        (lambda: Times({"a": True}, {}, 1.0), "forward of 'a' is True; give seconds"),
        (lambda: Times({0: 1.0}, {}, 1.0), "forward has times for 0; give the path"),  # type: ignore[dict-item]
        (lambda: Times([1.0], {}, 1.0), r"forward is \[1.0\]; give a mapping"),  # type: ignore[arg-type]
        (lambda: Times({}, {}, 0), "bytes_per_second is 0; give the bytes that a rank sends per second, more than 0"),
        (lambda: Times({}, {}, math.nan), "bytes_per_second is nan; give"),
        (lambda: Times({}, {}, None), "bytes_per_second is None; give"),  # type: ignore[arg-type]
    ],
)
def test_wrong_times_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_times_are_immutable_values_with_a_short_repr() -> None:
    # Ranks compare the reprs of their policies.
    seconds = {"a": 1, "b": 2.0}
    times, reordered = Times(seconds, {}, 3), Times({"b": 2, "a": 1.0}, {}, 3.0)
    assert (times, repr(times), hash(times)) == (reordered, repr(reordered), hash(reordered))
    assert {Policy(times=times), Policy(times=reordered)} == {Policy(times=times)}
    seconds["b"] = 2.5
    assert times == reordered != Times(seconds, {}, 3)
    swapped = Times({"a": 2.0, "b": 1.0}, {}, 3)
    assert repr(times) != repr(swapped)
    assert "2 gathers, 3 s" in repr(times)
    assert "2 gathers, 3 s" in repr(swapped)
    assert len(repr(Times({f"blocks.{number}.w": 0.1 for number in range(1000)}, seconds, 3))) < 200
    assert pickle.loads(pickle.dumps(times)) == copy.deepcopy(times) == times
