"""A script whose transform raises on all ranks ends with the exit code of its exception, although it leaves its group.

Gloo's threads get little time, as on a loaded machine, so that they still hold tensors when the interpreter ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ranks import ONE_RANK, ROOT

SECONDS = 100
SCRIPT = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import thunder_zero as tz
import thunder

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
cpu = min(os.sched_getaffinity(0))
for task in Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), {cpu})
    if "gloo_runloop" in (task / "comm").read_text():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
torch.manual_seed(rank)  # as if the module were built without a seed
thunder.jit(torch.nn.Linear(64, 64), transforms=[tz.ZeroTransform(stage=3)])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds gloo's threads in Linux's list")
def test_ranks_end_with_the_code_of_their_exception(tmp_path: Path) -> None:
    outputs = [tmp_path / f"said{rank}" for rank in range(2)]
    ranks = []
    try:
        for rank in range(2):
            command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(rank)]
            with outputs[rank].open("w") as errors:
                names = {**os.environ, **ONE_RANK, "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error{rank}.json")}
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=names, stderr=errors))
        codes = [process.wait(SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for text in (file.read_text() for file in outputs):
        assert "differs between ranks" in text
        assert "terminate called" not in text
    assert codes == [1, 1]
    for rank in range(2):  # torchrun's summary prints this message
        message = json.loads((tmp_path / f"error{rank}.json").read_text())["message"]
        assert message.startswith("RuntimeError: the initial value of parameter 'weight' differs between ranks")
        assert "\n" not in message
