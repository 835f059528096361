"""examples/train_gpt.py as a user runs it: torchrun, two ranks, a tiny model and few steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import thunder_zero as tz
from tests.harness.examples import ROOT, SECONDS, run_example, table_of, torchrun
from tests.harness.ranks import example_environment

EXAMPLE = "examples/train_gpt.py"
WIDTH = 32
BLOCK = 12 * WIDTH**2 + 9 * WIDTH + 4 * WIDTH  # weights, biases, two norms
TIED_MODEL = (256 + 32) * WIDTH + 2 * BLOCK + 2 * WIDTH  # parameters of --size tiny --context 32
MODEL = TIED_MODEL + 256 * WIDTH
# Backward does not read the lookup tables (256 + 32 rows) and biases: 9 + 2 widths a block, 1 in the last norm.
NOT_READ = (256 + 32 + 2 * (9 + 2) + 1) * WIDTH
GATHERED_ONCE = 2 * (BLOCK - 11 * WIDTH) + WIDTH + 256 * WIDTH  # both blocks, norm, head


TINY = ("--size", "tiny", "--context", "32", "--batch", "4", "--steps", "30", "--save-every", "5")
OPTIONS = {
    "zero3": ("--stage", "3"),
    "zero1-tied-bfloat16": ("--stage", "1", "--tied", "--dtype", "bfloat16"),
}
Example = Callable[[str], tuple[str, Path]]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Runs the example once with each of OPTIONS; returns its output and its folder."""

    @cache
    def run(name: str) -> tuple[str, Path]:
        out = tmp_path_factory.mktemp(name)
        return run_example(EXAMPLE, *TINY, *OPTIONS[name], "--out", str(out)), out

    return run


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    ("name", "sends", "words", "once"),
    [
        # u is half the model: 2 bytes a parameter.
        (
            "zero3",
            2 * (3 * MODEL - NOT_READ - GATHERED_ONCE),
            f"3u - {2 * NOT_READ:,} not read by backward - {2 * GATHERED_ONCE:,} gathered",
            (f"{4 * GATHERED_ONCE / 1e6:.2f} MB", "blocks.0, blocks.1, norm, head"),
        ),
        pytest.param("zero1-tied-bfloat16", TIED_MODEL * 2, "2u", None, marks=pytest.mark.slow),
    ],
)
def test_trains_and_reports(example: Example, name: str, sends: int, words: str, once: tuple[str, str] | None) -> None:
    printed, out = example(name)
    table = table_of(printed)

    first, end = float(table["training loss, first step"][0]), float(table["training loss, end"][0])
    assert 5.0 < first < 6.5  # ln 256 = 5.55 for a model that knows nothing
    assert end < first - 1.5
    assert float(table["validation loss"][0]) < float(table["validation loss"][1].split()[-1]) - 1.5
    assert table["bytes sent per rank and step"][0] == table["by the formula"][0] == f"{sends:,}"
    assert table["by the formula"][1].startswith(words)  # the table breaks the line after them
    assert table.get("gathered once") == once
    assert int(table["tokens/s"][0].replace(",", "")) > 0
    rest, peak = (float(table[f"memory at {when} per rank"][0].removesuffix(" MB")) for when in ("rest", "peak"))
    assert 0 < rest < peak
    (curve,) = out.glob("*.png")
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert curve.stat().st_size > 10_000
    assert str(curve) in printed.replace("\n", "")
    trace = printed[printed.index("# forward, ") :]  # of one block, both halves
    assert re.search(r"compute +blocks\.1\.", trace)
    assert not re.search(r"compute +blocks\.0\.", trace)
    assert "zero_reduce_scatter" in trace


def test_a_bad_option_gets_one_sentence() -> None:
    command = [sys.executable, EXAMPLE, "--steps", "1"]
    run = subprocess.run(command, cwd=ROOT, env=example_environment(), text=True, capture_output=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("--steps is 1; give at least 4")


def children(pid: int) -> list[int]:
    """The ids of a process's child processes."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = tz.consolidate(folder / "train_gpt_stage3" / "latest", folder / "model.pt")
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a rank's process in /proc")
def test_a_run_whose_rank_dies_ends_with_the_same_weights(example: Example, tmp_path: Path) -> None:
    """Rank 1 is killed while it trains; torchrun starts both again, and they resume from the last checkpoint.
    Gathering every unit again for backward changes the bytes they send, and no bit of the weights."""
    _, whole = example("zero3")
    command = [
        *torchrun(2),
        "--max-restarts",
        "2",
        EXAMPLE,
        *TINY,
        "--stage",
        "3",
        "--no-gather-last-units-once",
        "--out",
        str(tmp_path),
    ]
    with (tmp_path / "printed").open("w+") as printed:
        run = subprocess.Popen(command, cwd=ROOT, env=example_environment(), stdout=printed, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + SECONDS / 2
            while not list(tmp_path.glob("*/step-5")) and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(children(run.pid)[-1], signal.SIGKILL)
            run.wait(SECONDS / 2)
        finally:
            run.terminate()  # it ends its ranks
            run.wait()
        printed.seek(0)
        output = printed.read()
    assert run.returncode == 0, output
    assert "Resuming after step" in output
    table = table_of(output)
    sends = f"{2 * (3 * MODEL - NOT_READ):,}"
    assert table["bytes sent per rank and step"][0] == table["by the formula"][0] == sends
    assert table["gathered once"][1] == "nothing"
    right, found = weights_of(whole), weights_of(tmp_path)
    assert all(torch.equal(found[name], weight) for name, weight in right.items())
