"""The stages hold in live memory: which tensors are alive when, while models train as eager does.

Every gathered parameter's memory is watched by a weak reference to its storage, which any view keeps alive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import thunder_zero as tz
from tests.harness.memory import (
    TEXTBOOK,
    Case,
    check_numbers,
    live,
)
from tests.harness.models import (
    PATTERNS_AGAIN,
    Mlp,
    Patterns,
    fresh,
)
from tests.harness.ranks import RanksPool
from tests.harness.tiers import only

ALL_CASES = {
    "zero3": Case(Patterns, TEXTBOOK),
    "zero3-regather": Case(Patterns, replace(TEXTBOOK, gather_per_unit=True)),
    "zero3-autocast": Case(Patterns, TEXTBOOK, autocast=True),
    "zero2": Case(Patterns, tz.ZERO2),
    "zero2-autocast": Case(Patterns, tz.ZERO2, autocast=True),
    "zero3-last-units-once": Case(Patterns, tz.ZERO3),
}
NAMES = tuple(only(("zero3", "zero2", "zero2-autocast", "zero3-last-units-once"), ALL_CASES))
CASES = tuple(ALL_CASES[name] for name in NAMES)


@pytest.fixture(scope="module")
def results(ranks_pool: RanksPool) -> list[list[dict[str, Any]]]:
    """For each rank and each case. The rows of most parameters are padded: 3 divides 9, not 8, 11, 29 or 5."""
    return ranks_pool.run(3, live, CASES, timeout=110)


@pytest.mark.parametrize("at", range(len(CASES)), ids=NAMES)
def test_training_equals_eager(results: list[list[dict[str, Any]]], at: int) -> None:
    check_numbers([rank[at] for rank in results], CASES[at])


# Autocast to bfloat16 makes ZeRO-2 keep the casts, and free the float32 that they are made of; all but the weight
# norm's factors, which its gradient reads in float32.
ALIVE_IN_ZERO2 = {False: PATTERNS_AGAIN, True: {"v", "g"}}
# Whole units, the last three of forward: one computes and two are under way at the peak.
LISTED_IN_ZERO3 = {"w", "v", "g", "bias", "layers.2.weight", "layers.2.bias", "layers.1.weight", "layers.1.bias"}


@pytest.mark.parametrize("at", range(len(CASES)), ids=NAMES)
def test_alive_tensors(results: list[list[dict[str, Any]]], at: int) -> None:
    case = CASES[at]
    for rank in results:
        result = rank[at]
        listed = set(result["gathered once"])
        assert case.policy.stage == 2 or listed == (LISTED_IN_ZERO3 if case.policy.gather_last_units_once else set())
        # Parameters that backward does not read (biases) are freed.
        kept = listed & PATTERNS_AGAIN if case.policy.stage == 3 else ALIVE_IN_ZERO2[case.autocast]
        assert result["after forward"] == kept
        assert result["after backward"] == result["after inference"] == set()
        assert result["again"] == (PATTERNS_AGAIN - kept if case.policy.stage == 3 else set())
        assert bool(result["saved of parameters"]) == bool(kept)
        assert bool(kept) == (case.policy.stage == 2 or case.policy.gather_last_units_once)
        if case.policy.stage == 2 and case.autocast:
            assert result["peak"] <= result["planned peak"]
        else:
            assert result["peak"] == result["planned peak"]
        last = result["at reductions"][-1][1]  # when the last gradients leave, the layers' weights are gone
        assert {path for path in last if path.startswith("layers")} <= {"layers.0.weight"}


def test_peaks_of_the_stages(results: list[list[dict[str, Any]]]) -> None:
    """ZeRO-3 takes less than ZeRO-2, and no more if it gathers the last units once."""
    model = sum(param.numel() * 4 for param in fresh(Patterns).parameters())
    for rank in results:
        peak = {name: result["peak"] for name, result in zip(NAMES, rank, strict=True)}
        assert peak.get("zero3-regather", 0) <= peak["zero3"] < peak["zero2"] <= model
        assert peak["zero3-last-units-once"] == peak["zero3"]


@pytest.fixture(scope="module")
def fused(ranks_pool: RanksPool) -> list[list[dict[str, Any]]]:
    """For each of two ranks and each case of FUSED."""
    return ranks_pool.run(2, live, FUSED, timeout=380)


FUSED_CASES = {
    "mlp": Case(Mlp, replace(TEXTBOOK, prefetch=1)),
    "mlp-fused": Case(Mlp, replace(TEXTBOOK, prefetch=1), fused=True),
    "mlp-fused-keep-last": Case(Mlp, replace(tz.ZERO3, prefetch=1), fused=True),
    "patterns-fused": Case(Patterns, TEXTBOOK, fused=True),
}
FUSED_NAMES = tuple(only(("mlp", "mlp-fused"), FUSED_CASES))
FUSED = tuple(FUSED_CASES[name] for name in FUSED_NAMES)


@pytest.mark.slow
@pytest.mark.timeout(400)  # when the cache of torch's compiler is cold
@pytest.mark.parametrize("at", range(len(FUSED)), ids=FUSED_NAMES)
def test_a_fusing_executor_keeps_the_stage(fused: list[list[dict[str, Any]]], at: int) -> None:
    """With torch_compile, the lines between two gathers become a region; the gathers stay where they are without it."""
    case = FUSED[at]
    check_numbers([rank[at] for rank in fused], case)
    for rank in fused:
        result = rank[at]
        kept = {"layers.1.weight", "layers.2.weight"} if case.policy.gather_last_units_once else set()
        assert result["after forward"] == kept
        assert result["after backward"] == result["after inference"] == set()
        assert result["peak"] == result["planned peak"]
        assert len(result["saved of parameters"]) == len(kept)
        if case.kind is Mlp:  # three layers; each is gathered while the one before computes
            assert result["spread"] == "gwgcwgcwc"
            assert result["fused regions"] == (3 if case.fused else 0)
            assert result["again"] == {"layers.1.weight", "layers.2.weight"} - kept  # the input needs no gradient
            assert result["in flight"] == 8 * 7 * 4  # one layer of 7 x 7 + 7
            assert result["peak"] == 2 * 8 * 7 * 4
        else:  # the embeddings, three layers, the rest
            assert result["spread"] == "gwggcwgcwgcwcwc"
            assert result["fused regions"] == 5
            assert result["again"] == PATTERNS_AGAIN
