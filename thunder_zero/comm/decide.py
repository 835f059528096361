"""Lets rank 0 decide for all ranks."""

from __future__ import annotations

from collections.abc import Callable

from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.handle import Result
from thunder_zero.comm.places import doing
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0


def ranks_of_default_group() -> int | None:
    """The number of ranks of the default process group; None if there is none."""
    return process_group(None).size() if has_groups() else None


def on_rank_0(what: str, decide: Callable[[], Result]) -> Result:
    """What ``decide`` returns on rank 0 of the default process group, or raises there, on every rank.

    Args:
        what: the function that decides, for errors.
        decide: called on rank 0, or here if there is no process group; its result can be pickled.
    """
    if not has_groups():
        return decide()
    group = process_group(None)
    result: Result | None = None
    failure: Exception | None = None
    if group.rank() == 0:
        try:
            result = decide()
        except Exception as error:
            failure = error
    with doing(what):
        result, failure = broadcast_object_from_rank_0((result, failure), group)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
