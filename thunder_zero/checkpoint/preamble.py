"""Checks the arguments of ``tz.save`` and ``tz.load``, and lists the facts that ranks compare."""

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
    **options: object,
) -> tuple[Contents, list[Optimizer]]:
    """Check the arguments. Return this rank's values of the model, and a list of the optimizers.

    Extend ``facts`` with the path, the names of extras, the number of optimizers, and ``options``. ``action`` stands
    before the path in an error, such as "save at".
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; pass a mapping from names to values, such as {{'scheduler': scheduler}}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    facts += argument_facts(
        {
            f"the path to {action}": path,
            "the list of names in extra": sorted(extra),
            "the number of optimizers": len(optimizers),
            **options,
        }
    )
    return contents_of(sharded_model(model)), optimizers


def require_at_rest(state: State, action: str, extra: Mapping[str, Any]) -> None:
    """Raise unless a model, its gradients and its EMAs can be saved or loaded now."""
    state.require_own_values(action)
    state.require_reduced(action)
    for name, ema in extra.items():
        if isinstance(ema, EMA) and ema.state is not state:
            raise ValueError(
                f"the extra {name!r} is an EMA of {ema.state.name}, and the model is {state.name}; pass the model that "
                f"it averages"
            )
