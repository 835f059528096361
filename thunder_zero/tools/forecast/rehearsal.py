"""Makes a model's state out of meta tensors. The lines of a forecast run on this state.

The state before the step has shards, ZeRO-1's full parameters and deferred gradients. It also has the optimizer's
state, which a first step of the optimizer allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter, signature

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from thunder_zero.compat.private import disable_current_modes
from thunder_zero.plan.params import Plan
from thunder_zero.sharded.digests import digests_of
from thunder_zero.sharded.state import LocalState
from thunder_zero.tools.forecast.unsent import UnsentWire
from thunder_zero.tools.forecast.watch import META, NoForecast, needs_no_values

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def optimizer_at_rest(
    make: MakeOptimizer, shards: Mapping[str, nn.Parameter], *, foreach: bool
) -> tuple[torch.optim.Optimizer, list[tuple[str, Tensor]]]:
    """Return an optimizer of meta shards, and the tensors of its state with their names, as after a first step.

    ``foreach`` is True if torch chooses foreach by default for the shards: plain tensors on CUDA, not DTensors.
    """
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise TypeError(
            f"optimizer is of type {type(make).__name__}; give a class, such as torch.optim.AdamW, or a function from "
            f"parameters to an optimizer: lambda params: torch.optim.SGD(params, 0.1)"
        )
    with needs_no_values(lambda: "the optimizer: it", "leave out fused=True, or give its bytes as reserve="):
        optimizer = _make_optimizer(make, shards.values())
        for group in optimizer.param_groups:
            if foreach and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # torch's default depends on the device, which is META here
        take_step(optimizer, {path: torch.empty_like(shard) for path, shard in shards.items()}, shards)
    return optimizer, list(_named_state(optimizer, shards))


def _make_optimizer(make: MakeOptimizer, shards: Iterable[Tensor]) -> torch.optim.Optimizer:
    try:
        optimizer = make(shards)
    except TypeError as error:
        raise TypeError(
            f"optimizer= was called with the parameters and raised {error}; give a class, such as torch.optim.AdamW, "
            f"or a function from parameters to an optimizer: lambda params: torch.optim.SGD(params, 0.1)"
        ) from error
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise NoForecast(
            f"cannot forecast the optimizer: the step of {type(optimizer).__name__} needs a closure, which runs "
            f"forward and backward again; leave out optimizer=, and give its bytes as reserve="
        )
    return optimizer


def _named_state(optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of each state, as in ``blocks.0.up.weight: exp_avg``."""
    for path, shard in shards.items():
        for name, value in optimizer.state.get(shard, {}).items():
            yield from ((f"{path}: {name}", tensor) for tensor in tree_iter(value) if isinstance(tensor, Tensor))


def take_step(
    optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], shards: Mapping[str, nn.Parameter]
) -> None:
    """Step the optimizer with gradients keyed by path, like ``shards``, and drop the gradients."""
    for path, gradient in gradients.items():
        shards[path].grad = gradient
    optimizer.step()
    optimizer.zero_grad()


class Rehearsal(LocalState):
    """A model's state, made of meta tensors, for :class:`thunder_zero.sharded.runtime.ModelRuntime`.

    The rehearsed step follows an optimizer's step. So ZeRO-1 refreshes all parameters, and parameters that stay
    unsharded after a micro-batch (``reshard_after_backward=False``) are gathered again.
    """

    def __init__(self, plan: Plan, backend: str, *, synced: bool) -> None:
        with disable_current_modes():
            digests_of([torch.empty(1, device=META)])  # allocate constants that stay in the process
            wire = UnsentWire(plan, backend, META)
        tensors = {
            param.path: torch.empty(
                plan.geometry(param).in_compute if param.resident else plan.shard_shape(param),
                dtype=param.rest_dtype,
                device=META,
            )
            for param in plan.params
        }
        super().__init__(plan, META, "the model", wire, tensors, {})
        self.synced = synced
        self.expire(self.params.values())

    def at_rest(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, tensor) pairs of the tensors alive between steps: shards, and ZeRO-1's full parameters."""
        yield from ((path, param.rows) for path, param in self.params.items())
        yield from ((param.path, param.full_value()) for param in self.resident)

    def on_host(self) -> Iterator[Tensor]:
        """Yield the shards that are in host memory between steps (``cpu_offload``)."""
        return (param.rows for param in self.params.values() if self.plan.rests_on_host(param.planned))

    def trained_on_device(self) -> dict[str, nn.Parameter]:
        """Return a mapping from paths to shards, for shards whose optimizer state is on the device."""
        return {
            path: param.shard
            for path, param in self.params.items()
            if param.planned.requires_grad and not self.plan.rests_on_host(param.planned)
        }
