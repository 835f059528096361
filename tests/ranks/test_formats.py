"""Parameters and gradients travel as bytes: every rank computes with what arrives, and shards stay exact."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import thunder_zero as tz
from tests.harness.as_one_process import gather_objects
from tests.harness.errors import error_of
from tests.harness.models import Mlp, count_sends, fresh, full
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.comm import pairwise
from thunder_zero.comm.handle import AVERAGER, in_background
from thunder_zero.plan import layout
from thunder_zero.plan.traffic import reduce_traffic
from thunder_zero.schedule import Gather, Reduce

BLOCK = 16
WIDTH = 21
FORMATS: dict[str, Any] = {"gather_format": {"*": tz.Int8(BLOCK)}, "reduce_format": {"*": tz.Int8(BLOCK)}}


def make_mlp() -> nn.Module:
    return Mlp(WIDTH, 3)


def make_inputs(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def receive(value: Tensor, world_size: int) -> Tensor:
    """Return the value that all ranks receive for a parameter."""
    padded = value.new_zeros(layout.padded_shape(tuple(value.shape), world_size))
    padded[: len(value)] = value
    for rows in padded.chunk(world_size):
        tz.Int8(BLOCK).decode(tz.Int8(BLOCK).encode(rows), rows)
    return padded[: len(value)]


def loss_of(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def exact_gradients(weights: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Return the means over ranks of the gradients at these weights."""
    module, leaves = make_mlp(), {name: value.clone().requires_grad_() for name, value in weights.items()}
    losses = [loss_of(lambda x: functional_call(module, leaves, x), make_inputs(rank)) for rank in range(ranks)]
    torch.stack(losses).mean().backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: full(param.grad) for name, param in model.named_parameters()}


def assert_within_steps(grads: dict[str, Tensor], expected: dict[str, Tensor], steps: float = 1.0) -> None:
    """Check that each element is off by at most ``steps`` of the largest quantization steps of a rank's gradient."""
    for name, value in expected.items():
        assert (grads[name] - value).abs().max() <= steps * 4 * value.abs().max() / 127, name


def train_in_bytes(rank: int, world_size: int, stage: int) -> None:
    """Check that each step computes with the weights that arrive, and sends the bytes of the plan."""
    model = tz.compile(fresh(make_mlp), stage=stage, reshard_after_forward=True if stage == 3 else None, **FORMATS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        weights = tz.full_state_dict(model)
        arrived = {name: receive(value, world_size) for name, value in weights.items()}
        with count_sends() as sent:
            loss = loss_of(model, make_inputs(rank))
            loss.backward()
        expected = loss_of(lambda x, arrived=arrived: functional_call(make_mlp(), arrived, x), make_inputs(rank))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
        timeline = tz.traces_of(model).timeline
        assert sum(sent) == sum(timeline.traffic(op).sent for op in timeline.ops)
        assert_within_steps(gradients(model), exact_gradients(arrived, world_size))
        after = tz.full_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in weights.items()), "shards stay exact"
        with tz.full_parameters(model) as module:
            assert torch.equal(module.get_parameter("layers.0.weight"), weights["layers.0.weight"])
        optimizer.step()
        optimizer.zero_grad()
    gathers = [op for op in timeline.ops if isinstance(op, Gather)]
    assert len({op.backward for op in gathers}) == (2 if stage == 3 else 1)


def accumulate_in_bytes(rank: int, world_size: int, stage: int) -> None:
    """Check that deferred gradients are added before they become bytes."""
    model = tz.compile(fresh(make_mlp), stage=stage, **FORMATS)
    expected = exact_gradients({n: receive(v, world_size) for n, v in tz.full_state_dict(model).items()}, world_size)
    with model.no_sync():
        loss_of(model, make_inputs(rank)).backward()
    loss_of(model, make_inputs(rank)).backward()
    assert_within_steps(gradients(model), {name: 2 * value for name, value in expected.items()})


def send_inf(rank: int, world_size: int) -> None:
    """Check that a rank's Inf reaches the owner of each row of its block, and no other block."""
    model = tz.compile(nn.Linear(BLOCK, 4, bias=False), stage=3, reduce_format=tz.Int8(BLOCK))
    x = torch.ones(1, BLOCK)
    factor = torch.ones(1, 4)
    factor[0, 3] = torch.inf if rank == 0 else 1.0
    (model(x) * factor).sum().backward()
    assert gradients(model)["weight"].isfinite().all(1).tolist() == [True, True, True, False]


def measure_errors(rank: int, world_size: int, stage: int) -> None:
    """Compare ``wire_error`` with errors computed here; check that it changes no gradient and no weight."""
    model = tz.compile(fresh(make_mlp), stage=stage, **FORMATS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss_of(model, make_inputs(rank)).backward()
        optimizer.step()
    weights, grads = tz.full_state_dict(model), gradients(model)
    report = tz.tools.wire_error(model, lambda: loss_of(model, make_inputs(rank)).backward())
    exact = exact_gradients(weights, world_size)
    for name, value in weights.items():
        (error,) = [row for row in report if row["parameter"] == name]
        gather_error = (receive(value, world_size) - value).norm() / value.norm()
        assert error["gather"] == pytest.approx(gather_error.item(), rel=1e-3)
        assert 0 < error["gradient"] < 0.1
        assert 0.99 < error["cosine"] < 1
        assert error["gathers, reductions"] == "int8/16, int8/16"
    assert all(torch.equal(gradients(model)[name], grads[name]) for name in grads)
    with model.state.exact():
        model.zero_grad()
        loss_of(model, make_inputs(rank)).backward()
        for name, value in exact.items():
            torch.testing.assert_close(gradients(model)[name], value, rtol=1e-5, atol=1e-7)
    arrived = {name: receive(value, world_size) for name, value in weights.items()}
    expected = functional_call(make_mlp(), arrived, make_inputs(rank))
    torch.testing.assert_close(model(make_inputs(rank)), expected, rtol=1e-6, atol=1e-7)
    assert str(report).splitlines()[1].split()[:3] == ["layers.0.weight", "int8/16,", "int8/16"]
    with model.no_sync():
        loss_of(model, make_inputs(rank)).backward()
    refusal = error_of(lambda: tz.tools.wire_error(model, lambda: loss_of(model, make_inputs(rank)).backward()))
    assert "cannot measure what formats change: no_sync still holds" in refusal, refusal
    plain = tz.compile(nn.Linear(2, 2), stage=3)
    assert "no row or gradient is written as bytes" in error_of(lambda: tz.tools.wire_error(plain, lambda: None))


def mix_precision(rank: int, world_size: int) -> None:
    """Write bytes of float32 rows, and read them as bfloat16."""
    half = tz.MixedPrecision(torch.bfloat16, torch.float32)
    model = tz.compile(fresh(make_mlp), stage=3, mixed_precision=half, **FORMATS)
    arrived = {name: receive(value, world_size).bfloat16() for name, value in tz.full_state_dict(model).items()}
    output = model(make_inputs(rank))
    assert output.dtype is torch.bfloat16
    expected = functional_call(make_mlp(), arrived, make_inputs(rank).bfloat16())
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    output.sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), *slow((3, 1), (3, 3), (2, 2), (2, 1))])
def test_every_rank_computes_with_what_arrives(ranks_pool: RanksPool, world_size: int, stage: int) -> None:
    ranks_pool.run(world_size, train_in_bytes, stage)
    ranks_pool.run(world_size, accumulate_in_bytes, stage)
    ranks_pool.run(world_size, measure_errors, stage)


def test_non_finite_gradients_and_mixed_precision(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, send_inf)
    ranks_pool.run(2, mix_precision)


def average_copies(rank: int, world_size: int) -> None:
    """Average exactly inside of a copy, and as bytes between copies; check that copies have equal bits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = tz.compile(fresh(make_mlp), stage=3, mesh=mesh, **FORMATS)
    arrived = {name: receive(value, 2) for name, value in tz.full_state_dict(model).items()}
    with count_sends() as sent:
        loss_of(model, make_inputs(rank)).backward()
    timeline = tz.traces_of(model).timeline
    assert sum(gather_objects(sum(sent))) == pytest.approx(
        sum(gather_objects(sum(timeline.traffic(op).sent for op in timeline.ops))), rel=0.01
    )
    grads = gradients(model)
    assert_within_steps(grads, exact_gradients(arrived, world_size), steps=1.5)
    across = [op for op in timeline.ops if isinstance(op, Reduce) and op.over == "replicate"]
    params = [param for op in across for param in timeline.params_of(op)]
    sends = {reduce_traffic(timeline.plan, param, "replicate").busiest for param in params}
    assert sends == {2 * tz.Int8(BLOCK).nbytes(231 // 2 + 1), 2 * 12}
    weight_grads = gather_objects(grads["layers.0.weight"])
    assert all(torch.equal(grad, weight_grads[0]) for grad in weight_grads)
    dist.barrier()


def mix_exact_and_bytes(rank: int, world_size: int) -> None:
    """Check that exact messages of biases and bytes of weights do not mix if rank 0 averages late."""
    run = in_background

    def run_late(thread: str, call: Callable[[], Any]) -> Any:
        return run(thread, (lambda: sleep(0.02) or call()) if rank == 0 and thread == AVERAGER else call)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = tz.compile(fresh(make_mlp), stage=3, mesh=mesh, reduce_format=tz.Int8(BLOCK), bucket_bytes=2000)
    with mock.patch.object(pairwise, "in_background", run_late):
        for _ in range(2):
            model.zero_grad()
            loss_of(model, make_inputs(rank)).backward()
            expected = exact_gradients(tz.full_state_dict(model), world_size)
            assert_within_steps(gradients(model), expected, steps=1.5)
            for name in ("layers.0.bias", "layers.2.bias"):
                torch.testing.assert_close(gradients(model)[name], expected[name], rtol=1e-5, atol=1e-7)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    model = tz.compile(fresh(make_mlp), stage=2, mesh=alone, **FORMATS)
    with count_sends() as sent:
        loss_of(model, make_inputs(rank)).backward()
    assert sum(sent) == sum(tz.traces_of(model).timeline.traffic(op).sent for op in tz.traces_of(model).timeline.ops)
    assert_within_steps(gradients(model), exact_gradients(tz.full_state_dict(model), world_size), steps=1.5)


@pytest.mark.slow
def test_copies_average_in_bytes(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, average_copies)
    ranks_pool.run(4, mix_exact_and_bytes)
