"""Do all ranks hold the same model? Asked once, before the first collective of the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_zero.plan import Plan


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's elements in row-major order, 16 hex digits."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return hashlib.sha256(flat.numpy().tobytes() if flat.numel() else b"").hexdigest()[:16]


def describe(module: nn.Module, plan: Plan, weights: bool) -> dict[str, str]:
    """What has to agree, a line for each parameter and buffer."""
    parameters = {
        param.path: f"shape {param.shape}, {param.dtype}, requires_grad={param.requires_grad}" for param in plan.params
    }
    buffers = {name: f"buffer, shape {tuple(buffer.shape)}, {buffer.dtype}" for name, buffer in module.named_buffers()}
    policy = {field.name: getattr(plan.policy, field.name) for field in fields(plan.policy) if field.name != "unit_of"}
    lines = {"policy": f"{policy}", "units": f"{plan.units}", **parameters, **buffers}
    if weights:
        for param in plan.params:
            lines[param.path] += f", weights {digest(module.get_parameter(param.path))}"
    return lines


def require_agreement(lines: dict[str, str], group: dist.ProcessGroup) -> None:
    """Raise on every rank if any rank's lines differ from rank 0's.

    Raises:
        RuntimeError: naming the first parameter that differs, both values and both ranks.
    """
    gathered: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(gathered, lines, group=group)
    reference = gathered[0]
    for rank, other in enumerate(gathered):
        for name in [*reference, *other]:
            if reference.get(name) != other.get(name):
                raise RuntimeError(
                    f"{name!r} differs between ranks: rank 0 has {reference.get(name, 'none')}, rank {rank} has "
                    f"{other.get(name, 'none')}; build the same module on every rank (seed it alike), or pass "
                    f"broadcast_from=0 to take rank 0's weights"
                )


@torch.no_grad()
def broadcast(module: nn.Module, source: int, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of group rank ``source``, in place."""
    for tensor in [*module.parameters(), *module.buffers()]:
        staged = tensor.detach().contiguous()
        dist.broadcast(staged, group=group, group_src=source)
        tensor.copy_(staged)


def require_same_schedule(half: str, lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise on every rank if any rank's collectives differ from rank 0's.

    Args:
        half: "forward" or "backward", for the sentence.
        lines: what this rank starts, ends and frees, in order.
        group: the ranks that take part.

    Raises:
        RuntimeError: naming the first line that differs and both ranks.
    """
    if group.size() == 1:
        return
    gathered: list[str | Sequence[str]] = [""] * group.size()
    dist.all_gather_object(gathered, hashlib.sha256("\n".join(lines).encode()).hexdigest(), group=group)
    if len(set(gathered)) == 1:
        return
    dist.all_gather_object(gathered, lines, group=group)
    for rank, other in enumerate(gathered):
        for number, (expected, found) in enumerate(zip_longest(gathered[0], other, fillvalue="nothing")):
            if expected != found:
                raise RuntimeError(
                    f"the ranks would run different collectives: line {number} of {half} is {expected!r} on rank 0 and "
                    f"{found!r} on rank {rank}; give every rank inputs that take the same path through the module"
                )
