"""Runs an example as a user does: torchrun and its options."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.ranks import example_environment

ROOT = Path(__file__).parents[2]
SECONDS = 240


def torchrun(ranks: int) -> tuple[str, ...]:
    """The command that starts so many ranks on this machine."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def run_example(script: str, *options: str, ranks: int = 2) -> str:
    """Run an example and return its output; end it if it takes too long.

    Raises:
        AssertionError: it failed or was ended; the message is its output.
    """
    command = [*torchrun(ranks), script, *options]
    run = subprocess.Popen(
        command, cwd=ROOT, env=example_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        printed, _ = run.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        run.terminate()  # torchrun ends its ranks
        printed, _ = run.communicate()
    assert run.returncode == 0, printed
    return printed


def example_module(name: str) -> Any:
    """An example's module; the examples import each other by their bare names."""
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        return importlib.import_module(name)


def table_of(printed: str) -> dict[str, tuple[str, ...]]:
    """The rows of all tables: name -> the other cells."""
    rows = re.findall(r"^│ (.+?) │$", printed, re.MULTILINE)
    return {name.strip(): tuple(cell.strip() for cell in cells) for name, *cells in (row.split("│") for row in rows)}
