"""Options of optimizers, also in words that are equal in all processes."""

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

PARAMETERS = ("params", "param_names")  # entries of a group that are no options
OF_BASE = frozenset(vars(Optimizer([nn.Parameter(torch.zeros(1))], {})))  # attributes that every optimizer has
VALUES = (Number, str, bytes, type(None), Enum, torch.dtype, torch.device)
CODE = (FunctionType, BuiltinFunctionType, MethodType, type)
MANY = 1000  # elements of a tensor that is told by its shape alone


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in PARAMETERS}


def names_of(group: Mapping[str, Any]) -> Sequence[str | None]:
    """The names of a group's parameters; None for each, if the group has no names."""
    names: Sequence[str | None] = group.get("param_names", [None] * len(group["params"]))
    return names


def in_words(values: Mapping[str, Any], *, amounts: bool = True) -> dict[str, str]:
    """Options or attributes by name: numbers, strings, tensors that are not large, and collections of them by value,
    functions and classes by name, other objects by class. Without ``amounts`` floats are told from zero only."""
    return {name: repr(tree_map(partial(_told, amounts), value)) for name, value in values.items()}


def look_of(groups: Sequence[Mapping[str, Any]], moving: Collection[str]) -> list[dict[str, str]]:
    """Of each group what a probe run is good for: amounts may change, as schedulers change them, but not from or to
    zero; what steps change (``moving``) may."""
    options = ({key: group[key] for key in group.keys() - {"params", *moving}} for group in groups)
    return [in_words(group, amounts=False) for group in options]


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """What the class, or its user, keeps in attributes, in addition to what every optimizer has."""
    return {name: value for name, value in vars(optimizer).items() if name not in OF_BASE}


def changed(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> set[str]:
    """The names of what differs, or is there only before or after, in one of several mappings."""
    pairs = zip(before, after, strict=True)
    return {name for old, new in pairs for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def _told(amounts: bool, value: Any) -> Any:
    """What a value that is no collection is told by; its ``repr`` counts."""
    if isinstance(value, Tensor) and value.numel() <= MANY and not value.requires_grad:
        return tree_map(partial(_told, amounts), value.tolist())
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, float) and not amounts:
        return bool(value)
    if isinstance(value, CODE):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return value if isinstance(value, VALUES) else f"a {type(value).__name__}"
