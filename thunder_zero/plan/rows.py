"""Cuts tensors into this rank's rows: with the padding that a shard stores, or without."""

from __future__ import annotations

from torch import Tensor

from thunder_zero.plan import layout
from thunder_zero.plan.params import Param, Plan


def own_rows(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """This rank's rows of a full parameter, padded with zeros; the parameter itself if it is replicated."""
    if not param.sharded:
        return full
    start, stop = layout.row_range(param.shape[0], plan.world_size, plan.rank)
    shard = full.new_zeros(layout.shard_shape(param.shape, plan.world_size))
    shard[: stop - start] = full[start:stop]
    return shard


def real_rows(shard: Tensor, param: Param, plan: Plan) -> Tensor:
    """This rank's rows without their padding, as a view; all rows if the parameter is replicated."""
    if not param.sharded:
        return shard
    return shard[: len(shard) - layout.padding_rows(param.shape[0], plan.world_size, plan.rank)]


def rows_in(buffer: Tensor, param: Param, world_size: int, rank: int) -> Tensor:
    """The rows of a padded buffer that ``rank`` stores, padding included, as a view."""
    start, stop = layout.stored_range(param.shape[0], world_size, rank)
    return buffer[start:stop]


def padded(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """A copy of a full parameter with rows of zeros at its end, so that the number of ranks divides its rows."""
    buffer = full.new_zeros(layout.padded_shape(param.shape, plan.world_size))
    buffer[: param.shape[0]] = full
    return buffer
