"""``tz.full_parameters``: a block in which the plain module has full parameters.

In: a sharded model. Out: the plain module with full parameters. ``writeback`` copies the values at the end of the block
into the shards::

    rows of all ranks  -- gather_now, one parameter at a time -->  parameters of the plain module      before the block
    rows of each rank  <-- rows_at_rest --  values of rank 0, sent to all                              with writeback
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.comm.agree import Claim, all_or_none, require_same
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.small_collectives import broadcast
from thunder_zero.plan.params import Param
from thunder_zero.sharded.casts import without_casts
from thunder_zero.sharded.dtensors import local, parameter_like
from thunder_zero.sharded.frozen import rows_at_rest
from thunder_zero.sharded.placeholders import as_slice
from thunder_zero.sharded.quantized import StoredLinear, given_back, packed, stored_weights, unpacked
from thunder_zero.sharded.sharded_model import sharded_model
from thunder_zero.sharded.state import State


@contextmanager
def full_parameters(model: nn.Module, *, writeback: bool = False, rank0_only: bool = False) -> Iterator[Any]:
    """Temporarily give the plain module full parameters, for example to generate, export, inspect or initialise.

    A collective: all ranks must enter the block, and with ``writeback`` also leave it. Parameters are gathered one at a
    time. Inside the block each rank holds the shards and the whole model, in the dtypes of the shards. The sharded
    model cannot be called inside the block.

    A tensor-parallel module computes in the block on all ranks, as torch's ``parallelize_module`` left it: its sliced
    parameters are DTensors, whose ``full_tensor()`` is a collective of the ranks along the slices.

    >>> with tz.full_parameters(model) as module, torch.no_grad():
    ...     tokens = module.generate(prompt)

    ``writeback`` copies rank 0's parameters into the shards at the end of the block (of slices, those of the first data
    rank). If the block raises on any rank, or a parameter then has another shape or dtype, nothing is written and every
    rank raises. With ``rank0_only``, only rank 0 of the process group gets full parameters, not of a tensor-parallel
    model. The module casts nothing for mixed precision.
    """
    sharded = sharded_model(model)
    state, module = sharded.state, sharded.plain
    layers = stored_weights(module)
    full = _gathered(state, layers, writeback, rank0_only)
    values: dict[str, Tensor] = {}
    failure: Exception | None = None
    try:
        with without_casts(module), state.holding(full), given_back(layers.values()):
            yield module
            if writeback and full:
                values = {param.path: _value(module, param, full[param.path], layers) for param in state.plan.params}
    except Exception as error:
        if not writeback:
            raise
        failure = error
    if writeback:
        with doing("the end of full_parameters", state.name):
            with all_or_none(state.group, "the block of full_parameters"):
                if failure is not None:
                    raise failure
            _write_back(state, values, layers)


def _gathered(
    state: State, layers: Mapping[str, StoredLinear], writeback: bool, rank0_only: bool
) -> dict[str, nn.Parameter]:
    """Gather full parameters, keyed by path. This is a collective. With ``rank0_only``, return {} on other ranks."""
    group = state.group
    full: dict[str, nn.Parameter] = {}
    with doing("full_parameters", state.name):
        with all_or_none(group, "full_parameters"):
            state.require_sharded()
            if writeback:
                state.require_own_values("write back")
            if rank0_only and state.plan.mesh.is_sliced:
                raise ValueError(
                    "full_parameters has rank0_only=True, and the model is sliced by torch's tensor parallelism, so "
                    "one rank has no whole parameters; leave rank0_only out, or use tz.full_state_dict(model)"
                )
        require_same([Claim("writeback", str(writeback)), Claim("rank0_only", str(rank0_only))], group)
        for param in state.plan.params:
            layer, fmt = layers.get(param.path), param.frozen_format
            value = state.gather_now(param if layer is None else param.at_rest)
            if rank0_only and group.rank():
                continue
            if layer is not None and fmt is not None:
                full[param.path] = packed(value, layer, fmt, param.dtype)
            else:
                value = as_slice(value, state.params[param.path].placeholder)
                full[param.path] = parameter_like(state.params[param.path].shard, value)
    return full


def _value(module: nn.Module, param: Param, original: Tensor, layers: Mapping[str, StoredLinear]) -> Tensor:
    value = module.get_parameter(param.path)
    if local(value).shape != local(original).shape or value.dtype is not original.dtype:
        raise ValueError(
            f"parameter {param.path!r} is {tuple(value.shape)} {value.dtype} at the end of full_parameters, and was "
            f"{tuple(original.shape)} {original.dtype}; write new values into it in place"
        )
    layer = layers.get(param.path)
    return value.detach() if layer is None or not param.frozen_format else unpacked(value, layer, param.path)


@torch.no_grad()
def _write_back(state: State, values: dict[str, Tensor], as_bytes: Container[str]) -> None:
    """Copy the values of the first data rank into the shards."""
    for path, param in state.params.items():
        if (value := values.get(path)) is None:
            planned = param.planned.at_rest if path in as_bytes else param.planned
            value = torch.empty(planned.shape, dtype=planned.dtype, device=param.rows.device)
        value = local(value)
        broadcast(value, 0, state.ranks.data, state.device)
        param.rows.copy_(rows_at_rest(value, param.planned, state.plan))
    state.expire(state.params.values())
