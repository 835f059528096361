"""Casts inputs and outputs of modules to the dtypes of mixed precision.

A submodule's class is replaced by a subclass whose forward casts, so hooks of the user see the cast values. Torch's
``fully_shard`` also replaces the classes of modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from thunder_zero.plan.precision import MixedPrecision

BORDER = "_thunder_zero_border"  # attribute of the subclasses: the path of the module, for error messages


def cast_inputs(name: str, args: Any, kwargs: Any, precision: MixedPrecision) -> tuple[Any, Any]:
    """Return the arguments of the root module, cast as in FSDP2."""
    dtype, _ = precision.border("", None)
    return _cast(args, dtype, name), _cast(kwargs, dtype, name)


def cast_borders(module: nn.Module, precision: MixedPrecision) -> None:
    """Make the module cast its outputs, and make submodules with an override cast inputs and outputs."""
    for submodule, module_class in _casting(module, precision).items():
        submodule.__class__ = module_class


def casting_borders(module: nn.Module, precision: MixedPrecision) -> AbstractContextManager[None]:
    return _of_classes(_casting(module, precision))


def without_casts(module: nn.Module) -> AbstractContextManager[None]:
    casting = (submodule for submodule in module.modules() if BORDER in vars(type(submodule)))
    return _of_classes({submodule: type(submodule).__base__ for submodule in casting})


@contextmanager
def _of_classes(classes: Mapping[nn.Module, Any]) -> Iterator[None]:
    before = {submodule: type(submodule) for submodule in classes}
    for submodule, module_class in classes.items():
        submodule.__class__ = module_class
    try:
        yield
    finally:
        for submodule, module_class in before.items():
            submodule.__class__ = module_class


def _casting(module: nn.Module, precision: MixedPrecision) -> dict[nn.Module, type[nn.Module]]:
    kinds: dict[nn.Module, type[nn.Module]] = {}
    for path, submodule in module.named_modules():
        dtype = next((param.dtype for param in submodule.parameters() if param.is_floating_point()), None)
        input_dtype, output_dtype = precision.border(path, dtype)
        if path and input_dtype is not None:
            kinds[submodule] = _subclass(path, type(submodule), input_dtype, output_dtype)
        elif output_dtype is not None:
            kinds[submodule] = _subclass(path or type(submodule).__name__, type(submodule), None, output_dtype)
    return kinds


def _subclass(
    name: str, kind: type[nn.Module], input_dtype: torch.dtype | None, output_dtype: torch.dtype | None
) -> Any:
    """Return a subclass whose forward casts. A dtype of None means no cast."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast(args, input_dtype, self), _cast(kwargs, input_dtype, self)
        return _cast(kind.forward(self, *args, **kwargs), output_dtype, self)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, BORDER: name})


def _cast(tree: Any, dtype: torch.dtype | None, owner: Any) -> Any:
    """Return a copy of a structure in which floating-point tensors are cast. Dynamo traces this function.

    ``owner`` is a submodule, or the name of the root module. A structure that cannot be rebuilt raises TypeError.
    """
    if dtype is None:
        return tree
    return tree_map(lambda leaf: _cast_leaf(leaf, dtype, owner), tree, is_leaf=dataclasses.is_dataclass)


def _cast_leaf(leaf: Any, dtype: torch.dtype, owner: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = dataclasses.fields(leaf)
        values = {field.name: getattr(leaf, field.name) for field in fields}
        if all(field.init for field in fields):
            return type(leaf)(**{name: _cast(value, dtype, owner) for name, value in values.items()})
        items = [*values.values()]
    else:
        items = [*leaf.values()] if isinstance(leaf, dict) else [*leaf] if isinstance(leaf, (set, frozenset)) else []
    if any(isinstance(item, torch.Tensor) and item.is_floating_point() for item in items):
        name = owner if isinstance(owner, str) else getattr(type(owner), BORDER)
        raise TypeError(
            f"mixed precision cannot cast the tensors in a {type(leaf).__name__}, which {name} takes or returns; use "
            f"a tuple, list, dict, OrderedDict, named tuple, or dataclass whose fields are all arguments"
        )
    return leaf
