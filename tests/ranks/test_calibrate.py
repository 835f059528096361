"""A calibration on one rank and on two measures every curve, and forecasts a step. No time is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thunder_zero as tz
from tests.harness.errors import error_of
from tests.harness.ranks import RanksPool
from thunder_zero.tools import cli

pytestmark = pytest.mark.slow

TINY = 0.01  # seconds, so that each curve takes the least number of rounds


def assert_measured(device: tz.tools.Device) -> None:
    curves = [curve for name, curve in device.curves.items() if not name.endswith(("taken", "tensor"))]
    assert curves
    assert all(seconds > 0 for curve in curves for _, seconds in curve)


def calibrate(rank: int, world_size: int) -> tz.tools.Device:
    """Return the measured device; check that all ranks refuse what rank 1 refuses."""
    error = error_of(lambda: tz.tools.calibrate(-1.0 if rank else 1.0))
    assert "seconds is -1.0; give how long to measure, a number above 0" in error, error
    assert rank == 1 or "rank 1 refused to calibrate, so every rank stops: " in error, error
    return tz.tools.calibrate(TINY, dtypes=[torch.float32])


def test_ranks_calibrate_together(ranks_pool: RanksPool, tmp_path: Path) -> None:
    first, second = ranks_pool.run(2, calibrate)
    assert first == second
    tz.tools.save_device(first, tmp_path / "device.json")
    device = tz.tools.load_device(tmp_path / "device.json")
    assert device == first
    assert_measured(device)
    kinds = {name.removesuffix(" wire") for name in device.curves if name.endswith("wire")}
    assert (device.devices_per_node, kinds) == (2, {"gather", "scatter", "all_reduce"})
    model = torch.nn.Linear(4, 4).to("meta")
    traces = tz.trace(model, torch.empty(3, 4, device="meta"), policy=3, world_size=2)
    assert tz.tools.estimate(traces, device).seconds > 0


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not dist.is_initialized()
    path = tmp_path / "device.json"
    assert cli.main(["calibrate", str(path), "--seconds", str(TINY)]) == 0
    device = tz.tools.load_device(path)
    assert f"{path}: {device.name}, one process, each float32 " in capsys.readouterr().out
    assert device.devices_per_node == 1
    assert not any("gather" in name for name in device.curves)
    assert_measured(device)
    for arguments, words in (
        ([str(tmp_path / "none" / "device.json")], f"there is no folder {tmp_path / 'none'}"),
        ([str(path), "--seconds", "0"], "seconds is 0.0; give how long to measure"),
    ):
        assert cli.main(["calibrate", *arguments]) == 1
        assert words in capsys.readouterr().err
