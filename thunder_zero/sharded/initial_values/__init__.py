"""Computes the initial values of a plain module's parameters and buffers, before they are sharded.

A module on the meta device has shapes and no values. Its values are drawn as in construction (``drawn.py``), read from
a state dict, or sent by one rank. A module on a real device has its values already. A rank never holds more than its
shards and one module's full parameters. The entry point is :func:`initial_values`, which does not change the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from thunder_zero.comm import agree
from thunder_zero.comm.group import Ranks
from thunder_zero.comm.small_collectives import broadcast
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.stored import Stored
from thunder_zero.safetensors_files import SafetensorsWeights
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.initial_values.data import (
    CPU,
    InitialValues,
    PlainModel,
    Sharder,
    Sources,
    UnplannedValue,
    fitted,
    names_of,
    require_shape,
    whole_like,
)
from thunder_zero.sharded.initial_values.drawn import Drawn
from thunder_zero.sharded.initial_values.progress import Progress

__all__ = ["InitialValues", "Sources", "UnplannedValue", "initial_values"]


# A function that returns a tensor's full values, on any device. It is called once for each tensor, in module order.
FullOf = Callable[[Tensor], Tensor]


def initial_values(
    module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device, sources: Sources, *, progress: bool = False
) -> InitialValues:
    """Compare the modules of all ranks, and return the initial values. This is a collective.

    With ``progress``, rank 0 reports a long load on standard error.

    A rank that fails still takes part in all collectives up to the next agreement, where every rank raises.
    """
    group = ranks.world
    if group.size() > 1:
        # The names of the mesh's dimensions decide which parameters are tensor-parallel.
        names = None if ranks.mesh is None else ranks.mesh.mesh_dim_names
        mesh = agree.Claim("the mesh's dimensions", str(names), "give every rank the same mesh")
        claims = [*_source_claims(plan, sources), mesh]
        agree.require_same([*agree.module_claims(module, plan, device), *claims], group)
    model, failures = PlainModel(module, plan, ranks, device, names_of(module)), agree.Failures()
    are_read, weights = sources.weights is not None, sources.weights or {}
    saved = module.state_dict() if are_read else {}  # state dicts have no non-persistent buffers
    read = {tensor: names for tensor, names in model.names.items() if any(name in saved for name in names)}
    if stored := next((names for tensor, names in read.items() if isinstance(tensor, Stored)), None):
        raise ValueError(
            f"weights cannot replace {stored[0]!r}, which comes encoded from bitsandbytes; leave weights out"
        )
    to_draw = [tensor for tensor in model.names if tensor.is_meta and not isinstance(tensor, Stored)]
    missing = {tensor for tensor in to_draw if not model.arrives(tensor) and tensor not in read}
    sharder = Sharder(model, are_read=are_read)
    shown = Progress(type(module).__name__, model.names, reports=progress and group.rank() == 0)
    drawn = Drawn(model, missing, sharder, shown, all_draw=not are_read)
    with agree.all_or_none(group):
        _require_names(weights, read.values(), saved, type(module).__name__)
        drawn.reset()
    if sources.init is not None:
        sharder.compare()  # before the next collective: a gather from ranks that differ would hide it
        drawn.initialize(sources.init, failures)
    with agree.all_or_none(group):
        failures.raise_first()
        drawn.require_written()

    def value_here(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Stored):
            return tensor.payload if plan.by_name[model.name_of(tensor)].frozen_format else tensor.decoded()
        if tensor in read:
            return _read(tensor, read[tensor], weights, failures)
        return drawn.full(tensor) if drawn.has(tensor) else _existing(tensor, model)

    def rows_here(tensor: Tensor) -> Tensor | None:
        present = [name for name in read.get(tensor, ()) if name in weights]
        param = model.param_of(tensor)
        if len(present) != 1 or param is None or not _reads_rows(weights, param, model):
            return None
        return _read_rows(weights, present[0], tensor, param, sharder, failures)

    values = _collected(model, lambda tensor: _full(tensor, model, value_here), rows_here, drawn, sharder, shown)
    shown.end()
    with agree.all_or_none(group):
        failures.raise_first()
    sharder.compare()
    return values


def _source_claims(plan: Plan, sources: Sources) -> list[agree.Claim]:
    """Return claims about the user's sources, which decide which collectives run; [] if one rank sends all values."""
    if plan.policy.broadcast_from is not None:
        return []
    return [
        agree.Claim(
            f"the argument {name}", "None" if value is None else "something", f"give {name} on every rank, or on none"
        )
        for name, value in (("init", sources.init), ("weights", sources.weights))
    ]


def _require_names(weights: Collection[str], read: Iterable[Sequence[str]], saved: Container[str], kind: str) -> None:
    for names in read:
        if not any(name in weights for name in names):
            raise ValueError(f"weights has no {names[0]!r}; give the state dict of a {kind} like this one")
    for name in weights:
        if name not in saved:
            raise ValueError(
                f"weights has {name!r}, which {kind} does not have; leave it out of the state dict, or build the "
                f"module that it belongs to"
            )


def _read(tensor: Tensor, names: Sequence[str], weights: Mapping[str, Tensor], failures: agree.Failures) -> Tensor:
    """Read a tensor into CPU memory. If that fails, return the memory, since other ranks may wait to receive it."""
    buffer = torch.empty_like(whole_like(tensor), device=CPU, requires_grad=False)
    with failures.capture():
        first, *others = (name for name in names if name in weights)
        buffer.copy_(fitted(weights[first], tensor, f"weights has {first!r}"))
        for name in others:
            fitted(weights[name], tensor, f"weights has {name!r}")
            _require_equal(weights[name].to(CPU), weights[first].to(CPU), name, first)
    return buffer


def _reads_rows(weights: object, param: Param, model: PlainModel) -> TypeGuard[SafetensorsWeights]:
    """Return whether this rank can read its rows of a parameter without the others."""
    is_cut = param.sharded and not param.resident and param.sliced is None
    return is_cut and model.sender is None and isinstance(weights, SafetensorsWeights)


def _read_rows(
    weights: SafetensorsWeights, name: str, tensor: Tensor, param: Param, sharder: Sharder, failures: agree.Failures
) -> Tensor:
    """Read this rank's rows. All ranks also read the first row, a middle one and the last, and compare them."""
    own, last = sharder.rows(param), len(tensor) - 1
    rows = sample = torch.zeros(0, *tensor.shape[1:], dtype=tensor.dtype)
    with failures.capture():
        require_shape(weights.shape(name), tensor, f"weights has {name!r}")
        rows = weights.rows(name, own.start, own.stop).to(tensor.dtype)
        sample = torch.cat([weights.rows(name, row, row + 1) for row in (0, last // 2, last)])
    return sharder.take(rows, param.path, sample)


def _require_equal(value: Tensor, expected: Tensor, name: str, first: str) -> None:
    """Raise ValueError unless two values of a tied tensor are equal after a cast to the less precise dtype."""
    narrow = max(
        value.dtype, expected.dtype, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0
    )
    first_value, second_value = (
        tensor.to(narrow).double() if narrow.is_floating_point else tensor.to(narrow) for tensor in (value, expected)
    )
    unlike = ((first_value != second_value) & ~(first_value.isnan() & second_value.isnan())).nonzero()
    if len(unlike):
        place = tuple(unlike[0])
        raise ValueError(
            f"weights has unlike values for {first!r} and {name!r}, which this module ties: {expected[place].item()} "
            f"and {value[place].item()} at {[int(index) for index in place]}; leave one of the two names out, or build "
            f"the module untied"
        )


def _existing(tensor: Tensor, model: PlainModel) -> Tensor:
    return tensor if model.param_of(tensor) is None else local(tensor).detach()


def _full(tensor: Tensor, model: PlainModel, value_here: FullOf) -> Tensor:
    """Return a tensor's full values. This is a collective if rank ``policy.broadcast_from`` sends the values."""
    if model.sender is None or not model.travels(tensor):
        return value_here(tensor)
    if not model.arrives(tensor) or isinstance(tensor, Stored):
        full = value_here(tensor)
    elif tensor.is_meta:
        full = torch.empty_like(tensor, device=model.device, requires_grad=False)
    else:
        full = _existing(tensor, model)
    broadcast(full, model.sender, model.ranks.world, model.device)
    return full


def _collected(
    model: PlainModel,
    full_of: FullOf,
    rows_of: Callable[[Tensor], Tensor | None],
    drawn: Drawn,
    sharder: Sharder,
    shown: Progress,
) -> InitialValues:
    """Return all values. This is a collective if one rank sends values. At most one full tensor is alive at a time."""
    at_rest: dict[str, Tensor] = {}
    unplanned = []
    for tensor, names in model.names.items():
        param = model.param_of(tensor)
        if param is None:
            full = full_of(tensor)
            if full is not tensor:
                unplanned.append(
                    UnplannedValue(names, tensor, full.to(model.device if tensor.is_meta else tensor.device))
                )
        elif (rows := drawn.at_rest(tensor)) is not None or (rows := rows_of(tensor)) is not None:
            at_rest[param.path] = rows
        else:
            at_rest[param.path] = sharder.shard(full_of(tensor), param.path)
        shown.advance(tensor)
    return InitialValues({param.path: at_rest[param.path] for param in model.plan.params}, unplanned)
