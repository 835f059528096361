"""With ``thunder-zero why``, scripts run unchanged, and rank 0 prints measurements beside the forecast."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness.errors import error_of
from tests.harness.ranks import RanksPool
from thunder_zero.plan.amounts import size
from thunder_zero.tools import cli

SCRIPT = """
import sys
import torch
import thunder_zero as tz

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
model = tz.compile(module, stage=3)
optimizer = torch.optim.AdamW(model.parameters())
for rows in map(int, sys.argv[1:]):
    with model.no_sync():
        model(torch.ones(rows, 8)).sum().backward()
    model(torch.ones(rows, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", __name__)
"""


def run_why(rank: int, *arguments: str) -> str:
    """Return what a rank prints, then the error of the script or "nothing"."""
    printed = io.StringIO()
    replaced = mock.patch.dict(os.environ, RANK=str(rank)), mock.patch.multiple(sys, argv=[], path=[*sys.path])
    with replaced[0], replaced[1], redirect_stdout(printed):
        error = error_of(lambda: cli.main(["why", *arguments]))
    return printed.getvalue() + error


def run_scripts(rank: int, world_size: int, folder: str) -> list[str]:
    train, plain, wrong = (f"{folder}/{name}.py" for name in ("train", "plain", "wrong"))
    calls = (
        ("--device", "h100", "--steps", "3", train, "4", "4", "6", "6"),
        (train, "4", "4"),
        (train, "4"),
        (plain, "--steps"),
        (wrong,),
    )
    return [run_why(rank, *call) for call in calls]


@pytest.mark.slow
def test_scripts_run_unchanged_and_rank_0_prints_measured_beside_forecast(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (tmp_path / "wrong.py").write_text("raise ValueError('of the script')\n")
    (device, none, short, plain, wrong), others = ranks_pool.run(2, run_scripts, str(tmp_path))
    trained = "trained __main__\nnothing"
    assert others == [trained, trained, trained, "['--steps']\nnothing", "ValueError: of the script"]
    assert device.endswith(trained)  # the page comes before the script's end, after three steps
    assert device.splitlines()[0].endswith("(Sequential): ZeRO-3, rank 0 of 2, median of 3 steps of 2 forwards each")
    rows = {row[0]: row[1:] for row in (re.split("  +", line.strip()) for line in device.splitlines())}
    units = r"[\d.]+ [mun]?s"
    for part in ("a step", "forward, backward", "waits for collectives"):
        assert [bool(re.fullmatch(units, cell)) for cell in rows[part]] == [True, True], rows
    assert re.fullmatch(units, rows["the optimizer's step"][-1])  # measured alone
    module, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.ones(6, 8)
    traces = [tz.trace(module, x, world_size=2, synced=synced) for synced in (True, False)]
    assert rows["sent by this rank"] == [
        size(sum(each.timeline.traffic(op).sent for each in traces for op in each.timeline.ops))
    ]
    states = 2 * 4 * (8 * 16 + 16 + 16 * 8 + 8) // 2 + 4 * 4  # AdamW's averages of this rank's rows, and counts
    assert rows["most memory of tensors"][0] == size(tz.tools.memory(traces[0]).peak + states)
    assert "the largest difference: " in device
    listed = device.partition("programs\n")[2]
    assert listed.count("training") == listed.count("no_sync") == 2
    assert "(6, 8)" in listed or "size mismatch" in listed  # which shape asked for it
    assert "pass --device machine.json" in " ".join(none.split())
    assert "median of 1 step of 2" in none
    assert "no step was measured" in short
    assert "no optimizer stepped a model of thunder_zero" in plain
    assert wrong == "ValueError: of the script"


def test_scripts_that_cannot_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("")
    for arguments, words in (
        (["no.py"], "there is no file no.py; give a script"),
        (["--steps", "0", f"{tmp_path}/plain.py"], "--steps is 0; give how many"),
        (["--device", "h101", f"{tmp_path}/plain.py"], "there is no device 'h101'; give one of"),
    ):
        with pytest.raises(SystemExit, match=words):
            cli.main(["why", *arguments])
