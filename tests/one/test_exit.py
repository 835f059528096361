"""A process ends without threads of gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit
from pathlib import Path
atexit.register(lambda: print(*(task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm"))))

import torch
import torch.distributed as dist
import thunder_zero as tz
import thunder

dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
model = thunder.jit(torch.nn.Linear(2, 2), transforms=[tz.ZeroTransform(stage=3)])
model(torch.ones(1, 2)).sum().backward()
"""


FAILS = """
def fail(group):
    raise ValueError("a failure of the script")

fail(dist.group.WORLD)
"""
ENDS = {"destroyed": ("dist.destroy_process_group()", 0), "left by an error": (FAILS, 1)}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from Linux")
@pytest.mark.parametrize("end", ENDS)
def test_gloo_has_no_threads_when_the_interpreter_ends(end: str) -> None:
    # A thread that drops the tensors of the last collective at that time would abort the process.
    last_lines, code = ENDS[end]
    command = [sys.executable, "-c", SCRIPT + last_lines]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == code, run.stderr
    threads = run.stdout.split()
    assert threads
    assert not [name for name in threads if "gloo" in name]
