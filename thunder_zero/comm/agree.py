"""Compares modules, arguments and schedules between ranks; broadcasts decisions of rank 0.

Ranks that disagree do not fail by themselves: they hang, or mix up messages.
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

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.handle import Result
from thunder_zero.comm.small_collectives import all_gather_object, broadcast_object_from_rank_0, flat_bytes
from thunder_zero.plan.params import Plan

# Fields of a policy that hold functions. Ranks compare the units and schedules that these functions make.
FUNCTIONS = ("unit_of", "passes", "transport")


@dataclass(frozen=True, slots=True)
class Claim:
    """A property that must be equal on all ranks. Its ``name`` in errors is, for example, ``"parameter 'w'"``."""

    name: str
    value: str
    remedy: str = "build the same module on every rank"


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(flat_bytes(tensor.detach().cpu()).numpy().data).hexdigest()[:16]


def module_claims(module: nn.Module, plan: Plan, device: torch.device) -> list[Claim]:
    """Return the claims of a module that must be equal: the policy, the mesh, each parameter and buffer in order.

    Values are not compared, but which parameters are on the meta device if all ranks initialize them together.
    """
    claims = [
        Claim(f"the policy's {field.name}", repr(getattr(plan.policy, field.name)), "give every rank the same policy")
        for field in fields(plan.policy)
        if field.name not in FUNCTIONS
    ]
    claims.append(Claim("the device", device.type, "put the module on the same kind of device on every rank"))
    mesh = f"{plan.mesh.replicate.size} x {plan.mesh.shard.size}"
    mesh += f" x {plan.mesh.tensor.size} slices" * plan.mesh.is_sliced
    claims.append(Claim("the mesh (copies x ranks)", mesh, "give every rank the same mesh, or the same process_group"))
    for param in plan.params:
        value = (
            f"shape {plan.whole_shape(param)}, {param.dtype}, requires_grad={param.requires_grad}, unit {param.unit!r}"
        )
        if plan.mesh.is_sliced:
            value += f", sliced along {param.sliced}{', its gradient in parts' * param.is_partial}"
        if plan.policy.broadcast_from is None and module.get_parameter(param.path).is_meta:
            value += ", on the meta device"
        claims.append(Claim(f"parameter {' = '.join(map(repr, param.names))}", value))
    for name, buffer in module.named_buffers():
        claims.append(Claim(f"buffer {name!r}", f"shape {tuple(buffer.shape)}, {buffer.dtype}"))
    return claims


@contextmanager
def all_or_none(group: dist.ProcessGroup, what: str = "its module") -> Iterator[list[Claim]]:
    """Raise on every rank at the end of the block if the block raises on any rank; a collective. The other ranks raise
    "rank 1 refused ``what``" with the text of the first error. Also raise if the ranks append different claims to the
    list that this yields: a second collective finds the difference."""
    claims: list[Claim] = []
    failure: Exception | None = None
    try:
        yield claims
    except Exception as error:
        failure = error
    results = all_gather_object((None if failure is None else str(failure), _digest_of(claims)), group)
    if failure is not None:
        raise failure
    for rank, (refusal, _) in enumerate(results):
        if refusal is not None:
            raise RuntimeError(f"rank {rank} refused {what}, so every rank stops: {refusal}")
    if len({digest for _, digest in results}) > 1:
        _name_difference(all_gather_object(claims, group))


class Failures:
    """The first exception of this rank, held until the next agreement of all ranks."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        try:
            yield
        except Exception as failure:
            self._first = self._first or failure

    def raise_first(self) -> None:
        if self._first is not None:
            raise self._first


def require_same(claims: Sequence[Claim], group: dist.ProcessGroup) -> None:
    """Raise an error on every rank that names the first claim in which a rank differs from rank 0; a collective."""
    if len(set(all_gather_object(_digest_of(claims), group))) > 1:
        _name_difference(all_gather_object(claims, group))


def _digest_of(claims: Sequence[Claim]) -> str:
    return hashlib.sha256("\n".join(map(repr, claims)).encode()).hexdigest()


def _name_difference(claims_of_ranks: Sequence[Sequence[Claim]]) -> NoReturn:
    claims_of_rank_0, *other_claims = claims_of_ranks
    rank, expected, actual = next(
        (rank, expected, actual)
        for rank, claims in enumerate(other_claims, 1)
        for expected, actual in zip_longest(claims_of_rank_0, claims)
        if expected != actual
    )
    if expected and actual and expected.name != actual.name:
        raise RuntimeError(
            f"the ranks differ: rank 0 has {expected.name} where rank {rank} has {actual.name}; {expected.remedy}"
        )
    claim, values = expected or actual, [item.value if item else "nothing" for item in (expected, actual)]
    raise RuntimeError(
        f"{claim.name} differs between ranks: rank 0 has {values[0]}, rank {rank} has {values[1]}; {claim.remedy}"
    )


def argument_claims(arguments: Mapping[str, object]) -> list[Claim]:
    return [Claim(name, str(value), "pass the same on every rank") for name, value in arguments.items()]


def on_rank_0(what: str, decide: Callable[[Callable[[], None]], Result], every: float = 10.0) -> Result:
    """Call ``decide`` on rank 0 of the default process group; return its result, or raise its error, on every rank.

    ``decide`` gets a function that it must call regularly. Every ``every`` seconds, this function tells the other ranks
    that rank 0 is alive, so that they wait longer than the group's timeout.
    """
    if not has_groups():
        return decide(lambda: None)
    group = process_group(None)
    undecided: tuple[bool, Any, Exception | None] = (False, None, None)
    last_sign = monotonic()

    def show_sign_of_life() -> None:
        nonlocal last_sign
        if monotonic() - last_sign >= every:
            broadcast_object_from_rank_0(undecided, group)
            last_sign = monotonic()

    with doing(what):
        if group.rank() == 0:
            try:
                result = decide(show_sign_of_life)
            except Exception as error:
                broadcast_object_from_rank_0((True, None, _sendable(error)), group)
                raise
            broadcast_object_from_rank_0((True, result, None), group)
            return result
        while not (decision := broadcast_object_from_rank_0(undecided, group))[0]:
            pass
    _, result, failure = decision
    if failure is not None:
        raise failure
    return result


def _sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its class and text if pickling does not preserve it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        survives = type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # a user's class may raise anything
        survives = False
    return error if survives else RuntimeError(f"rank 0 raised {type(error).__name__}: {error}; see its traceback")
