"""Compares modules, arguments and schedules between ranks; lets rank 0 decide where one must.

Ranks that disagree do not fail by themselves: they hang, or exchange bytes that mean something else. So a rank that
refuses tells all others before anything is written, and everything that has to agree is compared fact by fact.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import zip_longest
from time import monotonic
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.handle import Result
from thunder_zero.comm.small_collectives import all_gather_object, broadcast_object_from_rank_0, flat_bytes
from thunder_zero.plan.params import Plan

FUNCTIONS = ("unit_of", "passes", "transport")  # of a policy; the units and the schedules that they make are compared


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that has to agree between ranks; an error calls it ``name``, such as ``"parameter 'w'"``."""

    name: str
    value: str
    remedy: str = "build the same module on every rank"


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's elements in row-major order, 16 hex digits."""
    return hashlib.sha256(flat_bytes(tensor.detach().cpu()).numpy().data).hexdigest()[:16]


def module_facts(module: nn.Module, plan: Plan, device: torch.device) -> list[Fact]:
    """Everything but values that has to agree: the policy, the mesh, each parameter and buffer in order. Which are on
    the meta device counts only without ``broadcast_from``, since all ranks then initialize them together."""
    facts = [
        Fact(f"the policy's {field.name}", repr(getattr(plan.policy, field.name)), "give every rank the same policy")
        for field in fields(plan.policy)
        if field.name not in FUNCTIONS
    ]
    facts.append(Fact("the device", device.type, "put the module on the same kind of device on every rank"))
    mesh = f"{plan.mesh.replicate.size} x {plan.mesh.shard.size}"
    mesh += f" x {plan.mesh.tensor.size} slices" * plan.mesh.is_sliced
    facts.append(Fact("the mesh (copies x ranks)", mesh, "give every rank the same mesh, or the same process_group"))
    for param in plan.params:
        value = f"shape {param.shape}, {param.dtype}, requires_grad={param.requires_grad}, unit {param.unit!r}"
        if plan.mesh.is_sliced:
            value += f", sliced along {param.sliced}{', its gradient in parts' * param.is_partial}"
        if plan.policy.broadcast_from is None and module.get_parameter(param.path).is_meta:
            value += ", on the meta device"
        facts.append(Fact(f"parameter {' = '.join(map(repr, param.names))}", value))
    for name, buffer in module.named_buffers():
        facts.append(Fact(f"buffer {name!r}", f"shape {tuple(buffer.shape)}, {buffer.dtype}"))
    return facts


@contextmanager
def all_or_none(group: dist.ProcessGroup, what: str = "its module") -> Iterator[None]:
    """If the block raises on one rank, every rank raises at its end; a collective. ``what`` completes "rank 1 refused
    ..." in the message on the other ranks, which quotes that of the first."""
    with all_alike_or_none(group, what):
        yield


@contextmanager
def all_alike_or_none(group: dist.ProcessGroup, what: str) -> Iterator[list[Fact]]:
    """:func:`all_or_none`, which yields a list: the facts that the block appends must be equal on all ranks. One
    collective; if facts differ, they travel in another."""
    facts: list[Fact] = []
    failure: Exception | None = None
    try:
        yield facts
    except Exception as error:
        failure = error
    told = all_gather_object((None if failure is None else str(failure), _digest_of(facts)), group)
    if failure is not None:
        raise failure
    for rank, (refusal, _) in enumerate(told):
        if refusal is not None:
            raise RuntimeError(f"rank {rank} refused {what}, so every rank stops: {refusal}")
    if len({digest for _, digest in told}) > 1:
        _name_difference(all_gather_object(facts, group))


def require_same(facts: Sequence[Fact], group: dist.ProcessGroup) -> None:
    """Raise on every rank if any rank's facts differ from rank 0's, naming the first that does; a collective. If they
    agree, only digests travel."""
    if len(set(all_gather_object(_digest_of(facts), group))) > 1:
        _name_difference(all_gather_object(facts, group))


def _digest_of(facts: Sequence[Fact]) -> str:
    return hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()


def _name_difference(facts: Sequence[Sequence[Fact]]) -> NoReturn:
    """Raise an error that names the first fact in which a rank differs from rank 0."""
    on_rank_0, *others = facts
    rank, expected, found = next(
        (rank, expected, found)
        for rank, theirs in enumerate(others, 1)
        for expected, found in zip_longest(on_rank_0, theirs)
        if expected != found
    )
    if expected and found and expected.name != found.name:
        raise RuntimeError(
            f"the ranks differ: rank 0 has {expected.name} where rank {rank} has {found.name}; {expected.remedy}"
        )
    fact, values = expected or found, [of.value if of else "nothing" for of in (expected, found)]
    raise RuntimeError(
        f"{fact.name} differs between ranks: rank 0 has {values[0]}, rank {rank} has {values[1]}; {fact.remedy}"
    )


def argument_facts(arguments: Mapping[str, object]) -> list[Fact]:
    """Return the facts that arguments, by name, are the same on every rank."""
    return [Fact(name, str(value), "pass the same on every rank") for name, value in arguments.items()]


def on_rank_0(what: str, decide: Callable[[Callable[[], None]], Result], every: float = 10.0) -> Result:
    """What ``decide`` returns on rank 0 of the default process group, or raises there, on every rank.

    An error that cannot be sent is a RuntimeError with its class and text on the other ranks; the result can be
    pickled. ``decide`` gets a function to call now and then: the others hear, at most every ``every`` seconds, that
    rank 0 is still there, and wait past the group's time-out.
    """
    if not has_groups():
        return decide(lambda: None)
    group = process_group(None)
    with doing(what):
        return _decide_on_rank_0(decide, group, every) if group.rank() == 0 else _follow_rank_0(group)


def _decide_on_rank_0(decide: Callable[[Callable[[], None]], Result], group: ProcessGroup, every: float) -> Result:
    told = monotonic()

    def go_on() -> None:
        nonlocal told
        if monotonic() - told >= every:
            broadcast_object_from_rank_0((False, None, None), group)
            told = monotonic()

    try:
        result = decide(go_on)
    except Exception as error:
        broadcast_object_from_rank_0((True, None, _sendable(error)), group)
        raise
    broadcast_object_from_rank_0((True, result, None), group)
    return result


def _sendable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its class and text if another rank could not make it from what is sent."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        survives = type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # a class of the user may raise anything there
        survives = False
    return error if survives else RuntimeError(f"rank 0 raised {type(error).__name__}: {error}; see its traceback")


def _follow_rank_0(group: ProcessGroup) -> Any:
    is_decided = False
    while not is_decided:
        is_decided, result, failure = broadcast_object_from_rank_0((False, None, None), group)
    if failure is not None:
        raise failure
    return result
