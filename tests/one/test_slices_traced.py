"""Programs of modules in slices, traced and forecast in one process: no ranks are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thunder_zero as tz
from tests.harness.errors import refused

PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"


class Pair(nn.Module):
    """Two layers between which torch slices, behind one that it does not."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(width, width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x)).relu())


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def pair(dp: int, tp: int, policy: tz.Policy | int = 3, rank: int = 0, rows: int = 8) -> tz.tools.Traces:
    with torch.device("meta"):
        module, x = Pair(), torch.empty(rows, 64)
    with tz.tools.fake_mesh((dp, tp), rank=rank) as mesh:
        return tz.trace(parallelize_module(module, mesh["tp"], dict(STYLES)), x, policy=policy, mesh=mesh)


def test_a_rank_of_many_is_traced_in_one_process() -> None:
    traces = pair(4, 8, rank=13)  # of 32
    plan = traces.plan
    assert (plan.mesh.shard.place, plan.mesh.shard.size, plan.mesh.tensor.place, plan.mesh.tensor.size) == (1, 4, 5, 8)
    shapes = {param.path: (param.shape, plan.shard_shape(param)) for param in plan.params}
    assert shapes["up.weight"] == ((32, 64), (8, 64))
    assert shapes["down.weight"] == ((64, 32), (16, 32))
    assert shapes["first.weight"] == ((64, 64), (16, 64))
    sent = [op.sends for op in traces.timeline.ops if op.sends]
    assert sent == [2 * 7 * (8 * 64 * 4 // 8)] * 2  # the activation behind down, the gradient in front of up
    assert not dist.is_initialized()


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text().partition("## Without ranks")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {})
    assert "and 1 of torch's tensor parallelism, which send 2,048 of these bytes" in capsys.readouterr().out


def test_what_is_refused() -> None:
    with torch.device("meta"):
        module, x = Pair(), torch.empty(8, 64)
    with refused(ValueError, "give a number of ranks, at least 1, for each name"), tz.tools.fake_mesh((2, 2), ("dp",)):
        pass
    with refused(ValueError, "rank is 4", "the ranks 0 to 3"), tz.tools.fake_mesh((2, 2), rank=4):
        pass
    with tz.tools.fake_mesh((2, 2)) as mesh:
        with refused(RuntimeError, "there is a process group", "init_device_mesh"), tz.tools.fake_mesh((1, 2)):
            pass
        with refused(ValueError, "no parameter of Pair is a DTensor"):
            tz.trace(module, x, mesh=mesh)
        parallelize_module(module, mesh["tp"], dict(STYLES))
        with refused(ValueError, "mesh says how many ranks there are", "leave out world_size"):
            tz.trace(module, x, mesh=mesh, world_size=2)
        with refused(ValueError, "Thunder's front end traces none"):
            tz.trace(module, x, mesh=mesh, frontend="thunder")
        with refused(RuntimeError, "parameter 'up.weight' is a DTensor", "give mesh="):
            tz.trace(module, x)
        with refused(ValueError, "'up.weight' is a DTensor and the policy ignores it"):
            tz.trace(module, x, mesh=mesh, policy=tz.Policy(3, ignored=("up",)))
