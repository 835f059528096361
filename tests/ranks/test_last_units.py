"""ZeRO-3 that keeps its last units trains as one that keeps nothing, to the bit, with fewer bytes and the same peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.testing import assert_close

import thunder_zero as tz
from tests.harness.memory import STEPS, Case, run
from tests.harness.models import Mlp, Patterns, count_sends, fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

UNIT = (7 * 7 + 7) * 4  # bytes of a layer of Mlp


class Five(Mlp):
    def __init__(self) -> None:
        super().__init__(layers=5)


def train(rank: int, world_size: int, kind: type[nn.Module], prefetch: int) -> None:
    """One that keeps units and one that keeps nothing, and what is alive and sent in their steps."""
    found: list[dict[str, Any]] = []
    for keeps in (True, False):
        policy = replace(tz.ZERO3, prefetch=prefetch, gather_last_units_once=keeps)
        with count_sends() as messages:
            result = run(Case(kind, policy), rank, world_size)
        found.append({**result, "sent": sum(messages)})
        assert result["peak"] == result["planned peak"], (result["peak"], result["planned peak"])
        assert result["after backward"] == result["after inference"] == set(), result
    ours, textbook = found
    for what in ("y", "grads", "inferred"):
        assert_close(ours[what], textbook[what], rtol=0, atol=0)
    assert ours["peak"] == textbook["peak"]
    kept = set(ours["gathered once"])
    assert kept
    assert textbook["gathered once"] == ()
    assert ours["again"] == textbook["again"] - kept, "gathered in backward"
    plan = tz.make_plan(fresh(kind), policy, world_size, rank)
    spared = sum(plan.gather_bytes(plan.by_name[path]) for path in textbook["again"] & kept)
    assert textbook["sent"] - ours["sent"] == STEPS * spared > 0, (textbook["sent"], ours["sent"], spared)
    if kind is Five:
        check_units(ours, textbook, prefetch)


def check_units(ours: dict[str, Any], textbook: dict[str, Any], prefetch: int) -> None:
    """One layer computes, ``prefetch`` are under way; as many are kept, and their weights are there after forward."""
    last = range(4 - prefetch, 5)
    assert ours["peak"] == (1 + prefetch) * UNIT, ours["peak"]
    assert set(ours["gathered once"]) == {f"layers.{at}.{name}" for at in last for name in ("weight", "bias")}
    assert ours["after forward"] == {f"layers.{at}.weight" for at in last}, ours["after forward"]
    assert textbook["after forward"] == set()
    assert textbook["again"] == {f"layers.{at}.weight" for at in range(1, 5)}, textbook["again"]


@pytest.mark.parametrize(("kind", "prefetch"), [(Five, 1), *slow((Five, 0), (Five, 2), (Patterns, 1))])
def test_units_that_are_kept_change_no_bit_and_no_peak(
    ranks_pool: RanksPool, kind: type[nn.Module], prefetch: int
) -> None:
    ranks_pool.run(2, train, kind, prefetch)
