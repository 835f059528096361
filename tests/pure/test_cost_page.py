"""docs/cost-model.md has the package's table of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thunder_zero.tools.devices.device import DEVICES

PAGE = (Path(__file__).parents[2] / "docs/cost-model.md").read_text()


def test_the_page_has_the_packages_devices() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(DEVICES)
    units = {"MiB": 1 << 20, "GiB": 1 << 30, "TB/s": 1e12, "GB/s": 1e9}

    def sizes(cell: str) -> list[float]:
        result = re.findall(r"([\d.]+) ([MGT]i?B(?:/s)?)", cell.replace(",", ""))
        return [float(number) * units[unit] for number, unit in result]

    for name, peaks, memory, inside, across, *_ in rows:
        device = DEVICES[name]
        assert {dtype: float(flops) for dtype, flops in re.findall(r"(\w+): ([\de.]+)", peaks)}.items() <= (
            device.flops_per_second.items()
        )
        assert sizes(memory) == pytest.approx([device.memory_bytes, device.memory_bytes_per_second])
        assert sizes(inside) == [device.intra_node.bytes_per_second]
        assert inside.replace(",", "").startswith(f"{device.devices_per_node} ")
        assert sizes(across) == ([] if device.inter_node is None else [device.inter_node.bytes_per_second])
