"""Do all ranks hold the same model, will they run the same collectives, do they all take what is loaded?

Ranks that disagree do not fail by themselves: they hang, or exchange bytes that mean something else. What one rank
refuses is therefore told to all, before anything is written, and what has to agree is compared line by line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_zero.comm.peers import answered, told_by_all
from thunder_zero.plan import Plan

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that has to agree.

    Attributes:
        name: what it is, as the sentence calls it: ``"parameter 'w'"``.
        value: what it is on this rank.
        remedy: what to do where it differs.
    """

    name: str
    value: str
    remedy: str = "build the same module on every rank"


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's elements in row-major order, 16 hex digits."""
    return hashlib.sha256(_flat_bytes(tensor.detach().cpu()).numpy().data).hexdigest()[:16]


def describe(module: nn.Module, plan: Plan, device: torch.device) -> list[Fact]:
    """What has to agree beside the values: the policy, the units, each parameter and buffer in order.

    Where values are comes in where no rank's are broadcast, since ranks make those of the meta device together.
    """
    lines = [
        Fact(f"the policy's {field.name}", repr(getattr(plan.policy, field.name)), "give every rank the same policy")
        for field in fields(plan.policy)
        if field.name != "unit_of"  # a function; what it answers is compared
    ]
    lines.append(Fact("the device", device.type, "put the module on the same kind of device on every rank"))
    mesh = f"{plan.replicas} x {plan.world_size}"
    lines.append(Fact("the mesh (copies x ranks)", mesh, "give every rank the same mesh, or the same process_group"))
    for param in plan.params:
        what = f"shape {param.shape}, {param.dtype}, requires_grad={param.requires_grad}, unit {param.unit!r}"
        if plan.policy.broadcast_from is None and module.get_parameter(param.path).is_meta:
            what += ", on the meta device"
        lines.append(Fact(f"parameter {' = '.join(map(repr, param.names))}", what))
    for name, buffer in module.named_buffers():
        lines.append(Fact(f"buffer {name!r}", f"shape {tuple(buffer.shape)}, {buffer.dtype}"))
    return lines


@contextmanager
def all_or_none(group: dist.ProcessGroup, what: str = "its module") -> Iterator[None]:
    """What one rank refuses inside of the block, every rank refuses at its end; ``what`` is for the sentence.

    Raises:
        Exception: what the block raised here.
        RuntimeError: the block raised on another rank; its sentence is in the message.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    told = told_by_all(None if failure is None else str(failure), group)
    if failure is not None:
        raise failure
    for rank, sentence in enumerate(told):
        if sentence is not None:
            raise RuntimeError(f"rank {rank} refused {what}, so all ranks do: {sentence}")


def require_same(lines: Sequence[Fact], group: dist.ProcessGroup) -> None:
    """Raise on every rank if any rank's lines differ from rank 0's; a collective.

    Raises:
        RuntimeError: naming the first line that differs, both values and both ranks.
    """
    difference = _first_difference(lines, group)
    if difference is None:
        return
    rank, _, expected, found = difference
    if expected is None or found is None or expected.name != found.name:
        here, there = (line.name if line is not None else "nothing more" for line in (expected, found))
        remedy = next(line.remedy for line in (expected, found) if line is not None)
        raise RuntimeError(f"the ranks differ: rank 0 has {here} where rank {rank} has {there}; {remedy}")
    raise RuntimeError(
        f"{expected.name} differs between ranks: rank 0 has {expected.value}, rank {rank} has {found.value}; "
        f"{expected.remedy}"
    )


def require_same_schedule(program: str, lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise on every rank if any rank's collectives differ from rank 0's.

    Args:
        program: what runs, such as "backward"; it has to agree, too.
        lines: what this rank starts, ends and frees, in order.
        group: the ranks that take part.

    Raises:
        RuntimeError: naming the program or the first line that differs, and both ranks.
    """
    difference = _first_difference([program, *lines], group)
    if difference is not None:
        rank, number, *texts = difference
        expected, found = (text or "nothing" for text in texts)
        if number == 0:
            raise RuntimeError(
                f"the ranks would run different programs: rank 0 runs {expected}, rank {rank} runs {found}; call the "
                f"model on every rank alike, with gradients or without, inside of no_sync or outside"
            )
        raise RuntimeError(
            f"the ranks would run different collectives: line {number - 1} of {program} is {expected!r} on rank 0 and "
            f"{found!r} on rank {rank}; give every rank inputs that take the same path through the module"
        )


def _first_difference(
    lines: Sequence[Item], group: dist.ProcessGroup
) -> tuple[int, int, Item | None, Item | None] | None:
    """The first rank and line that differ from rank 0's, what rank 0 has and what that rank has; a collective.

    Only digests travel where all agree.
    """
    if len(set(told_by_all(hashlib.sha256("\n".join(map(repr, lines)).encode()).hexdigest(), group))) == 1:
        return None
    of_all = told_by_all(lines, group)
    return next(
        (rank, number, expected, found)
        for rank, others in enumerate(of_all)
        for number, (expected, found) in enumerate(zip_longest(of_all[0], others))
        if expected != found
    )


@torch.no_grad()
def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give every rank the values that rank ``source`` of the group has, in place.

    They travel as bytes on ``device``, since no backend carries every dtype.
    """
    staged = tensor.detach().to(device).contiguous()
    if staged.numel():
        with answered(group):
            dist.broadcast(_flat_bytes(staged), group=group, group_src=source)
        tensor.copy_(staged)


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The elements in row-major order as bytes; a view, if the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
