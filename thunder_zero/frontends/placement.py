"""Puts shards and buffers into a plain module, and checks before each forward that nothing changed.

In: a jitted module and its state. Out: the plain module, which now has shards, and a list of checks. A check is a
function that returns an error message or None. Checks are created right after sharding, and run before each forward::

    module.h[0].w = other      ->      "parameter 'h.0.w' was replaced after thunder_zero sharded it; copy new values
                                        into it (load_original_state_dict, or in place), or transform the new module"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.compat.jitted import forget_buffers, hold_parameter, plain_of
from thunder_zero.sharded.attributes import parameter_like
from thunder_zero.sharded.initial_values import UnplannedValue
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
        if is_parameter:
            hold_parameter(model, name, value)


def place_parameters(model: ThunderModule, state: State) -> None:
    """Put the shards into the plain module and into the jitted module's table of parameters."""
    for param in state.plan.params:
        for name in param.names:
            hold_parameter(model, name, state.shards[param.path])
            set_tensor(plain_of(model), name, state.shards[param.path])


def place_buffers(model: ThunderModule, state: State, device: torch.device | None) -> None:
    """Cast the plain module's buffers, which programs read, to the policy's dtype, and move them to ``device``."""
    precision = state.plan.policy.mixed_precision
    for name, buffer in list(plain_of(model).named_buffers()):
        dtype = precision.of(name).buffer_dtype if buffer.is_floating_point() else None
        moved_buffer = buffer.to(device=device, dtype=dtype)
        if moved_buffer is not buffer:
            set_tensor(plain_of(model), name, moved_buffer)
    forget_buffers(model)


def hook_checks(plain: nn.Module) -> list[Check]:
    """Return checks that hooks of submodules do not change, since Thunder reads hooks only when it compiles."""
    return [_hooks_stay(module, path) for path, module in plain.named_modules()]


def module_checks(model: ThunderModule, state: State) -> list[Check]:
    """Return quick checks that the jitted module and the plain module do not change.

    Otherwise a change by ``.to()``, ``module.weight = ...``, ``load_state_dict(assign=True)`` or ``.data = ...`` would
    be ignored, or would train other tensors than the shards.
    """
    plain: nn.Module = plain_of(model)
    modules = list(plain.named_modules())
    holders: list[tuple[dict[str, Any], str, str]] = []
    for path, module in modules:
        holders += [(module._parameters, "parameter", path), (module._modules, "submodule", path)]
    checks = [_all_stay(holders)]
    kinds = {"attribute": vars(plain), "submodule": plain._modules, "buffer": plain._buffers}
    kinds["parameter"] = plain._parameters
    names = {name: kind for kind, holder in kinds.items() for name in holder if name not in vars(model)}
    holders_of_model = (model._modules, model._parameters, model._buffers, vars(model))
    checks += [_hides_nothing(holder, names) for holder in holders_of_model]
    return [*checks, _adds_no_parameter(model, plain), _all_as_planned(state.shards)]


def none_buffer_checks(plain: nn.Module) -> list[Check]:
    """Return checks that None buffers stay None, since Thunder reads None buffers only when it compiles."""
    slots = [(path, module._buffers) for path, module in plain.named_modules()]
    return [
        _stays_none(buffers, name, _joined(path, name))
        for path, buffers in slots
        for name in buffers
        if buffers[name] is None
    ]


def require_intact(checks: Iterable[Check]) -> None:
    """Raise RuntimeError with the message of the first check that fails."""
    if (sentence := first_error(checks)) is not None:
        raise RuntimeError(sentence)


def first_error(checks: Iterable[Check]) -> str | None:
    """Return the message of the first check that fails, or None."""
    return next((sentence for check in checks if (sentence := check()) is not None), None)


def _hooks_stay(module: nn.Module, path: str) -> Check:
    """Return a check that the number of hooks of a module does not change."""
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    counts = tuple(map(len, kinds))

    def check() -> str | None:
        if tuple(map(len, kinds)) == counts:
            return None
        return (
            f"a hook was registered on {f'submodule {path!r}' if path else 'the plain module'}, or removed, after "
            f"thunder_zero sharded the module, whose traces would not call it; do this before sharding, or hook the "
            f"sharded model itself"
        )

    return check


def _all_stay(holders: Sequence[tuple[dict[str, Any], str, str]]) -> Check:
    """Return a check that dicts of modules keep their objects in order.

    ``holders`` has (dict, kind of its objects, path of its module) tuples. The check compares all dicts at once, and
    compares dicts one by one only after a change.
    """
    dicts = [holder for holder, _, _ in holders]
    counts = list(map(len, dicts))
    expected = [value for holder in dicts for value in holder.values()]
    checks = [_stays(*holder) for holder in holders]

    def check() -> str | None:
        values = chain.from_iterable(map(dict.values, dicts))
        if list(map(len, dicts)) == counts and all(map(is_, values, expected)):
            return None
        return first_error(checks)

    return check


def _stays(holder: Mapping[str, Any], kind: str, path: str) -> Check:
    """Return a check that a dict of a module keeps its objects in order."""
    expected = dict(holder)

    def check() -> str | None:
        if len(holder) == len(expected) and all(map(is_, holder.values(), expected.values())):
            return None
        for name, value in expected.items():
            if holder.get(name) is not value:
                return _replaced(f"{kind} {_joined(path, name)!r}", value, holder.get(name))
        name = min(holder.keys() - expected.keys())
        return _added(f"{kind} {_joined(path, name)!r}")

    return check


def _stays_none(holder: Mapping[str, Any], key: str, name: str) -> Check:
    """Return a check that a buffer stays None."""

    def check() -> str | None:
        if holder.get(key) is None:
            return None
        return (
            f"buffer {name!r} was None when thunder_zero sharded the module, and has a value now, which Thunder would "
            f"not read; give it one before sharding, or shard the module with thunder_zero.compile"
        )

    return check


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _adds_no_parameter(model: ThunderModule, plain: nn.Module) -> Check:
    """Return a check that ``model.name = ...`` adds no parameter, since no step would train the new parameter."""
    modules, parameters = model._modules, model._parameters
    counts = len(modules), len(parameters)

    def check() -> str | None:
        if (len(modules), len(parameters)) == counts:
            return None
        known = set(plain.parameters())
        added = [(key, module) for key, module in modules.items() if module is not None and module is not plain]
        inner = {name: param for key, module in added for name, param in module.named_parameters(key)}
        for name, param in {**parameters, **inner}.items():
            if param is not None and param.requires_grad and param not in known:
                return _added(f"parameter {name!r}")
        return None

    return check


def _added(name: str) -> str:
    return (
        f"{name} was added after thunder_zero sharded the module, so no plan covers it and no step trains it; add it "
        f"to the module before thunder.jit or tz.compile"
    )


def _hides_nothing(holder: Mapping[str, Any], kinds: Mapping[str, str]) -> Check:
    """Return a check that ``model.name = ...`` hides no attribute of the plain module that programs would read.

    ``kinds`` maps each attribute of the plain module to its kind, such as "parameter".
    """

    def check() -> str | None:
        if not (hidden := kinds.keys() & holder):
            return None
        name = min(hidden)
        return _replaced(f"{kinds[name]} {name!r}", None, holder[name])

    return check


def _all_as_planned(shards: Mapping[str, Tensor]) -> Check:
    """Return a check that shards keep their properties. Shards are compared one by one only after a change."""
    tensors = list(shards.values())
    checks = [_as_planned(path, shard) for path, shard in shards.items()]
    shapes, memory = [shard.shape for shard in tensors], list(map(_memory_of, tensors))

    def check() -> str | None:
        if (
            [shard.shape for shard in tensors] == shapes
            and [shard.untyped_storage()._cdata for shard in tensors] == memory  # _memory_of, without 150 calls
        ):
            return None
        return first_error(checks)

    return check


def _as_planned(path: str, shard: Tensor) -> Check:
    """Return a check that a shard keeps its shape, dtype, device and memory."""
    shape, dtype, device = shard.shape, shard.dtype, shard.device
    memory, name = _memory_of(shard), f"parameter {path!r}"

    def check() -> str | None:
        if shard.shape == shape and _memory_of(shard) == memory:
            return None
        if shard.dtype is not dtype or shard.device != device:
            return _moved(name, shard, dtype, device)
        if shard.shape != shape:
            return (
                f"the memory of {name} was replaced (.data = ...): its shape is now {tuple(shard.shape)}, the shard's "
                f"is {tuple(shape)}; copy new values into it in place"
            )
        return (
            f"the memory of {name} was replaced (.data = ...), and programs read what it had before; copy new values "
            f"into it in place"
        )

    return check


def _memory_of(tensor: Tensor) -> Any:
    """Return an identifier of a tensor's storage.

    A DTensor has a storage without memory. ``.data = ...`` replaces this storage, but not the local tensor.
    """
    return tensor.untyped_storage()._cdata


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
