"""The passes: what each does to a small timeline, line by line, and what holds for all timelines."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_timelines import ALONE, gathered, lines, model
from tests.harness.timelines import (
    Terms,
    Use,
    gpt,
    in_flight_bytes,
    interpret,
    timelines,
    with_rank,
)
from thunder_zero.policy import MiB, Policy
from thunder_zero.schedule.bucket import bucket
from thunder_zero.schedule.free import free
from thunder_zero.schedule.passes import PASSES, run
from thunder_zero.schedule.prefetch import ended_before, prefetch
from thunder_zero.schedule.regather import regather
from thunder_zero.schedule.sink_waits import sink_waits
from thunder_zero.schedule.timeline import Kind, Op, Timeline, gathered_bytes
from thunder_zero.schedule.units import is_vector
from thunder_zero.schedule.verify import check_pass, check_schedule
from thunder_zero.times import Times

if TYPE_CHECKING:
    from _typeshed import TraceFunction


# regather


def test_regather_gathers_again_before_the_first_reader_in_backward() -> None:
    after = regather(model(ALONE, Use("a.w", ("view",))))
    assert lines(after, backward=True) == [
        "g <- gy",
        "gw0 <- g x",
        "gather a.w",
        "wait a.w",
        "c0.0_again <- a.w_again",
        "gx0 <- g c0.0_again",
        "g_a.w <- gw0",
        "reduce a.w",
        "wait a.w",
        "return <- y0 mean_a.w gx0",
    ]
    assert [op.again for op in after.ops if op.source == (0,)] == [False, True]
    assert after.values["a.w_again"] == after.values["a.w"]


def test_a_copy_of_a_view_views_the_copy() -> None:
    timeline = model(ALONE, Use("a.w", ("view", "view")))
    views = {name: replace(timeline.values[name], base="a.w") for name in ("c0.0", "c0.1")}
    after = regather(timeline.with_ops(timeline.ops, views))
    bases = {name: after.values[name].base for name in ("a.w", "c0.1", "a.w_again", "c0.0_again", "c0.1_again")}
    assert bases == {"a.w": "", "c0.1": "a.w", "a.w_again": "", "c0.0_again": "a.w_again", "c0.1_again": "a.w_again"}


def test_regather_leaves_what_backward_does_not_read() -> None:
    after = regather(model(ALONE, Use("a.embedding", needed=False), "a.w", Use("a.bias", ("view",), needed=False)))
    assert gathered(after, backward=True) == {"a.w": 1}


def test_regather_gathers_once_for_all_readers_in_backward() -> None:
    after = regather(model(ALONE, "a.w", Use("a.w", ("view",)), Use("a.w", ("view",), view_in_backward=True)))
    assert gathered(after, backward=True) == {"a.w": 1}
    assert [name for op in after.ops if op.again for name in op.writes] == [
        "fut_a.w_again",
        "a.w_again",
        "c2.0_again",
        "c1.0_again",
    ]


def test_regather_gathers_nothing_again_that_is_gathered_once_and_computes_again_what_mixes() -> None:
    after = regather(model(ALONE, Use("a.w", ("a.scale",)), a_scale={"gathered_once": True}))
    assert gathered(after, backward=True) == {"a.w": 1}
    (copy,) = [op for op in after.ops if op.again and op.kind is Kind.COMPUTE]
    assert copy.reads == ("a.w_again", "a.scale")


def test_regather_copies_operations_with_several_outputs_whole() -> None:
    after = regather(model(ALONE, Use("a.w", ("pair", "view"))))
    assert [op.writes for op in after.ops if op.again][2:] == [("c0.0'_again", "c0.0_again"), ("c0.1_again",)]


def test_regather_reads_forwards_constants_and_replicated_parameters() -> None:
    after = regather(model(ALONE, Use("a.w", ("constant", "a.scalar")), a_scalar={"shape": ()}))
    assert [op.reads for op in after.ops if op.again][2:] == [("a.w_again", "k0.0"), ("c0.0_again", "t_a.scalar")]


def test_regather_saves_what_is_random() -> None:
    after = regather(model(ALONE, Use("a.w", ("random",))))
    assert gathered(after, backward=True) == {}
    assert "gx0 <- g c0.0" in lines(after)


def test_regather_leaves_forwards_outputs() -> None:
    after = regather(model(ALONE, Use("a.w", ("view",), returned=True)))
    assert after.ops[-1].reads[0] == "c0.0"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_regather_changes_nothing_before_stage_3(stage: int) -> None:
    timeline = gpt(2, Policy(stage=stage))
    assert regather(timeline) == timeline


def test_regather_gathers_again_for_each_unit_in_forward() -> None:
    uses = ("root.tied", "a.w", "a.v", Use("root.tied", ("view",)), "root.tied", "b.w", "root.tied")
    again = regather(model(replace(ALONE, gather_per_unit=True), *uses, training=False))
    assert gathered(again, backward=False) == {"root.tied": 3, "a.w": 1, "a.v": 1, "b.w": 1}
    once = regather(model(ALONE, *uses, training=False))
    assert gathered(once, backward=False) == {"root.tied": 1, "a.w": 1, "a.v": 1, "b.w": 1}


def test_backward_gathers_once_what_forward_regathers() -> None:
    uses = ("root.tied", "a.w", Use("root.tied", ("view", "a.w")), "root.tied")
    after = run(model(replace(ALONE, gather_per_unit=True), *uses))
    assert gathered(after, backward=False) == {"root.tied": 2, "a.w": 1}
    assert gathered(after, backward=True) == {"root.tied": 1, "a.w": 1}


def test_regather_lowers_what_is_gathered_at_once() -> None:
    uses = ("root.tied", "a.w", "b.w", "root.tied")
    again = run(model(replace(ALONE, gather_per_unit=True), *uses, training=False))
    once = run(model(ALONE, *uses, training=False))
    assert max(gathered_bytes(once)) == 8  # root.tied beside a.w, then b.w
    assert max(gathered_bytes(again)) == 4  # one at a time


# bucket


def test_bucket_merges_a_units_gathers_where_the_first_stood_and_reductions_where_the_last_stood() -> None:
    after = bucket(regather(model(replace(ALONE, bucket_bytes=MiB), "a.w", "a.v", "b.w")))
    assert lines(after) == [
        "gather a.w a.v",
        "wait a.w a.v",
        "y0 <- x a.w",
        "y1 <- y0 a.v",
        "gather b.w",
        "wait b.w",
        "y2 <- y1 b.w",
        "g <- gy",
        "gw2 <- g y1",
        "gather b.w",
        "wait b.w",
        "gx2 <- g b.w_again",
        "g_b.w <- gw2",
        "reduce b.w",
        "wait b.w",
        "gw1 <- gx2 y0",
        "gather a.v a.w",
        "wait a.v a.w",
        "gx1 <- gx2 a.v_again",
        "g_a.v <- gw1",
        "gw0 <- gx1 x",
        "gx0 <- gx1 a.w_again",
        "g_a.w <- gw0",
        "reduce a.v a.w",
        "wait a.v a.w",
        "return <- y2 mean_b.w mean_a.v mean_a.w gx0",
    ]
    merged = after.ops[0]
    assert (merged.reads, merged.writes, merged.source) == (("t_a.w", "t_a.v"), ("fut_a.w",), (0, 3))
    assert after.values["fut_a.w"].nbytes == 8


@pytest.mark.parametrize(
    ("bucket_bytes", "buckets"),
    [
        (0, ["gather a.p", "gather a.q", "gather a.r"]),
        (7, ["gather a.p", "gather a.q", "gather a.r"]),
        (8, ["gather a.p a.q", "gather a.r"]),
        (12, ["gather a.p a.q a.r"]),
    ],
)
def test_bucket_cuts_by_bytes(bucket_bytes: int, buckets: list[str]) -> None:
    timeline = model(replace(ALONE, bucket_bytes=bucket_bytes), "a.p", "a.q", "a.r", training=False)
    assert lines(bucket(timeline), Kind.GATHER) == buckets


def test_bucket_separates_dtypes() -> None:
    half: dict[str, object] = {"dtype": torch.bfloat16}
    timeline = model(replace(ALONE, bucket_bytes=MiB), "a.p", "a.q", "a.r", training=False, a_q=half)
    assert lines(bucket(timeline), Kind.GATHER) == ["gather a.p a.r", "gather a.q"]


def test_bucket_separates_all_reduces_from_reduce_scatters() -> None:
    timeline = model(replace(ALONE, bucket_bytes=MiB), "a.p", "a.q", "a.r", a_q={"shape": ()})
    assert lines(bucket(timeline), Kind.REDUCE) == ["reduce a.q", "reduce a.r a.p"]


def test_bucket_ends_at_another_units_collective() -> None:
    timeline = model(replace(ALONE, bucket_bytes=MiB), "a.p", "b.p", "a.q")
    after = bucket(timeline)
    assert lines(after, Kind.GATHER, Kind.REDUCE) == [f"gather {p}" for p in ("a.p", "b.p", "a.q")] + [
        f"reduce {p}" for p in ("a.q", "b.p", "a.p")
    ]


def test_bucket_waits_for_shards_that_are_computed() -> None:
    timeline = model(replace(ALONE, bucket_bytes=MiB), "a.p", "a.q", training=False)
    cast = Op(Kind.COMPUTE, ("raw",), ("t_a.q",), repeatable=True, source=(99,))
    after = bucket(timeline.with_ops([*timeline.ops[:3], cast, *timeline.ops[3:]]))
    assert lines(after)[2:5] == ["y0 <- x a.p", "t_a.q <- raw", "gather a.q"]


def test_bucket_does_not_delay_who_reads_a_reduced_gradient() -> None:
    timeline = model(replace(ALONE, bucket_bytes=MiB), "a.p", "a.q")
    at = next(at for at, op in enumerate(timeline.ops) if "mean_a.q" in op.writes)
    reader = Op(Kind.COMPUTE, ("mean_a.q",), ("norm",), backward=True, source=(99,))
    after = timeline.with_ops([*timeline.ops[: at + 1], reader, *timeline.ops[at + 1 :]])
    assert lines(sink_waits(bucket(after)), Kind.REDUCE) == ["reduce a.q", "reduce a.p"]
    assert lines(bucket(timeline), Kind.REDUCE) == ["reduce a.q a.p"]


# prefetch


def test_prefetch_starts_gathers_at_the_borders_of_the_units_before() -> None:
    names = ("a.w", "b.w", "c.w", "d.w")
    after = prefetch(model(replace(ALONE, in_flight_bytes=8), *names, training=False))
    assert lines(after) == [
        "gather a.w",  # alone: what is not needed yet would only delay it
        "wait a.w",
        "gather b.w",
        "gather c.w",  # 8 bytes are under way
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


@pytest.mark.parametrize(("units", "under_way"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 4)])
def test_prefetch_puts_at_most_so_many_units_in_flight(units: int, under_way: int) -> None:
    policy = replace(ALONE, in_flight_bytes=MiB, prefetch=units)
    after = prefetch(model(policy, "a.w", "b.w", "c.w", "d.w", "e.w", training=False))
    assert max(in_flight_bytes(after, Kind.GATHER)) == 4 * under_way


def test_prefetch_starts_each_gather_right_before_its_wait_when_nothing_may_be_ahead() -> None:
    timeline = model(ALONE, "a.w", "b.w")
    assert prefetch(timeline) == timeline


def test_prefetch_keeps_the_gathers_of_backward_in_backward() -> None:
    after = prefetch(regather(model(replace(ALONE, in_flight_bytes=MiB), "a.w", "b.w")))
    assert lines(after, backward=True)[:4] == ["gather b.w", "g <- gy", "gw1 <- g y0", "wait b.w"]


def test_prefetch_waits_for_shards_that_are_computed() -> None:
    timeline = model(replace(ALONE, in_flight_bytes=MiB), "a.p", "a.q", training=False)
    cast = Op(Kind.COMPUTE, ("raw",), ("t_a.q",), repeatable=True, source=(99,))
    after = prefetch(timeline.with_ops([*timeline.ops[:3], cast, *timeline.ops[3:]]))
    assert lines(after)[:5] == ["gather a.p", "wait a.p", "y0 <- x a.p", "t_a.q <- raw", "gather a.q"]


@given(st.lists(st.integers(1, 20)), st.integers(0, 40))
def test_gathers_start_as_early_as_the_bound_allows(nbytes: list[int], bound: int) -> None:
    ended = ended_before(nbytes, bound)
    assert ended == sorted(ended)
    for number, before in enumerate(ended):
        assert 0 <= before <= number
        under_way = sum(nbytes[before : number + 1])
        assert under_way <= bound or before == number
        assert before == 0 or under_way + nbytes[before - 1] > bound  # one earlier would exceed it


# sink_waits


def test_sink_waits_ends_reductions_before_the_return() -> None:
    after = sink_waits(model(Policy(stage=2, bucket_bytes=0), "a.w", "b.w"))
    assert lines(after)[-4:-1] == ["reduce a.w", "wait b.w", "wait a.w"]


def test_sink_waits_ends_the_oldest_first_when_too_much_is_under_way() -> None:
    after = sink_waits(model(replace(ALONE, in_flight_bytes=8), "a.w", "b.w", "c.w", "d.w"))
    assert lines(after, Kind.REDUCE, Kind.WAIT, backward=True) == [
        "reduce d.w",
        "reduce c.w",
        "wait d.w",
        "reduce b.w",
        "wait c.w",
        "reduce a.w",
        "wait b.w",
        "wait a.w",
    ]


def test_sink_waits_ends_the_oldest_before_the_next_gradient_is_made() -> None:
    """Each gradient has 4 bytes: 8 bytes hold two, in flight or just made."""
    after = sink_waits(model(replace(ALONE, in_flight_bytes=8), "a.w", "b.w", "c.w"))
    assert lines(after, backward=True) == [
        "g <- gy",
        "gw2 <- g y1",
        "gx2 <- g c.w",
        "g_c.w <- gw2",
        "reduce c.w",
        "gw1 <- gx2 y0",
        "gx1 <- gx2 b.w",
        "g_b.w <- gw1",
        "reduce b.w",
        "wait c.w",  # two travel
        "gw0 <- gx1 x",
        "gx0 <- gx1 a.w",
        "g_a.w <- gw0",
        "reduce a.w",
        "wait b.w",
        "wait a.w",
        "return <- y2 mean_c.w mean_b.w mean_a.w gx0",
    ]


def test_sink_waits_counts_all_gradients_of_the_next_reduction() -> None:
    """b's reduction counts 8 bytes from its first gradient on, in addition to c's 4."""
    policy = replace(ALONE, bucket_bytes=MiB, in_flight_bytes=8)
    after = sink_waits(bucket(model(policy, "b.w", "b.v", "c.w")))
    assert lines(after, backward=True)[3:12] == [
        "g_c.w <- gw2",
        "reduce c.w",
        "gw1 <- gx2 y0",
        "gx1 <- gx2 b.v",
        "wait c.w",
        "g_b.v <- gw1",
        "gw0 <- gx1 x",
        "gx0 <- gx1 b.w",
        "g_b.w <- gw0",
    ]


def test_sink_waits_ends_what_nobody_reads() -> None:
    timeline = model(Policy(stage=2), "a.w")
    after = sink_waits(timeline.with_ops([*timeline.ops[:-1], replace(timeline.ops[-1], reads=("y0",))]))
    assert lines(after)[-2:] == ["wait a.w", "return <- y0"]


def test_sink_waits_comes_before_who_reads_a_reduced_gradient() -> None:
    timeline = model(Policy(stage=2, bucket_bytes=0), "a.w", "b.w")
    reader = Op(Kind.COMPUTE, ("mean_b.w",), backward=True, source=(99,))
    at = next(at for at, op in enumerate(timeline.ops) if op.kind is Kind.REDUCE and op.params == ("a.w",))
    after = sink_waits(timeline.with_ops([*timeline.ops[:at], reader, *timeline.ops[at:]]))
    assert lines(after)[-5:-1] == ["wait b.w", "return <- mean_b.w", "reduce a.w", "wait a.w"]


# free


def test_free_comes_after_the_last_read_of_what_may_be_a_view() -> None:
    after = free(model(ALONE, Use("a.w", ("view", "view")), "b.w", training=False))
    assert lines(after) == [
        "gather a.w",
        "wait a.w",
        "c0.0 <- a.w",
        "c0.1 <- c0.0",
        "y0 <- x c0.1",
        "free a.w",
        "gather b.w",
        "wait b.w",
        "y1 <- y0 b.w",
        "free b.w",
        "return <- y1",
    ]


@pytest.mark.parametrize(("stage", "frees"), [(0, 0), (1, 0), (2, 3), (3, 6)])
def test_frees_of_each_stage(stage: int, frees: int) -> None:
    after = run(model(Policy(stage=stage, gather_last_units_once=False), "a.w", "b.w", "c.w"))
    assert len(lines(after, Kind.FREE)) == frees


@pytest.mark.parametrize(("units", "frees"), [("abc", 3 + 0), ("abcde", 5 + 2)])
def test_frees_of_zero3_as_it_comes(units: str, frees: int) -> None:
    """Three units are alive at the peak, so the last three are gathered once: freed once, not twice."""
    after = run(model(Policy(), *(f"{unit}.w" for unit in units)))
    assert len(lines(after, Kind.FREE)) == frees


def test_free_of_what_is_gathered_once_comes_in_the_half_that_reads_it_last() -> None:
    after = run(model(Policy(stage=2), "a.w", Use("a.bias", needed=False)))
    assert lines(after, Kind.FREE, backward=False) == ["free a.bias"]
    assert lines(after, Kind.FREE, backward=True) == ["free a.w"]


def test_free_spares_what_escapes() -> None:
    after = run(model(ALONE, Use("a.w", ("view",), returned=True), "b.w", training=False))
    assert lines(after, Kind.FREE) == ["free b.w"]
    assert gathered_bytes(after)[-1] == 4


# all of them


def test_the_gathered_bytes_of_a_gpt() -> None:
    """A block has 16 + 768 + 96 + 256 + ... bytes; the stages hold all of them, or the blocks in the window."""
    policy = Policy(stage=3, in_flight_bytes=0)
    block = 4 * (8 * 2 + 24 * 8 + 24 + 8 * 8 + 8 + 8 * 2 + 32 * 8 + 32 + 8 * 32 + 8)  # 3,488 bytes
    embeddings = 4 * (64 + 16) * 8
    peaks = {stage: max(gathered_bytes(run(gpt(3, replace(policy, stage=stage))))) for stage in range(4)}
    assert peaks[0] == peaks[1] == 0
    needed_in_backward = block - 4 * (8 + 24 + 8 + 8 + 32 + 8)  # without biases
    assert peaks[2] == 4 * 64 * 8 + 2 * needed_in_backward + block + 0
    assert peaks[3] == embeddings - 4 * 16 * 8 + block  # the tied embedding, and one block


def test_counts_of_a_gpt() -> None:
    def collectives(stage: int, kind: Kind, layers: int = 3, **fields: bool) -> int:
        return len(lines(run(gpt(layers, Policy(stage=stage, **fields))), kind))  # type: ignore[arg-type]

    assert [collectives(stage, Kind.REDUCE) for stage in range(4)] == [5, 5, 5, 5]  # ln_f, three blocks, embeddings
    assert [collectives(stage, Kind.GATHER) for stage in range(4)] == [0, 5, 5, 5]  # ZeRO-3 has room for three blocks
    assert collectives(3, Kind.GATHER, gather_last_units_once=False) == 5 + 4  # and in backward: no embeddings
    assert collectives(3, Kind.GATHER, layers=9, gather_last_units_once=False) == 11 + 10
    assert collectives(3, Kind.GATHER, layers=9) == 11 + 7  # the tied embedding and six blocks


@given(timelines(), st.integers(0, len(PASSES) - 1))
def test_each_pass_is_right(timeline: Timeline, upto: int) -> None:
    after = timeline
    for step in PASSES[: upto + 1]:
        after = step(after)
    prove = check_schedule if upto == len(PASSES) - 1 else check_pass
    prove(after, timeline)
    terms: Terms = {}
    assert interpret(after, terms) == interpret(timeline, terms)


@given(timelines())
def test_bytes_in_flight_stay_within_the_bound_unless_one_is_alone(timeline: Timeline) -> None:
    after, bound = run(timeline), timeline.plan.policy.in_flight_bytes
    for kind in (Kind.GATHER, Kind.REDUCE):
        alone: list[Op] = []
        for op, under_way in zip(after.ops, in_flight_bytes(after, kind), strict=True):
            if op.kind is kind and after.full_bytes(op):
                alone.append(op)
            elif after.ends(op, kind):
                alone = [launched for launched in alone if launched.writes != op.reads]
            assert under_way <= bound or len(alone) == 1
            assert under_way == sum(map(after.full_bytes, alone))


@given(timelines())
def test_nothing_that_is_freed_crosses_to_backward(timeline: Timeline) -> None:
    after = run(timeline)
    alive = gathered_bytes(after)
    border = next((at for at, op in enumerate(after.ops) if op.backward), len(after.ops) - 1)
    returned = _roots(after, after.ops[-1].reads)
    once = {param.path for param in after.plan.params if param.gathered_once}
    escaped = sum(_full(after, path) for path in returned)
    crossing = sum(_full(after, path) for path in gathered(after, backward=False) if path in once)
    assert (alive[border - 1] if border else 0) <= crossing + escaped
    assert alive[-1] == escaped


def _full(timeline: Timeline, path: str) -> int:
    param = timeline.plan.by_name[path]
    return 0 if param.resident else param.full_bytes


def _roots(timeline: Timeline, names: tuple[str, ...]) -> list[str]:
    """Paths of the gathered values that ``names`` may be views of, one for each value."""
    memory: dict[str, dict[str, str]] = {}
    for op in timeline.ops:
        if timeline.ends(op, Kind.GATHER):
            memory |= {name: {name: path} for name, path in zip(op.writes, op.params, strict=True)}
        elif op.repeatable and all(read in memory or read in timeline.replicated for read in op.reads):
            merged = {name: path for read in op.reads for name, path in memory.get(read, {}).items()}
            memory.update(dict.fromkeys(op.writes, merged))
    return list({name: path for read in names for name, path in memory.get(read, {}).items()}.values())


@given(timelines())
def test_backward_gathers_again_just_what_it_needs(timeline: Timeline) -> None:
    needed: set[str] = set()
    forward = timeline.with_ops([op for op in timeline.ops if not op.backward] + [timeline.ops[-1]])
    for op in timeline.ops[:-1]:
        if op.backward:
            needed.update(_roots(forward, op.reads))
    after = run(timeline)  # its plan says which parameters gather_last_units_once chose
    freed = {path for path in needed if not after.plan.by_name[path].gathered_once}
    found = gathered(after, backward=True)
    biases = {path for path in found.keys() - freed if is_vector(after.plan.by_name[path])}
    assert not biases or after.plan.recomputed  # computing a unit again may need its biases
    assert found == dict.fromkeys(freed | biases, 1)


@given(timelines())
def test_forward_gathers_and_backward_reduces_each_once(timeline: Timeline) -> None:
    before, after = timeline, run(timeline)
    assert set(gathered(after, backward=False)) == set(gathered(before, backward=False))
    if not timeline.plan.policy.gather_per_unit:
        assert gathered(after, backward=False) == gathered(before, backward=False)
    reduced = Counter(path for op in after.ops if op.kind is Kind.REDUCE for path in op.params)
    assert reduced == Counter(path for op in before.ops if op.kind is Kind.REDUCE for path in op.params)


@given(timelines())
def test_computations_keep_their_order(timeline: Timeline) -> None:
    def computed(timeline: Timeline) -> list[tuple[int, ...]]:
        return [op.source for op in timeline.ops if op.kind is Kind.COMPUTE and not op.again]

    assert computed(run(timeline)) == computed(timeline)


@given(timelines(), st.integers(0, 7))
def test_all_ranks_schedule_alike(timeline: Timeline, rank: int) -> None:
    assert run(with_rank(timeline, rank)).ops == run(timeline).ops


@given(timelines())
def test_reductions_start_where_their_last_gradient_is_made(timeline: Timeline) -> None:
    ops = [op for op in run(timeline).ops if op.kind in (Kind.COMPUTE, Kind.REDUCE)]
    for before, op in pairwise(ops):
        assert op.kind is not Kind.REDUCE or before.kind is Kind.REDUCE or op.reads[-1] in before.writes


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("times", [None, Times({}, {}, 1e9)], ids=["prefetch", "times"])
def test_the_work_grows_in_proportion_to_the_operations(stage: int, times: Times | None) -> None:
    """Counted in executed lines: four times the blocks may take at most 4.2 times the lines."""

    def executed(layers: int) -> int:
        policy = Policy(stage=stage, bucket_bytes=2000, in_flight_bytes=8000, times=times, gather_per_unit=True)
        timeline, count = gpt(layers, policy), 0

        def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run(timeline)
        finally:
            sys.settrace(before)
        return count

    assert executed(16) <= 4.2 * executed(4)


def test_a_pass_changes_nothing_in_place() -> None:
    timeline = gpt(2, Policy(stage=3))
    ops, values = timeline.ops, dict(timeline.values)
    run(timeline)
    assert (timeline.ops, timeline.values) == (ops, values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_bytes", 0),
        ("in_flight_bytes", 0),
        ("prefetch", 0),
        ("times", Times({}, {}, 1e9)),
        ("gather_per_unit", True),
        ("gather_last_units_once", True),
        ("stage", 2),
    ],
)
def test_each_field_that_the_passes_read_changes_the_schedule(name: str, value: object) -> None:
    policy = Policy(stage=3, gather_last_units_once=False)
    assert run(gpt(2, replace(policy, **{name: value}))).ops != run(gpt(2, policy)).ops  # type: ignore[arg-type]
