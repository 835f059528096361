"""Our models do not affect other models: what is patched while ours compile is restored."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness.models import fresh
from tests.harness.one_rank import group_of_one
from thunder_zero.compat.torch import optimizers

import thunder

X, TARGET = torch.arange(12.0).view(3, 4).cos(), torch.tensor([1, -100, 2])


class Net(nn.Module):
    """A module that plain Thunder traces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.cross_entropy(x, TARGET, label_smoothing=0.1)


LASTING = {  # what stays for the life of the process and does not affect other models
    "DTensor's handlers: aten._amp_foreach_non_finite_check_and_unscale_.default",
    "optimizer_global_optimizer_post_hooks: thunder_zero.sharded.optimizers._note_step",
    "optimizer_global_optimizer_pre_hooks: thunder_zero.sharded.optimizers._before_step",
}


@pytest.mark.slow
def test_training_our_models_changes_nothing_else() -> None:
    """Runs in a new process, as changes by an earlier test would not show."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.harness.side_effects"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    changed = json.loads(process.stdout)
    assert {*changed.pop("training")} == LASTING
    assert changed == {key: [] for key in ("torch by itself", "import", "functions", "Thunder", "bits")}


def text_of(jitted: Any) -> str:
    """Return a model's first and last traces by Thunder, without times and addresses."""
    jitted(X).backward()
    traces = (
        *thunder.last_prologue_traces(jitted)[-1:],
        *thunder.last_traces(jitted)[::5],
        *thunder.last_backward_traces(jitted)[-1:],
    )
    return re.sub(r"took \d+ \w+|0x\w+|_\d{6,}", "", "\n".join(map(str, traces)))


def test_thunder_traces_plain_modules_as_before_our_transform() -> None:
    before = text_of(thunder.jit(fresh(Net)))
    with group_of_one("cpu"):
        model = thunder.jit(fresh(Net), transforms=[tz.ZeroTransform(stage=3)])
        model(X).backward()
    assert text_of(thunder.jit(fresh(Net))) == before


def test_a_scaler_of_other_models_uses_torchs_handler() -> None:
    """Our handler shares an overflow of any gradient by a collective; torch's looks at the first gradient only."""
    found, inverse = torch.zeros(()), torch.ones(())
    with group_of_one("cpu"):
        model: Any = tz.compile(nn.Linear(4, 4), stage=3)
        model(X).sum().backward()
        ours_grads = [param.grad for param in model.parameters()]
        mesh = init_device_mesh("cpu", (1,))
        others = [DTensor.from_local(torch.ones(4), mesh, [Shard(0)])]
        for grads, calls in ((others, 0), (ours_grads, 1)):
            with mock.patch.object(dist, "all_reduce") as reduced:
                optimizers.UNSCALE(grads, found, inverse)
            assert reduced.call_count == calls
