"""examples/bench/transport.py: the command behind docs/performance.md runs, and prints its tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "examples/bench/transport.py", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=100)


@pytest.mark.slow
def test_the_tables() -> None:
    run = bench("--rounds", "2", "--world-sizes", "2")
    assert run.returncode == 0, run.stderr
    for label in ("one tensor of 16 MiB", "a GPT block, 12 tensors", "16 small tensors, separate and packed"):
        assert f"\nloopback, {label}\n\n| W |" in run.stdout
    spread = r"[\d.]+ \([\d.]+-[\d.]+\)"
    rows = re.findall(rf"^\| 2 \| (\w+) \| {spread} \| {spread} \| {spread} \|$", run.stdout, re.MULTILINE)
    assert rows == ["all_gather", "reduce_scatter", "all_reduce"] * 2
    assert len(re.findall(rf"^\| 2 \| 16 x \d+ KiB( \| {spread}){{4}} \|$", run.stdout, re.MULTILINE)) == 6
    documented = (ROOT / "docs/performance.md").read_text()
    assert all(head in documented for head in re.findall(r"^\| W \|.*$", run.stdout, re.MULTILINE))


@pytest.mark.slow
def test_worlds_of_one_are_refused() -> None:
    run = bench("--world-sizes", "1")
    assert run.returncode == 2
    assert "give world sizes and rounds of 2 or more" in run.stderr
