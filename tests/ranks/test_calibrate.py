"""A calibration on one rank and on two: every curve has times, and a step can be forecast. No time is compared."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thunder_zero as tz
from thunder_zero import cli
from thunder_zero.cost.curve import Curve
from thunder_zero.cost.device_file import to_data

pytestmark = pytest.mark.slow

TINY = 0.01  # seconds: the least number of rounds


def curves_of(device: tz.Calibrated) -> list[Curve]:
    collectives = device.collectives.values()
    return [
        *chain.from_iterable(of.values() for of in device.products.values()),
        *device.traffic.values(),
        *chain.from_iterable((one.launch, one.wire, one.finish) for one in collectives),
    ]


def calibrated(rank: int, world_size: int) -> dict[str, Any]:
    return to_data(tz.calibrate(TINY, dtypes=[torch.float32]))


def refused(rank: int, world_size: int) -> str:
    try:
        tz.calibrate(-1.0 if rank else 1.0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_calibrate_together(ranks_pool: Any, tmp_path: Path) -> None:
    first, second = ranks_pool.run(2, calibrated)
    assert first == second
    (tmp_path / "device.json").write_text(json.dumps(first))
    device = tz.load_device(tmp_path / "device.json")
    assert device.ranks == 2
    assert set(device.collectives) == {"gather", "scatter", "all_reduce"}
    assert all(seconds > 0 for curve in curves_of(device) for _, seconds in curve.points)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("meta")
    traces = tz.trace(model, torch.empty(3, 4, device="meta"), policy=3, world_size=2)
    assert tz.estimate(traces, device).seconds > 0


def test_what_one_rank_refuses_all_refuse(ranks_pool: Any) -> None:
    first, second = ranks_pool.run(2, refused)
    assert second == "seconds is -1.0; give how long to measure, a number above 0"
    assert first == f"rank 1 refused to calibrate, so every rank stops: {second}"


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not dist.is_initialized()
    path = tmp_path / "device.json"
    assert cli.main(["calibrate", str(path), "--seconds", str(TINY)]) == 0
    device = tz.load_device(path)
    assert f"{path}: {device.name}, one process, each float32 " in capsys.readouterr().out
    assert (device.ranks, device.collectives) == (1, {})
    assert all(seconds > 0 for curve in curves_of(device) for _, seconds in curve.points)
    assert cli.main(["calibrate", str(tmp_path / "none" / "device.json")]) == 1
    assert cli.main(["calibrate", str(path), "--seconds", "0"]) == 1
    errors = capsys.readouterr().err
    assert f"there is no folder {tmp_path / 'none'}" in errors
    assert "seconds is 0.0; give how long to measure" in errors
