"""Makes an optimizer like another one, as new, over other tensors."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from inspect import Parameter, signature
from itertools import chain, count
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COUNTS_STEPS = "step"  # an entry of groups that many classes add in their first step; a new optimizer has taken none
OWN = ("params", "param_names", COUNTS_STEPS)  # entries of a group that its copy does not take over
OF_BASE = frozenset(vars(Optimizer([nn.Parameter(torch.zeros(1))], {})))  # attributes that every optimizer has
PATCHED = ("step", "zero_grad")  # methods that schedulers and torch.compile replace on the instance
DEPTH, MANY = 8, 1000  # collections and objects inside each other, and in all
VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CODE = (FunctionType, BuiltinFunctionType, type)
LEAVES = (*VALUES, *CODE)
SOME_LR = 1e-3
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")  # set in groups later
FEW = 16  # elements of a tensor that is an attribute, and an amount
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})

_numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()  # of CODE: addresses are used again
_next_number = count()


def same_optimizer(
    optimizer: Optimizer, members: Sequence[tuple[int, str | None, Tensor]], changes: Mapping[str, Any] = NO_CHANGES
) -> Optimizer:
    """An optimizer like this one, without its state and hooks.

    Its class has to keep what its constructor was given: in ``defaults``, in the groups or in attributes, which are
    values, collections of them, or methods of its own.

    Args:
        optimizer: stays as it is.
        members: for each tensor, the number of the group that it is to be in, its name there if groups have names, and
            the tensor.
        changes: other values of arguments, options and attributes, by name.

    Raises:
        ValueError: an argument of the constructor is nowhere to be found, or an attribute is of another type.
        Exception: the constructor raises it.
    """
    groups: dict[int, dict[str, Any]] = {}
    later: dict[int, dict[str, Any]] = {}
    for number, name, tensor in members:
        if number not in groups:
            options = options_of(optimizer, number)
            later[number] = {key: options.pop(key) for key in OF_SCHEDULERS if key in options}
            groups[number] = {**options, **_among(changes, options), "params": []}
        groups[number]["params"].append(tensor if name is None else (name, tensor))
    kind: Any = type(optimizer)
    arguments, lost = _arguments(optimizer)
    other: Optimizer = kind(list(groups.values()), **(arguments | _among(changes, arguments)))
    for group, options in zip(other.param_groups, later.values(), strict=False):  # a class may make groups of its own
        group.update(options)
    if (left := _take_attributes(optimizer, other, changes)) and lost:
        raise ValueError(
            f"its attribute {left[0]!r} cannot be copied, and may be what its argument {lost[0]!r} has become"
        )
    return other


def options_of(optimizer: Optimizer, number: int) -> dict[str, Any]:
    """A group's options, with a learning rate that moves parameters: a warmup may begin with zero."""
    group = optimizer.param_groups[number]
    options = {name: deepcopy(value) for name, value in group.items() if name not in OWN}
    if "lr" in options:
        rates = (options.get("initial_lr"), options["lr"], optimizer.defaults.get("lr"), SOME_LR)
        options["lr"] = next(deepcopy(rate) for rate in rates if isinstance(rate, int | float | Tensor) and rate != 0)
    return options


def late_counts(optimizer: Optimizer, soon: int) -> dict[str, int]:
    """The arguments, options and attributes that are whole numbers above ``soon``, and so may delay what an optimizer
    does; as ``soon``."""
    options = [options_of(optimizer, number).items() for number in range(len(optimizer.param_groups))]
    found = chain(*options, _arguments(optimizer)[0].items(), attributes_of(optimizer).items())
    return {name: soon for name, value in found if type(value) is int and value > soon}


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """What the class, or its user, keeps in attributes beside what every optimizer has."""
    left_out = OF_BASE.union(PATCHED)
    return {name: value for name, value in vars(optimizer).items() if name not in left_out}


def is_data(value: object) -> bool:
    """Whether a copy of a value may be handed to another optimizer: values, numbers in tensors, functions, classes,
    collections of them, and objects whose attributes are such; nothing that has to do with parameters."""
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, LEAVES) or _is_number(one) or id(one) in seen:
            continue
        inner = _inside(one)
        if inner is None or len(seen) == MANY:
            return False
        seen.add(id(one))
        left += inner
    return True


def in_words(values: Mapping[str, Any]) -> dict[str, str]:
    """Options or attributes in words: those that are data, methods, and tensors of few elements."""
    functions = {name: value.__func__ for name, value in values.items() if isinstance(value, MethodType)}
    tensors = {name: value.tolist() for name, value in values.items() if isinstance(value, Tensor) and _has_few(value)}
    data = {name: value for name, value in values.items() if is_data(value)}
    return {name: described(value) for name, value in (data | functions | tensors).items()}


def described(value: object, depth: int = 0) -> str:
    """A value that is data, in words: those of another one differ, and those of a copy do not."""
    if isinstance(value, CODE):
        return f"{value.__qualname__} {_numbers.setdefault(value, next(_next_number))}"
    inner = None if isinstance(value, VALUES) or depth > DEPTH else _inside(value)
    if inner is None:
        return repr(value)
    return f"{type(value).__qualname__}({', '.join(described(one, depth + 1) for one in inner)})"


def _inside(value: object) -> list[object] | None:
    """What a collection or an object consists of; None if that cannot be seen, or may not be copied."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | deque | set | frozenset):
        return list(value)
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Enum):
        return [value.name]
    if is_dataclass(value):
        return [getattr(value, of.name) for of in fields(value)]
    if isinstance(value, Tensor | nn.Module | Optimizer) or getattr(type(value), "__dictoffset__", 0) == 0:
        return None
    return [vars(value)]


def _has_few(value: Tensor) -> bool:
    return value.numel() <= FEW and not value.requires_grad


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad


def _arguments(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """The constructor's arguments but the first, by name; and the names of those that are kept by no such name, and so
    are left to their defaults.

    Raises:
        ValueError: an argument without a default is kept nowhere, or is not to be copied.
    """
    attributes = attributes_of(optimizer)
    found: dict[str, Any] = {}
    lost: list[str] = []
    _, *named = signature(type(optimizer)).parameters.values()
    for parameter in named:
        name = parameter.name
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue  # groups have all options anyway
        if name in optimizer.defaults:
            found[name] = deepcopy(optimizer.defaults[name])
        elif name in attributes and is_data(attributes[name]):
            found[name] = deepcopy(attributes[name])
        elif parameter.default is Parameter.empty:
            raise ValueError(f"the value of its argument {name!r} is neither in defaults nor in an attribute")
        elif name not in attributes:
            lost.append(name)
        elif attributes[name] is not parameter.default:
            kind = type(attributes[name]).__name__
            raise ValueError(f"its argument {name!r} is a {kind}, which cannot be copied for another optimizer")
    return found, lost


def _among(changes: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name in names}


def _take_attributes(optimizer: Optimizer, other: Optimizer, changes: Mapping[str, Any]) -> list[str]:
    """Give ``other`` the attributes that may be handed over; the names of those that stay as its constructor made them.

    Raises:
        ValueError: one of those is of another type than the constructor made it.
    """
    made = vars(other)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids, shapes = set(map(id, params)), {param.shape for param in params}
    left: list[str] = []
    for name, value in attributes_of(optimizer).items():
        few = isinstance(value, Tensor) and _has_few(value)
        if isinstance(value, MethodType) and value.__self__ is optimizer:
            made[name] = MethodType(value.__func__, other)
        elif (few and value.shape not in shapes) or (is_data(value) and not _whole_numbers(value) & ids):
            made[name] = changes.get(name, deepcopy(value))
        elif name in made and type(made[name]) is not type(value):
            raise ValueError(
                f"its attribute {name!r} is of type {type(value).__name__}, and the constructor makes a "
                f"{type(made[name]).__name__}"
            )
        else:
            left.append(name)
    return left


def _whole_numbers(value: object, depth: int = 0) -> set[int]:
    """The whole numbers in data, such as the ids of parameters."""
    if isinstance(value, int):
        return {value}
    inner = None if isinstance(value, LEAVES) or depth > DEPTH else _inside(value)
    return set[int]().union(*(_whole_numbers(one, depth + 1) for one in inner or ()))
