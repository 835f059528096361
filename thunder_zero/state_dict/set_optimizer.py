"""Reads a state dict for a sharded model's optimizers: checks it, and finds this rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.small_collectives import full_tensor
from thunder_zero.runtime.optimizers import load_state, state_is_full
from thunder_zero.state_dict.all_or_nothing import ValuesToWrite
from thunder_zero.state_dict.contents import (
    GROUPS,
    STATE,
    ModelContents,
    Named,
    group_facts,
    named_groups,
    named_states,
    numbered_state_dict,
)
from thunder_zero.state_dict.source import StateDictSource


@dataclass(frozen=True, slots=True)
class Full:
    """Replaces a full state, to be cut into rows or owned by one rank, in what ranks exchange: its tensor is sent or
    read by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def values_for_optimizers(
    contents: ModelContents,
    optimizers: Sequence[Optimizer],
    values: Mapping[str, Any],
    source: StateDictSource,
    *,
    strict: bool,
) -> ValuesToWrite:
    """Read a state dict for optimizers on this rank, and write nothing yet; it may have more. A collective.

    Raises:
        ValueError: no groups of a parameter, or several groups for one of these; a state of another shape.
        RuntimeError: no state of a parameter, and ``strict``; another rank refused; rank 0 sends, and ranks have
            optimizers with other groups.
    """
    groups: list[list[dict[str, Any]]] = []  # by optimizer
    states: dict[str, Mapping[str, Any]] = {}
    outline: dict[str, dict[str, Any]] = {}
    packed: Any = None
    with all_or_none(source.state.group, "to load"):
        members = {named.name: named for named, _ in named_states(contents, optimizers)}
        if source.is_read():
            by_name, states = by_parameter(contents, values, members)
            for optimizer in optimizers:
                groups.append(groups_for(optimizer, named_groups(contents, optimizer), by_name))
                if strict:
                    require_states(named_groups(contents, optimizer), states)
            outline = {name: _outline(members[name], of, source) for name, of in states.items()}
        packed = source.pack((groups, outline))
    source.require_same_groups(group_facts(contents, optimizers))
    groups, outline = source.exchange(packed)
    shared = [named for named in members.values() if named.param is not None]
    gathers = {named.name: _gathered(named, states.get(named.name, {}), source) for named in shared}
    source.require_same_gathers({f"the optimizer's state of {name!r}": keys for name, keys in gathers.items()})
    loaded = {
        name: {key: _loaded(members[name], was, states.get(name, {}).get(key), source) for key, was in of.items()}
        for name, of in outline.items()
    }
    rank = source.state.plan.rank
    loaded = {name: of for name, of in loaded.items() if members[name].owner in (None, rank)}
    states_to_load = []
    for optimizer, saved_groups in zip(optimizers, groups, strict=True):
        saved = numbered_state_dict(saved_groups, named_groups(contents, optimizer), loaded)
        states_to_load.append((optimizer, partial(load_state, optimizer, saved)))
    return ValuesToWrite([], states_to_load)


def by_parameter(
    contents: ModelContents, values: Mapping[str, Any], wanted: Collection[str]
) -> tuple[Mapping[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Groups' values and states of the wanted parameters, by first name, in a state dict that is flattened or not.

    Raises:
        ValueError: not an optimizer's state dict.
    """

    def path_of(name: str) -> str:
        param = contents.plan.by_name.get(name)
        return name if param is None else param.path

    by_name: Mapping[str, Mapping[str, Any]]
    states: Mapping[str, Mapping[str, Any]]
    if {STATE, GROUPS} & values.keys():
        states = values.get(STATE, {})
        by_name = {path_of(name): group for group in values.get(GROUPS, ()) for name in group["params"]}
    else:
        by_name, states = nested(values, path_of)
    if wanted and not by_name:
        raise ValueError(
            f"the state dict is not an optimizer's: it has no {GROUPS}; give the result of get_optimizer_state_dict"
        )
    return by_name, {path: of for name, of in states.items() if (path := path_of(name)) in wanted}


def nested(
    flat: Mapping[str, Any], path_of: Callable[[str], str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Groups' values and states by parameter, from a flattened state dict.

    Raises:
        ValueError: not an optimizer's state dict.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {STATE: {}, GROUPS: {}}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if kind not in found:
            raise ValueError(
                f"the state dict is not an optimizer's: {path!r} begins with neither {STATE!r} nor {GROUPS!r}; give "
                f"the result of get_optimizer_state_dict"
            )
        found[kind].setdefault(path_of(name), {})[key] = value
    return found[GROUPS], found[STATE]


def groups_for(
    optimizer: Optimizer, members: Sequence[Sequence[Named]], by_name: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """An optimizer's groups, without parameters, with the hyper-parameters that were saved for their parameters.

    Raises:
        ValueError: none were saved for a parameter; different ones were saved for parameters of one group.
    """
    found: list[dict[str, Any]] = []
    for group, names in zip(optimizer.param_groups, ([named.name for named in of] for of in members), strict=True):
        for name in names:
            if name not in by_name:
                raise ValueError(
                    f"the state dict has no {GROUPS} for parameter {name!r}; give the state dict of an optimizer that "
                    f"has this parameter"
                )
            one, other = by_name[names[0]], by_name[name]
            if key := _differing(one, other):
                raise ValueError(
                    f"parameters {names[0]!r} and {name!r} are in one group of this optimizer, but the state dict has "
                    f"{key}={one.get(key)} and {other.get(key)} for them; build the optimizer with the groups that "
                    f"were saved"
                )
        saved = by_name[names[0]] if names else group  # no name leads to an empty group: it stays as it is
        found.append({key: value for key, value in saved.items() if key != "params"})
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first hyper-parameter (possibly a tensor) that differs between two groups."""
    if one is other:
        return None
    keys = sorted((one.keys() | other.keys()) - {"params"})
    return next((key for key in keys if not torch.as_tensor(one.get(key) == other.get(key)).all()), None)


def require_states(groups: Iterable[Iterable[Named]], states: Mapping[str, Any]) -> None:
    """Raise unless a state dict has a state for each parameter that an optimizer trains, or for none.

    Raises:
        RuntimeError: naming the first parameter without one.
    """
    trained = [named.name for group in groups for named in group if named.tensor.requires_grad]
    if any(name in states for name in trained):
        for name in trained:
            if name not in states:
                raise RuntimeError(
                    f"the state dict has no state for parameter {name!r}, which this optimizer trains; set "
                    f"strict=False to start its state anew"
                )


def _outline(named: Named, values: Mapping[str, Any], source: StateDictSource) -> dict[str, Any]:
    """A parameter's states as ranks exchange them, without the full tensors."""
    outline: dict[str, Any] = {}
    for key, value in values.items():
        full = named.param is not None and (
            _is_tensor(value) if named.owner is not None else state_is_full(key, value, named.param)
        )
        if isinstance(value, Tensor):
            what = f"the optimizer's {key!r} of parameter {named.name!r}"
            source.require_tensor(what, value, tuple(value.shape), value.dtype)
        outline[key] = Full(tuple(value.shape), value.dtype) if full else value
    return outline


def _is_tensor(value: Any) -> bool:
    """Whether a whole state is a tensor that is sent by itself."""
    return isinstance(value, Tensor) and value.ndim > 0


def _gathered(named: Named, values: Mapping[str, Any], source: StateDictSource) -> list[str]:
    """The states of a parameter that are DTensors that must be gathered."""
    assert named.param is not None
    if named.owner is not None:
        return [key for key, value in values.items() if source.must_gather(value, None)]
    rows = {key: named.param if state_is_full(key, value, named.param) else None for key, value in values.items()}
    return [key for key, value in values.items() if source.must_gather(value, rows[key])]


def _loaded(named: Named, outline: Any, value: Tensor | None, source: StateDictSource) -> Any:
    """This rank's part of one state, in memory of its own: the optimizer changes it in place."""
    if isinstance(outline, Full):
        assert named.param is not None
        param = named.param if named.owner is None else None  # whole states are cut by nobody
        rows = source.rows(value, param, outline.shape, outline.dtype)
        return rows if param is not None and param.sharded else rows.clone()
    if isinstance(outline, DTensor) and named.param is not None:
        return full_tensor(outline, source.state.group)
    return outline.clone() if isinstance(outline, Tensor) else outline
