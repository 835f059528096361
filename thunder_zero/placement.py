"""Puts shards and buffers into a plain module, and lists the places that must stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from thunder_zero.marks import parameter_like
from thunder_zero.runtime.initial_values import Other
from thunder_zero.runtime.intact import Held, Hiding, Hooks, Pair
from thunder_zero.runtime.placeholders import set_tensor
from thunder_zero.runtime.state import State

from thunder.core.module import ThunderModule


def place_others(
    model: ThunderModule, others: Iterable[Other], known: Iterable[str], device: torch.device | None
) -> None:
    """Set the values of buffers and ignored parameters, and move the latter to ``device``.

    Args:
        model: the jitted module.
        others: values of tensors that are not in the plan.
        known: names of the parameters in the plan.
        device: the ``device`` argument of ZeroTransform.
    """
    for other in others:
        set_value(model, other)
    if device is not None:
        planned = set(known)
        for name, param in model._model.named_parameters(remove_duplicate=False):
            if name not in planned:
                param.data = param.data.to(device)


def set_value(model: ThunderModule, other: Other) -> None:
    """Copy a value into a tensor of the module, or replace the tensor if it is on the meta device."""
    if not other.tensor.is_meta:
        with torch.no_grad():
            other.tensor.copy_(other.value)
        return
    is_parameter = isinstance(other.tensor, nn.Parameter)
    value = parameter_like(other.tensor, other.value) if is_parameter else other.value
    for name in other.names:
        set_tensor(model._model, name, value)
        (model._overrides_parameters if is_parameter else model._overrides_buffers)[name] = value


def place_parameters(model: ThunderModule, state: State) -> None:
    """Put the shards into the plain module, and where Thunder looks parameters up."""
    for param in state.plan.params:
        for name in param.names:
            model._overrides_parameters[name] = state.shards[param.path]
            set_tensor(model._model, name, state.shards[param.path])


def place_buffers(model: ThunderModule, state: State, device: torch.device | None) -> None:
    """Cast the buffers to the policy's dtype and move them to ``device``."""
    precision = state.plan.policy.mixed_precision
    for name, buffer in list(model._model.named_buffers()):
        dtype = precision.of(name).buffer_dtype if buffer.is_floating_point() else None
        placed = buffer.to(device=device, dtype=dtype)
        if placed is not buffer:
            set_tensor(model._model, name, placed)
            model.set_buffer(name, model._model.get_buffer(name))


def held(model: ThunderModule) -> Iterator[Held]:
    """What the modules of the plain module hold: no other parameters and submodules."""
    for path, module in model._model.named_modules():
        yield Held(module._parameters, dict(module._parameters), "parameter", path)
        yield Held(module._modules, dict(module._modules), "submodule", path)


def hiding(model: ThunderModule) -> Iterator[Hiding]:
    """What ``model.name = ...`` would hide: the traces read the plain module, and would not see it."""
    plain = model._model
    kinds = {"attribute": vars(plain), "submodule": plain._modules, "buffer": plain._buffers}
    kinds["parameter"] = plain._parameters
    names = {name: kind for kind, holder in kinds.items() for name in holder if name not in vars(model)}
    for holder in (model._modules, model._parameters, model._buffers, vars(model)):
        yield Hiding(holder, names)


def pairs(model: ThunderModule) -> Iterator[Pair]:
    """The buffers: both modules have the same tensor, which a forward may replace in both."""
    first: dict[int, str] = {}
    for name, buffer in model._overrides_buffers.items():
        first.setdefault(id(buffer), name)
    for path, module in model._model.named_modules():
        for name, buffer in module._buffers.items():  # None, or one of several names
            yield Pair(module._buffers, name, model._overrides_buffers, first.get(id(buffer), f"{path}.{name}"))


def hooks_inside(model: ThunderModule) -> Iterator[Hooks]:
    """The hooks of forward and backward that the traces have; Thunder reads them when it compiles."""
    plain: nn.Module = model._model
    for path, module in plain.named_modules():
        for kind in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        ):
            yield Hooks(kind, len(kind), f"submodule {path!r}" if path else "the plain module")
