"""State dicts of a sharded model as FSDP2's have them: DTensors, or full tensors, by name; what is read of them is
written all together, or not at all.

With ``optimizer_state.py`` what ``thunder_zero.state_dict`` is made of; nothing here knows Thunder.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thunder_zero.comm import agree
from thunder_zero.comm.agree import Fact, all_or_none
from thunder_zero.comm.peers import broadcast_object_from_rank_0
from thunder_zero.plan import Param
from thunder_zero.rows import own_rows, real_rows
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.all_or_nothing import OwnState, Pending
from thunder_zero.state_dict.contents import ModelContents

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def keeps(state: State, options: StateDictOptions) -> bool:
    """Whether this rank keeps a state dict: as with torch's, full ones on the CPU are rank 0's alone."""
    return not (options.full_state_dict and options.cpu_offload and state.group.rank() != 0)


def rows_value(state: State, param: Param, rows: Tensor, options: StateDictOptions) -> Tensor:
    """A parameter, or a state of it, as a DTensor without padding or in full; a collective if it is full."""
    rows = rows.detach()
    if options.full_state_dict:
        value = state.gather_now(param, rows)
        if not keeps(state, options):
            return value.new_empty(0)
    elif param.sharded:
        mesh = DeviceMesh.from_group(state.ranks.inside, state.device.type)
        stride = torch.empty(param.shape, device="meta").stride()
        shape = torch.Size(param.shape)
        rows = real_rows(rows, param, state.plan)
        value = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    else:
        value = rows
    return value.cpu() if options.cpu_offload else value


def whole_value(value: Any, options: StateDictOptions) -> Any:
    """What each rank has all of, as it stands in a state dict: a copy in a full one, otherwise a view."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().clone() if options.full_state_dict else value.detach()
    return value.cpu() if options.cpu_offload else value


@torch.no_grad()
def model_state_dict(state: State, held: ModelContents, options: StateDictOptions) -> dict[str, Any]:
    """The plain module's state dict, with what is in the model; what hooks add to it stays as it is."""
    whole = {**held.ignored, **held.buffers, **held.states}
    frozen = {name for name, param in held.plan.by_name.items() if not param.requires_grad}
    frozen |= {name for name, tensor in held.ignored.items() if not tensor.requires_grad}
    found: dict[str, Any] = {}
    made: dict[str, Tensor] = {}  # by path: a tied parameter is gathered once
    for name, plain in held.plain.items():
        if options.ignore_frozen_params and name in frozen:
            continue
        param = held.plan.by_name.get(name)
        if param is None:
            found[name] = whole_value(whole.get(name, plain), options)
            continue
        if param.path not in made:
            made[param.path] = rows_value(state, param, held.shards[param.path], options)
        found[name] = made[param.path]
    return found if keeps(state, options) else {}


# The other way


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the model that a state dict has a value for: a shard of a parameter, or one that each rank has."""

    tensor: Tensor
    param: Param | None

    @property
    def shape(self) -> tuple[int, ...]:
        """What the value's shape is in a state dict."""
        return tuple(self.tensor.shape) if self.param is None else self.param.shape


def counts(state: State, options: StateDictOptions) -> bool:
    """Whether what this rank was given is read: rank 0's alone, if that is sent to all."""
    return not options.broadcast_from_rank0 or state.group.rank() == 0


@torch.no_grad()
def values_for_model(
    state: State, held: ModelContents, module: nn.Module, values: Mapping[str, Any], options: StateDictOptions
) -> tuple[list[str], list[str], Pending]:
    """What is missing in a state dict, what is unknown, and the rest for this rank; a collective.

    Args:
        state: the model's state.
        held: what this rank holds of the model.
        module: the plain module, whose submodules take states of their own.
        values: by name.
        options: whose they are, and whether names may differ.

    Raises:
        RuntimeError: names differ, and ``options.strict``; another rank refused.
        ValueError: no tensor, another shape, or what cannot be copied.
    """
    names, targets = list(held.plain), targets_of(held)
    values = values if counts(state, options) else {}
    told: Any = None
    with all_or_none(state.group, "to load"):
        if counts(state, options):
            require_values(state, values, names, targets, options)
        told = as_sent((list(values), {name: values[name] for name in held.states if name in values}), options)
    has, extras = of_rank_0(state, told, options)
    if not options.broadcast_from_rank0:
        gathers = {name: must_gather(state, values.get(name), target.param) for name, target in targets.items()}
        require_same_gathers(state, gathers)
    tensors = [
        (target.tensor, received(state, target.param, values.get(name), target.shape, target.tensor.dtype, options))
        for name, target in _once(names, has, targets)
    ]
    owners = {name: OwnState(module.get_submodule(name.rpartition(".")[0])) for name in extras}
    states = [(owner, partial(owner.load_state_dict, extras[name])) for name, owner in owners.items()]
    there, known = set(has), set(names)
    missing, unknown = [name for name in names if name not in there], [name for name in has if name not in known]
    return missing, unknown, Pending(tensors, states)


def targets_of(held: ModelContents) -> dict[str, Target]:
    """Everything that tensors of a state dict go into, by each of its names."""
    shards = {name: Target(held.shards[param.path], param) for name, param in held.plan.by_name.items()}
    return {**shards, **{name: Target(tensor, None) for name, tensor in {**held.ignored, **held.buffers}.items()}}


def _once(names: Iterable[str], has: Iterable[str], targets: Mapping[str, Target]) -> list[tuple[str, Target]]:
    """What a state dict has a value for, by the first name there: a tied parameter once."""
    there, found = set(has), dict[int, tuple[str, Target]]()
    for name in names:
        if name in there and name in targets:
            found.setdefault(id(targets[name].tensor), (name, targets[name]))
    return list(found.values())


def require_values(
    state: State,
    values: Mapping[str, Any],
    names: Sequence[str],
    targets: Mapping[str, Target],
    options: StateDictOptions,
) -> None:
    """Raise unless a state dict is of this model.

    Raises:
        RuntimeError: ``options.strict``, and names that are missing or not known.
        ValueError: no tensor, another shape, or what cannot be copied.
    """
    missing, unknown = [name for name in names if name not in values], sorted(values.keys() - set(names))
    if options.strict and (missing or unknown):
        raise RuntimeError(
            f"the state dict lacks {missing or 'nothing'} and has {unknown or 'nothing'} that the model does not know; "
            f"set strict=False to take what fits"
        )
    for name in names:
        if name in values and name in targets:
            require_tensor(
                repr(name), values[name], targets[name].shape, targets[name].tensor.dtype, state.device, options
            )
    first: dict[int, str] = {}
    for name in filter(targets.__contains__, values):
        other = first.setdefault(id(targets[name].tensor), name)
        if other != name and not same_values(values[other], values[name]):
            raise ValueError(f"{other!r} and {name!r} differ in the state dict, and are tied in the model")


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a state dict are equal, as far as this rank has them."""
    mine, its = (value.to_local() if isinstance(value, DTensor) else value for value in (one, other))
    return mine is its or (mine.shape == its.shape and torch.equal(mine.cpu(), its.cpu()))


def require_tensor(
    what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, options: StateDictOptions
) -> None:
    """Raise unless a value of a state dict can be put where it belongs: later on, other ranks would wait for this one.

    Raises:
        ValueError: no tensor; another shape; a DTensor that rank 0 alone would have to gather; a tensor that cannot
            be copied to this device or dtype.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is a {type(value).__name__} in the state dict; it is a tensor of shape {shape}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{what} has shape {tuple(value.shape)} in the state dict; it is {shape}")
    if isinstance(value, DTensor) and options.broadcast_from_rank0:
        raise ValueError(
            f"{what} is a DTensor in the state dict, and rank 0 cannot send one; load it on all ranks, without "
            f"broadcast_from_rank0"
        )
    local = value.to_local() if isinstance(value, DTensor) else value.detach()
    try:
        first = local[(slice(0, 1),) * local.ndim]
        torch.empty(first.shape, dtype=dtype, device=device).copy_(first)
    except Exception as error:
        raise ValueError(f"{what} of the state dict cannot be copied to {device} as {dtype}: {error}") from error


def as_sent(value: Any, options: StateDictOptions) -> Any:
    """What a rank has to tell; as bytes, if rank 0's are sent.

    Raises:
        ValueError: it cannot be sent, which must be known before other ranks wait for it.
    """
    if not options.broadcast_from_rank0:
        return value
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise ValueError(
            f"the state dict has something that rank 0 cannot send ({error}); give numbers, strings, tensors, and "
            f"dicts and lists of them, or load it on all ranks, without broadcast_from_rank0"
        ) from error
    return stream.getvalue()


def of_rank_0(state: State, told: Any, options: StateDictOptions) -> Any:
    """What ``as_sent`` was given here, or on rank 0 with its tensors on the CPU, for none is on that rank's device; a
    small collective then."""
    if not options.broadcast_from_rank0:
        return told
    return torch.load(
        io.BytesIO(broadcast_object_from_rank_0(told, state.group)), weights_only=False, map_location="cpu"
    )


def require_same_gathers(state: State, gathers: Mapping[str, object]) -> None:
    """Raise on every rank unless all ranks have to gather the same of a state dict, as told by name; a collective.

    Raises:
        RuntimeError: some ranks would wait for others.
    """
    remedy = "give every rank its part of the same state dict"
    lines = [
        Fact(f"what of {name!r} in the state dict must be gathered", repr(what), remedy)
        for name, what in gathers.items()
    ]
    agree.require_same(lines, state.group)


def must_gather(state: State, value: Any, param: Param | None) -> bool:
    """Whether a value of a state dict is a DTensor whose rows are not this rank's, of a parameter if it is one's."""
    if not isinstance(value, DTensor):
        return False
    ranks = dist.get_process_group_ranks(state.ranks.inside)
    ours = param is not None and param.sharded and value.placements == (Shard(0),)
    return not (ours and value.device_mesh.mesh.tolist() == ranks)


def received(
    state: State,
    param: Param | None,
    value: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    options: StateDictOptions,
) -> Tensor:
    """This rank's rows, padded, of what a state dict has, or all of it; a collective where it is rank 0's, or a DTensor
    of another layout."""
    if options.broadcast_from_rank0:
        full = torch.empty(shape, dtype=dtype, device=state.device)
        if state.group.rank() == 0:
            assert value is not None, "it was required"
            full.copy_(value)
        agree.broadcast(full, 0, state.group, state.device)
        return _rows(state, param, full)
    assert value is not None
    if not isinstance(value, DTensor):
        return _rows(state, param, value)
    if must_gather(state, value, param):
        return _rows(state, param, value.full_tensor())
    assert param is not None
    local = value.to_local()
    padded = local.new_zeros(state.plan.shard_shape(param))
    padded[: len(local)] = local
    return padded


def _rows(state: State, param: Param | None, full: Tensor) -> Tensor:
    return full if param is None else own_rows(full, param, state.plan)
