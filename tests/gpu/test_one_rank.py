"""One rank trains on a GPU: a group of one whose transport launches all collectives, and shards in host memory.

``--slow`` rehearses on the CPU, over gloo, the tests that need no stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import thunder_zero as tz
from tests.harness.host_reads import host_reads
from tests.harness.models import LENGTH, VOCABULARY, GptShape, Mlp, fresh, relative_error
from tests.harness.one_rank import communicating, group_of_one
from tests.harness.ranks import everyone
from tests.harness.slow_wire import slow_wire
from thunder_zero.comm.native import CoalescedNccl
from thunder_zero.schedule.ops import Launch
from thunder_zero.sharded.dtensors import local

import thunder

REHEARSAL = pytest.param("cpu", marks=(pytest.mark.slow, pytest.mark.rehearsal))
STAGES, STEPS = (0, 1, 2, 3), 3
HALF = tz.MixedPrecision(torch.bfloat16, torch.float32)
SHARDED, REPLICATED = ((5, 3), (1,), (64, 2)), ((), (0, 3), (7,))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FROZEN = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool, torch.complex64)
SLEEP_CYCLES = 200_000_000  # about 0.1 s


@pytest.fixture(params=["cuda", REHEARSAL])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with group_of_one(request.param):
        yield request.param


@pytest.fixture
def cuda() -> Iterator[None]:
    with group_of_one("cuda"):
        yield


def policy_of(stage: int, **fields: Any) -> tz.Policy:
    return tz.Policy(stage=stage, reshard_after_forward=True, **fields)


def shard(module: nn.Module, policy: tz.Policy, device: str) -> Any:
    """Return the sharded model of a copy of a module."""
    return thunder.jit(deepcopy(module), transforms=[tz.ZeroTransform(policy, device=torch.device(device))])


def tokens(device: str) -> Tensor:
    return (torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY).to(device)


def step_of(model: nn.Module, inputs: Tensor, no_sync: bool = False) -> Callable[[], Tensor]:
    """Return a function that takes a step of SGD. The step reads no value on the host."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        if no_sync:
            with model.no_sync():
                model(inputs).float().square().mean().backward()
        loss: Tensor = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def losses(step: Callable[[], Tensor]) -> Tensor:
    return torch.stack([step() for _ in range(STEPS)]).cpu()


# The transport


def test_the_schedule_has_the_sizes_for_this_gpu(cuda: None) -> None:
    model = shard(fresh(GptShape), tz.Policy(3), "cuda")
    model(tokens("cuda"))
    plan = tz.traces_of(model).plan
    assert plan.memory_bytes == torch.cuda.get_device_properties(torch.device("cuda")).total_memory
    assert plan.sizes.prefetch == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("means", [frozenset(FLOATS), frozenset()], ids=["AVG", "SUM"])
def test_collectives_accept_all_shapes(device: str, dtype: torch.dtype, means: frozenset[torch.dtype]) -> None:
    # Empty and 0-dim tensors, transposed gradients, padding. The values of NCCL's AVG of one rank are not compared.
    if means and device == "cpu":
        pytest.skip("gloo takes no means")
    with mock.patch.object(CoalescedNccl, "means", means):
        transport = CoalescedNccl(everyone())
        grads = [torch.randn(shape, device=device).to(dtype) for shape in SHARDED]
        turned = [grad.t().contiguous().t() if grad.dim() == 2 else grad for grad in grads]
        outputs = [transport.all_gather(grads, SHARDED).wait(), transport.reduce_scatter(turned).wait()]
        into = [grad.clone() for grad in grads]
        outputs.append(transport.all_gather(into, SHARDED, into=into).wait())
        small = [torch.randn(shape, device=device).to(dtype) for shape in REPLICATED]
        outputs.append(transport.all_reduce(small).wait())
    for results, expected in zip(outputs, (grads, grads, grads, small), strict=True):
        for result, value in zip(results, expected, strict=True):
            assert result.shape == value.shape
            assert result.dtype is dtype
            assert means or torch.equal(result, value)
    padded = transport._input(grads[0], (8, 3))
    assert torch.equal(padded[:5], grads[0])
    assert not padded[5:].any()


@pytest.mark.parametrize("dtype", FROZEN, ids=str)
def test_frozen_parameters_of_all_dtypes_are_gathered(device: str, dtype: torch.dtype) -> None:
    rows = torch.arange(12, device=device).view(4, 3).to(dtype)
    (full,) = CoalescedNccl(everyone()).all_gather([rows], [(4, 3)]).wait()
    assert full.dtype is dtype
    assert torch.equal(full, rows)


@pytest.mark.parametrize("form", [tz.Int8(), tz.Int8(block=24), tz.NF4()], ids=str)
def test_encodings_on_a_gpu_have_the_bytes_of_a_cpu(device: str, form: tz.Int8 | tz.NF4) -> None:
    rows = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    payload = form.encode(rows.to(device))
    assert torch.equal(payload.cpu(), form.encode(rows))
    result = form.decode(payload, torch.empty(rows.shape, device=device))
    assert torch.equal(result.cpu(), form.decode(form.encode(rows), torch.empty_like(rows)))


# A step


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_trains_as_one_process_without_waiting_for_the_device(device: str, stage: int) -> None:
    # On a GPU a line that makes the host wait raises; on the CPU such reads are counted. Each bucket is one launch.
    expected = losses(step_of(fresh(GptShape), tokens("cpu")))
    with communicating():
        model = shard(fresh(GptShape), policy_of(stage), device)
    step = step_of(model, tokens(device))
    first = step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            second = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with host_reads() as reads:
            second = step()
        assert reads == []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as seen:
        third = step()
    assert relative_error(torch.stack([first, second, third]).cpu(), expected) < 1e-4
    launches = [event for event in seen.events() or () if event.name.startswith("c10d::") and "coalesced" in event.name]
    planned = [op for op in tz.traces_of(model).timeline.ops if isinstance(op, Launch)]
    assert len(launches) == len(planned), sorted({event.name for event in seen.events() or ()})


@pytest.mark.parametrize("mixed", [{}, {"mixed_precision": HALF}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("cuda")
def test_a_slow_wire_changes_nothing(stage: int, no_sync: bool, mixed: dict[str, Any]) -> None:
    # Outputs are NaN until a sleeping stream writes them, so a missing wait or a freed buffer changes numbers.
    policy = policy_of(stage, **mixed)
    with communicating():
        expected = losses(step_of(shard(fresh(GptShape), policy, "cuda"), tokens("cuda"), no_sync))
        with slow_wire() as wire:
            result = losses(step_of(shard(fresh(GptShape), policy, "cuda"), tokens("cuda"), no_sync))
    assert wire.launched > 0
    assert relative_error(result, expected) < (1e-2 if mixed else 1e-5)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_collectives_of_nccl_are_launched(stage: int, offload: bool) -> None:
    # The fake backend stands in for two ranks of NCCL: it checks shapes, dtypes and devices, but sends no values.
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        half = tz.MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
        model = shard(fresh(GptShape), tz.Policy(stage=stage, cpu_offload=offload, mixed_precision=half), "cuda")
        losses(step_of(model, tokens("cuda")))
        assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
    finally:
        dist.destroy_process_group()


# Host memory


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_trains_as_on_the_cpu(stage: int, offload: bool) -> None:
    expected = losses(step_of(fresh(GptShape), tokens("cpu")))
    with communicating():
        model = shard(fresh(GptShape), tz.Policy(stage=stage, cpu_offload=offload), "cuda")
    assert relative_error(losses(step_of(model, tokens("cuda"))), expected) < 1e-4
    for param in tz.traces_of(model).plan.params:
        shard_param = model.get_parameter(param.path)
        rows, grad = local(shard_param), shard_param.grad
        is_on_host = offload and param.sharded
        assert rows.device.type == ("cpu" if is_on_host else "cuda")
        assert rows.is_pinned() == is_on_host
        assert grad is None or local(grad).device == rows.device


def test_offload_never_has_all_shards_on_the_device(device: str) -> None:
    # Neither while a model is sharded nor at rest. The largest parameter may pass through the device.
    module = fresh(Mlp, 512, 8)
    full = sum(param.nbytes for param in module.parameters())
    x = torch.ones(2, 512, device=device)
    step_of(fresh(Mlp, 512, 1).to(device), x)()  # the workspaces of cuBLAS are no part of the model
    with communicating():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        model = shard(module, policy_of(3, cpu_offload=True), device)
    if device == "cuda":
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < full / 4
        assert torch.cuda.memory_allocated() - before < full / 16
    assert all(param.device.type == "cpu" for param in model.parameters())
    step_of(model, x)()
    if device == "cuda":
        assert torch.cuda.memory_allocated() - before < full / 2
        assert all(local(param).is_pinned() for param in model.parameters())


@pytest.mark.parametrize("grad", [False, True])
def test_the_host_may_write_to_an_offloaded_shard_after_forward(device: str, grad: bool) -> None:
    # Copies of shards to the device have ended then, although the device is far behind.
    with communicating():
        model = shard(fresh(Mlp, 64, 3), policy_of(3, cpu_offload=True), device)
    x = torch.ones(2, 64, device=device)
    with torch.set_grad_enabled(grad):
        expected = model(x).detach().clone()
        if device == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        result = model(x).detach()
    for param in model.parameters():
        param.data.fill_(torch.nan)
    assert torch.equal(result, expected)


# Checkpoints


def test_an_asynchronous_save_has_the_values_of_its_call(device: str, tmp_path: Path) -> None:
    with communicating():
        model = shard(fresh(GptShape), policy_of(3), device)
    step = step_of(model, tokens(device))
    step()
    saved = {name: param.detach().clone() for name, param in model.named_parameters()}
    done = tz.save(tmp_path / "now", model, wait=False)
    for _ in range(STEPS):
        step()
    done.result(timeout=60)
    tz.load(tmp_path / "now", model)
    assert all(torch.equal(param, saved[name]) for name, param in model.named_parameters())
