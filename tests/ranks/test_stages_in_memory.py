"""While models train as in eager mode, each stage frees gathered parameters when it says so.

A weak reference watches the storage of every gathered parameter; any view keeps the storage alive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.testing import assert_close

import thunder_zero as tz
from tests.harness.memory import STEPS, TEXTBOOK, Case, check_numbers, run
from tests.harness.models import PATTERNS_AGAIN, Mlp, Patterns, count_sends, fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.plan.traffic import gather_traffic

CASES = {  # with the peak bytes of gathered parameters; the model has 2804
    "zero3": (Case(Patterns, TEXTBOOK), 2356),
    "zero3-autocast": (Case(Patterns, replace(TEXTBOOK, gather_per_unit=True), autocast=True), 2356),
    "zero3-last-units-once": (Case(Patterns, tz.ZERO3), 2356),
    "zero2": (Case(Patterns, tz.ZERO2), 2612),
    "zero2-autocast": (Case(Patterns, tz.ZERO2, autocast=True), 2356),
}
# Under autocast to bfloat16, ZeRO-2 keeps the casts and frees their float32 originals, except the weight norm's
# factors, which its gradient reads in float32.
ALIVE_IN_ZERO2 = {False: PATTERNS_AGAIN, True: {"v", "g"}}
# The last three units of forward: one computes and two are under way.
LAST_IN_ZERO3 = {"w", "v", "g", "bias", "layers.2.weight", "layers.2.bias", "layers.1.weight", "layers.1.bias"}


def check_stage(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Check what is alive when. Parameters that backward does not read (biases) are freed, even if kept unsharded."""
    case, peak = CASES[name]
    result = run(case, rank, world_size)
    is_zero3, listed = case.policy.stage == 3, set(result["kept unsharded"])
    assert not is_zero3 or listed == (set() if case.policy.reshard_after_forward else LAST_IN_ZERO3), listed
    kept = listed & PATTERNS_AGAIN if is_zero3 else ALIVE_IN_ZERO2[case.autocast]
    assert result["after forward"] == kept, (result["after forward"], kept)
    assert result["after backward"] == result["after inference"] == set()
    assert result["again"] == (PATTERNS_AGAIN - kept if is_zero3 else set()), result["again"]
    assert bool(result["saved of parameters"]) == bool(kept), result["saved of parameters"]
    last = result["at reductions"][-1][1]  # when the last gradients leave, the layers' weights are gone
    assert {path for path in last if path.startswith("layers")} <= {"layers.0.weight"}, last
    planned = result["planned peak"]
    assert result["peak"] == peak, (result["peak"], planned)
    assert planned == peak or (name == "zero2-autocast" and planned > peak), planned
    return result


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(3, "zero3"), (3, "zero2"), *slow((2, "zero3-autocast"), (2, "zero3-last-units-once"), (2, "zero2-autocast"))],
)
def test_each_stage_frees_what_it_says_and_peaks_as_planned(ranks_pool: RanksPool, world_size: int, name: str) -> None:
    """Most parameters have padded rows: 3 divides 9, but not 8, 11, 29 or 5."""
    check_numbers(ranks_pool.run(world_size, check_stage, name), CASES[name][0])


FUSED = {
    "mlp": Case(Mlp, replace(TEXTBOOK, prefetch=1)),
    "mlp-fused": Case(Mlp, replace(TEXTBOOK, prefetch=1), fused=True),
    "mlp-fused-keep-last": Case(Mlp, replace(tz.ZERO3, prefetch=1), fused=True),
    "patterns-fused": Case(Patterns, TEXTBOOK, fused=True),
}


def check_stage_when_fused(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    result = run(case, rank, world_size)
    kept = set() if case.policy.reshard_after_forward else {"layers.1.weight", "layers.2.weight"}
    assert result["after forward"] == kept, result["after forward"]
    assert result["after backward"] == result["after inference"] == set()
    assert result["peak"] == result["planned peak"], (result["peak"], result["planned peak"])
    assert len(result["saved of parameters"]) == len(kept), result["saved of parameters"]
    if case.kind is Mlp:  # three layers; each is gathered while the one before computes
        layer = 4 * (7 * 7 + 7)
        expected = ("gwgcwgcwc", 3 if case.fused else 0, {"layers.1.weight", "layers.2.weight"} - kept)
        assert (result["in flight"], result["peak"]) == (layer, 2 * layer), result
    else:  # the embeddings, three layers, the rest
        expected = ("gwggcwgcwgcwcwc", 5, PATTERNS_AGAIN)
    actual = (result["spread"], result["fused regions"], result["again"])
    assert actual == expected, actual
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp-fused-keep-last", "patterns-fused", *deep("mlp", "mlp-fused")])
def test_fusion_keeps_the_stage(ranks_pool: RanksPool, name: str) -> None:
    """Inductor fuses the lines between two gathers and does not move the gathers."""
    check_numbers(ranks_pool.run(2, check_stage_when_fused, FUSED[name], timeout=380), FUSED[name])


# The last units of ZeRO-3

UNIT = (7 * 7 + 7) * 4  # bytes of a layer of Mlp


class Five(Mlp):
    def __init__(self) -> None:
        super().__init__(layers=5)


def compare_kept_units(rank: int, world_size: int, kind: type[nn.Module], prefetch: int) -> None:
    """Keeping the last units changes no bit and no peak, and sends fewer bytes."""
    results: list[dict[str, Any]] = []
    for keeps in (True, False):
        policy = replace(tz.ZERO3, prefetch=prefetch, reshard_after_forward=None if keeps else True)
        with count_sends() as messages:
            result = run(Case(kind, policy), rank, world_size)
        results.append({**result, "sent": sum(messages)})
        assert result["peak"] == result["planned peak"], (result["peak"], result["planned peak"])
        assert result["after backward"] == result["after inference"] == set(), result
    keeping, textbook = results
    for name in ("y", "grads", "inferred"):
        assert_close(keeping[name], textbook[name], rtol=0, atol=0)
    assert keeping["peak"] == textbook["peak"]
    kept = set(keeping["kept unsharded"])
    assert kept
    assert textbook["kept unsharded"] == ()
    assert keeping["again"] == textbook["again"] - kept, "gathered in backward"
    plan = tz.schedule.make_plan(fresh(kind), policy, tz.schedule.Mesh.of(world_size, rank))
    spared = sum(gather_traffic(plan, plan.by_name[path]).sent for path in textbook["again"] & kept)
    assert textbook["sent"] - keeping["sent"] == STEPS * spared > 0, (textbook["sent"], keeping["sent"], spared)
    if kind is Five:
        check_units(keeping, textbook, prefetch)


def check_units(keeping: dict[str, Any], textbook: dict[str, Any], prefetch: int) -> None:
    """Check that at most ``1 + prefetch`` layers are alive, and that as many are kept after forward."""
    last = range(4 - prefetch, 5)
    assert keeping["peak"] == (1 + prefetch) * UNIT, keeping["peak"]
    assert set(keeping["kept unsharded"]) == {f"layers.{index}.{name}" for index in last for name in ("weight", "bias")}
    assert keeping["after forward"] == {f"layers.{index}.weight" for index in last}, keeping["after forward"]
    assert textbook["after forward"] == set()
    assert textbook["again"] == {f"layers.{index}.weight" for index in range(1, 5)}, textbook["again"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "prefetch"), [(Five, 1), (Five, 0), (Five, 2), (Patterns, 1)])
def test_kept_units_change_no_bit_and_no_peak(ranks_pool: RanksPool, kind: type[nn.Module], prefetch: int) -> None:
    ranks_pool.run(2, compare_kept_units, kind, prefetch)
