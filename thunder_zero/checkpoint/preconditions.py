"""Checks that ``save`` and ``load`` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thunder_zero.checkpoint.extras import require_named
from thunder_zero.comm.agree import Fact, all_or_none, require_same
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.contents import ModelContents, Optimizers, contents_of, optimizer_list


def list_contents(
    model: nn.Module, optimizer: Optimizers | None, extra: Mapping[str, Any], action: str
) -> tuple[ModelContents, list[Optimizer]]:
    """This rank's part of the model, and the optimizers as a list; a collective.

    Raises:
        TypeError: ``model`` has no ZeroTransform; ``extra`` is not a mapping from names.
        RuntimeError: another rank refused.
    """
    sharded = sharded_model(model)
    with all_or_none(sharded.state.group, f"to {action}"):
        require_named(extra)
        return contents_of(sharded), optimizer_list(optimizer)


def shared_arguments(
    action: str, path: Path, extra: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> dict[str, object]:
    """The arguments of both ``save`` and ``load`` that all ranks have to agree on, by their names in a message."""
    return {
        f"the path to {action}": path,
        "the list of names in extra": sorted(extra),
        "the number of optimizers": len(optimizers),
    }


def require_same_arguments(arguments: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Raise on every rank unless all ranks pass the same; a collective.

    Raises:
        RuntimeError: an argument differs.
    """
    require_same([Fact(name, str(value), "pass the same on every rank") for name, value in arguments.items()], group)


def require_at_rest(state: State, action: str) -> None:
    """Raise in the middle of an accumulation, or if the parameters are averages.

    Raises:
        RuntimeError: ``no_sync`` holds gradients; inside ``EMA.applied``.
    """
    state.require_own_values(action)
    if state.open_accumulation(state.shards.values()):
        raise RuntimeError(
            f"cannot {action}: no_sync still holds unreduced gradients of the current weights; run the last "
            f"micro-batch outside no_sync and call optimizer.step(), or drop them with model.zero_grad()"
        )
