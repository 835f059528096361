"""Encodes frozen parameters as bytes at rest, and decodes them for full state dicts.

::

    q_proj.weight (64, 64), bfloat16    one rank of two      DTensor (64, 36), uint8, local (32, 36)
                                        full state dicts     (64, 64), bfloat16: decoded by a save, encoded by a load

Encoding a decoded value gives the original bytes, so saving and loading a full state dict changes no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import local_rows, padded_rows
from thunder_zero.sharded.dtensors import dtensor_like, local
from thunder_zero.sharded.sharded_model import owner_of
from thunder_zero.sharded.wire import decode_frozen


def rows_at_rest(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return this rank's rows of a full parameter: padded, and encoded if the parameter has a frozen format.

    The full parameter may come encoded (``Stored``).
    """
    fmt = param.frozen_format
    if fmt is not None and full.dtype is fmt.dtype:
        return local_rows(full, param.at_rest, plan)
    if fmt is None:
        return local_rows(full, param, plan)
    return own_rows_at_rest(full[plan.geometry(param).rows] if param.sharded else full, param, plan)


def own_rows_at_rest(rows: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return a copy of this rank's rows: padded, and encoded if the parameter has a frozen format."""
    if param.frozen_format is None:
        return padded_rows(rows, param, plan)
    encoded = param.frozen_format.encode(rows)  # first, since padding copies, and rows of a file are only mapped
    return padded_rows(encoded, param.at_rest, plan) if plan.geometry(param).padding else encoded


def frozen_param(tensor: object) -> Param | None:
    """Return the ``Param`` of an encoded shard; None for any other object."""
    owner = owner_of(tensor) if isinstance(tensor, Tensor) else None
    return owner[1].planned if owner is not None and owner[1].planned.frozen_format is not None else None


def shape_and_dtype(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the full shape and the dtype of a model's tensor. For an encoded shard, they are those after decoding."""
    param = frozen_param(tensor)
    return (tensor.shape, tensor.dtype) if param is None else (torch.Size(param.shape), param.dtype)


def decoded_values(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a full state dict with encoded parameters decoded to the plain module's dtypes."""
    decoded = dict(values)
    for name, _, param in _frozen_of(module):
        if name in decoded:
            decoded[name] = decode_frozen(decoded[name], param, param.dtype)
    return decoded


def encoded_values(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which full frozen parameters are replaced by this rank's encoded rows."""
    encoded = dict(values)
    for name, shard, param in _frozen_of(module):
        value, encoding = encoded.get(name), param.frozen_format
        if encoding and isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.shape:
            start = shard.__create_chunk_list__()[0].offsets[0]
            rows = value[start : start + len(local(shard))].to(local(shard).device, param.dtype)
            # bitsandbytes' scales need not be the largest magnitudes, so equal values keep their bytes
            same = torch.equal(decode_frozen(local(shard), param, param.dtype), rows)
            encoded[name] = shard if same else dtensor_like(encoding.encode(rows), shard, shard.shape)
    return encoded


def _frozen_of(module: nn.Module) -> Iterator[tuple[str, Any, Param]]:
    """Yield a (name in the state dict, shard, ``Param``) tuple for each encoded parameter of a module."""
    for name, value in module.state_dict(keep_vars=True).items():
        if (param := frozen_param(value)) is not None:
            yield name, value, param
