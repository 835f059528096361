"""Gathers that start as late as they can: checked by hand, and compute never waits longer for it."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_timelines import ALONE, lines, model
from tests.harness.timelines import Terms, in_flight_bytes, interpret, timelines, with_rank
from thunder_zero.policy import MiB, Policy
from thunder_zero.schedule.bucket import bucket
from thunder_zero.schedule.fault import ScheduleError
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.prefetch import ended_in_time, prefetch
from thunder_zero.schedule.regather import regather
from thunder_zero.schedule.timeline import Kind, Timeline
from thunder_zero.schedule.verify import check_pass, check_schedule
from thunder_zero.times import Times

NAMES = ("a.w", "b.w", "c.w", "d.w")
BYTES = 4  # of each of them; on two ranks each rank sends and receives all of it at most
SECONDS = {"a.w": 3.0, "b.w": 1.0, "c.w": 1.0}


def times(seconds: dict[str, float], bytes_per_second: float = BYTES) -> Times:
    return Times(seconds, {}, bytes_per_second)


def scheduled(times: Times, *, in_flight: int = MiB, buckets: int = 2, **fields: dict[str, object]) -> list[str]:
    """Forward of four units, as words."""
    policy = replace(ALONE, in_flight_bytes=in_flight, prefetch=buckets, times=times)
    return lines(prefetch(model(policy, *NAMES, training=False, **fields)))


RIGHT_BEFORE = [
    "gather a.w",
    "wait a.w",
    "gather b.w",
    "y0 <- x a.w",
    "wait b.w",
    "gather c.w",
    "y1 <- y0 b.w",
    "wait c.w",
    "gather d.w",
    "y2 <- y1 c.w",
    "wait d.w",
    "y3 <- y2 d.w",
    "return <- y3",
]
ALL_AT_ONCE = [
    "gather a.w",  # alone: what is not needed yet would only delay it
    "wait a.w",
    "gather b.w",
    "gather c.w",
    "gather d.w",
    "y0 <- x a.w",
    "wait b.w",
    "y1 <- y0 b.w",
    "wait c.w",
    "y2 <- y1 c.w",
    "wait d.w",
    "y3 <- y2 d.w",
    "return <- y3",
]
TWO_AT_ONCE = [
    "gather a.w",
    "wait a.w",
    "gather b.w",
    "gather c.w",
    "y0 <- x a.w",
    "wait b.w",
    "gather d.w",
    "y1 <- y0 b.w",
    "wait c.w",
    "y2 <- y1 c.w",
    "wait d.w",
    "y3 <- y2 d.w",
    "return <- y3",
]


@pytest.mark.parametrize("buckets", [0, 1, 9])
def test_with_plenty_of_compute_each_starts_one_wait_ahead(buckets: int) -> None:
    """Whatever ``policy.prefetch`` says."""
    assert scheduled(times(SECONDS), buckets=buckets) == RIGHT_BEFORE
    assert scheduled(times(SECONDS, math.inf), buckets=buckets) == RIGHT_BEFORE


def test_one_that_takes_longer_than_the_compute_before_it_starts_a_wait_earlier() -> None:
    """Waits at 0, 3, 4 and 5 s. d takes 2 s, so it leaves at 3 s, with b's wait; c must end by 3 s."""
    assert scheduled(times(SECONDS), d_w={"shape": (3,)}) == TWO_AT_ONCE


def test_one_that_follows_pushes_those_before_it() -> None:
    """d takes 3 s and leaves at 2 s, c at 1 s, b at 0 s: all of them after a's wait."""
    assert scheduled(times(SECONDS), d_w={"shape": (5,)}) == ALL_AT_ONCE


def test_a_moment_that_is_just_in_time_is_in_time() -> None:
    """c and d take exactly the time between two waits, 1 s."""
    assert scheduled(times(SECONDS, BYTES)) == RIGHT_BEFORE
    assert scheduled(times(SECONDS, BYTES * 0.99)) != RIGHT_BEFORE


@pytest.mark.parametrize(("in_flight", "expected"), [(MiB, ALL_AT_ONCE), (12, ALL_AT_ONCE), (8, TWO_AT_ONCE)])
def test_on_a_slow_wire_they_start_as_early_as_the_bytes_in_flight_allow(in_flight: int, expected: list[str]) -> None:
    assert scheduled(times(SECONDS, 0.001), in_flight=in_flight) == expected
    policy = replace(ALONE, in_flight_bytes=in_flight, prefetch=99)
    assert lines(prefetch(model(policy, *NAMES, training=False))) == expected


def test_nothing_in_flight_is_right_before_its_use() -> None:
    policy = replace(ALONE, in_flight_bytes=0, times=times(SECONDS, 0.001))
    timeline = model(policy, *NAMES, training=False)
    assert prefetch(timeline) == timeline


def test_what_is_not_named_counts_as_no_compute() -> None:
    """Rather too early than too late: d seems to be needed at 4 s, with c."""
    assert scheduled(times({"a.w": 3.0, "b.w": 1.0})) == TWO_AT_ONCE
    assert scheduled(times({})) == ALL_AT_ONCE


def test_shards_that_are_computed_late_hold_their_gather_back() -> None:
    policy = replace(ALONE, in_flight_bytes=MiB, times=times({}))
    timeline = model(policy, *NAMES, training=False)
    cast = replace(timeline.ops[2], reads=("raw",), writes=("t_b.w",), source=(99,))
    after = prefetch(timeline.with_ops([*timeline.ops[:3], cast, *timeline.ops[3:]]))
    assert lines(after)[:6] == [
        "gather a.w",
        "wait a.w",
        "y0 <- x a.w",
        "t_b.w <- raw",
        "gather b.w",
        "gather c.w",
    ]


def test_backward_has_times_of_its_own_and_its_reductions_take_the_wire_too() -> None:
    """Waits for d, c, b, a at 0, 2, 4, 6 s. A gather takes 1 s; so does the reduction of the unit before."""

    def backward(bytes_per_second: float) -> list[str]:
        seconds = {"d.w": 2.0, "c.w": 2.0, "b.w": 2.0}
        policy = replace(ALONE, in_flight_bytes=MiB, times=Times({}, seconds, bytes_per_second))
        after = prefetch(bucket(regather(model(policy, *NAMES))))
        halves = [op for op in after.ops if op.backward and (op.kind is Kind.GATHER or after.ends(op, Kind.GATHER))]
        return [f"{op.kind} {op.params[0]}" for op in halves]

    fast = ["gather d.w", "wait d.w", "gather c.w", "wait c.w", "gather b.w", "wait b.w", "gather a.w", "wait a.w"]
    assert backward(BYTES) == fast
    slow = ["gather d.w", "wait d.w", "gather c.w", "gather b.w", "wait c.w", "gather a.w", "wait b.w", "wait a.w"]
    assert backward(BYTES * 0.9) == slow  # more than 2 s for a gather and a reduction


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_busiest_rank_of_all_decides(world_size: int) -> None:
    """In gathers and reduce-scatters of rows that do not divide; an all-reduce keeps all ranks equally busy."""
    timeline = model(replace(ALONE, stage=3), "a.w", "a.scalar", a_w={"shape": (7, 3)}, a_scalar={"shape": ()})
    timeline = replace(timeline, plan=replace(timeline.plan, world_size=world_size))
    for op in timeline.ops:
        if op.kind in (Kind.GATHER, Kind.REDUCE):
            ranks = [with_rank(timeline, rank) for rank in range(world_size)]
            assert timeline.wire_bytes(op) >= max(seen.bytes_sent(op) for seen in ranks)
            if op.kind is Kind.GATHER or op.params == ("a.scalar",):
                assert {seen.wire_bytes(op) for seen in ranks} == {max(seen.bytes_sent(op) for seen in ranks)}


# What holds for all


@st.composite
def timed(draw: st.DrawFn) -> Timeline:
    """A lifted timeline whose policy has times, of most buckets; small integers, so that sums are exact.

    Units with parameters that are gathered once have no time in forward: prefetch would use it for their first read in
    backward, where ``moments`` counts no time.
    """
    timeline = draw(timelines())
    seconds = st.dictionaries(
        st.sampled_from([param.path for param in timeline.plan.params]), st.integers(0, 60).map(float)
    )
    speed = draw(st.sampled_from((0.5, 1.0, 4.0, 16.0, math.inf)))
    forward, backward = draw(seconds), draw(seconds)
    once = {param.unit for param in timeline.plan.params if param.gathered_once and param.sharded}
    forward = {path: time for path, time in forward.items() if timeline.plan.by_name[path].unit not in once}
    policy = replace(timeline.plan.policy, times=Times(forward, backward, speed))
    return replace(timeline, plan=replace(timeline.plan, policy=policy))


def moments(timeline: Timeline, times: Times, more: int) -> list[float]:
    """When the wait for each gather is over, on a wire that carries one gather after the other, in launch order.

    The computations between two waits take the seconds in ``times``, and ``more``.
    """
    now, wire, half = 0.0, 0.0, False
    ends: dict[str, float] = {}
    waited: list[float] = []
    computing = 0.0  # until the next wait, unless that comes at once
    for op in timeline.ops:
        if op.backward is not half:
            half, computing = True, 0.0
        if op.kind is Kind.GATHER:
            wire = max(wire, now) + timeline.wire_bytes(op) / times.bytes_per_second
            ends[op.writes[0]] = wire
        elif op.kind is Kind.COMPUTE:
            now, computing = now + computing, 0.0
        elif timeline.ends(op, Kind.GATHER):
            now = max(now + computing, ends[op.reads[0]])
            waited.append(now)
            computing = (times.backward if half else times.forward).get(op.params[0], 0.0) + more
    return waited


@given(timed(), st.integers(0, 1))
def test_compute_waits_no_longer_than_if_all_started_as_early_as_they_may(timeline: Timeline, more: int) -> None:
    """Also if compute takes longer than the times say."""
    policy = timeline.plan.policy
    assert policy.times is not None
    eager = replace(timeline.plan, policy=replace(policy, times=None, prefetch=10**6))
    late = moments(bucketed(timeline), policy.times, more)
    early = moments(bucketed(replace(timeline, plan=eager)), policy.times, more)
    assert len(late) == len(early)
    assert all(one <= other for one, other in zip(late, early, strict=True))


def bucketed(timeline: Timeline) -> Timeline:
    return prefetch(bucket(regather(timeline)))


@given(timed())
def test_the_schedule_is_right(timeline: Timeline) -> None:
    """``run`` checks after each pass."""
    after = run(timeline)
    check_schedule(after, timeline)
    terms: Terms = {}
    assert interpret(after, terms) == interpret(timeline, terms)


@given(timed())
def test_it_starts_nothing_earlier_than_without_times(timeline: Timeline) -> None:
    eager = replace(timeline.plan, policy=replace(timeline.plan.policy, times=None, prefetch=10**6))
    late = in_flight_bytes(bucketed(timeline), Kind.GATHER)
    early = in_flight_bytes(bucketed(replace(timeline, plan=eager)), Kind.GATHER)
    assert max(late, default=0) <= max(early, default=0)


@given(timed(), st.integers(0, 7))
def test_all_ranks_schedule_alike(timeline: Timeline, rank: int) -> None:
    assert run(with_rank(timeline, rank)).ops == run(timeline).ops


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_each_starts_at_the_latest_wait_that_suffices(pairs: list[tuple[int, int]]) -> None:
    """Against the definition, by trying all waits for each gather."""
    computed, on_wire = [float(c) for c, _ in pairs], [float(w) for _, w in pairs]
    waits = [sum(computed[:number]) for number in range(len(pairs))]
    for number, ended in enumerate(ended_in_time(computed, on_wire)):

        def in_time(start: float, first: int = number) -> bool:
            return all(start + sum(on_wire[first : last + 1]) <= waits[last] for last in range(first, len(waits)))

        assert 0 <= ended <= number
        assert ended == 0 or in_time(waits[ended - 1])
        assert ended == number or not in_time(waits[ended])


def test_the_limit_of_buckets_under_way_is_checked_without_times_only() -> None:
    lifted = model(replace(ALONE, in_flight_bytes=MiB, times=times({})), *NAMES, training=False)
    timeline = prefetch(lifted)
    check_pass(timeline, lifted)
    plan = replace(timeline.plan, policy=replace(timeline.plan.policy, times=None))
    with pytest.raises(ScheduleError, match="prefetch is 2"):
        check_pass(replace(timeline, plan=plan), lifted)


# The data


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (({"a": -1.0}, {}, 1.0), "forward of 'a' is -1.0; give seconds of compute, 0 or more"),
        (({}, {"a": math.nan}, 1.0), "backward of 'a' is nan; give seconds"),
        (({"a": math.inf}, {}, 1.0), "forward of 'a' is inf; give seconds"),
        (({"a": "1"}, {}, 1.0), "forward of 'a' is '1'; give seconds"),
        (({"a": True}, {}, 1.0), "forward of 'a' is True; give seconds"),
        (({0: 1.0}, {}, 1.0), "forward has times for 0; give the path of a parameter"),
        (([1.0], {}, 1.0), r"forward is \[1.0\]; give a mapping"),
        (({}, {}, 0), "bytes_per_second is 0; give the bytes that a rank sends per second, more than 0"),
        (({}, {}, -1.0), "bytes_per_second is -1.0; give"),
        (({}, {}, math.nan), "bytes_per_second is nan; give"),
        (({}, {}, None), "bytes_per_second is None; give"),
    ],
)
def test_times_that_cannot_be(arguments: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Times(*arguments)


def test_a_policy_takes_nothing_but_times() -> None:
    with pytest.raises(ValueError, match=r"times is \{\}; give thunder_zero.Times"):
        Policy(times={})  # type: ignore[arg-type]


def test_equal_times_look_equal() -> None:
    """Ranks compare how their policies look."""
    one, other = Times({"a": 1, "b": 2.0}, {}, 3), Times({"b": 2, "a": 1.0}, {}, 3.0)
    assert (one, repr(one), hash(one)) == (other, repr(other), hash(other))
    assert one != Times({"a": 1, "b": 2.5}, {}, 3)
    assert {Policy(times=one), Policy(times=other)} == {Policy(times=one)}


def test_times_are_frozen_and_can_be_copied() -> None:
    seconds = {"a": 1.0}
    made = Times(seconds, {}, 3.0)
    seconds["a"] = 2.0
    assert made.forward == {"a": 1.0}
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
