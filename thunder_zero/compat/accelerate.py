"""needed while: Accelerate writes rows as whole values, and hides its lists of objects.

Two functions of Accelerate are replaced for the whole process once a sharded model and Accelerate are in it, since a
hook of ``state_dict`` would see no difference between Accelerate's call and that of torch's checkpoints::

    Accelerator.get_state_dict     asked first about the model
    save_accelerator_state         asked first about the optimizers, whose states it would write on one rank
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

_guarded = False


def guard_files(refuse_model: Callable[[Any], None], refuse_optimizers: Callable[[Sequence[Any]], None]) -> None:
    """Let functions that raise see what Accelerate is about to collect or write. Do nothing without Accelerate."""
    global _guarded
    library: Any = sys.modules.get("accelerate.accelerator")
    if library is None or _guarded:
        return
    _guarded = True
    get_state_dict, save_state = library.Accelerator.get_state_dict, library.save_accelerator_state

    @wraps(get_state_dict)
    def guarded_get_state_dict(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_model(model)
        return get_state_dict(accelerator, model, *args, **kwargs)

    @wraps(save_state)
    def guarded_save_state(folder: Any, models: Any, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_optimizers([torch_optimizer(optimizer) for optimizer in optimizers])
        return save_state(folder, models, optimizers, *args, **kwargs)

    library.Accelerator.get_state_dict = guarded_get_state_dict
    library.save_accelerator_state = guarded_save_state


def torch_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of torch inside of Accelerate's wrappers, of which there may be none."""
    library: Any = sys.modules["accelerate.optimizer"]
    while isinstance(optimizer, library.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def models_of(accelerator: Any) -> list[Any]:
    return list(accelerator._models)


def optimizers_of(accelerator: Any) -> list[Any]:
    return [torch_optimizer(optimizer) for optimizer in accelerator._optimizers]


@contextmanager
def left_out(accelerator: Any, optimizers: Sequence[Any]) -> Iterator[None]:
    """Hide these optimizers of torch from an accelerator, so that it neither saves nor loads them."""
    every, ids = accelerator._optimizers, set(map(id, optimizers))
    accelerator._optimizers = [wrapper for wrapper in every if id(torch_optimizer(wrapper)) not in ids]
    try:
        yield
    finally:
        accelerator._optimizers = every
