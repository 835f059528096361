"""The cheapest choices of units that fit into memory are found; and the estimate of bytes alive is right."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import model
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.lifetimes import bytes_alive, lifetimes
from thunder_zero.schedule.ops import Compute, Gather, Work
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Value
from thunder_zero.tools.plan.search import UnitCost, cheapest, flops_to_repeat

UNITS = 7
CHOICES = st.builds(UnitCost, left=st.integers(0, 9), peak=st.integers(0, 20), cost=st.integers(0, 9))


def fits(chosen: tuple[UnitCost, ...], budget: int) -> bool:
    return all(
        sum(earlier.left for earlier in chosen[:index]) + choice.peak <= budget for index, choice in enumerate(chosen)
    )


def least_cost(units: list[list[UnitCost]], budget: int) -> float | None:
    costs = (sum(choice.cost for choice in chosen) for chosen in product(*units) if fits(chosen, budget))
    return min(costs, default=None)


@given(st.lists(st.lists(CHOICES, min_size=2, max_size=2), min_size=UNITS, max_size=UNITS), st.integers(0, 120))
def test_the_cheapest_choices_are_as_good_as_exhaustive_search(units: list[list[UnitCost]], budget: int) -> None:
    expected, numbers = least_cost(units, budget), cheapest(units, budget)
    assert (expected is None) == (numbers is None)
    if numbers is None:
        return
    chosen = tuple(choices[number] for choices, number in zip(units, numbers, strict=True))
    assert fits(chosen, budget)
    assert sum(choice.cost for choice in chosen) == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_alive_bytes_count_gathered_units(stage: int) -> None:
    timeline = run(model(Policy(stage, reshard_after_forward=True, prefetch=0, in_flight_bytes=0), "a.w", "b.w"))
    alive = bytes_alive(timeline, lifetimes(timeline))
    gathers = [index for index, op in enumerate(timeline.ops) if isinstance(op, Gather)]
    full = timeline.traffic(timeline.ops[gathers[0]]).full
    assert alive[gathers[0]] == full
    units = 2 if stage == 2 else 1  # ZeRO-2 still holds the first unit
    assert units * full <= alive[gathers[1]] < units * full + 100
    assert len(gathers) == (2 if stage == 2 else 4)


def test_repeating_costs_a_products_flops_or_the_written_elements() -> None:
    timeline = model(Policy(), "a.w").with_ops((), {"x": Value(24, "float32"), "y": Value(40, "float64")})
    product = Compute(("x",), ("y",), work=Work.MATMUL, flops=60)
    assert flops_to_repeat(product, timeline) == 60
    assert flops_to_repeat(Compute(("x",), ("y",), work=Work.POINTWISE), timeline) == 5
