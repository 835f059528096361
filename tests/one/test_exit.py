"""How a process ends."""

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
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from Linux")
def test_gloo_has_no_threads_when_the_interpreter_ends() -> None:
    """One that drops the tensors of the last collective then would abort the process; the model is still alive."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    threads = run.stdout.split()
    assert threads
    assert not [name for name in threads if "gloo" in name]
