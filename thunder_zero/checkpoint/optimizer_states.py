"""Maps states of optimizers to keys of a checkpoint, and keys to states.

An optimizer refers to parameters by number, a checkpoint by name. So any number of ranks can load it in any stage::

    optimizer.state[shard]["exp_avg"]     optim.state.h.0.w.exp_avg      by rows; whole by the owner of tz.whole
    optimizer.param_groups[0]["lr"]       optim.param_groups.0.lr        groups of all optimizers are numbered together
    optimizer.param_groups[0]["params"]   optim.param_groups.0.params    ["h.0.w", "h.0.b"]

torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` do not serve. Both step an optimizer that has no
states, so AdamW would count a step. The second raises if a parameter has no state: it was never used, or another rank
owns it.
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
from thunder_zero.comm.agree import Claim
from thunder_zero.optim.agreement import option_claims
from thunder_zero.sharded.dtensors import dtensor_like, local
from thunder_zero.sharded.optimizers import StepsWhole, class_name

OPTIMIZER_CLASSES = "optimizer_classes"  # the key of the optimizers' class names, which other tools do not save
AS_SAVED = "build the optimizer as it was saved"
SAME_OPTIONS = (
    "set it alike on every rank; give a scheduler such as ReduceLROnPlateau the mean of its metric over ranks"
)
Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SteppedParam:
    name: str  # the first name in the model's state dict
    number: int | None  # the index among the model's parameters; None for an ignored parameter
    tensor: Tensor
    states: Mapping[str, Any]  # of this rank
    owner: int | None  # the rank of a replica that has the whole states (``tz.whole``); None if each rank has its rows


def params_by_group(contents: Contents, optimizers: Sequence[Optimizer]) -> list[list[SteppedParam]]:
    """Return the parameters of each group. Raise ValueError if a parameter or a state has no name of its own."""
    known: dict[Tensor, tuple[str, int | None]] = {tensor: (name, None) for name, tensor in contents.ignored.items()}
    known |= {tensor: (name, number) for number, (name, tensor) in enumerate(contents.params.items())}
    groups: list[list[SteppedParam]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            groups.append([])
            for tensor in group["params"]:
                if tensor not in known:
                    raise ValueError(
                        f"{class_name(optimizer)} has a parameter of shape {tuple(tensor.shape)} that is not one of "
                        f"this model's; build the optimizer on model.parameters()"
                    )
                owner = optimizer.owner_of(tensor) if isinstance(optimizer, StepsWhole) else None
                groups[-1].append(SteppedParam(*known[tensor], tensor, optimizer.state.get(tensor, {}), owner))
    stepped = {member.tensor for member in chain(*groups)}
    for optimizer in optimizers:
        for key in optimizer.state:
            if key in stepped:
                continue
            label = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise ValueError(
                f"{class_name(optimizer)} has a state for {label}, which is not one of its parameters, so the state "
                f"has no name to be saved under; remove it from optimizer.state and save it as an extra"
            )
    for name, count in Counter(member.name for member in chain(*groups)).items():
        if count > 1:
            raise ValueError(f"parameter {name!r} is in {count} optimizers; give each parameter to one of them")
    return groups


# Saving


def optimizer_entries(contents: Contents, optimizers: Sequence[Optimizer]) -> tuple[Entries, list[Claim]]:
    """Return the entries that this rank writes for optimizers, and claims that ranks compare.

    Ranks compare the states of each parameter, because a state that a rank lacks would not be saved in full. Ranks
    compare the options of groups, because only rank 0 saves options.
    """
    values, claims, groups = Entries(), list[Claim](), params_by_group(contents, optimizers)
    for member in chain(*groups):
        label, descriptions = f"the optimizer's state of parameter {member.name!r}", list[str]()
        for key, value in member.states.items():
            values |= _state_entry(contents, member, key, value)
            descriptions.append(f"{key} by rows" if is_cut(value) else str(key))
        if member.owner is not None:
            claims.append(Claim(label, f"whole, on rank {member.owner}", "build the same optimizer on every rank"))
        elif member.number is not None:
            claims.append(Claim(label, ", ".join(descriptions) or "none", "step the optimizer on every rank"))
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for number, (group, members) in enumerate(zip(param_groups, groups, strict=True)):
        for key, value in {**group, "params": [member.name for member in members]}.items():
            label = f"hyper-parameter {key!r} of parameter group {number}"
            values |= contents.entries_of(label, (OPTIM, GROUPS, number, key), value, 0)
    classes = [class_name(optimizer) for optimizer in optimizers]
    for optimizer, kind in zip(optimizers, classes, strict=True):
        claims += option_claims(kind, optimizer.param_groups, SAME_OPTIONS)
    return values | contents.entries_of(OPTIMIZER_CLASSES, (OPTIMIZER_CLASSES,), classes, 0), claims


def _state_entry(contents: Contents, member: SteppedParam, key: str, value: Any) -> Entries:
    label, param = f"the optimizer's state {key!r} of parameter {member.name!r}", member.tensor
    path = (OPTIM, STATE, member.name, key)
    if not isinstance(key, str) or "." in key:
        raise ValueError(f"cannot save {label}: the name of a state must be a string without dots; rename it")
    if member.owner is not None:
        return contents.entries_of(label, path, value, member.owner)
    if not isinstance(value, Tensor | bool | int | float | str | None):
        raise ValueError(
            f"cannot save {label}: values of type {type(value).__name__} cannot be merged across ranks; save it as an "
            f"extra"
        )
    is_like_param = (
        is_cut(param) and is_cut(value) and (value.shape, value.placements) == (param.shape, param.placements)
    )
    if is_cut(param) and isinstance(value, Tensor) and value.numel() != 1 and not is_like_param:
        raise ValueError(
            f"cannot save {label}: it has shape {tuple(value.shape)}, and is neither one number nor cut like the "
            f"parameter, of shape {tuple(param.shape)}; save optimizer.state_dict() on each rank instead"
        )
    return contents.entries_of(label, path, value, member.number)


# Loading


class SavedOptimizers:
    """The optimizer states that this rank reads from a checkpoint, under ``prefix``."""

    def __init__(self, metadata: Metadata, contents: Contents, optimizers: Sequence[Optimizer], prefix: str) -> None:
        stored, self._optimizers = metadata.state_dict_metadata, optimizers
        self._groups, self._group_prefix = params_by_group(contents, optimizers), f"{prefix}{GROUPS}."
        self._states = _states_of(contents, list(chain(*self._groups)), prefix, stored)
        self._options = [key for key in stored if key.startswith(self._group_prefix)]
        classes = [OPTIMIZER_CLASSES] if OPTIMIZER_CLASSES in stored else []
        self.keys: list[str] = [*self._states, *self._options, *classes]
        self.parts = _parts(self._states, stored)  # the parameters of sharded states. Other values are read in full.

    def state_dicts(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Build a state dict for each optimizer's ``load_state_dict``, from the values of all keys."""
        names = [[member.name for member in group] for group in self._groups]
        saved = groups_of({key.removeprefix(self._group_prefix): values[key] for key in self._options}, names)
        _require_groups(saved, names)
        states: dict[str, dict[str, Any]] = {}
        for key, (member, name) in self._states.items():
            states.setdefault(member.name, {})[name] = _as_state(values[key], member, key in self.parts)
        for kind, optimizer in zip(values.get(OPTIMIZER_CLASSES, ()), self._optimizers, strict=False):
            if kind != class_name(optimizer):  # another class might load the state without an error
                raise ValueError(
                    f"the checkpoint's optimizer is {kind}, this one is {class_name(optimizer)}; pass an optimizer of "
                    f"the saved class, or load without it"
                )
        groups, state_dicts = zip(saved, names, strict=True), []
        for optimizer in self._optimizers:
            own = [next(groups) for _ in optimizer.param_groups]
            numbers = {name: number for number, name in enumerate(chain(*(members for _, members in own)))}
            numbered = [{**group, "params": [numbers[name] for name in members]} for group, members in own]
            own_states = {number: states[name] for name, number in numbers.items() if name in states}
            state_dicts.append({STATE: own_states, GROUPS: numbered})
        return state_dicts


def _states_of(
    contents: Contents, members: Sequence[SteppedParam], prefix: str, stored: Mapping[str, Any]
) -> dict[str, tuple[SteppedParam, str]]:
    """Return the keys of states that this rank reads, with (parameter, state name) tuples. Owners read whole states."""
    by_start = {f"{prefix}{STATE}.{member.name}": member for member in members}
    ignored = [member for member in members if member.number is None]
    by_start |= {f"{contents.rank_prefix}.{OPTIM}.{STATE}.{member.name}": member for member in ignored}
    states = {}
    for key in stored:
        start, dot, name = key.rpartition(".")
        while dot and start not in by_start:  # state names of other tools may contain dots
            start, dot, part = start.rpartition(".")
            name = f"{part}.{name}"
        if dot and by_start[start].owner in (None, contents.replica_rank):
            states[key] = by_start[start], name
    return states


def _parts(states: Mapping[str, tuple[SteppedParam, str]], stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters of the states that are sharded like their parameter, by state key."""
    param_shaped = {
        name for key, (member, name) in states.items() if _has_shape(stored[key], member) and member.tensor.ndim
    }
    parts = {}
    for key, (member, name) in states.items():
        entry = stored[key]
        if member.owner is not None or not isinstance(entry, TensorStorageMetadata):
            continue
        # A state with one element may be a step count, even if its parameter has one element, too.
        if _has_shape(entry, member) and name in param_shaped:
            parts[key] = member.tensor
        elif is_cut(member.tensor) and entry.size.numel() != 1:
            raise ValueError(
                f"{key} cannot be cut into rows: its shape is {tuple(entry.size)}, the parameter's is "
                f"{tuple(member.tensor.shape)}; load it into an optimizer made by tz.whole, or where the parameter is "
                f"replicated (stage 0)"
            )
    return parts


def groups_of(values: Mapping[str, Any], names: Iterable[Sequence[str]] = ()) -> list[Group]:
    """Build an optimizer's parameter groups from hyper-parameters, keyed by ``"<group>.<name>"``.

    With torch's ``flatten_optimizer_state_dict``, keys are ``"<parameter>.<name>"``, which needs the ``names`` of each
    group's parameters.
    """
    groups: dict[int, Group] = {}
    by_param: dict[str, Group] = {name: {} for name in chain(*names)}
    for key, value in values.items():
        number, _, name = key.partition(".")
        param, _, option = key.rpartition(".")
        if param in by_param:
            by_param[param][option] = value
        elif number.isdecimal() and (
            name != "params" or (isinstance(value, list) and all(isinstance(param, str) for param in value))
        ):
            groups.setdefault(int(number), {})[name] = value
        else:
            raise ValueError(f"the optimizer's parameter groups are damaged: {key!r} is {value!r}; {USE_ANOTHER}")
    return [groups[number] for number in sorted(groups)] or [_merge_group(members, by_param) for members in names]


def _merge_group(names: Sequence[str], by_param: Mapping[str, Group]) -> Group:
    """Return the hyper-parameters of a group, whose parameters must have equal hyper-parameters."""
    known = [name for name in names if by_param[name]]
    for name in known:
        expected, options = by_param[known[0]], by_param[name]
        if expected.keys() != options.keys() or any(
            not torch.as_tensor(value == options[key]).all() for key, value in expected.items()
        ):
            raise ValueError(
                f"parameters {known[0]!r} and {name!r} are in one group of this optimizer, and had other "
                f"hyper-parameters in the checkpoint; {AS_SAVED}"
            )
    return {**(by_param[known[0]] if known else {}), "params": known}


def _require_groups(saved: Sequence[Mapping[str, Any]], names_of_groups: Sequence[Sequence[str]]) -> None:
    if len(saved) != len(names_of_groups):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has {len(names_of_groups)}; "
            f"{AS_SAVED}"
        )
    for number, (group, names) in enumerate(zip(saved, names_of_groups, strict=True)):
        label = f"parameter group {number} of the checkpoint's optimizer"
        if "params" not in group:
            raise ValueError(f"{label} lists no parameters; {USE_ANOTHER}")
        require_same_names(f"{label} has other parameters", group["params"], names, AS_SAVED)


def _has_shape(entry: Any, member: SteppedParam) -> bool:
    return isinstance(entry, TensorStorageMetadata) and entry.size == member.tensor.shape


def _as_state(value: Any, member: SteppedParam, is_like_param: bool) -> Any:
    """Return a state in the optimizer's form: a DTensor if the state is sharded or has several elements."""
    param, is_whole = member.tensor, member.owner is not None or not isinstance(value, Tensor)
    if is_whole or not isinstance(param, DTensor) or (value.numel() == 1 and not is_like_param):
        return value
    return dtensor_like(value.to(local(param).device), param, param.shape if is_like_param else value.shape)
