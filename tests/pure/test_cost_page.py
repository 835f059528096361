"""docs/cost-model.md: each published number is what its call gives, and the table of devices is that of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thunder_zero.tools.cost import rooflines
from thunder_zero.tools.devices import device
from thunder_zero.tools.devices.device import DEVICES

PAGE = (Path(__file__).parents[2] / "docs/cost-model.md").read_text()
ROWS = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
(GPT,) = re.findall(r"^gpt, .*$", PAGE, re.MULTILINE)


def test_the_page_has_the_published_numbers_that_its_calls_give() -> None:
    assert {gives for _, _, gives in ROWS} >= {"181.5", "46450", "2550", "56e9", "4.667", "9.83e9", "112e9", "14e9"}
    assert len(ROWS) == PAGE.count("| `", PAGE.index("## Published numbers")) // 2
    names: dict[str, object] = {**vars(rooflines), **vars(device)}
    exec(GPT, names)
    for what, call, gives in ROWS:
        value = eval(call, names)
        numbers, given = (value, eval(gives)) if isinstance(value, list) else ([value], [float(gives)])
        assert [float(f"{number:.4g}") for number in numbers] == given, (what, call)


def test_the_table_of_devices() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(DEVICES)
    units = {"MiB": 1 << 20, "GiB": 1 << 30, "TB/s": 1e12, "GB/s": 1e9}

    def sizes(cell: str) -> list[float]:
        found = re.findall(r"([\d.]+) ([MGT]i?B(?:/s)?)", cell.replace(",", ""))
        return [float(number) * units[unit] for number, unit in found]

    for name, peaks, memory, inside, across, *_ in rows:
        one = DEVICES[name]
        assert {dtype: float(flops) for dtype, flops in re.findall(r"(\w+): ([\de.]+)", peaks)}.items() <= (
            one.flops_per_second.items()
        )
        assert sizes(memory) == pytest.approx([one.memory_bytes, one.memory_bytes_per_second])
        assert sizes(inside) == [one.intra_node.bytes_per_second]
        assert inside.replace(",", "").startswith(f"{one.devices_per_node} ")
        assert sizes(across) == ([] if one.inter_node is None else [one.inter_node.bytes_per_second])
