"""Reads a checkpoint's optimizers for this rank, and checks that they are the same optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thunder_zero.checkpoint.contents import (
    GROUPS,
    OPTIM,
    OPTIMIZER_CLASS,
    STATE,
    Contents,
    Named,
    all_named_groups,
    is_cut,
    listed,
    named_groups,
)
from thunder_zero.checkpoint.dcp_read import read_entries
from thunder_zero.checkpoint.manifest import USE_ANOTHER
from thunder_zero.checkpoint.roots import optimizer_prefix
from thunder_zero.runtime.dtensors import dtensor_like, local
from thunder_zero.runtime.optimizers import class_name

Group = dict[str, Any]
AS_SAVED = "build the optimizer as it was saved"


def read_optimizers(
    folder: Path, metadata: Metadata, contents: Contents, optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """A state dict for ``Optimizer.load_state_dict`` of each optimizer.

    Raises:
        ValueError: the checkpoint has no optimizer, other parameter groups, optimizers of another class, or states that
            cannot be cut into rows; or it is damaged.
    """
    stored = metadata.state_dict_metadata
    prefix, groups = optimizer_prefix(stored), all_named_groups(contents, optimizers)
    states = _states_of(contents, list(chain(*groups)), prefix, stored)
    hyper = [key for key in stored if key.startswith(f"{prefix}{GROUPS}.")]
    classes = [key for number in range(len(optimizers)) if (key := f"{OPTIMIZER_CLASS}.{number}") in stored]
    parts = _parts(states, stored)
    values = read_entries(folder, metadata, [*states, *hyper, *classes], parts)
    names = [[named.name for named in group] for group in groups]
    saved = groups_of({key.removeprefix(f"{prefix}{GROUPS}."): values[key] for key in hyper}, names)
    require_groups(saved, names)
    require_classes({key: values[key] for key in classes}, optimizers)
    by_param: dict[str, dict[str, Any]] = {}
    for key, (named, name) in states.items():
        by_param.setdefault(named.name, {})[name] = _as_state(values[key], named, key in parts)
    return [
        _numbered([saved.pop(0) for _ in own], own, by_param)
        for own in (named_groups(contents, optimizer) for optimizer in optimizers)
    ]


def groups_of(values: Mapping[str, Any], names: Iterable[Sequence[str]] = ()) -> list[Group]:
    """An optimizer's parameter groups, from hyper-parameters by ``"<group>.<name>"``; or by ``"<parameter>.<name>"``,
    as ``flatten_optimizer_state_dict`` has them, with the names of each group's parameters.

    Raises:
        ValueError: a key that is not of this form; parameters that are not a list of names; a group's parameters had
            other hyper-parameters.
    """
    groups: dict[int, Group] = {}
    of_param: dict[str, Group] = {name: {} for name in chain(*names)}
    for key, value in values.items():
        number, _, name = key.partition(".")
        param, _, flat = key.rpartition(".")
        if param in of_param:
            of_param[param][flat] = value
        elif number.isdecimal() and (name != "params" or is_names(value)):
            groups.setdefault(int(number), {})[name] = value
        else:
            raise ValueError(
                f"the optimizer's parameter groups are damaged: {key!r} is {value!r}; use another checkpoint"
            )
    if groups:
        return [groups[number] for number in sorted(groups)]
    return [_one_group(members, of_param) for members in names]


def _one_group(names: Sequence[str], of_param: Mapping[str, Group]) -> Group:
    """The hyper-parameters of a group, which all of its parameters were saved with."""
    known = [name for name in names if of_param[name]]
    for name in known:
        one, other = of_param[known[0]], of_param[name]
        if one.keys() != other.keys() or any(not torch.as_tensor(one[key] == other[key]).all() for key in one):
            raise ValueError(
                f"parameters {known[0]!r} and {name!r} are in one group of this optimizer, and had other "
                f"hyper-parameters in the checkpoint; {AS_SAVED}"
            )
    return {**(of_param[known[0]] if known else {}), "params": known}


def is_names(value: object) -> bool:
    """Whether a value is a list of names."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def require_groups(saved: Sequence[Mapping[str, Any]], here: Sequence[Sequence[str]]) -> None:
    """Raise unless each parameter group has the parameters that it had when it was saved.

    Raises:
        ValueError: the groups differ.
    """
    if len(saved) != len(here):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has {len(here)}; {AS_SAVED}"
        )
    for number, (group, names) in enumerate(zip(saved, here, strict=True)):
        if "params" not in group:
            raise ValueError(
                f"parameter group {number} of the checkpoint's optimizer lists no parameters; {USE_ANOTHER}"
            )
        missing, unexpected = sorted(set(names) - set(group["params"])), sorted(set(group["params"]) - set(names))
        if missing or unexpected:
            raise ValueError(
                f"parameter group {number} of the checkpoint's optimizer has other parameters (missing: "
                f"{listed(missing)}; unexpected: {listed(unexpected)}); {AS_SAVED}"
            )


def require_classes(saved: Mapping[str, str], optimizers: Sequence[Optimizer]) -> None:
    """Raise unless optimizers are of the classes that were saved; other tools do not save them.

    Raises:
        ValueError: one is of another class, which might take the state for something else without an error.
    """
    for number, optimizer in enumerate(optimizers):
        here = class_name(optimizer)
        found = saved.get(f"{OPTIMIZER_CLASS}.{number}", here)
        if found != here:
            raise ValueError(
                f"the checkpoint's optimizer is {found}, this one is {here}; pass an optimizer of the saved class, or "
                f"load without it"
            )


def _states_of(
    contents: Contents, members: Sequence[Named], prefix: str, stored: Mapping[str, Any]
) -> dict[str, tuple[Named, str]]:
    """The parameter and the name of each of its states in a checkpoint, by key; whole states for their owner alone."""
    of_prefix = {f"{prefix}{STATE}.{named.name}": named for named in members}
    own = {f"{contents.rank_prefix}.{OPTIM}.{STATE}.{named.name}": named for named in members if named.number is None}
    of_prefix |= own
    states = {}
    for key in stored:
        start, dot, name = key.rpartition(".")
        while dot and start not in of_prefix:  # another tool's states may have dots in their names
            start, dot, more = start.rpartition(".")
            name = f"{more}.{name}"
        if dot and of_prefix[start].owner in (None, contents.in_copy[0]):
            states[key] = of_prefix[start], name
    return states


def _parts(states: Mapping[str, tuple[Named, str]], stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters of those states that are cut as their parameter is, by key; of others, all is read.

    Raises:
        ValueError: a state of a parameter that this rank has a part of can be neither cut nor kept whole.
    """
    alike = {name for key, (named, name) in states.items() if _has_shape(stored[key], named) and named.tensor.ndim}
    parts = {}
    for key, (named, name) in states.items():
        found = stored[key]
        if named.owner is not None or not isinstance(found, TensorStorageMetadata):
            continue
        if _has_shape(found, named) and name in alike:  # a number may be a step, or the average of a number
            parts[key] = named.tensor
        elif is_cut(named.tensor) and found.size.numel() != 1:
            raise ValueError(
                f"{key} cannot be cut into rows: its shape is {tuple(found.size)}, the parameter's is "
                f"{tuple(named.tensor.shape)}; load it into an optimizer made by tz.whole, or where the parameter is "
                f"replicated (stage 0)"
            )
    return parts


def _has_shape(found: Any, named: Named) -> bool:
    return isinstance(found, TensorStorageMetadata) and found.size == named.tensor.shape


def _as_state(value: Any, named: Named, like_parameter: bool) -> Any:
    """A state as the optimizer has it: a DTensor, if it is cut like one or has more than one number."""
    param = named.tensor
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or named.owner is not None:
        return value
    if not like_parameter and value.numel() == 1:
        return value
    rows = value.to(local(param).device)
    return dtensor_like(rows, param, param.shape if like_parameter else value.shape)


def _numbered(
    saved: Sequence[Group], groups: Sequence[Sequence[Named]], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One optimizer's state dict with its parameters by number, as ``Optimizer.load_state_dict`` takes it."""
    names = [named.name for group in groups for named in group]
    at = {name: number for number, name in enumerate(names)}
    numbered = [
        {**group, "params": [at[named.name] for named in members]} for group, members in zip(saved, groups, strict=True)
    ]
    return {STATE: {at[name]: dict(states[name]) for name in names if name in states}, GROUPS: numbered}
