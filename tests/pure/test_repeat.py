"""Periods in a sequence, and where further ones go; meshes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_zero.tools.planner.repeat import Stretch, linked, positions, stretch_of
from thunder_zero.tools.planner.training_plan import MeshShape, meshes


def longer(signs: str, marks: list[int], copies: int) -> str:
    stretch = stretch_of(signs, marks)
    assert stretch is not None
    return "".join(signs[at] for at in positions(len(signs), stretch, copies))


def test_a_period_that_occurs_twice_is_repeated() -> None:
    assert stretch_of("abcdecdecdfg", [2, 5, 8]) == Stretch(2, 3)
    assert longer("abcdecdecdfg", [2, 5, 8], 2) == "abcdecdecdecdecdfg"


@pytest.mark.parametrize(("signs", "marks"), [("abcdecdfg", [2, 5]), ("abcd", [1]), ("abcbd", [1, 1]), ("", [])])
def test_one_that_occurs_once_is_not(signs: str, marks: list[int]) -> None:
    assert stretch_of(signs, marks) is None


@given(st.text("ab", max_size=4), st.text("cde", min_size=1, max_size=5), st.text("fg", max_size=4), st.integers(2, 6))
def test_repeating_gives_the_longer_sequence(head: str, period: str, tail: str, copies: int) -> None:
    signs = head + period * 2 + tail
    marks = [len(head), len(head) + len(period)]
    assert longer(signs, marks, copies) == head + period * (2 + copies) + tail


def test_links_go_along_with_periods_and_stay_before_them() -> None:
    stretch = Stretch(2, 3)  # signs 2 .. 4 repeat
    assert linked(8, 5, 4, stretch, 1) == 7  # one period later, as is what it refers to
    assert linked(8, 5, 1, stretch, 1) == 1  # in front of the periods
    assert linked(4, 4, 1, stretch, 1) == 1
    assert linked(5, 5, 1, None, 0) == 1


def test_meshes_go_from_a_node_to_all_ranks() -> None:
    assert meshes(0, 1024, 8) == (MeshShape(1, 1024),)
    assert [str(mesh) for mesh in meshes(3, 1024, 8)] == ["128 x 8", "16 x 64", "2 x 512", "1024"]
    assert meshes(2, 4, 8) == (MeshShape(1, 4),)
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8 devices"):
        meshes(3, 12, 8)
