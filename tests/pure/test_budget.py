"""Planning without traces: the cheapest choices that fit, bytes alive, periods that are repeated, and meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import model
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.lifetimes import bytes_alive, lifetimes
from thunder_zero.schedule.ops import Compute, Gather, Work
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Value
from thunder_zero.tools.plan.repeat import find_period, lengthen
from thunder_zero.tools.plan.search import UnitCost, cheapest, flops_to_repeat
from thunder_zero.tools.plan.training_plan import MeshShape, meshes

UNITS = 7
CHOICES = st.builds(UnitCost, left=st.integers(0, 9), peak=st.integers(0, 20), cost=st.integers(0, 9))


def fits(chosen: Sequence[UnitCost], budget: int) -> bool:
    left = accumulate((choice.left for choice in chosen), initial=0)
    return all(before + choice.peak <= budget for before, choice in zip(left, chosen, strict=False))


@given(st.lists(st.lists(CHOICES, min_size=2, max_size=2), min_size=UNITS, max_size=UNITS), st.integers(0, 120))
def test_the_cheapest_choices_are_as_good_as_exhaustive_search(units: list[list[UnitCost]], budget: int) -> None:
    fitting = [sum(choice.cost for choice in chosen) for chosen in product(*units) if fits(chosen, budget)]
    numbers = cheapest(units, budget)
    assert (numbers is None) == (not fitting)
    if numbers is not None:
        chosen = [choices[number] for choices, number in zip(units, numbers, strict=True)]
        assert fits(chosen, budget)
        assert sum(choice.cost for choice in chosen) == min(fitting)


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
    product = Compute(("x",), ("y",), repeated=True, work=Work.MATMUL, flops=60)
    assert flops_to_repeat(product, timeline) == 60
    assert flops_to_repeat(replace(product, work=Work.POINTWISE, flops=0), timeline) == 5
    assert flops_to_repeat(replace(product, repeated=False), timeline) == 0


def longer(signs: str, marks: list[int], copies: int) -> str:
    return "".join(signs[position] for position in lengthen(signs, marks, copies))


def test_a_period_that_occurs_twice_is_repeated() -> None:
    assert find_period("abcdecdecdfg", [2, 5, 8]) == range(2, 5)
    assert longer("abcdecdecdfg", [2, 5, 8], 2) == "abcdecdecdecdecdfg"


@pytest.mark.parametrize(("signs", "marks"), [("abcdecdfg", [2, 5]), ("abcd", [1]), ("abcbd", [1, 1]), ("", [])])
def test_a_period_that_occurs_once_is_not_repeated(signs: str, marks: list[int]) -> None:
    assert find_period(signs, marks) is None


@given(st.text("ab", max_size=4), st.text("cde", min_size=1, max_size=5), st.text("fg", max_size=4), st.integers(2, 6))
def test_repeating_gives_the_longer_sequence(head: str, period: str, tail: str, copies: int) -> None:
    signs = head + period * 2 + tail
    marks = [len(head), len(head) + len(period)]
    assert longer(signs, marks, copies) == head + period * (2 + copies) + tail


def test_meshes_go_from_a_node_to_all_ranks() -> None:
    assert meshes(0, 1024, 8) == (MeshShape(1, 1024),)
    assert [str(mesh) for mesh in meshes(3, 1024, 8)] == ["128 x 8", "16 x 64", "2 x 512", "1024"]
    assert meshes(2, 4, 8) == (MeshShape(1, 4),)
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8 devices"):
        meshes(3, 12, 8)
