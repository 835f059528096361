"""The page of a step that ``check_step`` recorded has the allocator's peak, and the bytes of rings."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.profiler import profile

import thunder_zero as tz
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero.tools.cli import main
from thunder_zero.tools.views.page.report import page_of, page_of_step

WIDTH, RANKS = 64, 4
BYTES = 4 * sum(param.numel() for param in nn.Linear(WIDTH, WIDTH).parameters())


def train(mesh: DeviceMesh, watch: Any = None) -> nn.Module:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    inputs, targets = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(mesh.get_rank()))
    with watch or nullcontext():
        F.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    return net


def slices(mesh: DeviceMesh) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    net(torch.randn(4, 8, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    return net


def program_of(verdict: tz.tools.Verdict) -> dict[str, Any]:
    page = page_of_step(verdict, "h100")
    ours = page_of(traced(lambda: Chain(ResidualBlock(8)), (4, 8)), "h100")
    assert page.keys() == ours.keys()
    program: dict[str, Any] = page["programs"][0]
    assert program.keys() == ours["programs"][0].keys()
    for part in ("figures", "lines", "bars", "memory"):
        assert program[part].keys() - {"types"} == ours["programs"][0][part].keys(), part
    assert program["collectives"][0].keys() == ours["programs"][0]["collectives"][0].keys()
    return program


def allocated_at_most() -> int:
    """Return the most bytes that torch's profiler sees allocated from the first forward on."""
    watch = profile(profile_memory=True)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    try:
        train(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",)), watch)
    finally:
        dist.destroy_process_group()
    assert watch.profiler is not None
    events = watch.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


def test_the_peak_is_that_of_the_allocator_and_the_bytes_are_those_of_rings() -> None:
    verdict = tz.tools.check_step(train, {"dp": RANKS})
    assert verdict.status == 0, str(verdict)
    program = program_of(verdict)
    tensors, memory = program["memory"]["tensors"], program["memory"]
    assert verdict.step is not None
    before = sum(nbytes for line, _, nbytes in verdict.step.sizes if line < 0)
    assert max(program["lines"]["highest"]) - before == pytest.approx(allocated_at_most(), rel=0.01)
    sizes = zip(tensors["size"], tensors["kind"], strict=True)
    gathered = [nbytes for nbytes, kind in sizes if memory["kinds"][kind] == "gathered parameters"]
    assert gathered == ["16.0 KiB"] * 6 + ["256 B"] * 6  # three layers, in forward and in backward
    part = (RANKS - 1) * BYTES // RANKS
    assert [one["sent_bytes"] for one in program["collectives"]] == [part] * (6 + 3)
    assert [one["kind"] for one in program["collectives"]].count("gather") == 6
    assert [one["label"] for one in program["collectives"][:2]] == ["0.0.weight, 0.0.bias", "1.0.weight, 1.0.bias"]
    assert program["lanes"] == ["compute", "gathers", "reductions"]
    assert [phase["name"] for phase in program["phases"]] == ["forward", "backward", "optimizer step"]
    assert "allocator rounds tensors up" in program["note"]


def test_the_command_writes_the_page_of_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.html"
    assert main(["check", f"{__file__}:slices", "--mesh", "tp=2", "--html", str(out)]) == 0
    assert capsys.readouterr().out.startswith("nothing wrong")
    text = out.read_text().partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    program = json.loads(text)["programs"][0]
    assert program["lanes"] == ["compute", "tensor parallelism"]
    assert [one["sent_bytes"] for one in program["collectives"]] == [4 * 8 * 4]  # twice half of 4 rows of 8
    assert "tp:P" in program["lines"]["types"]


def test_a_step_that_was_not_recorded_has_no_page(tmp_path: Path) -> None:
    verdict = tz.tools.Verdict({"dp": 2}, (tz.tools.Fault("dp", "unknown", "a rank took over 1 s"),))
    with pytest.raises(ValueError, match="a rank took over 1 s"):
        tz.tools.report(verdict, tmp_path / "step.html", device="h100")
