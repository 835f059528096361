"""Frozen parameters that rest as bytes: what rests, and their values in full state dicts.

::

    q_proj.weight (64, 64), bfloat16    a rank of two has    DTensor (64, 36), uint8, local (32, 36)
                                        state dicts in full  (64, 64), bfloat16: decoded, and encoded when they load

Encoding a decoded value gives the same bytes, so a full state dict changes nothing on its way out and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import local_rows
from thunder_zero.sharded.dtensors import dtensor_like, local
from thunder_zero.sharded.sharded_model import owner_of
from thunder_zero.sharded.wire import decode_frozen


def rows_at_rest(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """Return this rank's rows of a full parameter as they rest: padded, and as bytes if the plan says so."""
    rows = local_rows(full, param, plan)
    return rows if param.frozen_format is None else param.frozen_format.encode(rows)


def frozen_param(tensor: object) -> Param | None:
    """Return the plan of a parameter that rests as bytes, given its tensor at rest; None for anything else."""
    owner = owner_of(tensor) if isinstance(tensor, Tensor) else None
    return owner[1] if owner is not None and owner[1].frozen_format is not None else None


def shape_and_dtype(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of a tensor of a model in full. A parameter that rests as bytes has those of the plain
    module."""
    param = frozen_param(tensor)
    return (tensor.shape, tensor.dtype) if param is None else (torch.Size(param.shape), param.dtype)


def decoded_values(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a full state dict as a plain module has them: bytes are decoded."""
    decoded = dict(values)
    for name, _, param in _frozen_of(module):
        if name in decoded:
            decoded[name] = decode_frozen(decoded[name], param, param.dtype)
    return decoded


def encoded_values(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a state dict that a module loads: full frozen parameters become this rank's rows,
    encoded."""
    encoded = dict(values)
    for name, shard, param in _frozen_of(module):
        value, form = encoded.get(name), param.frozen_format
        if form and isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.shape:
            start = shard.__create_chunk_list__()[0].offsets[0]
            rows = value[start : start + len(local(shard))].to(local(shard).device, param.dtype)
            encoded[name] = dtensor_like(form.encode(rows), shard, shard.shape)
    return encoded


def _frozen_of(module: nn.Module) -> Iterator[tuple[str, Any, Param]]:
    """Yield the names in a module's state dict, the shards and the plans of the parameters that rest as bytes."""
    for name, value in module.state_dict(keep_vars=True).items():
        if (param := frozen_param(value)) is not None:
            yield name, value, param
