"""What ``save`` and ``load`` check first: ranks give the same arguments, and the model is at rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thunder_zero.checkpoint.contents import Contents, Optimizers, contents_of, optimizer_list
from thunder_zero.checkpoint.extras import require_named
from thunder_zero.comm.agree import Fact, all_or_none, require_same
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.runtime.state import State


def agreed(
    action: str, path: Path, model: nn.Module, optimizer: Optimizers | None, extra: Mapping[str, Any], **others: object
) -> tuple[Contents, list[Optimizer]]:
    """What this rank has of the model, and the optimizers as a list, once all ranks give the same; a collective.

    Args:
        action: completes "the path to", such as "save at".
        path, model, optimizer, extra: the arguments.
        others: further arguments, by name.

    Raises:
        TypeError: ``model`` has no ZeroTransform; ``extra`` is not a mapping from names.
        RuntimeError: another rank refused; an argument differs.
    """
    sharded = sharded_model(model)
    with all_or_none(sharded.state.group, f"to {action.split()[0]}"):
        require_named(extra)
        contents, optimizers = contents_of(sharded), optimizer_list(optimizer)
    arguments = {
        f"the path to {action}": path,
        "the list of names in extra": sorted(extra),
        "the number of optimizers": len(optimizers),
        **others,
    }
    facts = [Fact(name, str(value), "pass the same on every rank") for name, value in arguments.items()]
    require_same(facts, sharded.state.group)
    return contents, optimizers


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
