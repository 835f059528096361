"""The small pictures of notebooks have the shapes of their values, and escape text."""

from __future__ import annotations

import re

from thunder_zero.notebook import HEIGHT, WIDTH, curve, lanes, small


def test_a_curve_has_a_step_for_each_value_and_marks_the_highest() -> None:
    picture = curve([1, 4, 2], "bytes")
    tops = [float(top) for top in re.findall(r"L[\d.]+ ([\d.]+)h", picture)]
    assert tops == [HEIGHT * 3 / 4, 0, HEIGHT / 2]
    (marked,) = re.findall(r'cx="([\d.]+)"', picture)
    assert float(marked) == WIDTH / 2
    assert 'aria-label="bytes"' in picture
    assert "<svg" in curve([], "nothing")


def test_touching_bars_merge_but_waits_stay_apart() -> None:
    spans = [(index / 100, (index + 1) / 100, False) for index in range(100)]
    assert lanes({"compute": spans}, "x").count("<rect") == 1
    picture = lanes({"compute": [(0.0, 1.0, False), (1.0, 2.0, True)], "wire": [(1.0, 2.0, False)]}, "x")
    lefts = [float(left) for left in re.findall(r'<rect x="([\d.]+)"', picture)]
    assert lefts == [0, WIDTH / 2, WIDTH / 2]
    assert picture.count("<title>waits</title>") == 1
    assert picture.count("<text") == 2


def test_names_and_values_are_escaped() -> None:
    form = small("a <b>", {"x & y": "<i>"}, curve([1], 'a "b"'))
    assert "a &lt;b&gt;" in form
    assert "<i>" not in form
    assert "x &amp; y" in form
    assert "a &quot;b&quot;" in form
