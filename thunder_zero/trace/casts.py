"""Casts inputs and outputs of modules to the dtypes of mixed precision, as lines of the trace.

A submodule's class is replaced by a subclass whose forward casts, as torch's ``fully_shard`` does with the modules that
it shards. Hooks would be simpler, but Thunder 0.2.6 cannot trace them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from thunder_zero.precision import MixedPrecision


def cast_borders(module: nn.Module, precision: MixedPrecision) -> None:
    """Make the module, and the submodules that an override names, cast their inputs and outputs."""
    for submodule, kind in _casting(module, precision).items():
        submodule.__class__ = kind


@contextmanager
def casting_borders(module: nn.Module, precision: MixedPrecision) -> Iterator[None]:
    """As :func:`cast_borders`, but only inside the block."""
    before = {submodule: type(submodule) for submodule in _casting(module, precision)}
    cast_borders(module, precision)
    try:
        yield
    finally:
        for submodule, kind in before.items():
            submodule.__class__ = kind


def _casting(module: nn.Module, precision: MixedPrecision) -> dict[nn.Module, type[nn.Module]]:
    found: dict[nn.Module, type[nn.Module]] = {}
    for path, submodule in module.named_modules():
        own = next((param.dtype for param in submodule.parameters() if param.is_floating_point()), None)
        dtypes = precision.border(path, own)
        if any(dtypes):
            found[submodule] = _subclass(type(submodule), *dtypes)
    return found


def _subclass(kind: type[nn.Module], input_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _cast(kind.forward(self, *_cast(args, input_dtype), **_cast(kwargs, input_dtype)), output_dtype)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors, also in tuples, lists, dicts and dataclasses; Thunder traces this."""
    if dtype is None:
        return tree
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if type(tree) in (tuple, list):
        return type(tree)([_cast(item, dtype) for item in tree])
    if type(tree) is dict:
        return {key: _cast(item, dtype) for key, item in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree)(**{field.name: _cast(getattr(tree, field.name), dtype) for field in dataclasses.fields(tree)})
    return tree
