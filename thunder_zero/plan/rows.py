"""Cuts tensors into this rank's rows, with or without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_zero.plan.params import Param, Plan


def local_slice(whole: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return a copy of this rank's tensor-parallel slice of a parameter, or the parameter itself if it is unsliced."""
    if param.sliced is None or plan.mesh.tensor.size == 1:
        return whole
    start, stop = plan.geometry(param).part
    return whole.narrow(param.sliced, start, stop - start).clone(memory_format=torch.contiguous_format)


def local_rows(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return this rank's rows of a full parameter, padded with zeros, or the parameter itself if it is replicated."""
    return padded_rows(full[plan.geometry(param).rows], param, plan) if param.sharded else full


def padded_rows(rows: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return a copy of this rank's rows of a sharded parameter, padded with zeros."""
    shard = rows.new_zeros(plan.geometry(param).at_rest)
    shard[: len(rows)] = rows
    return shard


def real_rows(shard: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return a view of a shard without its padding, or of all rows if the parameter is replicated."""
    return shard[: len(shard) - plan.geometry(param).padding] if param.sharded else shard


def rows_in(buffer: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return a view of this rank's rows in a padded buffer, padding included."""
    return buffer[plan.geometry(param).stored_rows]


def padded(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return a copy of a full parameter, padded with zero rows to a multiple of the number of ranks."""
    buffer = full.new_zeros(plan.geometry(param).gathered)
    buffer[: len(full)] = full
    return buffer


def in_equal_parts(mean: Tensor, count: int) -> Tensor:
    """Split a mean into ``count`` flat float32 parts, padded with zeros. Return a view if possible."""
    flat = mean.reshape(-1).float()
    missing = -len(flat) % count
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(count, -1)
