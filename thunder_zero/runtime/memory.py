"""Lays out a rank's memory: the optimizer's rows, and ZeRO-1's full buffers around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_zero.comm.staging import is_staged, rest_device
from thunder_zero.plan import Plan
from thunder_zero.rows import own_rows, padded, rows_in


@dataclass(frozen=True, slots=True)
class Memory:
    """Tensors by parameter path.

    Attributes:
        rows: what programs read: this rank's rows with padding, or the full parameter where it is replicated.
        buffers: ZeRO-1's full parameters, padded.
        shared: paths of the buffers whose own rows are ``rows`` themselves, not copies of them.
    """

    rows: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shared: tuple[str, ...]


def lay_out(plan: Plan, device: torch.device, at_rest: dict[str, Tensor]) -> Memory:
    """Memory with the values of ``at_rest``, which is emptied: an unpadded full tensor must not outlive its copy."""
    rows: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for param in plan.params:
        value = at_rest.pop(param.path)
        if param.resident:
            buffers[param.path] = buffer = padded(value.to(param.compute_dtype), param, plan)
            is_copied = is_staged(param, plan, device)
            value = own_rows(value, param, plan) if is_copied else rows_in(buffer, param, plan.world_size, plan.rank)
        rows[param.path] = _at_rest(value, rest_device(param, plan, device), device)
    shared = tuple(path for path in buffers if not is_staged(plan.by_name[path], plan, device))
    return Memory(rows, buffers, shared)


def _at_rest(rows: Tensor, place: torch.device, device: torch.device) -> Tensor:
    """The rows where they rest; in host memory they are pinned, if ``device`` is a GPU."""
    rows = rows.to(place)
    return rows.pin_memory() if device.type == "cuda" and place.type == "cpu" else rows
