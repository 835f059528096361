"""Averages gradients of full parameters that code outside of the model's forward has used.

A program reduces the gradients of its own computation. A loss that reads the embedding, or a submodule called alone,
adds this rank's gradient, which DDP would average::

    Rows.backward     writes the mean gradient          .grad = mean
    autograd          adds the gradient from outside    .grad = mean + this rank's gradient     the hook notes the path
    end of backward   averages .grad over ranks         .grad = mean + mean from outside

The average of a mean is the mean, so nothing is subtracted. Sharded parameters need no average: they are DTensors,
which torch refuses to mix with plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.hooks import unserializable_hook

from thunder_zero.comm.collective_tags import CollectiveTag
from thunder_zero.compat.private import at_end_of_backward, running_backward, will_engine_execute_node
from thunder_zero.plan.params import Plan
from thunder_zero.sharded.dtensors import dtensor_like, local
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.wire import Wire


def accumulates(leaves: Iterable[Node]) -> bool:
    """Return whether the running backward adds to the ``.grad`` of all leaves."""
    try:
        return all(map(will_engine_execute_node, leaves))
    except RuntimeError:  # raised under torch.autograd.grad of a leaf
        return False


class OutsideGradients:
    """The gradients that full parameters of one model get from outside of its programs."""

    def __init__(
        self, plan: Plan, wire: Wire, name: str, device: torch.device, params: Mapping[str, ShardedParam]
    ) -> None:
        self._plan, self._wire, self._name, self._device, self._params = plan, wire, name, device, params
        self._noted: dict[int, list[str]] = {}  # paths to average when a backward ends, by the backward's number
        for path, param in params.items():
            if not param.planned.sharded and param.shard.is_floating_point():
                param.has_own_hook = True
                _hook(param.shard, path, WeakMethod(self._arrived))

    def _arrived(self, path: str, total: Tensor) -> Tensor | None:
        """Return the mean of a gradient if the gradient must be right now. Otherwise note the parameter's path."""
        param = self._params[path]
        shard, mean, param.given = param.shard, param.given, None
        if total is mean:
            return None
        if isinstance(total, DTensor) and isinstance(shard, DTensor) and total.placements != shard.placements:
            return None  # torch computed with DTensors, and adds the parts of all ranks itself
        adds_to_grad = accumulates([get_gradient_edge(shard).node])
        if not adds_to_grad and mean is None:
            return None  # torch.autograd.grad of code outside gives this rank's gradient, as with DDP
        if total.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) reaches parameter {path!r} outside of the forward of {self._name}, and "
                f"the mean over ranks has no graph; use torch.autograd.grad(..., create_graph=True), then backward()"
            )
        if isinstance(shard, DTensor) or not adds_to_grad or param.is_hooked:
            (average,) = self._means({path: local(total)})
            return dtensor_like(average, shard, shard.shape) if isinstance(shard, DTensor) else average
        if (backward := running_backward()) not in self._noted:
            self._noted[backward] = []
            at_end_of_backward(partial(self._average_noted, backward))
        self._noted[backward].append(path)
        return None

    def _average_noted(self, backward: int) -> None:
        paths = sorted(self._noted.pop(backward))
        grads = {path: grad for path in paths if (grad := self._params[path].shard.grad) is not None}
        with torch.no_grad():
            for grad, mean in zip(grads.values(), self._means(grads) if grads else (), strict=True):
                grad.copy_(mean)

    def _means(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the means of gradients over all data ranks. This is a collective for each dtype."""
        first, means = next(iter(grads)), dict[str, Tensor]()
        more = f" and {len(grads) - 1} more" if len(grads) > 1 else ""
        text = f"the mean of the gradient of {first!r}{more} from outside of the forward of {self._name}"
        for dtype in dict.fromkeys(grad.dtype for grad in grads.values()):
            bucket = {path: grad.to(self._device) for path, grad in grads.items() if grad.dtype is dtype}
            self._wire.transport.enter(CollectiveTag(text, repr((dtype, list(bucket)))))
            (over, *_) = self._plan.reduced_over(self._plan.by_name[first])
            handle = self._wire.transport.all_reduce(self._wire.weighed([*bucket.values()]), over)
            means.update(zip(bucket, handle.wait(), strict=True))
        return [means[path] for path in grads]


def _hook(shard: Tensor, path: str, arrived: WeakMethod[Callable[[str, Tensor], Tensor | None]]) -> None:
    """Register the first hook on a shard's gradient. The shard, which an optimizer has, does not keep the model."""

    @unserializable_hook  # so that pickling the shard does not warn
    def hook(total: Tensor | None) -> Tensor | None:
        if total is None:  # the program has written its gradient, and nothing else has one
            return None
        function = arrived()
        return None if function is None else function(path, total)

    trains = shard.requires_grad
    shard.requires_grad_().register_hook(hook)  # torch accepts no hook on a frozen tensor, which may train later
    shard.requires_grad_(trains)
