"""The user's sources, the module that needs values, the values; what ranks compare of them.

:func:`initial_values` takes :class:`Sources` and gives :class:`InitialValues`. :class:`PlainModel` says which tensor
gets its value from whom. :class:`Sharder` cuts full values to what a rank keeps, and remembers their digests.
:class:`Failures` keeps an error until the next agreement, as the other ranks wait in collectives::

    full value (5, 8)  ->  Sharder.shard  ->  this rank's rows (3, 8), with padding
                                         SHA-256 of the full value, which ranks compare, unless one sent it to all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.comm import agree
from thunder_zero.comm.group import Ranks
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import local_slice
from thunder_zero.sharded.attributes import parameter_like
from thunder_zero.sharded.frozen import rows_at_rest
from thunder_zero.sharded.wire import rest_device

CPU = torch.device("cpu")  # values are drawn here, whatever the device, so that a seed gives equal values everywhere


@dataclass(frozen=True, slots=True)
class Sources:
    """The user's sources of initial values."""

    init: Callable[[nn.Module], object] | None = None  # called as by ``module.apply(init)``, after ``reset_parameters``
    weights: Mapping[str, Tensor] | None = None  # full tensors by their names in the plain module's state dict


@dataclass(frozen=True, slots=True)
class UnplannedValue:
    """A value for a tensor outside the plan: a buffer, or a parameter that the policy ignores."""

    names: Sequence[str]  # all names of the tensor
    tensor: Tensor  # the module's tensor
    value: Tensor  # the initial value


@dataclass(frozen=True, slots=True)
class InitialValues:
    """The initial values of a module."""

    at_rest: dict[str, Tensor]  # planned parameters by path, in full or this rank's rows
    unplanned: list[UnplannedValue]  # for tensors on the meta device, and those read from a state dict


@dataclass(frozen=True, slots=True)
class PlainModel:
    """The plain module whose tensors need values."""

    module: nn.Module
    plan: Plan
    ranks: Ranks
    device: torch.device  # where compute is
    names: Mapping[Tensor, Sequence[str]]  # all names of each parameter and buffer, in the module's order

    def name_of(self, tensor: Tensor) -> str:
        """Return the tensor's first name, which is a planned parameter's path."""
        return self.names[tensor][0]

    def param_of(self, tensor: Tensor) -> Param | None:
        """Return the plan of a parameter; None for a buffer, and for a parameter that the policy ignores."""
        return self.plan.by_name.get(self.name_of(tensor))

    @property
    def sender(self) -> int | None:
        """Return the rank that sends its values to all ranks (``policy.broadcast_from``), if there is one."""
        return self.plan.policy.broadcast_from

    def travels(self, tensor: Tensor) -> bool:
        """Return whether one rank sends the tensor's values to all ranks. Parameters that the policy ignores do not
        travel."""
        is_ignored = isinstance(tensor, nn.Parameter) and self.param_of(tensor) is None
        return self.sender is not None and not is_ignored

    def arrives(self, tensor: Tensor) -> bool:
        """Return whether another rank sends the tensor's values to this one."""
        return self.travels(tensor) and self.sender != self.ranks.world.rank()


def names_of(module: nn.Module) -> dict[Tensor, list[str]]:
    """Return all names of each parameter and buffer."""
    names: dict[Tensor, list[str]] = {}
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    for name, tensor in chain[tuple[str, Tensor]](parameters, buffers):
        names.setdefault(tensor, []).append(name)
    return names


def fitted(value: object, like: Tensor, what: str) -> Tensor:
    """Return the value in the dtype of the module's tensor; refuse a wrong shape. ``what`` begins the sentence of the
    error."""
    if not isinstance(value, Tensor) or value.is_meta:
        kind = "tensor on the meta device (without values)" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{what} as a {kind}; give a tensor of shape {tuple(like.shape)}")
    if value.shape != like.shape:
        raise ValueError(
            f"{what} with shape {tuple(value.shape)}, where the module has shape {tuple(like.shape)}; build the module "
            f"that the values belong to"
        )
    return value.detach().to(like.dtype)


def whole_like(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device that looks like a DTensor in full; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    return parameter_like(tensor, whole)


class Failures:
    """The first failure, kept until all ranks can hear of it."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep an exception of the block instead of raising it."""
        try:
            yield
        except Exception as failure:
            self._first = self._first or failure

    def raise_first(self) -> None:
        """Raise the first failure, if there was one."""
        if self._first is not None:
            raise self._first


class Sharder:
    """Cuts full parameters to what rests on this rank; keeps a digest of each where every rank makes its own values."""

    def __init__(self, model: PlainModel, *, are_read: bool) -> None:
        self._model, self._are_read = model, are_read
        self._digests: dict[str, str] = {}
        self._sliced: set[str] = set()  # paths whose digests are of this rank's slice

    def shard(self, full: Tensor, path: str) -> Tensor:
        """Return a parameter as it rests: in full, or this rank's rows. ``full`` may be this rank's slice already."""
        param, plan, device = self._model.plan.by_name[path], self._model.plan, self._model.device
        is_slice = tuple(full.shape) != plan.whole_shape(param)
        if self._model.sender is None and self._model.ranks.world.size() > 1:
            self._digests[path] = agree.digest(full)
            self._sliced |= {path} if is_slice else set()
        full = full if is_slice else local_slice(full, param, plan)
        if param.resident:
            return full.to(device)
        # Cut where the full values are: if the rows rest in host memory, the device never has all of them.
        return rows_at_rest(full, param, plan).to(rest_device(param, plan, device))

    def compare(self) -> None:
        """Raise on every rank if ranks cut different values. A collective, unless one rank sent the values."""
        if self._model.sender is None:
            plan, ranks = self._model.plan, self._model.ranks
            facts: dict[bool, list[agree.Fact]] = {True: [], False: []}  # True: facts of slices
            for path, digest in self._digests.items():
                facts[path in self._sliced].append(self._fact(path, digest))
            agree.require_same(facts[False], ranks.world)
            if plan.mesh.is_sliced:
                agree.require_same(facts[True], ranks.data)

    def _fact(self, path: str, digest: str) -> agree.Fact:
        """Return the digest of a parameter's value, with a remedy where ranks differ."""
        when = "before it builds the module"
        if self._model.module.get_parameter(path).is_meta:
            when = "before the transform, which draws them"
        remedy = f"seed every rank alike {when}, or pass broadcast_from=0"
        if self._are_read:
            remedy = "give every rank the same weights, or pass broadcast_from=0"
        return agree.Fact(f"the initial value of parameter {path!r}", f"weights with SHA-256 {digest}", remedy)
