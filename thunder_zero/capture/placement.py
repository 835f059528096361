"""Puts buffers into a plain module, and checks before each forward that nothing changed.

In: a jitted module and its state. Out: the plain module, which now has shards, and a list of checks. A check is a
function that returns an error message or None. Checks are created right after sharding, and run before each forward::

    module.h[0].w = other      ->      "parameter 'h.0.w' was replaced after thunder_zero sharded it; copy new values
                                        into it (load_original_state_dict, or in place), or transform the new module"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.compat.jitted import plain_of
from thunder_zero.sharded.dtensors import parameter_like
from thunder_zero.sharded.initial_values import UnplannedValue
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.placeholders import set_tensor
from thunder_zero.sharded.state import State

from thunder.core.module import ThunderModule

Check = Callable[[], str | None]  # returns an error message, or None


def place_unplanned(
    model: ThunderModule, values: Iterable[UnplannedValue], planned_names: Iterable[str], device: torch.device | None
) -> None:
    """Set the values of buffers and ignored parameters, and move ignored parameters to ``device``."""
    for unplanned in values:
        set_value(model, unplanned)
    if device is not None:
        planned = set(planned_names)
        for name, param in plain_of(model).named_parameters(remove_duplicate=False):
            if name not in planned:
                param.data = param.data.to(device)


def set_value(model: ThunderModule, unplanned: UnplannedValue) -> None:
    """Copy a value into a tensor of the module, or replace the tensor if it is on the meta device."""
    if not unplanned.tensor.is_meta:
        with torch.no_grad():
            unplanned.tensor.copy_(unplanned.value)
        return
    is_parameter = isinstance(unplanned.tensor, nn.Parameter)
    value = parameter_like(unplanned.tensor, unplanned.value) if is_parameter else unplanned.value
    for name in unplanned.names:
        set_tensor(plain_of(model), name, value)


def place_buffers(model: ThunderModule, state: State, device: torch.device | None) -> None:
    """Cast the plain module's buffers, which programs read, to the policy's dtype, and move them to ``device``."""
    precision = state.plan.policy.mixed_precision
    for name, buffer in list(plain_of(model).named_buffers()):
        dtype = precision.of(name).buffer_dtype if buffer.is_floating_point() else None
        moved_buffer = buffer.to(device=device, dtype=dtype)
        if moved_buffer is not buffer:
            set_tensor(plain_of(model), name, moved_buffer)


def module_checks(model: ThunderModule, state: State) -> list[Check]:
    """Return quick checks that the parameters of the plain module do not change.

    Otherwise a change by ``.to()``, ``module.weight = ...``, ``load_state_dict(assign=True)`` or ``.data = ...`` would
    be ignored, or would train other tensors than the shards. Dynamo guards all other attributes.
    """
    return [_parameters_stay(plain_of(model)), _memory_stays(state.params)]


def require_intact(checks: Iterable[Check]) -> None:
    """Raise RuntimeError with the message of the first check that fails."""
    if (sentence := next((sentence for check in checks if (sentence := check()) is not None), None)) is not None:
        raise RuntimeError(sentence)


def _parameters_stay(plain: nn.Module) -> Check:
    """Return a check that a module has the same parameters, and no more that train.

    Names are compared only after a parameter or a submodule was set anywhere, also one without parameters.
    """
    expected, holders, members = dict(plain.named_parameters(remove_duplicate=False)), list[Any](), list[Any]()
    known, added = set(expected.values()), list[nn.Parameter]()  # those added are frozen now

    def look() -> None:
        modules = list(plain.modules())
        added[:] = [param for param in plain.parameters() if param not in known]
        holders[:] = [holder for module in modules for holder in (module._parameters, module._modules)]
        members[:] = [*chain.from_iterable(map(dict.values, holders)), None]

    def check() -> str | None:
        is_same = all(map(is_, chain(chain.from_iterable(map(dict.values, holders)), (None,)), members))
        if is_same and not any(param.requires_grad for param in added):
            return None
        params = dict(plain.named_parameters(remove_duplicate=False))
        for name, param in expected.items():
            if params.get(name) is not param:
                return _replaced(f"parameter {name!r}", param, params.get(name))
        for name, param in params.items():
            if param.requires_grad and param not in known:
                return (
                    f"parameter {name!r} was added after thunder_zero sharded the module, so no plan covers it and no "
                    f"step trains it; add it to the module before thunder.jit or tz.compile"
                )
        look()
        return None

    look()
    return check


def _memory_stays(params: Mapping[str, ShardedParam]) -> Check:
    """Return a check that shards keep their shapes, dtypes, devices and memory.

    A DTensor has a storage without memory. ``.data = ...`` replaces this storage, but not the local tensor.
    """

    def memory() -> list[tuple[torch.Size, Any]]:
        return [(param.shard.shape, param.shard.untyped_storage()._cdata) for param in params.values()]

    expected, places = memory(), [(param.shard.dtype, param.shard.device) for param in params.values()]

    def check() -> str | None:
        if (found := memory()) == expected:
            return None
        for (path, param), place, before, now in zip(params.items(), places, expected, found, strict=True):
            if (param.shard.dtype, param.shard.device) != place:
                return _moved(f"parameter {path!r}", param.shard, *place)
            if now != before:
                return (
                    f"the memory of parameter {path!r} was replaced (.data = ...): its shape is now {tuple(now[0])}, "
                    f"the shard's is {tuple(before[0])}, and programs read what it had before; copy new values into it "
                    f"in place"
                )
        return None

    return check


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
