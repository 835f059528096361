"""Checks that ``save`` and ``load`` share."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from thunder_zero.comm.agree import Fact, require_same
from thunder_zero.runtime.state import State


def require_same_arguments(arguments: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Raise on every rank unless all ranks pass the same; a collective.

    Raises:
        RuntimeError: an argument differs.
    """
    require_same([Fact(name, str(value), "pass the same on every rank") for name, value in arguments.items()], group)


def require_reduced_gradients(state: State, action: str) -> None:
    """Raise in the middle of an accumulation.

    Raises:
        RuntimeError: ``no_sync`` holds gradients.
    """
    if state.open_accumulation(state.shards.values()):
        raise RuntimeError(
            f"cannot {action}: no_sync still holds unreduced gradients of the current weights; call optimizer.step() "
            f"first"
        )
