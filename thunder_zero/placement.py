"""Puts shards and buffers into a plain module, and lists the places that must stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from thunder_zero.marks import parameter_like
from thunder_zero.runtime.initial_values import Other
from thunder_zero.runtime.intact import Hooks, Link, Members, Pair
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


def links(model: ThunderModule) -> Iterator[Link]:
    """Every place in the plain module that must stay as it is now, and those that would hide it."""
    plain: nn.Module = model._model
    for path, module in plain.named_modules():
        prefix = f"{path}." if path else ""
        for name, child in module._modules.items():
            yield Link(module._modules, name, child, f"submodule '{prefix}{name}'")
        for name, buffer in module._buffers.items():
            if f"{prefix}{name}" not in model._overrides_buffers:  # None, or one of two names
                yield Link(module._buffers, name, buffer, f"buffer '{prefix}{name}'")
        for name, param in module._parameters.items():
            yield Link(module._parameters, name, param, f"parameter '{prefix}{name}'")
    yield from _hiding(model)


def _hiding(model: ThunderModule) -> Iterator[Link]:
    """What ``model.name = ...`` would hide: the traces read the plain module, and would not see it."""
    plain = model._model
    kinds = (
        ("submodule", plain._modules),
        ("buffer", plain._buffers),
        ("parameter", plain._parameters),
        ("attribute", vars(plain)),
    )
    for kind, names in kinds:
        for name in names:
            if name not in vars(model):
                for holder in (model._modules, model._parameters, model._buffers, vars(model)):
                    yield Link(holder, name, None, f"{kind} {name!r}")


def pairs(model: ThunderModule) -> Iterator[Pair]:
    """The buffers: both modules have the same tensor, which a forward may replace in both."""
    for name in model._overrides_buffers:
        parent, _, attribute = name.rpartition(".")
        yield Pair(model._model.get_submodule(parent)._buffers, attribute, model._overrides_buffers, name)


def members(model: ThunderModule) -> Iterator[Members]:
    """The modules of the plain module, which must get no other parameters and submodules."""
    for path, module in model._model.named_modules():
        where = f"submodule {path!r}" if path else "the module"
        yield Members(module._parameters, frozenset(module._parameters), f"{where} got the parameter")
        yield Members(module._modules, frozenset(module._modules), f"{where} got the submodule")


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
