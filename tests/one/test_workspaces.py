"""What convolutions allocate inside on CPUs, beside the allocator's record and by arithmetic."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import thunder_zero as tz
from examples.tensor_memory import added_at_peak, bytes_held
from tests.harness.models import fresh, sharded
from tests.harness.traced import traced
from thunder_zero.tools import Holds, memory
from thunder_zero.tools.forecast.workspaces import BLOCKS, Convolution, hidden_bytes

from thunder.core.pytree import tree_iter

pytestmark = pytest.mark.slow

aten = torch.ops.aten
CPU = torch.device("cpu")
ON_ONEDNN = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in BLOCKS, reason="no rules for this CPU's convolutions"
)
# Input, weight, stride, padding, transposed; large enough for the bytes of the layouts to be more than scratch memory.
ALLOCATES = {
    "3x3": ((4, 64, 32, 32), (64, 64, 3, 3), 1, 1, False),
    "channels that fill no block": ((4, 20, 32, 32), (36, 20, 3, 3), 1, 1, False),
    "images": ((4, 3, 32, 32), (64, 3, 3, 3), 1, 1, False),
    "strided": ((4, 64, 32, 32), (128, 64, 3, 3), 2, 1, False),
    "strided 1x1": ((4, 64, 32, 32), (128, 64, 1, 1), 2, 0, False),
    "1x1": ((4, 64, 32, 32), (64, 64, 1, 1), 1, 0, False),
    "patches": ((4, 3, 64, 64), (192, 3, 8, 8), 8, 0, False),
    "transposed": ((4, 64, 16, 16), (64, 32, 2, 2), 2, 0, True),
    "float64": ((4, 64, 16, 16), (64, 64, 3, 3), 1, 1, False),
}


@ON_ONEDNN
@pytest.mark.parametrize("name", ALLOCATES)
def test_the_workspaces_of_a_convolution_beside_the_allocators_record(name: str) -> None:
    image, weight, stride, padding, is_transposed = ALLOCATES[name]
    dtype = torch.float64 if name == "float64" else torch.float32
    x, w = torch.randn(image, dtype=dtype), torch.randn(weight, dtype=dtype)
    how = [stride] * 2, [padding] * 2, [1, 1], is_transposed, [0, 0], 1
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        y = torch.convolution(x, w, None, *how)
        calls: list[tuple[Any, tuple[Any, ...]]] = [(aten.convolution.default, (x, w, None, *how))]
        for mask in ([True, False, False], [False, True, False], [True, True, False]):
            calls.append((aten.convolution_backward.default, (torch.ones_like(y), x, w, None, *how, mask)))
        for operator, args in calls:
            out = operator(*args)
            results = bytes_held(each for each in tree_iter(out) if isinstance(each, Tensor))
            found = added_at_peak(partial(operator, *args), CPU)
            assert results + hidden_bytes(operator, args, out) == pytest.approx(found, rel=0.03)
    finally:
        torch.set_num_threads(before)


def test_the_workspaces_by_arithmetic() -> None:
    """Blocks of 16 channels: 20 fill 32, 36 fill 48; a float32 has 4 bytes."""
    one = Convolution((4, 20, 8, 8), (4, 36, 8, 8), (36, 20, 3, 3), 4, 1, is_strided=False, block=16, threads=1)
    image, features, weight = 4 * 32 * 64 * 4, 4 * 48 * 64 * 4, 48 * 32 * 9 * 4
    assert one.to_features() == one.to_image() == image + weight + features
    assert one.to_weight() == image + features + weight
    strided = replace(one, features=(4, 36, 4, 4), is_strided=True)
    assert strided.to_image() == 36 * 16 * 4 + 4 * 36 * 16 * 4 + weight + 4 * 20 * 64 * 4
    assert replace(strided, weight=(36, 20, 1, 1)).to_image() == 3 * (4 * 20 * 64 * 4)  # one from the other
    assert replace(one, block=8).to_weight() == 4 * 24 * 64 * 4 + 4 * 40 * 64 * 4 + 40 * 24 * 9 * 4
    assert replace(one, threads=2).to_weight() == one.to_weight() + weight


def test_other_operators_and_cpus_without_rules_hide_nothing() -> None:
    x, w = torch.empty(4, 64, 32, 32, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(*args)
    assert hidden_bytes(aten.mm.default, (x, w), out) == 0
    with mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value="DEFAULT"):
        assert hidden_bytes(aten.convolution.default, args, out) == 0


class Net(nn.Module):
    """A convolution, a strided one, a transposed one, and one by one around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.second = nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False)
        self.third, self.around = nn.ConvTranspose2d(128, 64, 2, stride=2), nn.Conv2d(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first.forward(x)
        y = self.second.forward(F.relu(self.norm.forward(x)))
        return F.relu(self.third.forward(y) + self.around.forward(x))


def forecast(frontend: str, **options: Any) -> tz.tools.Memory:
    traces = traced(Net, (4, 3, 32, 32), tz.DDP, world_size=1, frontend=frontend)
    return memory(traces, loss=lambda y: y.square().mean(), **options)


@ON_ONEDNN
@pytest.mark.parametrize("frontend", ["dynamo", "thunder"])
def test_the_peak_of_a_model_with_convolutions_beside_the_allocators_record(frontend: str, group: ProcessGroup) -> None:
    model = sharded(fresh(Net), tz.DDP) if frontend == "thunder" else tz.compile(fresh(Net), tz.DDP)
    images = torch.randn(4, 3, 32, 32)

    def step() -> None:
        model(images).square().mean().backward()

    step()
    model.zero_grad()
    held = bytes_held([*model.parameters(), *model.buffers(), images])
    measured = held + added_at_peak(step, CPU)
    memory = forecast(frontend)
    assert memory.peak == pytest.approx(measured, rel=0.01)
    assert sum(memory.by_kind.values()) == memory.peak
    if frontend == "thunder":  # the peak of the other is in the loss
        with mock.patch.dict(BLOCKS, clear=True):
            assert forecast(frontend).peak < 0.9 * measured
    # Workspaces live for a line, and are those of CPUs.
    found = [one for one in memory.storages if one.kind is Holds.WORKSPACE]
    assert {one.name for one in found} == {"of convolution", "of convolution_backward"}
    assert all(one.freed == one.line for one in found)
    assert all(Holds.WORKSPACE not in line.alive for line in memory.lines)
    assert not [one for one in forecast(frontend, backend="nccl").storages if one.kind is Holds.WORKSPACE]
