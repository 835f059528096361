"""Checks the arguments of ``tz.save`` and ``tz.load``, and lists what ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thunder_zero.checkpoint.contents import Contents, contents_of
from thunder_zero.checkpoint.optimizer_states import Optimizers
from thunder_zero.comm.agree import Fact, argument_facts
from thunder_zero.optim.ema import EMA
from thunder_zero.sharded.sharded_model import sharded_model
from thunder_zero.sharded.state import State

NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})


def check_arguments(
    facts: list[Fact],
    action: str,
    path: Path,
    model: nn.Module,
    optimizer: Optimizers | None,
    extra: Mapping[str, Any],
    **others: object,
) -> tuple[Contents, list[Optimizer]]:
    """Return what this rank has of the model, and the optimizers as a list.

    Args:
        facts: what ranks must agree on is appended: the path, the extras' names, the number of optimizers, ``others``.
        action: comes before the path in a message, such as "save at".
        others: further arguments by name.

    Raises:
        TypeError: ``extra`` is no mapping from names; ``model`` has no ZeroTransform.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; pass a mapping from names to values, such as {{'scheduler': scheduler}}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    facts += argument_facts(
        {
            f"the path to {action}": path,
            "the list of names in extra": sorted(extra),
            "the number of optimizers": len(optimizers),
            **others,
        }
    )
    return contents_of(sharded_model(model)), optimizers


def require_at_rest(state: State, action: str, extra: Mapping[str, Any]) -> None:
    """Raise unless the parameters and gradients of a model, and its EMAs, can be saved or loaded.

    Raises:
        RuntimeError: gradients are accumulated, or the parameters are averages.
        ValueError: an extra is an EMA of another model.
    """
    state.require_own_values(action)
    state.require_reduced(action)
    for name, ema in extra.items():
        if isinstance(ema, EMA) and ema.state is not state:
            raise ValueError(
                f"the extra {name!r} is an EMA of {ema.state.name}, and the model is {state.name}; pass the model that "
                f"it averages"
            )
