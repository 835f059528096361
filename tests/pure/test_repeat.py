"""Periods in a sequence, and where further ones go; meshes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_zero.tools.plan.repeat import find_period, lengthen
from thunder_zero.tools.plan.training_plan import MeshShape, meshes


def longer(signs: str, marks: list[int], copies: int) -> str:
    sections = lengthen(signs, marks, copies)
    return "".join(signs[section.lines.start : section.lines.stop] * section.times for section in sections)


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
