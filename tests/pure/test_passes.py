"""Each pass changes a small timeline as expected, line by line; and all timelines keep their results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.tiers import slow
from tests.harness.timelines import (
    ALONE,
    Use,
    gathered,
    lines,
    model,
    same_results,
    split,
    timed,
    timelines,
    with_rank,
)
from thunder_zero.plan.policy import MiB, Policy, Times
from thunder_zero.schedule.bucket import bucket
from thunder_zero.schedule.free import free
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Compute, Free, Gather, Reduce, Return, Wait
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.prefetch import prefetch
from thunder_zero.schedule.regather import regather
from thunder_zero.schedule.sink_waits import sink_waits
from thunder_zero.schedule.timeline import Timeline

if TYPE_CHECKING:
    from _typeshed import TraceFunction

ROOMY = replace(ALONE, bucket_bytes=MiB, in_flight_bytes=MiB)


def with_line(timeline: Timeline, index: int, writes: str, reads: str) -> Timeline:
    """Insert a computation at an index."""
    op = Compute((reads,), (writes,), backward=timeline.ops[index].backward, repeatable=True)
    return timeline.with_ops([*timeline.ops[:index], op, *timeline.ops[index:]])


# regather


def test_regather_gathers_again_before_the_first_reader_in_backward() -> None:
    before = model(ALONE, Use("a.w", ("view",)))
    views = {name: replace(before.values[name], base="a.w") for name in ("c0.0", "gx0")}
    after = regather(before.with_ops(before.ops, views))
    bases = {name: after.values[name].base for name in ("c0.0", "c0.0_again", "gx0")}
    assert bases == {"c0.0": "a.w", "c0.0_again": "a.w_again", "gx0": "a.w_again"}
    assert lines(after, backward=True) == split("""
        gw0 <- g x
        gather a.w; wait a.w; c0.0_again <- a.w_again
        gx0 <- g c0.0_again; g_a.w <- gw0
        reduce a.w; wait a.w; return <- mean_a.w gx0
    """)


@pytest.mark.parametrize(
    ("uses", "again"),
    [
        ([Use("a.embedding", needed=False), "a.w", Use("a.bias", ("view",), needed=False)], ""),  # backward reads a.w
        (["a.w", Use("a.w", ("view",)), Use("a.w", ("view",), view_in_backward=True)], "c2.0 <- a.w; c1.0 <- a.w"),
        ([Use("a.w", ("a.once",))], "c0.0 <- a.w a.once"),  # backward has forward's value
        ([Use("a.w", ("pair", "view"))], "c0.0' c0.0 <- a.w; c0.1 <- c0.0"),
        ([Use("a.w", ("constant", "a.scalar"))], "c0.0 <- a.w k0.0; c0.1 <- c0.0 t_a.scalar"),
        ([Use("a.w", ("view",), returned=True)], "c0.0 <- a.w"),
        ([Use("a.w", ("random",))], None),  # backward reads the value that forward drew
    ],
)
def test_backward_recomputes_values_of_a_regathered_parameter(uses: list[Use | str], again: str | None) -> None:
    before = model(ALONE, *uses, a_once={"kept_unsharded": True}, a_scalar={"shape": ()})
    views = {name: replace(value, base="a.w") for name, value in before.values.items() if name.startswith("c")}
    after = regather(before.with_ops(before.ops, views))
    copies = [line.replace("_again", "") for line in lines(after.with_ops(op for op in after.ops if op.repeated))]
    assert copies == ([] if again is None else ["gather a.w", "wait a.w", *split(again)])
    assert [op for op in after.ops if isinstance(op, Return)] == [op for op in before.ops if isinstance(op, Return)]
    for name in after.values.keys() - before.values.keys():
        value = after.values[name.removesuffix("_again")]
        assert after.values[name] == replace(value, base=value.base and "a.w_again"), name


def test_regather_gathers_again_for_each_unit_in_forward_and_once_in_backward() -> None:
    # A tied parameter need not be alive beside parameters of other units.
    uses = ("root.tied", "a.w", Use("root.tied", ("view",)), "root.tied", "b.w", "root.tied")
    for training in (False, True):
        once = run(model(ALONE, *uses, training=training))
        per_unit = run(model(replace(ALONE, gather_per_unit=True), *uses, training=training))
        assert gathered(once, backward=False) == {"root.tied": 1, "a.w": 1, "b.w": 1}
        assert gathered(per_unit, backward=False) == {"root.tied": 3, "a.w": 1, "b.w": 1}
        assert gathered(per_unit, backward=True) == gathered(once, backward=True)
        if not training:
            assert (max(gathered_bytes(free(once))), max(gathered_bytes(free(per_unit)))) == (8, 4)
    read_beside_its_own = Use("a.w", ("root.tied",))  # the gather of a.w is no reason to gather the tied weight again
    shared = run(model(replace(ALONE, gather_per_unit=True), "root.tied", "b.w", "root.tied", read_beside_its_own))
    assert gathered(shared, backward=False) == {"root.tied": 2, "a.w": 1, "b.w": 1}


# bucket


def test_bucket_merges_a_units_gathers_where_the_first_stood_and_reductions_where_the_last_stood() -> None:
    after = bucket(regather(model(replace(ALONE, bucket_bytes=MiB), "a.w", "a.v", "b.w")))
    assert lines(after) == split("""
        gather a.w a.v; wait a.w a.v; y0 <- x a.w; y1 <- y0 a.v
        gather b.w; wait b.w; y2 <- y1 b.w; return <- y2
        gw2 <- g y1
        gather b.w; wait b.w; gx2 <- g b.w_again; g_b.w <- gw2
        reduce b.w; wait b.w; gw1 <- gx2 y0
        gather a.v a.w; wait a.v a.w; gx1 <- gx2 a.v_again; g_a.v <- gw1
        gw0 <- gx1 x; gx0 <- gx1 a.w_again; g_a.w <- gw0
        reduce a.v a.w; wait a.v a.w; return <- mean_b.w mean_a.v mean_a.w gx0
    """)
    merged = after.ops[0]
    assert (merged.reads, merged.writes) == (("t_a.w", "t_a.v"), ("fut_a.w",))
    assert after.values["fut_a.w"].nbytes == 8


@pytest.mark.parametrize(
    ("nbytes", "paths", "q", "launches"),
    [
        (7, "a.p a.q a.r", {}, "gather a.p; gather a.q; gather a.r; reduce a.r; reduce a.q; reduce a.p"),
        (8, "a.p a.q a.r", {}, "gather a.p a.q; gather a.r; reduce a.r a.q; reduce a.p"),
        (12, "a.p a.q a.r", {}, "gather a.p a.q a.r; reduce a.r a.q a.p"),
        (MiB, "a.p a.q a.r", {"dtype": torch.bfloat16}, "gather a.p a.r; gather a.q; reduce a.q; reduce a.r a.p"),
        (MiB, "a.p a.q a.r", {"shape": ()}, "gather a.p a.r; reduce a.q; reduce a.r a.p"),  # an all-reduce
        (MiB, "a.p b.p a.q", {}, "gather a.p; gather b.p; gather a.q; reduce a.q; reduce b.p; reduce a.p"),
    ],
)
def test_a_bucket_has_one_unit_dtype_and_collective_and_at_most_bucket_bytes(
    nbytes: int, paths: str, q: dict[str, object], launches: str
) -> None:
    timeline = model(replace(ALONE, bucket_bytes=nbytes), *paths.split(), a_q=q)
    assert lines(bucket(timeline), Gather, Reduce) == split(launches)


@pytest.mark.parametrize(
    ("step", "times"), [(bucket, None), (prefetch, None), (prefetch, Times({}, {}, 1.0))], ids=["bucket", "", "times"]
)
def test_gathers_wait_for_shards_that_are_computed(step: Callable[[Timeline], Timeline], times: Times | None) -> None:
    timeline = model(replace(ROOMY, times=times), "a.p", "a.q", training=False)
    after = step(with_line(timeline, 3, "t_a.q", "raw"))
    assert lines(after)[:5] == split("gather a.p; wait a.p; y0 <- x a.p; t_a.q <- raw; gather a.q")


def test_readers_of_a_reduced_gradient_are_not_delayed() -> None:
    timeline = model(replace(ALONE, stage=2, bucket_bytes=MiB), "a.p", "a.q")
    index = next(index for index, op in enumerate(timeline.ops) if "mean_a.q" in op.writes)
    assert "reduce a.q a.p" in lines(sink_waits(bucket(timeline)))
    after = sink_waits(bucket(with_line(timeline, index + 1, "norm", "mean_a.q")))
    order = ["reduce a.q", "wait a.q", "norm <- mean_a.q", "reduce a.p"]
    assert [line for line in lines(after, backward=True) if line in order] == order


# sink_waits


def test_reductions_end_as_late_as_the_bytes_in_flight_allow() -> None:
    # Two gradients of b count 8 bytes from the first on. With c's 4 bytes they exceed the limit, so c ends first.
    policy = replace(ALONE, bucket_bytes=MiB, in_flight_bytes=8)
    assert lines(sink_waits(bucket(model(policy, "b.w", "b.v", "c.w"))), backward=True) == split("""
        gw2 <- g y1; gx2 <- g c.w; g_c.w <- gw2; reduce c.w
        gw1 <- gx2 y0; gx1 <- gx2 b.v; wait c.w
        g_b.v <- gw1; gw0 <- gx1 x; gx0 <- gx1 b.w; g_b.w <- gw0; reduce b.v b.w
        wait b.v b.w; return <- mean_c.w mean_b.v mean_b.w gx0
    """)


def test_reductions_make_room_for_gathers_ahead() -> None:
    # The reduction of d ends before a is gathered. The reductions of c and b stay in flight longer.
    policy = replace(ALONE, bucket_bytes=MiB, in_flight_bytes=8, prefetch=1)
    timeline = prefetch(bucket(regather(model(policy, "a.w", "b.w", "c.w", "d.w"))))
    collectives = (Gather, Wait, Reduce)
    assert lines(sink_waits(timeline), *collectives, backward=True) == split("""
        gather d.w; wait d.w; gather c.w; reduce d.w
        wait c.w; gather b.w; reduce c.w
        wait b.w; wait d.w; gather a.w; reduce b.w
        wait a.w; wait c.w; reduce a.w; wait b.w; wait a.w
    """)


def test_sink_waits_ends_a_reduction_that_nobody_reads() -> None:
    timeline = model(Policy(stage=2), "a.w")
    after = sink_waits(timeline.with_ops([*timeline.ops[:-1], Return(("g",), backward=True)]))
    assert lines(after)[-2:] == ["wait a.w", "return <- g"]


# free


def test_a_free_comes_after_the_last_read_of_a_possible_view() -> None:
    after = free(model(ALONE, Use("a.w", ("view", "view")), "b.w", training=False))
    assert lines(after) == split("""
        gather a.w; wait a.w; c0.0 <- a.w; c0.1 <- c0.0; y0 <- x c0.1; free a.w
        gather b.w; wait b.w; y1 <- y0 b.w; free b.w; return <- y1
    """)


@pytest.mark.parametrize(
    ("policy", "uses", "forward", "backward"),
    [
        (Policy(1), ["a.w", "b.w"], "", ""),
        (Policy(2), ["a.w", "b.w", Use("b.bias", needed=False)], "free b.bias", "free b.w; free a.w"),
        (ALONE, ["a.w", "b.w"], "free a.w; free b.w", "free b.w; free a.w"),
        (ALONE, [Use("a.w", ("view",), returned=True), Use("b.w", needed=False)], "free b.w", "free a.w"),
        (Policy(), ["a.w", "b.w", "c.w"], "", "free c.w; free b.w; free a.w"),  # the last units are kept unsharded
    ],
)
def test_each_phase_frees_the_parameters_that_it_reads_last(
    policy: Policy, uses: list[Use | str], forward: str, backward: str
) -> None:
    after = free(run(model(policy, *uses)))
    assert lines(after, Free, backward=False) == split(forward)
    assert lines(after, Free, backward=True) == split(backward)


# all passes


def gpt(layers: int, policy: Policy) -> Timeline:
    """Return a GPT: an embedding tied to the head through a transpose, and blocks of a norm, a weight and its bias."""
    blocks = [f"h{layer}.{name}" for layer in range(layers) for name in ("norm", "w", "bias")]
    uses = (Use(path, ("view",), needed=not path.endswith("bias")) for path in blocks)
    return model(policy, Use("root.tied", needed=False), *uses, Use("root.tied", ("view",)))


def test_the_collectives_and_gathered_bytes_of_a_gpt() -> None:
    # ZeRO-2 holds the whole model. ZeRO-3 holds three blocks, which it therefore gathers once.

    def figures(layers: int, stage: int, **fields: object) -> tuple[int, int, int]:
        after = free(run(gpt(layers, Policy(stage=stage, **fields))))  # type: ignore[arg-type]
        reductions, gathers = (len(lines(after, kind)) for kind in (Reduce, Gather))
        return reductions, gathers, max(gathered_bytes(after))

    tied, block, in_backward = 4, 12, 8  # bytes; backward needs no bias
    assert figures(3, 1, in_flight_bytes=0) == (4, 4, 0)  # the embedding and three blocks
    assert figures(3, 2, in_flight_bytes=0) == (4, 4, tied + 2 * in_backward + block)
    assert figures(3, 3, in_flight_bytes=0)[2] == tied + block
    assert figures(3, 3, reshard_after_forward=True)[:2] == (4, 4 + 4)
    assert figures(9, 3) == (10, 10 + 7, tied + 3 * block)  # the tied embedding and six blocks


def test_the_reduction_between_copies_starts_right_after_the_one_between_shards() -> None:
    policy = replace(ALONE, stage=2, bucket_bytes=MiB, in_flight_bytes=MiB)
    after = sink_waits(bucket(model(policy, "a.w", "a.v", "b.w", replicas=3)))
    local = (op for op in after.ops if op.backward and isinstance(op, Reduce | Wait))
    order = [f"{op.kind} {' '.join(op.params)} {op.launch.over if isinstance(op, Wait) else op.over}" for op in local]
    assert order == split("""
        reduce b.w shard; wait b.w shard; reduce b.w replicate
        reduce a.v a.w shard; wait a.v a.w shard; reduce a.v a.w replicate
        wait b.w replicate; wait a.v a.w replicate
    """)


@given(timelines() | timed(), st.integers(0, 7))
def test_a_schedule_is_right(timeline: Timeline, rank: int) -> None:
    # ``run`` checks its timeline after each pass, but the check allows any order of computations.
    ops, values = timeline.ops, dict(timeline.values)
    after = run(timeline)
    assert (timeline.ops, timeline.values) == (ops, values), "no pass changes anything in place"
    assert same_results(free(after), timeline)
    seen = run(with_rank(timeline, rank))
    assert (seen.ops, seen.plan.params) == (after.ops, after.plan.params), "all ranks schedule alike"
    computed = [op.line for op in after.ops if isinstance(op, Compute) and not op.repeated]
    assert computed == [op.line for op in timeline.ops if isinstance(op, Compute)]
    launched = [op for op in after.ops if isinstance(op, Compute | Reduce) and not after.is_second_reduction(op)]
    for previous, op in pairwise(launched):
        assert not isinstance(op, Reduce) or isinstance(previous, Reduce) or op.reads[-1] in previous.writes, (
            "a late reduction"
        )


@pytest.mark.parametrize(("stage", "times"), [(3, None), *slow((2, None), (3, Times({}, {}, 1e9)))], ids=str)
def test_the_work_grows_in_proportion_to_the_operations(stage: int, times: Times | None) -> None:
    # Counted in executed lines: four times the blocks may execute at most 4.2 times the lines.

    def executed(layers: int) -> int:
        policy = Policy(stage=stage, bucket_bytes=8, in_flight_bytes=28, times=times, gather_per_unit=True)
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
