"""``repair_fusion`` repairs what a fuser may do to a good schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.timelines import Use, gathered, model, same_results
from thunder_zero.compat.thunder.fusion_repair import repair_fusion
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.free import free
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Kind, ScheduleError, Timeline
from thunder_zero.schedule.verify import check

THREE = Policy(stage=3, reshard_after_forward=True)


def fused(timeline: Timeline, reader: int, extra: str) -> Timeline:
    """Return the schedule without frees, in which an operation of backward also reads ``extra``."""
    ops = [op for op in timeline.ops if op.kind is not Kind.FREE]
    positions = [index for index, op in enumerate(ops) if op.backward and op.kind is Kind.COMPUTE and op.writes]
    index = positions[reader]
    ops[index] = replace(ops[index], reads=(*ops[index].reads, extra))
    return timeline.with_ops(ops)


def test_a_good_schedule_is_left_as_it_is() -> None:
    timeline = run(model(THREE, "a.w", "b.w"))
    assert repair_fusion(timeline) is timeline


@pytest.mark.parametrize("reader", [0, -1])
def test_backward_reads_the_gather_that_it_has(reader: int) -> None:
    broken = fused(run(model(THREE, "a.w", "b.w", "c.w")), reader, "a.w")
    with pytest.raises(ScheduleError, match=r"a\.w"):
        check(free(broken))
    repaired = repair_fusion(broken)
    check(free(repaired))
    assert gathered(repaired, backward=True) == {"a.w": 1, "b.w": 1, "c.w": 1}
    assert same_results(repaired, broken)


def test_a_parameter_that_backward_did_not_need_is_gathered_alone() -> None:
    uses = (Use("a.embedding", needed=False), "a.w", "b.w")
    broken = fused(run(model(THREE, *uses)), 0, "a.embedding")
    repaired = repair_fusion(broken)
    check(free(repaired))
    assert gathered(repaired, backward=True) == {"a.embedding": 1, "a.w": 1, "b.w": 1}
    assert ("a.embedding",) in [op.params for op in repaired.ops if op.kind is Kind.GATHER and op.backward]


def test_a_view_is_computed_again() -> None:
    broken = fused(run(model(THREE, Use("a.w", ("view",)), "b.w")), 0, "c0.0")
    broken = broken.with_ops(broken.ops, {"c0.0": replace(broken.values["c0.0"], base="a.w")})
    repaired = repair_fusion(broken)
    check(free(repaired))
    assert next(op.writes for op in repaired.ops if op.repeated and op.kind is Kind.COMPUTE) == ("c0.0_repaired",)
    assert repaired.values["c0.0_repaired"].base == "a.w_again"
