"""The demo examples/train_gpt.py trains a tiny model, prints its report, and resumes under torchrun after a death."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import thunder_zero as tz
from tests.harness.examples import (
    RESTARTING,
    example_module,
    kill_a_rank,
    output_of,
    run_main,
    start,
    table_of,
    torchrun,
)
from tests.harness.ranks import RanksPool

EXAMPLE = "examples/train_gpt.py"
WIDTH = 32
BLOCK = 12 * WIDTH**2 + 9 * WIDTH + 4 * WIDTH  # weights, biases, two norms
TIED_MODEL = (256 + 32) * WIDTH + 2 * BLOCK + 2 * WIDTH  # parameters of --size tiny --context 32
MODEL = TIED_MODEL + 256 * WIDTH
# Backward does not read the lookup tables (256 + 32 rows) and biases: 9 + 2 widths a block, 1 in the last norm.
NOT_READ = (256 + 32 + 2 * (9 + 2) + 1) * WIDTH
GATHERED_ONCE = 2 * (BLOCK - 11 * WIDTH) + WIDTH + 256 * WIDTH  # both blocks, norm, head
TINY = ("--size", "tiny", "--context", 32, "--batch", 4, "--steps", 30)


def check_report(printed: str, folder: Path, sends: int, words: str, once: tuple[str, str] | None) -> None:
    """Check the figures of the table, the curve, and the trace of one block."""
    table = table_of(printed)
    first, end = float(table["training loss, first step"][0]), float(table["training loss, end"][0])
    assert 5.0 < first < 6.5  # ln 256 = 5.55 for a model that knows nothing
    assert end < first - 1.5
    assert float(table["validation loss"][0]) < float(table["validation loss"][1].split()[-1]) - 1.5
    assert table["bytes sent per rank and step"][0] == table["by the formula"][0] == f"{sends:,}"
    assert table["by the formula"][1].startswith(words)  # the table breaks the line after them
    assert table.get("kept unsharded") == once
    assert int(table["tokens/s"][0].replace(",", "")) > 0
    rest, peak = (float(table[f"memory at {when} per rank"][0].removesuffix(" MB")) for when in ("rest", "peak"))
    assert 0 < rest < peak
    (curve,) = folder.glob("*.png")
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert str(curve) in printed.replace("\n", "")
    life = printed[printed.index("The life of blocks.") :].splitlines()
    events = [line.partition(" ")[0] for line in life if re.match(r"(gathered|used|freed|regathered|reduced) ", line)]
    assert events == ["gathered", "used", *["freed"] * (once is not None), "reduced"]
    assert all(line.startswith((" " * 12 + "forward: ", " " * 12 + "backward: ")) for line in sentences(life))
    assert "zero_reduce_scatter" in next(line for line in life if line.startswith("reduced"))
    assert "tz.print_trace(model, unit=" in life[-1]
    assert len(life) < 20


def sentences(life: list[str]) -> list[str]:
    """Return the sentences that follow the program's lines."""
    return [after for line, after in pairwise(life) if re.match(r"(gathered|used|freed|regathered|reduced) ", line)]


@pytest.fixture(scope="module")
def zero3(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return what a run prints, and its folder."""
    out = tmp_path_factory.mktemp("zero3")
    return run_main(ranks_pool, "train_gpt", *TINY, "--save-every", 30, "--out", out), out


@pytest.mark.slow
def test_it_trains_and_reports(zero3: tuple[str, Path]) -> None:
    sends = 2 * (3 * MODEL - NOT_READ - GATHERED_ONCE)  # u is half the model: 2 bytes a parameter
    words = f"3u - {2 * NOT_READ:,} not read by backward - {2 * GATHERED_ONCE:,} kept"
    check_report(*zero3, sends, words, (f"{4 * GATHERED_ONCE / 1e6:.2f} MB", "blocks.0, blocks.1, norm, head"))


@pytest.mark.slow
def test_tied_weights_in_bfloat16(ranks_pool: RanksPool, tmp_path: Path) -> None:
    options = ("--stage", 1, "--tied", "--dtype", "bfloat16", "--out", tmp_path)
    printed = run_main(ranks_pool, "train_gpt", *TINY, *options)
    check_report(printed, tmp_path, 2 * TIED_MODEL, "2u", None)


def test_a_bad_option_gets_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        example_module("train_gpt").main(["--steps", "1"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("--steps is 1; give at least 4")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = tz.tools.consolidate(folder / "train_gpt_stage3" / "latest", folder / "model.safetensors")
    return load_file(file)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a rank's process in /proc")
def test_a_run_whose_rank_dies_ends_with_the_same_weights(zero3: tuple[str, Path], tmp_path: Path) -> None:
    """Rank 1 is killed in training; torchrun restarts both ranks, which resume from the last checkpoint.

    Gathering every unit again for backward changes the bytes that are sent, but no bit of the weights.
    """
    options = (*TINY, "--save-every", 5, "--reshard-after-forward", "--out", tmp_path)
    agent = torchrun("--standalone", "--nproc-per-node", 2, "--max-restarts", 2)
    run = start(*RESTARTING, *agent, EXAMPLE, *options)
    kill_a_rank(run, lambda: list(tmp_path.glob("*/step-5")))
    printed = output_of(run)
    assert "Resuming after step" in printed
    table = table_of(printed)
    sends = f"{2 * (3 * MODEL - NOT_READ):,}"
    assert table["bytes sent per rank and step"][0] == table["by the formula"][0] == sends
    assert table["kept unsharded"][1] == "nothing"
    expected, weights = weights_of(zero3[1]), weights_of(tmp_path)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
