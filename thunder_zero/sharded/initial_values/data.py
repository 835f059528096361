"""Holds the user's sources and the module's values, and compares values between ranks.

::

    full value (5, 8)  ->  Sharder.shard  ->  this rank's rows (3, 8), with padding
                                         SHA-256 of the full value, which ranks compare unless one rank sent the value
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.comm import agree
from thunder_zero.comm.group import Ranks
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import local_slice
from thunder_zero.sharded.dtensors import parameter_like
from thunder_zero.sharded.frozen import own_rows_at_rest, rows_at_rest
from thunder_zero.sharded.wire import rest_device

CPU = torch.device("cpu")  # values are drawn on the CPU, so that a seed gives equal values on every device


@dataclass(frozen=True, slots=True)
class Sources:
    init: Callable[[nn.Module], object] | None = None  # a function for ``module.apply``, after ``reset_parameters``
    weights: Mapping[str, Tensor] | None = None  # full tensors by name in the plain module's state dict


@dataclass(frozen=True, slots=True)
class UnplannedValue:
    """A value for a tensor without a ``Param``: a buffer, or a parameter that the policy ignores."""

    names: Sequence[str]  # all names of the tensor
    tensor: Tensor  # the module's tensor
    value: Tensor  # the initial value


@dataclass(frozen=True, slots=True)
class InitialValues:
    at_rest: dict[str, Tensor]  # planned parameters by path: full values, or this rank's rows
    unplanned: list[UnplannedValue]  # values of tensors on the meta device, and values from a state dict


@dataclass(frozen=True, slots=True)
class PlainModel:
    module: nn.Module
    plan: Plan
    ranks: Ranks
    device: torch.device  # the device that computes
    names: Mapping[Tensor, Sequence[str]]  # all names of each parameter and buffer, in the module's order

    def name_of(self, tensor: Tensor) -> str:
        return self.names[tensor][0]

    def param_of(self, tensor: Tensor) -> Param | None:
        """Return the ``Param`` of a parameter; None for a buffer or an ignored parameter."""
        return self.plan.by_name.get(self.name_of(tensor))

    @property
    def sender(self) -> int | None:
        return self.plan.policy.broadcast_from

    def travels(self, tensor: Tensor) -> bool:
        """Return whether one rank sends the tensor's values to all ranks. Ignored parameters are never sent."""
        is_ignored = isinstance(tensor, nn.Parameter) and self.param_of(tensor) is None
        return self.sender is not None and not is_ignored

    def arrives(self, tensor: Tensor) -> bool:
        """Return whether another rank sends the tensor's values to this rank."""
        return self.travels(tensor) and self.sender != self.ranks.world.rank()


def names_of(module: nn.Module) -> dict[Tensor, list[str]]:
    names: dict[Tensor, list[str]] = {}
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    for name, tensor in chain[tuple[str, Tensor]](parameters, buffers):
        names.setdefault(tensor, []).append(name)
    return names


def fitted(value: object, like: Tensor, subject: str) -> Tensor:
    """Cast a value to the dtype of the module's tensor. ``subject`` begins the error about another shape."""
    if not isinstance(value, Tensor) or value.is_meta:
        kind = "tensor on the meta device (without values)" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{subject} as a {kind}; give a tensor of shape {tuple(like.shape)}")
    require_shape(value.shape, like, subject)
    return value.detach().to(like.dtype)


def require_shape(shape: Sequence[int], like: Tensor, subject: str) -> None:
    if tuple(shape) != tuple(like.shape):
        raise ValueError(
            f"{subject} with shape {tuple(shape)}, where the module has shape {tuple(like.shape)}; build the module "
            f"that the values belong to"
        )


def whole_like(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the full shape of a DTensor. Return any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    return parameter_like(tensor, whole)


class Sharder:
    def __init__(self, model: PlainModel, *, are_read: bool) -> None:
        self._model, self._are_read = model, are_read
        # Claims about full values, and (True) about slices, by path.
        self._claims: dict[bool, dict[str, agree.Claim]] = {False: {}, True: {}}

    def shard(self, full: Tensor, path: str) -> Tensor:
        """Return this rank's rows of a parameter, or a resident parameter in full. ``full`` may be a local slice."""
        param, plan, device = self._model.plan.by_name[path], self._model.plan, self._model.device
        is_encoded = param.frozen_format is not None and full.dtype is param.rest_dtype
        is_slice = not is_encoded and tuple(full.shape) != plan.whole_shape(param)
        if self._model.sender is None and self._model.ranks.world.size() > 1:
            self._claims[is_slice][path] = self._claim(path, agree.digest(full))
        full = full if is_slice else local_slice(full, param, plan)
        if param.resident:
            return full.to(device)
        # Select rows on the full value's device, so that only rows are copied to another device.
        return rows_at_rest(full, param, plan).to(rest_device(param, plan, device))

    def rows(self, param: Param) -> slice:
        return self._model.plan.geometry(param).rows

    def take(self, rows: Tensor, path: str, sample: Tensor) -> Tensor:
        """Return this rank's rows, which it has read alone, at rest. All ranks have read the ``sample``."""
        param, plan, device = self._model.plan.by_name[path], self._model.plan, self._model.device
        if self._model.ranks.world.size() > 1:
            self._claims[False][path] = self._claim(path, agree.digest(sample))
        return own_rows_at_rest(rows, param, plan).to(rest_device(param, plan, device))

    def compare(self) -> None:
        """Raise on all ranks if their full values differ. This is a collective, unless one rank sent the values."""
        if self._model.sender is None:
            agree.require_same([*self._claims[False].values()], self._model.ranks.world)
            if self._model.plan.mesh.is_sliced:
                agree.require_same([*self._claims[True].values()], self._model.ranks.data)

    def _claim(self, path: str, digest: str) -> agree.Claim:
        when = "before it builds the module"
        if self._model.module.get_parameter(path).is_meta:
            when = "before the transform, which draws them"
        remedy = f"seed every rank alike {when}, or pass broadcast_from=0"
        if self._are_read:
            remedy = "give every rank the same weights, or pass broadcast_from=0"
        return agree.Claim(f"the initial value of parameter {path!r}", f"weights with SHA-256 {digest}", remedy)
