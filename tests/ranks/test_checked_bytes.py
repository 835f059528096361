"""The bytes that a checked step sends, as its page has them, are those that ranks write to their sockets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import thunder_zero as tz
from examples.sent_bytes import bytes_on_sockets
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

WIDTH = 360  # 2 and 3 ranks divide its square
HEADERS = 0.01  # of the bytes that are sent, at most
REDUCE_SCATTER = 2  # gloo's is an all-reduce, of which each rank keeps its part
CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {  # with a whole tensor and a rank's part of it
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_to_all": lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what was written to a socket"),
]


def train(mesh: DeviceMesh) -> nn.Module:
    return count(mesh)[0]


def count(mesh: DeviceMesh) -> tuple[nn.Module, list[int]]:
    """Train a step, then call each collective once. Return the bytes on sockets of the step, and of each call."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(mesh.get_rank()))
    totals = [bytes_on_sockets()]

    def note() -> None:
        dist.barrier()  # all messages are written
        totals.append(bytes_on_sockets())

    net(inputs).square().mean().backward()
    optimizer.step()
    note()
    whole = torch.randn(WIDTH, WIDTH)
    part = whole.chunk(mesh.size())[0].clone()
    for call in CALLS.values():
        call(whole, part)
        note()
    return net, [after - before for before, after in pairwise(totals)]


def count_again(rank: int, world_size: int) -> list[int]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    count(mesh)  # connects
    return count(mesh)[1]


@pytest.mark.parametrize("world_size", [2, *slow(3)])
def test_sockets_have_the_bytes_of_the_page(ranks_pool: RanksPool, world_size: int) -> None:
    verdict = tz.tools.check_step(train, {"dp": world_size})
    assert verdict.step is not None, str(verdict)
    lines = [(line.collective, line.sent) for line in verdict.step.lines if line.sent]
    on_wire = [sent * (REDUCE_SCATTER if kind == "reduce_scatter" else 1) for kind, sent in lines]
    of_step = len(lines) - len(CALLS)
    assert [kind for kind, _ in lines[of_step:]] == [*CALLS]
    expected = [sum(on_wire[:of_step]), *on_wire[of_step:]]
    for sent in ranks_pool.run(world_size, count_again):
        assert sent == pytest.approx(expected, rel=HEADERS)
