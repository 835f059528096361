"""Puts buffers into a plain module, and checks before each forward that nothing changed.

::

    module.h[0].w = other      ->      "parameter 'h.0.w' was replaced after thunder_zero sharded it; copy new values
                                        into it (load_original_state_dict, or in place), or transform the new module"
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.sharded.dtensors import parameter_like
from thunder_zero.sharded.initial_values import UnplannedValue
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.placeholders import set_tensor


def place_unplanned(
    plain: nn.Module, values: Iterable[UnplannedValue], planned: Container[str], device: torch.device | None
) -> None:
    """Set the values of buffers and ignored parameters, and move ignored parameters to ``device``."""
    for unplanned in values:
        old, value = unplanned.tensor, unplanned.value
        if not old.is_meta:
            with torch.no_grad():
                old.copy_(value)
            continue
        value = parameter_like(old, value) if isinstance(old, nn.Parameter) else value
        for name in unplanned.names:
            set_tensor(plain, name, value)
    if device is not None:
        for name, param in plain.named_parameters(remove_duplicate=False):
            if name not in planned:
                param.data = param.data.to(device)


def place_buffers(plain: nn.Module, precision: MixedPrecision, device: torch.device | None) -> None:
    """Cast the buffers, which programs read, and move them to ``device``."""
    for name, buffer in list(plain.named_buffers()):
        dtype = precision.of(name).buffer_dtype if buffer.is_floating_point() else None
        moved_buffer = buffer.to(device=device, dtype=dtype)
        if moved_buffer is not buffer:
            set_tensor(plain, name, moved_buffer)


class Placement:
    """The parameters of a plain module as sharding left them, which each forward compares.

    A change by ``.to()``, ``module.weight = ...``, ``load_state_dict(assign=True)`` or ``.data = ...`` would be
    ignored, or would train other tensors than the shards. Dynamo guards all other attributes.
    """

    def __init__(self, plain: nn.Module, params: Mapping[str, ShardedParam]) -> None:
        self._plain, self._params = plain, params
        self._expected = dict(plain.named_parameters(remove_duplicate=False))
        self._known = set(self._expected.values())
        self._places = [(param.shard.dtype, param.shard.device) for param in params.values()]
        self._memory = self._memory_now()
        self._look()

    def require(self) -> None:
        """Raise RuntimeError if anything has changed."""
        if (fault := self._fault_of_parameters() or self._fault_of_memory()) is not None:
            raise RuntimeError(fault)

    def _look(self) -> None:
        modules = list(self._plain.modules())
        self._added = [param for param in self._plain.parameters() if param not in self._known]  # they are frozen now
        self._holders: list[Any] = [holder for module in modules for holder in (module._parameters, module._modules)]
        self._members = [*chain.from_iterable(map(dict.values, self._holders)), None]

    def _fault_of_parameters(self) -> str | None:
        """Compare names only after a parameter or a submodule was set anywhere, also one without parameters."""
        is_same = all(map(is_, chain(chain.from_iterable(map(dict.values, self._holders)), (None,)), self._members))
        if is_same and not any(param.requires_grad for param in self._added):
            return None
        params = dict(self._plain.named_parameters(remove_duplicate=False))
        for name, param in self._expected.items():
            if params.get(name) is not param:
                return _replaced(f"parameter {name!r}", param, params.get(name))
        for name, param in params.items():
            if param.requires_grad and param not in self._known:
                return (
                    f"parameter {name!r} was added after thunder_zero sharded the module, so no plan covers it and no "
                    f"step trains it; add it to the module before thunder.jit or tz.compile"
                )
        self._look()
        return None

    def _memory_now(self) -> list[tuple[torch.Size, Any]]:
        """A DTensor has a storage without memory. ``.data = ...`` replaces this storage, but not the local tensor."""
        return [(param.shard.shape, param.shard.untyped_storage()._cdata) for param in self._params.values()]

    def _fault_of_memory(self) -> str | None:
        if (found := self._memory_now()) == self._memory:
            return None
        for (path, param), place, before, now in zip(
            self._params.items(), self._places, self._memory, found, strict=True
        ):
            if (param.shard.dtype, param.shard.device) != place:
                return _moved(f"parameter {path!r}", param.shard, *place)
            if now != before:
                return (
                    f"the memory of parameter {path!r} was replaced (.data = ...): its shape is now {tuple(now[0])}, "
                    f"the shard's is {tuple(before[0])}, and programs read what it had before; copy new values into it "
                    f"in place"
                )
        return None


def _replaced(name: str, expected: object, value: object) -> str:
    if isinstance(value, Tensor) and isinstance(expected, Tensor):
        if value.dtype is not expected.dtype or value.device != expected.device:
            return _moved(name, value, expected.dtype, expected.device)
        if isinstance(expected, nn.Parameter) and not isinstance(value, nn.Parameter):
            return (
                f"{name} was replaced by a tensor that is no parameter, as torch.func.functional_call does, after "
                f"thunder_zero sharded it; call the model itself, with new values copied into its parameters"
            )
        return (
            f"{name} was replaced after thunder_zero sharded it; copy new values into it "
            f"(load_original_state_dict, or in place), or transform the new module"
        )
    return f"{name} was replaced after thunder_zero sharded the module; change the module before sharding"


def _moved(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> str:
    return (
        f"{name} was moved or cast: it is {tensor.dtype} on {tensor.device}, and thunder_zero sharded it as {dtype} on "
        f"{device}; call .to() on the module before sharding"
    )
