"""Runs examples/fabric_litgpt.py as a user does: two ranks train LitGPT's GPT as plain torch does."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.harness.models import error
from tests.harness.ranks import example_environment

ROOT = Path(__file__).parents[2]
SECONDS = 120
STEPS, ROWS, CONTEXT = 3, 2, 16  # rows on each rank

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
    for name in ("lightning", "litgpt")
]


def run_example(*options: str) -> str:
    """Run the example and return its output; if it takes too long, kill it and the rank that it has started.

    Raises:
        AssertionError: the example failed or was killed; the message is its output.
    """
    run = subprocess.Popen(
        [sys.executable, "examples/fabric_litgpt.py", *options],
        cwd=ROOT,
        env=example_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that both ranks can be killed
    )
    try:
        printed, _ = run.communicate(timeout=SECONDS)
    except BaseException as failure:
        os.killpg(run.pid, signal.SIGKILL)
        printed, _ = run.communicate()
        if not isinstance(failure, subprocess.TimeoutExpired):
            raise
    assert run.returncode == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_litgpt_trains_as_with_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"steps": STEPS, "micro-batches": 1, "rows": ROWS, "context": CONTEXT, "out": tmp_path / "model.pt"}
    printed = run_example(*(f"--{name}={value}" for name, value in sizes.items()))
    assert re.search(r"gather +transformer\.h\.1", printed)

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from fabric_litgpt import GPT, SEED, Shape, config_of, load_text, loss_of, train_batch

    text = load_text()
    torch.manual_seed(SEED)
    model = GPT(config_of(None, CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    lines = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, train_batch(text, number, Shape(2 * ROWS, CONTEXT, 0, 1), SEED))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lines.append((loss.item(), norm.item()))
    found = [tuple(map(float, line)) for line in re.findall(r"step \d: loss (\S+), norm (\S+)", printed)]
    assert found == [pytest.approx(line, rel=2e-5) for line in lines]
    saved = torch.load(tmp_path / "model.pt")
    assert saved["steps"] == STEPS
    right = model.state_dict()
    assert saved["model"].keys() == right.keys()
    differences = {name: error(saved["model"][name], right[name]) for name in right}
    assert {name: difference for name, difference in differences.items() if difference > 1e-5} == {}
