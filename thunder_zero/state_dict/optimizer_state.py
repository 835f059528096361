"""State dicts of a sharded model's optimizers as FSDP2's have them: by parameter names, flattened if asked for.

With ``model_state.py`` what ``thunder_zero.state_dict`` is made of; nothing here knows Thunder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thunder_zero.comm import agree
from thunder_zero.comm.agree import all_or_none
from thunder_zero.plan import Param
from thunder_zero.runtime.optimizers import load_state, parameters_of, state_is_full, state_is_rows
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.all_or_nothing import Pending
from thunder_zero.state_dict.contents import (
    GROUPS,
    STATE,
    ModelContents,
    Named,
    all_names,
    names_of,
    packed,
    state_lines,
    states_of,
)
from thunder_zero.state_dict.model_state import (
    as_sent,
    counts,
    keeps,
    must_gather,
    of_rank_0,
    received,
    require_same_gathers,
    require_tensor,
    rows_value,
    whole_value,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def make_states(optimizer: Optimizer) -> None:
    """Let an optimizer that never stepped make its state, as torch's functions do, so that there is something to load
    into: a step with gradients of zero and a learning rate of zero. With gradients it is as it is: it may be one that
    never has a state, and they are to be stepped."""
    params = parameters_of(optimizer)
    if optimizer.state or any(param.grad is not None for param in params):
        return
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for param in params:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
        optimizer.step(closure=None)
    finally:
        for group, rate in rates:
            group["lr"] = rate  # the very tensor, if it is one: a scheduler may hold it
        optimizer.zero_grad(set_to_none=True)


def state_value(state: State, param: Param | None, key: str, value: Any, options: StateDictOptions) -> Any:
    """One state as it stands in a state dict; a collective if it is rows, and ``options`` ask for a full one.

    Raises:
        ValueError: it cannot be put together.
    """
    if param is not None and state_is_rows(key, value, param, state.plan):
        return rows_value(state, param, value, options)
    return whole_value(value, options)


@torch.no_grad()
def optimizers_state_dict(
    state: State, held: ModelContents, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """State by parameter name, and groups with names; or flattened. Nothing of no optimizer. A collective.

    Raises:
        ValueError: a parameter that is none of the model's; a state that cannot be put together.
        RuntimeError: another rank refused; an optimizer has other states there.
    """
    if not optimizers:
        return {}
    with all_or_none(state.group, "the optimizer"):
        all_names(held, optimizers)  # refused before any steps
        for optimizer in optimizers:
            make_states(optimizer)
        of_all = states_of(held, optimizers)
        lines = state_lines(held, optimizers)
    agree.require_same(lines, state.group)
    states = {
        named.name: {key: state_value(state, named.param, key, value, options) for key, value in values.items()}
        for named, values in of_all
        if values
    }
    groups = [
        {key: whole_value(value, options) for key, value in group.items()}
        | {"params": [named.name for named in members]}
        for optimizer in optimizers
        for group, members in zip(optimizer.param_groups, names_of(held, optimizer), strict=True)
    ]
    if not keeps(state, options):
        return {}
    return flattened(states, groups) if options.flatten_optimizer_state_dict else {STATE: states, GROUPS: groups}


def flattened(states: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """As torch flattens it: ``"state.0.weight.exp_avg"``, and each group's values once for each of its parameters,
    ``"param_groups.0.weight.lr"``; so parts of a model that several optimizers step lie side by side."""
    flat = {f"{STATE}.{name}.{key}": value for name, of in states.items() for key, value in of.items()}
    for group in groups:
        values = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"{GROUPS}.{name}.{key}": value for name in group["params"] for key, value in values.items()}
    return flat


# The other way


class Full:
    """Stands for a tensor of a parameter's shape, which does not travel with the others."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@torch.no_grad()
def values_for_optimizers(
    state: State,
    held: ModelContents,
    optimizers: Sequence[Optimizer],
    values: Mapping[str, Any],
    options: StateDictOptions,
) -> Pending:
    """What a state dict has for optimizers; it may have more. A collective.

    Raises:
        ValueError: it lacks groups of their parameters, or one group had several; a state of another shape.
        RuntimeError: it lacks states of them, and ``options.strict``; another rank refused.
    """
    groups: list[dict[str, Any]] = []
    states: dict[str, Mapping[str, Any]] = {}
    told: dict[str, dict[str, Any]] = {}
    sent: Any = None
    with all_or_none(state.group, "to load"):
        members = {named.name: named for named, _ in states_of(held, optimizers)}
        if counts(state, options):
            by_name, states = by_parameter(held, values, members)
            for optimizer in optimizers:
                groups += groups_for(optimizer, names_of(held, optimizer), by_name)
                if options.strict:
                    require_states(names_of(held, optimizer), states)
            told = {name: _told(state, members[name], of, options) for name, of in states.items()}
        sent = as_sent((groups, told), options)
    groups, told = of_rank_0(state, sent, options)
    if not options.broadcast_from_rank0:
        shared = [named for named in members.values() if named.param is not None]
        gathers = {named.name: _gathered(state, named, states.get(named.name, {})) for named in shared}
        require_same_gathers(state, gathers)
    loaded = {
        name: {key: _own(state, members[name], was, states.get(name, {}).get(key), options) for key, was in of.items()}
        for name, of in told.items()
    }
    pending = []
    for optimizer in optimizers:
        mine, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
        saved = packed(mine, names_of(held, optimizer), loaded)
        pending.append((optimizer, partial(load_state, optimizer, saved)))
    return Pending([], pending)


def by_parameter(
    held: ModelContents, values: Mapping[str, Any], wanted: Collection[str]
) -> tuple[Mapping[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Hyper-parameters and states of these parameters in a state dict, flattened or not, by their first names.

    Raises:
        ValueError: it is none of an optimizer.
    """

    def path_of(name: str) -> str:
        param = held.plan.by_name.get(name)
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
            f"the state dict has no {GROUPS}, so it is of no optimizer; give what get_optimizer_state_dict returned"
        )
    return by_name, {path: of for name, of in states.items() if (path := path_of(name)) in wanted}


def nested(
    flat: Mapping[str, Any], path_of: Callable[[str], str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Hyper-parameters and states by parameter out of what ``flattened`` made.

    Raises:
        ValueError: something else.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {STATE: {}, GROUPS: {}}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if kind not in found:
            raise ValueError(f"{path!r} in the state dict is neither {STATE!r} nor {GROUPS!r}; give an optimizer's")
        found[kind].setdefault(path_of(name), {})[key] = value
    return found[GROUPS], found[STATE]


def groups_for(
    optimizer: Optimizer, members: Sequence[Sequence[Named]], by_name: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """An optimizer's groups, without parameters, with the hyper-parameters that these had when they were saved.

    Raises:
        ValueError: there are none of a parameter; parameters of one group had different ones.
    """
    found: list[dict[str, Any]] = []
    for group, names in zip(optimizer.param_groups, ([named.name for named in of] for of in members), strict=True):
        for name in names:
            if name not in by_name:
                raise ValueError(f"the state dict has no {GROUPS} of parameter {name!r}; give one of this optimizer")
            one, other = by_name[names[0]], by_name[name]
            if key := _differing(one, other):
                raise ValueError(
                    f"parameters {names[0]!r} and {name!r} are in one group of this optimizer, and the state dict has "
                    f"{key}={one.get(key)} and {other.get(key)} for them; build it as when it was saved"
                )
        saved = by_name[names[0]] if names else group  # an empty group stays as it is: no name leads to another
        found.append({key: value for key, value in saved.items() if key != "params"})
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first hyper-parameter, which may be a tensor, that two parameters did not have alike."""
    if one is other:  # they were in one group
        return None
    keys = sorted((one.keys() | other.keys()) - {"params"})
    return next((key for key in keys if not torch.as_tensor(one.get(key) == other.get(key)).all()), None)


def require_states(groups: Iterable[Iterable[Named]], states: Mapping[str, Any]) -> None:
    """Raise unless a state dict has a state of each parameter that an optimizer trains, or of none.

    Raises:
        RuntimeError: naming the first that it lacks.
    """
    trained = [named.name for group in groups for named in group if named.tensor.requires_grad]
    if any(name in states for name in trained):
        for name in trained:
            if name not in states:
                raise RuntimeError(
                    f"the state dict has no state of parameter {name!r}, which this optimizer trains; set strict=False "
                    f"to begin it anew"
                )


def _told(state: State, named: Named, values: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """The states of a parameter as all ranks learn of them."""
    told: dict[str, Any] = {}
    for key, value in values.items():
        full = named.param is not None and state_is_full(key, value, named.param)
        if isinstance(value, Tensor):
            what = f"the optimizer's {key!r} of parameter {named.name!r}"
            require_tensor(what, value, tuple(value.shape), value.dtype, state.device, options)
        told[key] = Full(value.dtype) if full else value
    return told


def _gathered(state: State, named: Named, values: Mapping[str, Any]) -> list[str]:
    """Which states of a parameter are DTensors that must be gathered."""
    assert named.param is not None
    rows = {key: named.param if state_is_full(key, value, named.param) else None for key, value in values.items()}
    return [key for key, value in values.items() if must_gather(state, value, rows[key])]


def _own(state: State, named: Named, told: Any, value: Tensor | None, options: StateDictOptions) -> Any:
    """What this rank has of one state, in memory of its own, which the optimizer steps in place."""
    if isinstance(told, Full):
        assert named.param is not None
        rows = received(state, named.param, value, named.param.shape, told.dtype, options)
        return rows if named.param.sharded else rows.clone()
    if isinstance(told, DTensor) and named.param is not None:
        return told.full_tensor()
    return told.clone() if isinstance(told, Tensor) else told
