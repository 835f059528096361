"""State dicts of a sharded model's optimizers, as FSDP2 has them, by parameter names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    all_named_groups,
    named_groups,
    named_states,
    numbered_state_dict,
    state_facts,
)
from thunder_zero.state_dict.model_state import is_returned, rows_value, whole_value
from thunder_zero.state_dict.source import Source

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def make_states(optimizer: Optimizer) -> None:
    """Make the state of an optimizer that never stepped, as torch's functions do, so that there is something to load
    into: one step with zero gradients and a learning rate of zero.

    An optimizer with gradients is left alone: it may be one that never has a state, and its gradients are to be used.
    """
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
            group["lr"] = rate  # the same object: a scheduler may hold the tensor
        optimizer.zero_grad(set_to_none=True)


def state_value(state: State, param: Param | None, key: str, value: Any, options: StateDictOptions) -> Any:
    """The state dict's value of one state; a collective if the state is rows, and the options ask for full tensors.

    Raises:
        ValueError: neither rows nor one number, so that no full state can be made.
    """
    if param is not None and state_is_rows(key, value, param, state.plan):
        return rows_value(state, param, value, options)
    return whole_value(value, options)


@torch.no_grad()
def optimizers_state_dict(
    state: State, contents: ModelContents, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """States by parameter name, and groups with names; or flattened. Empty without optimizers. A collective.

    Raises:
        ValueError: a parameter that is not the model's; a state that is neither rows nor one number.
        RuntimeError: another rank refused, or its optimizer has other states.
    """
    if not optimizers:
        return {}
    with all_or_none(state.group, "the optimizer"):
        all_named_groups(contents, optimizers)  # refuses before any optimizer steps
        for optimizer in optimizers:
            make_states(optimizer)
        of_all = named_states(contents, optimizers)
        facts = state_facts(contents, optimizers)
    agree.require_same(facts, state.group)
    states = {
        named.name: {key: state_value(state, named.param, key, value, options) for key, value in values.items()}
        for named, values in of_all
        if values
    }
    groups = [
        {key: whole_value(value, options) for key, value in group.items()}
        | {"params": [named.name for named in members]}
        for optimizer in optimizers
        for group, members in zip(optimizer.param_groups, named_groups(contents, optimizer), strict=True)
    ]
    if not is_returned(state, options):
        return {}
    return flattened(states, groups) if options.flatten_optimizer_state_dict else {STATE: states, GROUPS: groups}


def flattened(states: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Flatten as torch does: ``"state.0.weight.exp_avg"``, and the group's values once for each of its parameters,
    ``"param_groups.0.weight.lr"``, so that flat state dicts of several optimizers can be merged."""
    flat = {f"{STATE}.{name}.{key}": value for name, of in states.items() for key, value in of.items()}
    for group in groups:
        values = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"{GROUPS}.{name}.{key}": value for name in group["params"] for key, value in values.items()}
    return flat


# Loading


@dataclass(frozen=True, slots=True)
class Full:
    """Replaces a state of the parameter's full shape in what ranks exchange: its tensor is sent or read by itself."""

    dtype: torch.dtype


@torch.no_grad()
def values_for_optimizers(
    contents: ModelContents,
    optimizers: Sequence[Optimizer],
    values: Mapping[str, Any],
    source: Source,
    *,
    strict: bool,
) -> Pending:
    """Read a state dict for optimizers on this rank, and write nothing yet; it may have more. A collective.

    Raises:
        ValueError: no groups of a parameter, or several groups for one of these; a state of another shape.
        RuntimeError: no state of a parameter, and ``strict``; another rank refused.
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
    groups, outline = source.exchange(packed)
    shared = [named for named in members.values() if named.param is not None]
    gathers = {named.name: _gathered(named, states.get(named.name, {}), source) for named in shared}
    source.require_same_gathers({f"the optimizer's state of {name!r}": keys for name, keys in gathers.items()})
    loaded = {
        name: {key: _loaded(members[name], was, states.get(name, {}).get(key), source) for key, was in of.items()}
        for name, of in outline.items()
    }
    pending = []
    for optimizer, saved_groups in zip(optimizers, groups, strict=True):
        saved = numbered_state_dict(saved_groups, named_groups(contents, optimizer), loaded)
        pending.append((optimizer, partial(load_state, optimizer, saved)))
    return Pending([], pending)


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


def _outline(named: Named, values: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """A parameter's states as ranks exchange them, without the full tensors."""
    outline: dict[str, Any] = {}
    for key, value in values.items():
        full = named.param is not None and state_is_full(key, value, named.param)
        if isinstance(value, Tensor):
            what = f"the optimizer's {key!r} of parameter {named.name!r}"
            source.require_tensor(what, value, tuple(value.shape), value.dtype)
        outline[key] = Full(value.dtype) if full else value
    return outline


def _gathered(named: Named, values: Mapping[str, Any], source: Source) -> list[str]:
    """The states of a parameter that are DTensors that must be gathered."""
    assert named.param is not None
    rows = {key: named.param if state_is_full(key, value, named.param) else None for key, value in values.items()}
    return [key for key, value in values.items() if source.must_gather(value, rows[key])]


def _loaded(named: Named, outline: Any, value: Tensor | None, source: Source) -> Any:
    """This rank's part of one state, in memory of its own: the optimizer changes it in place."""
    if isinstance(outline, Full):
        assert named.param is not None
        rows = source.rows(value, named.param, named.param.shape, outline.dtype)
        return rows if named.param.sharded else rows.clone()
    if isinstance(outline, DTensor) and named.param is not None:
        return outline.full_tensor()
    return outline.clone() if isinstance(outline, Tensor) else outline
