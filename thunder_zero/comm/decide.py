"""Lets rank 0 decide for all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from time import monotonic
from typing import Any

from torch.distributed import ProcessGroup

from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.handle import Result
from thunder_zero.comm.places import doing
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0


def ranks_of_default_group() -> int | None:
    """The number of ranks of the default process group; None if there is none."""
    return process_group(None).size() if has_groups() else None


def on_rank_0(what: str, decide: Callable[[Callable[[], None]], Result], every: float = 10.0) -> Result:
    """What ``decide`` returns on rank 0 of the default process group, or raises there, on every rank.

    An error that cannot be sent is a RuntimeError with its class and text on the other ranks.

    Args:
        what: the function that decides, for errors.
        decide: called on rank 0, or here if there is no process group; its result can be pickled. It gets a function to
            call now and then: the other ranks hear that rank 0 is still there, and wait past the group's time-out.
        every: seconds between such messages, at least.
    """
    if not has_groups():
        return decide(lambda: None)
    group = process_group(None)
    with doing(what):
        return _decided_here(decide, group, every) if group.rank() == 0 else _decided_there(group)


def _decided_here(decide: Callable[[Callable[[], None]], Result], group: ProcessGroup, every: float) -> Result:
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


def _decided_there(group: ProcessGroup) -> Any:
    is_decided = False
    while not is_decided:
        is_decided, result, failure = broadcast_object_from_rank_0((False, None, None), group)
    if failure is not None:
        raise failure
    return result
