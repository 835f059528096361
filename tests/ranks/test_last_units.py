"""ZeRO-3 that keeps its last units trains as one that keeps nothing, to the bit, with fewer bytes and the same peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import thunder_zero as tz
from tests.harness.memory import Case, check_numbers, live
from tests.harness.models import Gpt, Mlp, count_sends, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from tests.harness.training import OPTIMIZERS, assert_same_bits, batch, make_optimizer, train
from thunder_zero.schedule.timeline import gathered_bytes

NAMES = of_tier(OPTIMIZERS[-1:], OPTIMIZERS)
UNIT = (7 * 7 + 7) * 4  # bytes of a layer of Mlp


class Five(Mlp):
    def __init__(self) -> None:
        super().__init__(layers=5)


FIVE = tuple(
    Case(Five, replace(tz.ZERO3, prefetch=prefetch, gather_last_units_once=gather_last_units_once))
    for prefetch in of_tier((1,), (0, 1, 2))
    for gather_last_units_once in (True, False)
)


@pytest.fixture(scope="module")
def five(ranks_pool: RanksPool) -> list[list[dict[str, Any]]]:
    """Of two ranks, for each of FIVE."""
    return ranks_pool.run(2, live, FIVE, timeout=110)


@pytest.mark.parametrize("at", range(len(FIVE)), ids=lambda at: f"{FIVE[at].policy.prefetch}-{at % 2 == 0}")
def test_the_peak_of_live_memory_is_the_timelines(five: list[list[dict[str, Any]]], at: int) -> None:
    """One layer computes, ``prefetch`` are under way; as many are kept, and their weights are there after forward."""
    case = FIVE[at]
    check_numbers([rank[at] for rank in five], case)
    units = 1 + case.policy.prefetch
    kept = range(5 - units, 5) if case.policy.gather_last_units_once else range(0)
    for rank in five:
        result = rank[at]
        assert result["peak"] == result["planned peak"] == units * UNIT
        assert set(result["gathered once"]) == {f"layers.{n}.{name}" for n in kept for name in ("weight", "bias")}
        assert result["after forward"] == {f"layers.{n}.weight" for n in kept}
        assert result["again"] == {f"layers.{n}.weight" for n in range(1, 5) if n not in kept}
        assert result["after backward"] == result["after inference"] == set()


def train_gpt(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Twenty steps with each optimizer, once as it comes and once keeping nothing; the bytes of one more step."""
    results = []
    for gather_last_units_once in (True, False):
        plain = fresh(Gpt)
        model = sharded(plain, replace(tz.ZERO3, prefetch=1, gather_last_units_once=gather_last_units_once))
        result: dict[str, Any] = {"records": []}
        for name in NAMES:
            model.load_original_state_dict(plain.state_dict())
            result["records"].append(train(model, make_optimizer(name, model.parameters()), rank, world_size))
        with count_sends() as messages:
            model(batch(0)[0]).square().mean().backward()
        traces = tz.traces_of(model)
        timeline = traces.timeline
        result |= {"sent": sum(messages), "plan": traces.plan, "peak": max(gathered_bytes(timeline))}
        result["by the timeline"] = sum(map(timeline.bytes_sent, timeline.ops))
        results.append(result)
    return results


def test_training_is_the_same_to_the_bit_and_sends_less(ranks_pool: RanksPool) -> None:
    """With one unit ahead, both blocks and the last norm are kept; backward gathers the tied embedding alone."""
    ranks = ranks_pool.run(2, train_gpt, timeout=110)
    kept, textbook = ([results[at] for results in ranks] for at in (0, 1))
    for number in range(len(NAMES)):
        assert_same_bits(*([result["records"][number] for result in results] for results in (kept, textbook)))
    for ours, theirs in zip(kept, textbook, strict=True):
        plan = ours["plan"]
        assert {plan.by_name[path].unit for path in plan.gathered_once} == {"blocks.0", "blocks.1", ""}
        assert {path for path in plan.gathered_once if "blocks" not in path} == {"norm.weight", "norm.bias"}
        assert theirs["plan"].gathered_once == ()
        again = [path for path in plan.gathered_once if path.endswith("weight")]  # backward reads no bias
        assert len(again) == 4 + 4 + 1
        assert theirs["sent"] - ours["sent"] == sum(plan.gather_bytes(plan.by_name[path]) for path in again)
        assert theirs["by the timeline"] - ours["by the timeline"] == theirs["sent"] - ours["sent"]
        assert ours["peak"] == theirs["peak"]
    assert sum(theirs["sent"] - ours["sent"] for ours, theirs in zip(kept, textbook, strict=True)) == 4 * (2 * 344 + 8)
