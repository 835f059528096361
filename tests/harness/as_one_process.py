"""Trains models twice on each rank, sharded on its rows and plain on all rows, and compares the numbers.

A test passes pairs of a sharded and a plain model, and a loop. The loop runs once for each side, step by step in turn::

    def steps(side: Side) -> Steps:
        (model,) = side.models
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(8):
            optimizer.zero_grad()
            y = model(side.rows(batch(number)))
            y.square().mean().backward()
            optimizer.step()
            yield side.gather(y)

    trains_as_one_process([(sharded(plain, 3), plain)], steps)

After each step the yielded values, gradients and weights of both sides must agree; at the end, their full state dicts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import local_rows, real_rows
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.sharded_model import sharded_model

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.complex64: 1e-5}
CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."  # torch puts it into paths of parameters, not of state dicts
ZERO = 1e-7  # the norm of a gradient that is zero in exact arithmetic
Steps = Iterator[Tensor]


@dataclass(frozen=True)
class Side:
    """One of the two runs of a loop.

    Attributes:
        models: all plain, or all sharded.
        rank: this rank's number among the ranks that share the batch; 0 if the models are plain.
        world_size: the number of ranks that share the batch; 1 if the models are plain.
        group: the ranks that share the batch.
    """

    models: Sequence[Any]
    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.models[0], tz.ZeroModule)

    def rows(self, batch: Tensor) -> Tensor:
        """Return this side's rows of a batch: all rows, or an equal share."""
        return batch.tensor_split(self.world_size)[self.rank]

    def parts(self, batch: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Cut a batch into parts of these sizes. Return all parts, or only this rank's."""
        parts = list(batch.split(list(sizes)))
        return [parts[self.rank]] if self.is_sharded else parts

    def gather(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows of a tensor."""
        if not self.is_sharded:
            return rows.detach()
        return torch.cat(gather_objects(rows.detach(), self.group))

    def mean(self, local: Tensor) -> Tensor:
        """Return the mean of the ranks' tensors."""
        if not self.is_sharded:
            return local.detach()
        return torch.stack(gather_objects(local.detach(), self.group)).mean(0)


Loop = Callable[[Side], Steps]


def gather_objects(local: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, on each rank."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, local, group)
    return objects


def assert_near(
    result: Tensor, expected: Tensor, where: str, tolerance: float | None = None, whole: Tensor | None = None
) -> None:
    """Check the norm of the difference relative to the norm of ``whole``, or against ``ZERO`` if that norm is zero."""
    assert result.shape == expected.shape, (where, result.shape, expected.shape)
    assert result.dtype == expected.dtype, (where, result.dtype, expected.dtype)
    limit = TOLERANCE.get(expected.dtype, 0.0) if tolerance is None else tolerance
    whole = expected if whole is None else whole
    if expected.is_complex():
        result, expected, whole = (torch.view_as_real(tensor.resolve_conj()) for tensor in (result, expected, whole))
    distance, norm = float((result.double() - expected.double()).norm()), float(whole.double().norm())
    assert distance <= (limit * norm if norm > ZERO else ZERO), f"{where}: {distance / max(norm, ZERO)} off"


def trains_as_one_process(
    pairs: Sequence[tuple[Any, nn.Module]], loop: Loop, rank: int | None = None, tolerance: float | None = None
) -> list[dict[str, Tensor]]:
    """Run a loop with sharded models and with copies of plain ones. Return the full state dicts after it.

    Args:
        pairs: each model of the loop, sharded and plain, with equal values.
        rank: number of the part of the batch that this rank takes; by default its rank in the models' group.
        tolerance: limit of relative errors, instead of the dtype's.
    """
    models = [model for model, _ in pairs]
    plain = [deepcopy(module) for _, module in pairs]
    group = sharded_model(models[0]).state.group
    sharded = Side(models, dist.get_rank(group) if rank is None else rank, dist.get_world_size(group), group)
    try:
        for step, (result, expected) in enumerate(zip(loop(sharded), loop(Side(plain)), strict=True)):
            assert_near(result, expected, f"values of step {step}", tolerance)
            for model, module in zip(models, plain, strict=True):
                assert_same_parameters(model, module, f" after step {step}", tolerance)
    except Exception as error:
        error.add_note(f"in {loop}")
        raise
    return [assert_same_state(model, module, tolerance) for model, module in zip(models, plain, strict=True)]


def assert_same_parameters(model: Any, plain: nn.Module, where: str = "", tolerance: float | None = None) -> None:
    """Check that weights and gradients are this rank's rows of the plain model's, and that padding is zero.

    The gradient of an ignored parameter differs by rank; its mean over ranks must be the plain model's.
    """
    state = sharded_model(model).state
    params = dict(model.named_parameters())
    expected = dict(plain.named_parameters())
    assert params.keys() == expected.keys(), (params.keys(), expected.keys())
    for name, param in expected.items():
        planned, grad = state.plan.by_name.get(name), params[name].grad
        assert (grad is None) == (param.grad is None), (name, where)
        for kind, result, full in (("weight", params[name], param), ("gradient", grad, param.grad)):
            if result is None or full is None:
                continue
            result, full = local(result.detach()), full.detach()
            if planned is None:
                result, expected_rows = torch.stack(gather_objects(result, state.group)).mean(0), full
            else:
                expected_rows = rows_of(full, planned, state.plan)
            assert_near(result, expected_rows, f"{kind} of {name}{where}", tolerance, full)
        if planned is not None and planned.sharded:
            stored = state.params[planned.path].rows
            assert not stored[len(real_rows(stored, planned, state.plan)) :].any(), f"padding of {name}{where}"


def rows_of(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return this rank's rows of a full parameter, without padding."""
    return real_rows(local_rows(full, param, plan), param, plan)


def assert_same_state(model: Any, plain: nn.Module, tolerance: float | None = None) -> dict[str, Tensor]:
    """Check that the full state dict has the shards' bits and the plain model's values, on all ranks. Return it."""
    state = sharded_model(model).state
    full, expected = tz.full_state_dict(model), plain.state_dict()
    assert list(full) == list(expected), (list(full), list(expected))
    for name, value in expected.items():
        assert_near(full[name], value, name, tolerance)
    values = {path: full[path.replace(CHECKPOINT_WRAPPER, "")] for path in state.params}
    for path, param in state.params.items():
        assert torch.equal(local(param.shard), rows_of(values[path], param.planned, state.plan)), path
    digests = gather_objects(digest(values.values()), state.group)
    assert len(set(digests)) == 1, "the bits differ between ranks"
    return full


def digest(tensors: Any) -> str:
    """Return a digest of the bits of tensors, or of this rank's parts of DTensors."""
    total = hashlib.blake2b()
    for tensor in map(local, tensors):
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
