"""Trains models twice on each rank: sharded on its rows, and plain on all rows; both must have the same numbers.

A test gives pairs of a sharded and a plain model, and a loop, which runs once for each side, step by step in turn::

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

After each step, what both sides yield must agree, and so must gradients and weights; at the end, full state dicts.
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
CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."  # torch's, in paths of parameters but not of state dicts
ZERO = 1e-7  # the norm of a gradient that is zero in exact arithmetic
Steps = Iterator[Tensor]


@dataclass(frozen=True)
class Side:
    """One of both runs of a loop.

    Attributes:
        models: plain ones, or sharded ones.
        rank: of this process among those that share the batch; 0 if the models are plain.
        world_size: how many share it; 1 if the models are plain.
        group: of these ranks.
    """

    models: Sequence[Any]
    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.models[0], tz.ZeroModule)

    def rows(self, batch: Tensor) -> Tensor:
        """This side's rows of a batch: all, or as many as each other rank has."""
        return batch.tensor_split(self.world_size)[self.rank]

    def parts(self, batch: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """A batch cut into the parts of ranks: all of them, or this rank's."""
        parts = list(batch.split(list(sizes)))
        return [parts[self.rank]] if self.is_sharded else parts

    def gather(self, own: Tensor) -> Tensor:
        """All ranks' rows of a tensor."""
        if not self.is_sharded:
            return own.detach()
        return torch.cat(gather_objects(own.detach(), self.group))

    def mean(self, own: Tensor) -> Tensor:
        """The mean over ranks."""
        if not self.is_sharded:
            return own.detach()
        return torch.stack(gather_objects(own.detach(), self.group)).mean(0)


Loop = Callable[[Side], Steps]


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank has, on each."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group)
    return found


def assert_near(
    found: Tensor, right: Tensor, where: str, tolerance: float | None = None, whole: Tensor | None = None
) -> None:
    """By the norm of the difference, relative to that of the whole tensor; what is zero in exact arithmetic by ZERO."""
    assert (found.shape, found.dtype) == (right.shape, right.dtype), (where, found.shape, found.dtype, right.dtype)
    limit = TOLERANCE.get(right.dtype, 0.0) if tolerance is None else tolerance
    whole = right if whole is None else whole
    if right.is_complex():
        found, right, whole = (torch.view_as_real(each.resolve_conj()) for each in (found, right, whole))
    distance, norm = float((found.double() - right.double()).norm()), float(whole.double().norm())
    assert distance <= (limit * norm if norm > ZERO else ZERO), f"{where}: {distance / max(norm, ZERO)} off"


def trains_as_one_process(
    pairs: Sequence[tuple[Any, nn.Module]], loop: Loop, rank: int | None = None, tolerance: float | None = None
) -> list[dict[str, Tensor]]:
    """Run a loop with sharded models and with copies of plain ones; returns the full state dicts after it.

    Args:
        pairs: each model of the loop, sharded and plain, with the same values.
        rank: the part of the batch that this rank takes, if not that of its number in the models' group.
        tolerance: of relative errors, instead of that of the dtype.
    """
    models = [model for model, _ in pairs]
    plain = [deepcopy(one) for _, one in pairs]
    group = sharded_model(models[0]).state.group
    ours = Side(models, dist.get_rank(group) if rank is None else rank, dist.get_world_size(group), group)
    try:
        for step, (found, right) in enumerate(zip(loop(ours), loop(Side(plain)), strict=True)):
            assert_near(found, right, f"values of step {step}", tolerance)
            for model, one in zip(models, plain, strict=True):
                assert_same_parameters(model, one, f" after step {step}", tolerance)
    except Exception as error:
        error.add_note(f"in {loop}")
        raise
    return [assert_same_state(model, one, tolerance) for model, one in zip(models, plain, strict=True)]


def assert_same_parameters(model: Any, one: nn.Module, where: str = "", tolerance: float | None = None) -> None:
    """This rank's weights and gradients are its rows of the plain model's; weights have zeros as padding.

    Of an ignored parameter each rank has its own gradient; the mean over ranks is the plain model's.
    """
    state = sharded_model(model).state
    named = dict(model.named_parameters())
    right = dict(one.named_parameters())
    assert named.keys() == right.keys(), (named.keys(), right.keys())
    for name, param in right.items():
        planned, grad = state.plan.by_name.get(name), named[name].grad
        assert (grad is None) == (param.grad is None), (name, where)
        for kind, found, full in (("weight", named[name], param), ("gradient", grad, param.grad)):
            if found is None or full is None:
                continue
            found, full = local(found.detach()), full.detach()
            if planned is None:
                found, rows = torch.stack(gather_objects(found, state.group)).mean(0), full
            else:
                rows = rows_of(full, planned, state.plan)
            assert_near(found, rows, f"{kind} of {name}{where}", tolerance, full)
        if planned is not None and planned.sharded:
            stored = state.rows[planned.path]
            assert not stored[len(real_rows(stored, planned, state.plan)) :].any(), f"padding of {name}{where}"


def rows_of(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """This rank's rows of a full parameter, without padding."""
    return real_rows(local_rows(full, param, plan), param, plan)


def assert_same_state(model: Any, one: nn.Module, tolerance: float | None = None) -> dict[str, Tensor]:
    """The full state dict, which has the bits of the shards, the same on all ranks, and the plain model's values."""
    state = sharded_model(model).state
    full, right = tz.full_state_dict(model), one.state_dict()
    assert list(full) == list(right), (list(full), list(right))
    for name, value in right.items():
        assert_near(full[name], value, name, tolerance)
    values = {path: full[path.replace(CHECKPOINT_WRAPPER, "")] for path in state.shards}
    for path, shard in state.shards.items():
        assert torch.equal(local(shard), rows_of(values[path], state.plan.by_name[path], state.plan)), path
    digests = gather_objects(digest(values.values()), state.group)
    assert len(set(digests)) == 1, "ranks have other bits"
    return full


def digest(tensors: Any) -> str:
    """Of the bits of tensors, or of this rank's parts of them, by which processes compare them."""
    total = hashlib.blake2b()
    for tensor in map(local, tensors):
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
