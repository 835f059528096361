"""Rules of the GPU path that a machine without a GPU can show: calls, their tensors and their order.

The meta device stands in for the GPU in tests that only distinguish its tensors from tensors in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import thunder_zero as tz
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import everyone
from thunder_zero.checkpoint import save as saving
from thunder_zero.comm import backends, native
from thunder_zero.comm.native import CoalescedNccl, float16_divisors
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.sharded.dtensors import part_of
from thunder_zero.sharded.initial_values.data import PlainModel, Sharder, names_of
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.sharded_model import sharded_model
from thunder_zero.sharded.wire import HostCopies

import thunder

CUDA, META = torch.device("cuda"), torch.device("meta")


@pytest.fixture
def two_fake_ranks() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield everyone()
    dist.destroy_process_group()


def rows_of(dtype: torch.dtype) -> Tensor:
    """Return the first two of four rows."""
    return torch.arange(6).view(2, 3).to(dtype)


# Devices


def test_all_ranks_plan_for_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(backends, "all_gather_object", lambda value, group: [value, 40, 60])
    assert backends.memory_bytes(CUDA, None) == 40  # type: ignore[arg-type]
    assert backends.memory_bytes(torch.device("cpu"), None) is None  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the second refusal needs a machine without a GPU")
@pytest.mark.usefixtures("two_fake_ranks")
def test_a_gpu_that_is_not_the_current_one_is_refused() -> None:
    with mock.patch.object(torch.cuda, "current_device", return_value=0):
        with pytest.raises(ValueError, match=r"'cuda:1', but .* 'cuda:0'.*call torch.cuda.set_device\(1\)"):
            thunder.jit(fresh(Mlp, 4, 1), transforms=[tz.ZeroTransform(3, device=torch.device("cuda:1"))])
        with pytest.raises(ValueError, match="cannot be used here"):  # the current device, which this machine lacks
            thunder.jit(fresh(Mlp, 4, 1), transforms=[tz.ZeroTransform(3, device=torch.device("cuda:0"))])


def test_the_thread_of_asynchronous_saves_chooses_its_device(
    two_fake_ranks: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((threading.current_thread().name, device)))
    monkeypatch.setattr(saving, "group_like", lambda group, device: group)
    device = torch.device("cuda:1")
    saving.BackgroundSaves(two_fake_ranks, device).thread.submit(lambda: None).result(timeout=10)
    ((thread, chosen),) = seen
    assert thread.startswith("thunder_zero-save")
    assert chosen == device


# NCCL


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.complex64, torch.bool])
def test_parameters_that_nccl_cannot_send_travel_as_bytes(
    two_fake_ranks: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    # NCCL has no int16 and no uint16, but a frozen table may have any dtype. Fake ranks have this rank's rows.
    rows = rows_of(dtype)
    launch = mock.Mock(wraps=dist.all_gather_single)
    with mock.patch.object(native, "all_gather_single", launch), mock.patch.object(native, "one_launch"):
        (full,) = CoalescedNccl(two_fake_ranks).all_gather([rows], [(4, 3)]).wait()
    assert [tensor.dtype for tensor in launch.call_args.args[:2]] == [torch.uint8] * 2
    assert full.dtype is dtype
    assert torch.equal(full, torch.cat([rows, rows]))


def test_a_collective_that_raises_leaves_nothing_queued(two_fake_ranks: dist.ProcessGroup) -> None:
    # Otherwise torch would queue the group's next collectives behind it, and launch none of them.
    rows = rows_of(torch.float32)
    second_raises = mock.Mock(wraps=dist.all_gather_single, side_effect=[mock.DEFAULT, KeyboardInterrupt])
    with mock.patch.object(native, "all_gather_single", second_raises), pytest.raises(KeyboardInterrupt):
        CoalescedNccl(two_fake_ranks).all_gather([rows, rows], [(4, 3), (4, 3)])
    full = torch.zeros(8, 3)
    dist.all_gather_single(full, torch.ones(4, 3), group=two_fake_ranks)
    assert full.eq(1).all()
    (next_full,) = CoalescedNccl(two_fake_ranks).all_gather([rows], [(4, 3)]).wait()
    assert torch.equal(next_full, torch.cat([rows, rows]))


def test_nccl_averages_all_floats_but_float16(two_fake_ranks: dist.ProcessGroup) -> None:
    transport = CoalescedNccl(two_fake_ranks)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert transport._options([torch.ones(1, dtype=dtype)])["op"] == dist.ReduceOp.AVG
        assert transport._divisors(dtype) == (1, 1)
    assert transport._options([torch.ones(1, dtype=torch.float16)])["op"] == dist.ReduceOp.SUM
    assert transport._divisors(torch.float16) == (2, 1)
    assert [float16_divisors(size) for size in (1, 3, 8, 64)] == [(1, 1), (2, 1.5), (4, 2), (8, 8)]


# Shards in host memory


@pytest.mark.parametrize("stage", [3, 1])
def test_offloaded_shards_are_never_on_the_device_together(two_fake_ranks: dist.ProcessGroup, stage: int) -> None:
    # With cpu_offload at most one full value is on the device at a time. ZeRO-1's full parameters rest there.
    module = fresh(Mlp, 4, 1)
    plan = make_plan(module, tz.Policy(stage, cpu_offload=True), Mesh.of(2))
    ranks: Any = mock.Mock(world=two_fake_ranks, shard_group=two_fake_ranks)
    sharder = Sharder(PlainModel(module, plan, ranks, META, names_of(module)), are_read=False)
    cut = {param.path: sharder.shard(module.get_parameter(param.path).detach(), param.path) for param in plan.params}
    for param in plan.params:
        assert cut[param.path].device == (META if param.resident else torch.device("cpu"))
        if not param.resident:
            assert torch.equal(cut[param.path], module.get_parameter(param.path)[: len(cut[param.path])])
    if stage == 3:
        params = [ShardedParam(param, plan, META, cut[param.path], None) for param in plan.params]
        assert {param.rows.device.type for param in params} == {"cpu"}


def test_loaded_values_of_offloaded_shards_stay_in_host_memory() -> None:
    # ``DTensor.from_local`` and ``distribute_tensor`` would copy them to the mesh's device.
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=1)
    meta = TensorMeta(torch.Size((5, 2)), (2, 1), torch.bfloat16)
    param = DTensor(torch.zeros(2, 2), DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
    state = part_of(torch.arange(10.0).view(5, 2), param)
    assert isinstance(state, DTensor)
    assert (state.device_mesh, state.placements, state.shape, state.dtype) == (
        mesh,
        param.placements,
        (5, 2),
        torch.float32,
    )
    assert state._local_tensor.device.type == "cpu"
    assert state._local_tensor.tolist() == [[6, 7], [8, 9]]


def test_the_host_waits_for_the_last_copy_and_not_for_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    event = mock.Mock()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    without = HostCopies(CUDA, offloaded=False)  # with mixed precision alone: a cast, no copy from host memory
    without.note()
    without.wait()
    copies = HostCopies(CUDA, offloaded=True)
    copies.wait()
    copies.note()
    copies.wait()
    copies.wait()
    assert event.mock_calls == [mock.call.record("stream of cuda"), mock.call.synchronize()]


@pytest.mark.usefixtures("two_fake_ranks")
def test_no_copy_of_a_shard_runs_when_training_code_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # The host may write to shards after a forward, a backward that reduces nothing, or a gather. On the CPU
    # bfloat16 makes the transport stage its shards. Each backward that reduces ends with ``wait_offloaded``.
    seen: list[str] = []
    monkeypatch.setattr(HostCopies, "note", lambda self: seen.append("copy"))
    monkeypatch.setattr(HostCopies, "wait", lambda self: seen.append("wait"))
    half = tz.MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
    policy = tz.Policy(stage=3, cpu_offload=True, mixed_precision=half, reshard_after_forward=True)
    with pytest.warns(UserWarning, match="cpu_offload changes nothing"):
        model = sharded(fresh(Mlp, 4, 2), policy)

    def after(call: Any) -> tuple[int, str]:
        seen.clear()
        call()
        return seen.count("copy"), seen[-1]

    outputs: list[Tensor] = []
    with model.no_sync():
        assert after(lambda: outputs.append(model(torch.ones(1, 4)))) == (2, "wait")
        assert after(outputs[0].sum().backward) == (1, "wait")
    state = sharded_model(model).state
    assert after(lambda: state.gather_now(state.plan.params[0])) == (1, "wait")
