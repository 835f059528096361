"""State dicts of a sharded model and its optimizers as FSDP2's have them: DTensors, or full tensors, by name.

The model's part of ``thunder_zero.state_dict``; nothing here knows Thunder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from thunder_zero.plan import Param
from thunder_zero.runtime import agree
from thunder_zero.runtime.agree import all_or_none
from thunder_zero.runtime.contents import GROUPS, STATE, Held, Named, names_of, require_groups
from thunder_zero.runtime.optimizers import parameters_of
from thunder_zero.runtime.peers import told_by_rank_0
from thunder_zero.runtime.shards import own_rows, real_rows
from thunder_zero.runtime.state import State

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def keeps(held: Held, options: StateDictOptions) -> bool:
    """Whether this rank keeps a state dict: as with torch's, full ones on the CPU are rank 0's alone."""
    return not (options.full_state_dict and options.cpu_offload and held.rank != 0)


def value_of(state: State, held: Held, param: Param, shard: Tensor, options: StateDictOptions) -> Tensor:
    """A parameter, or a state of it, as a DTensor without padding or in full; a collective if it is full."""
    shard = shard.detach()
    if options.full_state_dict:
        value = state.gather_now(param, shard)
        if not keeps(held, options):
            return value.new_empty(0)
    elif param.sharded:
        mesh = DeviceMesh.from_group(state.ranks.inside, state.device.type)
        stride = torch.empty(param.shape, device="meta").stride()
        shape = torch.Size(param.shape)
        rows = real_rows(shard, param, held.plan)
        value = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    else:
        value = shard
    return value.cpu() if options.cpu_offload else value


@torch.no_grad()
def model_state_dict(state: State, held: Held, names: Iterable[str], options: StateDictOptions) -> dict[str, Any]:
    """What these names of the plain module's state dict are."""
    found: dict[str, Any] = {}
    made: dict[str, Tensor] = {}  # by path: a tied parameter is gathered once
    for name in names:
        param = held.plan.by_name.get(name)
        if param is not None:
            if options.ignore_frozen_params and not param.requires_grad:
                continue
            if param.path not in made:
                made[param.path] = value_of(state, held, param, held.shards[param.path], options)
            found[name] = made[param.path]
        elif name in held.states:
            found[name] = held.states[name]
        else:
            value = {**held.ignored, **held.buffers}[name].detach()
            if options.full_state_dict:
                value = value.clone()
            found[name] = value.cpu() if options.cpu_offload else value
    return found if keeps(held, options) else {}


def all_names(held: Held, optimizers: Sequence[Optimizer]) -> list[list[Named]]:
    """The parameters of each group of all optimizers, one after the other."""
    return [group for optimizer in optimizers for group in names_of(held, optimizer)]


def make_states(optimizer: Optimizer) -> None:
    """Let an optimizer that never stepped make its state, as torch's functions do, so that there is something to load
    into: a step with gradients of zero and a learning rate of zero.

    Raises:
        RuntimeError: it never stepped, and there are gradients.
    """
    if optimizer.state:
        return
    params = parameters_of(optimizer)
    if any(param.grad is not None for param in params):
        raise RuntimeError("the optimizer has no state yet, and there are gradients; call this before backward")
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for param in params:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
        optimizer.step(closure=None)
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def optimizer_state_dict(
    state: State, held: Held, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """State by parameter name, and groups with names; or flattened.

    Raises:
        ValueError: a parameter that is none of the model's.
    """
    states: dict[str, dict[str, Any]] = {}
    groups = []
    for optimizer in optimizers:
        for group, members in zip(optimizer.param_groups, names_of(held, optimizer), strict=True):
            groups.append({**group, "params": [named.name for named in members]})
            for named in members:
                values = optimizer.state.get(named.tensor)
                if values:
                    states[named.name] = {
                        key: _state_value(state, held, named.param, value, options) for key, value in values.items()
                    }
    if not keeps(held, options):
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


def nested(flat: Mapping[str, Any], groups: Sequence[Sequence[str]], path_of: Callable[[str], str]) -> dict[str, Any]:
    """What ``flattened`` made, for an optimizer with these groups of paths.

    Raises:
        ValueError: something else; nothing of a parameter; parameters of one group that had different values.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {STATE: {}, GROUPS: {}}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if kind not in found:
            raise ValueError(f"{path!r} in the state dict is neither {STATE!r} nor {GROUPS!r}; give an optimizer's")
        found[kind].setdefault(path_of(name), {})[key] = value
    saved = []
    for names in groups:
        for name in names:
            if name not in found[GROUPS]:
                raise ValueError(f"the state dict has no {GROUPS} of parameter {name!r}; give one of this optimizer")
            if found[GROUPS][name] != found[GROUPS][names[0]]:
                raise ValueError(
                    f"parameters {names[0]!r} and {name!r} are in one group of this optimizer, and the state dict has "
                    f"{found[GROUPS][names[0]]} and {found[GROUPS][name]} for them; build it as when it was saved"
                )
        saved.append({**(found[GROUPS][names[0]] if names else {}), "params": list(names)})
    return {STATE: found[STATE], GROUPS: saved}


def _state_value(state: State, held: Held, param: Param | None, value: Any, options: StateDictOptions) -> Any:
    if not isinstance(value, Tensor):
        return value
    if param is not None and param.sharded and tuple(value.shape) == held.plan.shard_shape(param):
        return value_of(state, held, param, value, options)
    return value.detach().cpu() if options.cpu_offload else value.detach()


# The other way


def rows_from(state: State, held: Held, param: Param, value: Tensor) -> Tensor:
    """This rank's rows, padded, of what a state dict has: a full tensor, or a DTensor, which may be a collective."""
    if not isinstance(value, DTensor):
        return own_rows(value, param, held.plan)
    ranks = dist.get_process_group_ranks(state.ranks.inside)
    if param.sharded and value.placements == (Shard(0),) and value.device_mesh.mesh.tolist() == ranks:
        local = value.to_local()
        padded = local.new_zeros(held.plan.shard_shape(param))
        padded[: len(local)] = local
        return padded
    return own_rows(value.full_tensor(), param, held.plan)


def from_rank_0(state: State, param: Param, value: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rank 0's full tensor on every rank; a collective."""
    full = torch.empty(param.shape, dtype=dtype, device=state.device)
    if value is not None and state.group.rank() == 0:
        full.copy_(value)
    agree.broadcast(full, 0, state.group, state.device)
    return full


def require_values(held: Held, values: Mapping[str, Any], names: Sequence[str], strict: bool) -> None:
    """Raise unless a state dict is of this model.

    Raises:
        RuntimeError: ``strict``, and names that are missing or not known.
        ValueError: another shape.
    """
    missing, unknown = [name for name in names if name not in values], sorted(values.keys() - set(names))
    if strict and (missing or unknown):
        raise RuntimeError(
            f"the state dict lacks {missing or 'nothing'} and has {unknown or 'nothing'} that the model does not know; "
            f"set strict=False to take what fits"
        )
    for name in set(names) & values.keys():
        tensor = held.plan.by_name.get(name) or held.buffers.get(name)
        shape = None if tensor is None else tuple(tensor.shape)
        if shape is not None and tuple(values[name].shape) != shape:
            raise ValueError(f"{name!r} has shape {tuple(values[name].shape)} in the state dict; it is {shape}")


@torch.no_grad()
def load_model(
    state: State, held: Held, values: Mapping[str, Any], names: Sequence[str], options: StateDictOptions
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Put a state dict into shards and buffers; what is missing, what is unknown, and the modules' own states.

    Raises:
        RuntimeError: names differ, and ``options.strict``; another rank refused.
        ValueError: another shape.
    """
    told: Any = None
    with all_or_none(state.group, "to load"):
        if not options.broadcast_from_rank0 or held.rank == 0:
            require_values(held, values, names, options.strict)
        states = {name: values[name] for name in held.states if name in values}
        told = list(values), states
    if options.broadcast_from_rank0:
        told = told_by_rank_0(told, state.group)
    has, states = told
    pairs: list[tuple[Tensor, Tensor]] = []
    done = set()
    for name in (name for name in names if name in has and name not in held.states):
        param = held.plan.by_name.get(name)
        if param is not None and param.path not in done:
            done.add(param.path)
            shard, value = held.shards[param.path], values.get(name)
            if options.broadcast_from_rank0:
                value = from_rank_0(state, param, value, shard.dtype)
            pairs.append((shard, rows_from(state, held, param, value)))  # type: ignore[arg-type]
        elif param is None:
            target = {**held.ignored, **held.buffers}[name]
            value = target.detach().clone()
            if name in values:
                value.copy_(values[name])
            if options.broadcast_from_rank0:
                agree.broadcast(value, 0, state.group, state.device)
            pairs.append((target, value))
    for target, value in pairs:
        target.copy_(value)
    return [name for name in names if name not in has], [name for name in has if name not in names], states


@torch.no_grad()
def load_optimizers(
    state: State, held: Held, optimizers: Sequence[Optimizer], values: Mapping[str, Any], options: StateDictOptions
) -> None:
    """Put a state dict into optimizers.

    Raises:
        ValueError: other parameters, or states of another shape.
        RuntimeError: another rank refused.
    """
    groups = all_names(held, optimizers)
    saved: list[dict[str, Any]] = []
    states: dict[str, Mapping[str, Any]] = {}
    told: dict[str, dict[str, Any]] = {}
    with all_or_none(state.group, "to load"):
        if not options.broadcast_from_rank0 or held.rank == 0:
            saved, states = by_path(held, values, [[named.name for named in group] for group in groups])
            told = {name: {key: _told(held, name, value) for key, value in of.items()} for name, of in states.items()}
    if options.broadcast_from_rank0:
        saved, told = told_by_rank_0((saved, told), state.group)
    loaded = {
        name: {key: _own(state, held, name, value, states.get(name, {}).get(key), options) for key, value in of.items()}
        for name, of in told.items()
    }
    with agree.restored(optimizers) as before:
        with all_or_none(state.group, "to load"):
            for optimizer in optimizers:
                of_this = [saved.pop(0) for _ in optimizer.param_groups]
                optimizer.load_state_dict(_packed(of_this, names_of(held, optimizer), loaded))
        before.pop_all()


def by_path(
    held: Held, values: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any]]]:
    """Groups and states of an optimizer's state dict, flattened or not, by parameters' first names.

    Raises:
        ValueError: of other groups of parameters.
    """

    def path_of(name: str) -> str:
        param = held.plan.by_name.get(name)
        return name if param is None else param.path

    if not {STATE, GROUPS} & values.keys():
        values = nested(values, groups, path_of)
    saved = [{**group, "params": list(map(path_of, group["params"]))} for group in values.get(GROUPS, ())]
    require_groups(saved, groups)
    return saved, {path_of(name): of for name, of in values[STATE].items()}


def _own(state: State, held: Held, name: str, told: Any, value: Tensor | None, options: StateDictOptions) -> Any:
    """What this rank has of one state, in memory of its own, which the optimizer steps in place."""
    if not isinstance(told, Full):
        return told.clone() if isinstance(told, Tensor) else told
    param = held.plan.by_name[name]
    if options.broadcast_from_rank0:
        value = from_rank_0(state, param, value, told.dtype)
    rows = rows_from(state, held, param, value)  # type: ignore[arg-type]
    return rows if param.sharded else rows.clone()


class Full:
    """Stands for a tensor of a parameter's shape, which does not travel with the others."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _told(held: Held, name: str, value: Any) -> Any:
    param = held.plan.by_name.get(name)
    if not isinstance(value, Tensor) or param is None:
        return value
    if tuple(value.shape) == param.shape:
        return Full(value.dtype)
    if param.sharded and value.numel() != 1:
        raise ValueError(
            f"a state of parameter {name!r} has shape {tuple(value.shape)} in the state dict; the parameter is "
            f"{param.shape}"
        )
    return value.full_tensor() if isinstance(value, DTensor) else value


def _packed(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Named]], states: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    names = [named.name for group in groups for named in group]
    at = {name: number for number, name in enumerate(names)}
    packed = [
        {**group, "params": [at[named.name] for named in members]} for group, members in zip(saved, groups, strict=True)
    ]
    return {STATE: {at[name]: dict(states[name]) for name in names if name in states}, GROUPS: packed}
