"""Optimizers by the names of a checkpoint: what a rank writes of them, and what it reads.

An optimizer numbers parameters; a checkpoint names them, so that it can be loaded in any stage, on any number of
ranks::

    optimizer.state[shard]["exp_avg"]     optim.state.h.0.w.exp_avg      by rows; with tz.whole all of it, by the owner
    optimizer.param_groups[0]["lr"]       optim.param_groups.0.lr        the groups of all optimizers are numbered on
    optimizer.param_groups[0]["params"]   optim.param_groups.0.params    ["h.0.w", "h.0.b"]

To write, in: optimizers; out: entries by path, and facts that ranks compare (:func:`optimizer_entries`). To read, in:
a checkpoint; out: for each optimizer a state dict that its ``load_state_dict`` takes (:class:`SavedOptimizers`). All
begins with :func:`named_groups`. Nothing here is a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thunder_zero.checkpoint.contents import GROUPS, OPTIM, STATE, Contents, is_cut, require_same_names
from thunder_zero.checkpoint.dcp_write import Entries
from thunder_zero.checkpoint.manifest import USE_ANOTHER
from thunder_zero.comm.agree import Fact
from thunder_zero.optim.agreement import option_facts
from thunder_zero.sharded.dtensors import dtensor_like, local
from thunder_zero.sharded.optimizers import StepsWhole, class_name

OPTIMIZER_CLASSES = "optimizer_classes"  # their names; other tools do not save them
AS_SAVED = "build the optimizer as it was saved"
SAME_OPTIONS = (
    "set it alike on every rank; give a scheduler such as ReduceLROnPlateau the mean of its metric over ranks"
)
Group = dict[str, Any]
Optimizers = Optimizer | Iterable[Optimizer]


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter that an optimizer steps.

    Attributes:
        name: its first name in the model's state dict.
        number: its place among the model's parameters; None if it is ignored: each rank has its own.
        states: its states by name, as far as this rank has them.
        owner: the rank of its copy of the model that alone has its states, and in full (``tz.whole``); None if each
            rank has its part of them.
    """

    name: str
    number: int | None
    tensor: Tensor
    states: Mapping[str, Any]
    owner: int | None


def named_groups(contents: Contents, optimizers: Sequence[Optimizer]) -> list[list[Named]]:
    """The parameters of each group of all optimizers, in one list."""
    known: dict[int, tuple[str, int | None]] = {id(tensor): (name, None) for name, tensor in contents.ignored.items()}
    known |= {id(tensor): (name, number) for number, (name, tensor) in enumerate(contents.params.items())}
    groups: list[list[Named]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            groups.append([])
            for tensor in group["params"]:
                if id(tensor) not in known:
                    raise ValueError(
                        f"{class_name(optimizer)} has a parameter of shape {tuple(tensor.shape)} that is not one of "
                        f"this model's; build the optimizer on model.parameters()"
                    )
                owner = optimizer.owner_of(tensor) if isinstance(optimizer, StepsWhole) else None
                groups[-1].append(Named(*known[id(tensor)], tensor, optimizer.state.get(tensor, {}), owner))
    stepped = {id(named.tensor) for named in chain(*groups)}
    for stepper, key in ((one, key) for one in optimizers for key in one.state):
        if id(key) not in stepped:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise ValueError(
                f"{class_name(stepper)} has a state for {what}, which is not one of its parameters, so the state has "
                f"no name to be saved under; remove it from optimizer.state and save it as an extra"
            )
    for name, count in Counter(named.name for named in chain(*groups)).items():
        if count > 1:
            raise ValueError(f"parameter {name!r} is in {count} optimizers; give each parameter to one of them")
    return groups


# To write


def optimizer_entries(contents: Contents, optimizers: Sequence[Optimizer]) -> tuple[Entries, list[Fact]]:
    """Return what this rank writes of the optimizers, whose groups are numbered consecutively, and facts to compare.

    Ranks compare the states of each parameter, because a state that one rank lacks is not saved, and the options of
    groups, because rank 0 saves its own.
    """
    values, facts, groups = Entries(), list[Fact](), named_groups(contents, optimizers)
    for named in chain(*groups):
        what, shown = f"the optimizer's state of parameter {named.name!r}", list[str]()
        for key, value in named.states.items():
            values |= _state_entry(contents, named, key, value)
            shown.append(f"{key} by rows" if is_cut(value) else str(key))
        if named.owner is not None:
            facts.append(Fact(what, f"whole, on rank {named.owner}", "build the same optimizer on every rank"))
        elif named.number is not None:
            facts.append(Fact(what, ", ".join(shown) or "none", "step the optimizer on every rank"))
    saved = [group for optimizer in optimizers for group in optimizer.param_groups]
    for at, (group, members) in enumerate(zip(saved, groups, strict=True)):
        for key, value in {**group, "params": [named.name for named in members]}.items():
            what = f"hyper-parameter {key!r} of parameter group {at}"
            values |= contents.share(what, (OPTIM, GROUPS, at, key), value, 0)
    classes = [class_name(optimizer) for optimizer in optimizers]
    for optimizer, kind in zip(optimizers, classes, strict=True):
        facts += option_facts(kind, optimizer.param_groups, SAME_OPTIONS)
    return values | contents.share(OPTIMIZER_CLASSES, (OPTIMIZER_CLASSES,), classes, 0), facts


def _state_entry(contents: Contents, named: Named, key: str, value: Any) -> Entries:
    """What this rank writes of a state: its part, of which the other ranks have theirs; all, if it is in turn."""
    what, param = f"the optimizer's state {key!r} of parameter {named.name!r}", named.tensor
    path = (OPTIM, STATE, named.name, key)
    if not isinstance(key, str) or "." in key:
        raise ValueError(f"cannot save {what}: the name of a state must be a string without dots; rename it")
    if named.owner is not None:
        return contents.share(what, path, value, named.owner)
    if not isinstance(value, Tensor | bool | int | float | str | None):
        raise ValueError(
            f"cannot save {what}: values of type {type(value).__name__} cannot be merged across ranks; save it as an "
            f"extra"
        )
    alike = is_cut(param) and is_cut(value) and (value.shape, value.placements) == (param.shape, param.placements)
    if is_cut(param) and isinstance(value, Tensor) and value.numel() != 1 and not alike:
        raise ValueError(
            f"cannot save {what}: it has shape {tuple(value.shape)}, and is neither one number nor cut like the "
            f"parameter, of shape {tuple(param.shape)}; save optimizer.state_dict() on each rank instead"
        )
    return contents.share(what, path, value, named.number)


# Read


class SavedOptimizers:
    """The optimizers' part of a checkpoint, as the optimizers of this rank need it.

    Attributes:
        keys: what has to be read.
        parts: the parameter of each key whose value is cut like it; of other keys everything is read.

    Args:
        prefix: begins the keys of all optimizers.
    """

    def __init__(self, metadata: Metadata, contents: Contents, optimizers: Sequence[Optimizer], prefix: str) -> None:
        stored, self._optimizers = metadata.state_dict_metadata, optimizers
        self._groups, self._group_prefix = named_groups(contents, optimizers), f"{prefix}{GROUPS}."
        self._states = _states_of(contents, list(chain(*self._groups)), prefix, stored)
        self._options = [key for key in stored if key.startswith(self._group_prefix)]
        classes = [OPTIMIZER_CLASSES] if OPTIMIZER_CLASSES in stored else []
        self.keys: list[str] = [*self._states, *self._options, *classes]
        self.parts = _parts(self._states, stored)

    def state_dicts(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a state dict for ``Optimizer.load_state_dict`` of each optimizer, from the values of all keys."""
        names = [[named.name for named in group] for group in self._groups]
        saved = groups_of({key.removeprefix(self._group_prefix): values[key] for key in self._options}, names)
        _require_groups(saved, names)
        by_name: dict[str, dict[str, Any]] = {}
        for key, (named, name) in self._states.items():
            by_name.setdefault(named.name, {})[name] = _as_state(values[key], named, key in self.parts)
        for kind, optimizer in zip(values.get(OPTIMIZER_CLASSES, ()), self._optimizers, strict=False):
            if kind != class_name(optimizer):  # it might take the state for something else without an error
                raise ValueError(
                    f"the checkpoint's optimizer is {kind}, this one is {class_name(optimizer)}; pass an optimizer of "
                    f"the saved class, or load without it"
                )
        groups = zip(saved, names, strict=True)
        return [_numbered([next(groups) for _ in optimizer.param_groups], by_name) for optimizer in self._optimizers]


def _numbered(groups: Sequence[tuple[Group, list[str]]], states: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with parameters by number, from groups and their parameters' names."""
    at = {name: number for number, name in enumerate(chain(*(members for _, members in groups)))}
    numbered = [{**group, "params": [at[name] for name in members]} for group, members in groups]
    return {STATE: {number: states[name] for name, number in at.items() if name in states}, GROUPS: numbered}


def _states_of(
    contents: Contents, members: Sequence[Named], prefix: str, stored: Mapping[str, Any]
) -> dict[str, tuple[Named, str]]:
    """The parameter and the name of each of its states in a checkpoint, by key; whole states for their owner alone."""
    of_start = {f"{prefix}{STATE}.{named.name}": named for named in members}
    own = {f"{contents.rank_prefix}.{OPTIM}.{STATE}.{named.name}": named for named in members if named.number is None}
    of_start |= own
    states = {}
    for key in stored:
        start, dot, name = key.rpartition(".")
        while dot and start not in of_start:  # another tool's states may have dots in their names
            start, dot, more = start.rpartition(".")
            name = f"{more}.{name}"
        if dot and of_start[start].owner in (None, contents.in_copy[0]):
            states[key] = of_start[start], name
    return states


def _parts(states: Mapping[str, tuple[Named, str]], stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters of those states that are cut as their parameter is, by key; of others, all is read."""
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


def groups_of(values: Mapping[str, Any], names: Iterable[Sequence[str]] = ()) -> list[Group]:
    """An optimizer's parameter groups, from hyper-parameters by ``"<group>.<name>"``; or by ``"<parameter>.<name>"``,
    as ``flatten_optimizer_state_dict`` has them, with the names of each group's parameters."""
    groups: dict[int, Group] = {}
    of_param: dict[str, Group] = {name: {} for name in chain(*names)}
    for key, value in values.items():
        number, _, name = key.partition(".")
        param, _, flat = key.rpartition(".")
        if param in of_param:
            of_param[param][flat] = value
        elif number.isdecimal() and (name != "params" or _are_names(value)):
            groups.setdefault(int(number), {})[name] = value
        else:
            raise ValueError(f"the optimizer's parameter groups are damaged: {key!r} is {value!r}; {USE_ANOTHER}")
    return [groups[number] for number in sorted(groups)] or [_one_group(members, of_param) for members in names]


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


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _require_groups(saved: Sequence[Mapping[str, Any]], here: Sequence[Sequence[str]]) -> None:
    """Raise unless each parameter group has the parameters that it had when it was saved."""
    if len(saved) != len(here):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has {len(here)}; {AS_SAVED}"
        )
    for number, (group, names) in enumerate(zip(saved, here, strict=True)):
        what = f"parameter group {number} of the checkpoint's optimizer"
        if "params" not in group:
            raise ValueError(f"{what} lists no parameters; {USE_ANOTHER}")
        require_same_names(f"{what} has other parameters", group["params"], names, AS_SAVED)


def _has_shape(found: Any, named: Named) -> bool:
    return isinstance(found, TensorStorageMetadata) and found.size == named.tensor.shape


def _as_state(value: Any, named: Named, like_parameter: bool) -> Any:
    """A state as the optimizer has it: a DTensor, if it is cut like one or has more than one number."""
    param, kept = named.tensor, named.owner is not None or not isinstance(value, Tensor)
    if kept or not isinstance(param, DTensor) or (value.numel() == 1 and not like_parameter):
        return value
    return dtensor_like(value.to(local(param).device), param, param.shape if like_parameter else value.shape)
