"""Forecasts the host memory that loading a module on the meta device needs, from its plan.

::

    weights=folder    at rest so far | this rank's rows, mapped from the file    | 7 MiB to encode them, if encoded
    weights=mapping   at rest so far | one full tensor, and the rows cut from it | ...
    init              at rest        | the full tensors of one submodule, and their rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from thunder_zero.encodings.encoding import PIECE
from thunder_zero.plan.params import Param, Plan

ENCODED_AT_ONCE = 14  # bytes of temporaries for each element that NF4 encodes at once
DECODED_AT_ONCE = 6


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes of one parameter while it is loaded."""

    owner: str  # the path of its module
    full: int
    own: int  # this rank's rows before they are encoded
    rest: int  # what this rank keeps
    on_host: int  # the part of it that stays in host memory
    encoding: int  # temporaries of the encoding
    decoding: int  # temporaries of decoding all rows
    reads_rows: bool  # True if this rank's rows can be read alone
    is_kept: bool  # True if the full value itself rests
    is_resident: bool


def loading(plan: Plan, *, on_cpu: bool) -> dict[str, int]:
    """Return the most bytes that a rank holds in host memory while it loads, by source of the values.

    Memory of a mapping of weights is not counted, nor are the two tensors that gloo may hold after a broadcast.
    ``on_cpu`` tells that the model computes on the CPU.
    """
    loads, sender = [_load(plan, param, on_cpu) for param in plan.params], plan.policy.broadcast_from
    alone, by_owner = [[load] for load in loads], [[*turn] for _, turn in groupby(loads, key=lambda load: load.owner)]
    mapped = _peak(alone)
    if sender is not None and sender != plan.mesh.place():
        return {f"sent by rank {sender}": mapped}
    rows = [load.own if load.reads_rows and sender is None else load.full * (2 - load.is_kept) for load in loads]
    drawn = {"reset_parameters": _peak(by_owner), "init": _peak(by_owner, initializes=True)}
    if sender is not None:
        drawn = dict.fromkeys(drawn, sum(load.full for load in loads) + max((load.rest for load in loads), default=0))
    return {"weights=folder": _peak(alone, rows), "weights=mapping": mapped} | drawn


def _load(plan: Plan, param: Param, on_cpu: bool) -> Load:
    geometry, itemsize = plan.geometry(param), param.dtype.itemsize
    is_cut, encodes = param.sharded and not param.resident, param.frozen_format is not None
    full = prod(geometry.shape) * itemsize
    at_rest = prod(plan.shard_shape(param)) * param.rest_dtype.itemsize
    rest = prod(geometry.in_compute) * itemsize if param.resident else at_rest
    return Load(
        owner=param.path.rpartition(".")[0],
        full=full,
        own=geometry.numel * itemsize,
        rest=rest,
        on_host=rest * (on_cpu or plan.rests_on_host(param)),
        encoding=encodes * ENCODED_AT_ONCE * min(geometry.numel, PIECE),
        decoding=encodes * (param.rest_bytes + DECODED_AT_ONCE * min(prod(geometry.shape), PIECE)),
        reads_rows=is_cut and param.sliced is None,
        is_kept=not is_cut and not encodes and param.sliced is None,
        is_resident=param.resident,
    )


def _peak(turns: Sequence[Sequence[Load]], extra: Sequence[int] | None = None, *, initializes: bool = False) -> int:
    """Return the peak of loading parameters in turns, such as one by one, or those of one module together.

    A turn holds ``extra`` (default: its parameters in full) beside what rests. If it ``initializes``, all parameters
    rest already, and it gathers its own. In the end the largest resident parameter has a padded copy.
    """
    loads = [load for turn in turns for load in turn]
    total, before = sum(load.on_host for load in loads), 0
    peak = total + max((load.rest for load in loads if load.is_resident), default=0)
    for index, turn in enumerate(turns):
        own = sum(load.on_host for load in turn)
        held = sum(load.full for load in turn if not load.is_kept) if extra is None else extra[index]
        cut = sum(load.rest for load in turn) + max(load.encoding for load in turn)
        gathered = max(load.decoding for load in turn) if initializes else 0
        peak = max(peak, (total - own if initializes else before) + held + max(cut, gathered))
        before += own
    return peak
