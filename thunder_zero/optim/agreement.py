"""Compares ranks before and after a step of whole parameters, so that all ranks raise together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from thunder_zero.comm.agree import Claim, all_or_none, require_same
from thunder_zero.comm.small_collectives import all_reduce_sum
from thunder_zero.optim.exchange import Member
from thunder_zero.optim.options import describe_values, hyper_parameters
from thunder_zero.sharded.gather import may_be_stale
from thunder_zero.sharded.state import State

FIRST = "build the same optimizer, with the same groups, on every rank"
LATER = (
    "set the same options on every rank; if the optimizer sets them in its own step, by gradients or for groups with "
    "parameters only, tz.whole cannot step it"
)


def agree_on_step(
    kind: str, members: Sequence[Member], groups: Sequence[Mapping[str, Any]], state: State, *, known: bool
) -> tuple[frozenset[str], frozenset[str]]:
    """Compare the next step between ranks, in one small collective if all agree. All ranks raise if they differ.

    Return the paths of the parameters with a gradient, and of those that every rank has in full. With ``known``, an
    earlier step compared members and groups.
    """
    claims = _claims(kind, () if known else members, groups, LATER if known else FIRST)
    if not known:
        require_same(claims, state.group)
    paths = [member.param.path for member in members]
    has_grad = [member.shard.grad is not None for member in members]
    digest = _digest(claims)
    numbers = [digest, digest**2, *map(int, (*has_grad, *may_be_stale(state, paths)))]
    total, squares, *sums = all_reduce_sum(numbers, state.group, state.device)
    if state.plan.ranks * squares != total**2:  # equal if and only if all digests are equal
        require_same(claims, state.group)
    counts, stale_counts = sums[: len(paths)], sums[len(paths) :]
    for path, count in zip(paths, counts, strict=True):
        if 0 < count < state.plan.ranks:
            raise RuntimeError(
                f"parameter {path!r} has a gradient on {count} of {state.plan.ranks} ranks, so its owner cannot have "
                f"the whole gradient; set .grad, or clear it, on all ranks alike"
            )
    with_grad = frozenset(path for path, count in zip(paths, counts, strict=True) if count)
    return with_grad, frozenset(path for path, count in zip(paths, stale_counts, strict=True) if count == 0)


def _claims(kind: str, members: Sequence[Member], groups: Sequence[Mapping[str, Any]], remedy: str) -> list[Claim]:
    claims = [Claim("the optimizer's class", kind, remedy)]
    claims += [
        Claim(f"parameter {number} of {kind}", f"{member.param.path!r}, owned by rank {member.owner}", remedy)
        for number, member in enumerate(members)
    ]
    return claims + option_claims(kind, groups, remedy)


def option_claims(kind: str, groups: Sequence[Mapping[str, Any]], remedy: str) -> list[Claim]:
    return [
        Claim(f"{key!r} of group {number} of {kind}", text, remedy)
        for number, group in enumerate(groups)
        for key, text in describe_values(hyper_parameters(group)).items()
    ]


def _digest(claims: Sequence[Claim]) -> int:
    """Return a digest of 24 bits, so that sums of squares fit into int64 on 32,768 ranks."""
    return int.from_bytes(sha256(repr(claims).encode()).digest()[:3], "big")


def raise_on_all(failure: Exception | None, kind: str, state: State) -> None:
    """Raise on every rank if a step failed on any rank. This is one small collective."""
    if all_reduce_sum([int(failure is not None)], state.group, state.device)[0]:
        with all_or_none(state.group, f"its part of a step of {kind}"):
            if failure is not None:
                raise failure
