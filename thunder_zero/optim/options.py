"""Reads options of optimizers, and describes options as text that is equal in all processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

PARAMETERS = ("params", "param_names")  # entries of a group that are not options
OF_BASE = frozenset(vars(Optimizer([nn.Parameter(torch.zeros(1))], {})))  # attributes that every optimizer has
VALUES = (Number, str, bytes, type(None), Enum, torch.dtype, torch.device)
CODE = (FunctionType, BuiltinFunctionType, MethodType, type)
MANY = 1000  # elements; a larger tensor is described by its shape only


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in PARAMETERS}


def names_of(group: Mapping[str, Any]) -> Sequence[str | None]:
    names: Sequence[str | None] = group.get("param_names", [None] * len(group["params"]))
    return names


def describe_values(values: Mapping[str, Any], *, amounts: bool = True) -> dict[str, str]:
    """Describe options or attributes by value: functions and classes by name, other objects by class.

    With ``amounts=False``, a float is described only as zero or not zero.
    """
    return {name: repr(tree_map(partial(_describe, amounts), value)) for name, value in values.items()}


def describe_for_probe(groups: Sequence[Mapping[str, Any]], moving: Collection[str]) -> list[dict[str, str]]:
    """Describe the options that a probe's result depends on, but not those that schedulers and steps change."""
    options = ({key: group[key] for key in group.keys() - {"params", *moving}} for group in groups)
    return [describe_values(group, amounts=False) for group in options]


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in OF_BASE}


def changed_names(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> set[str]:
    pairs = zip(before, after, strict=True)
    return {name for old, new in pairs for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def _describe(amounts: bool, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() <= MANY and not value.requires_grad:
        return tree_map(partial(_describe, amounts), value.tolist())
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, float) and not amounts:
        return bool(value)
    if isinstance(value, CODE):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return value if isinstance(value, VALUES) else f"a {type(value).__name__}"
