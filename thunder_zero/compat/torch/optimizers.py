"""Optimizers and scalers: steps that fail, steps without global hooks, overflows that ranks share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer

from thunder_zero.compat.private import DispatchKeySet, custom_op_handlers, dispatch_keyset_full_after

# needed while: torch has no hook for an optimizer's step that fails.
# Every step leaves a range of the profiler by an operator of torch, also when it raises. A kernel of ours in front of
# the operator's own, by torch's own registry, sees the error: nothing of torch is patched.

LEAVE = torch.ops.profiler._record_function_exit._RecordFunction
# torch has no kernel of the operator there. It is passed once a call, in inference mode and without tensors, too.
KEY = torch.DispatchKey.BackendSelect

_libraries: list[torch.library.Library] = []  # a kernel is removed when its library is


def on_failed_steps(explain: Callable[[Optimizer, BaseException], None]) -> None:
    """From now on, for the life of the process, call ``explain`` with the optimizer and the error of a failed step.

    A second call changes nothing.
    """
    if _libraries:
        return

    def leave(keys: DispatchKeySet, record: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and error.__traceback__ is not None:
            optimizer = error.__traceback__.tb_frame.f_locals.get("self")  # of the wrapper around all steps
            if isinstance(optimizer, Optimizer):
                explain(optimizer, error)
        # Not a guard that excludes our key: what the operator calls next needs it.
        LEAVE.redispatch(keys & dispatch_keyset_full_after(KEY), record)

    library = torch.library.Library(LEAVE.namespace, "IMPL")
    library.impl(LEAVE, leave, KEY.name, with_keyset=True)
    _libraries.append(library)


# needed while: torch wraps each class's ``step`` in the hooks of all optimizers.


def step_alone(optimizer: Optimizer) -> None:
    """Step an optimizer with its own hooks, and without those that were registered for all optimizers.

    Torch calls both kinds in a wrapper around ``step`` of the class, which it marks as hooked.
    """
    step: Any = type(optimizer).step
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    (step.__wrapped__ if vars(step).get("hooked") else step)(optimizer)
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


# needed while: torch shares what a scaler finds by the first gradient alone, sharded or not.
# A scaler skips a step, and lowers its scale, if gradients have NaN or Inf. ``torch.amp.GradScaler``, and all that is
# built on it, look at the gradients of a device and dtype with one operator, for which DTensor has a handler. Where the
# first gradient is replicated, torch's shares nothing: ranks would find 0 and 1, step apart, and scale apart.

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_handlers: list[Any] = []  # ours, once it is there


def share_found_inf(is_ours: Callable[[Sequence[Tensor]], bool]) -> None:
    """From now on, for the life of the process, let ranks share what they find in any gradient of our models.

    Torch's own handler still gets all other lists of gradients. A second call changes nothing.

    Args:
        is_ours: says of a list of gradients whether one of them belongs to a model of ours.
    """
    if _handlers:
        return
    torchs = custom_op_handlers[UNSCALE]

    def unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (_unscale if is_ours(args[0]) else torchs)(operator, args, kwargs)

    custom_op_handlers[UNSCALE] = unscale
    _handlers.append(unscale)


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run torch's operator on local tensors, then take the largest flag of all ranks that share a sharded gradient.

    The flag has one element. Each dimension of each mesh takes one small collective.
    """
    grads, found, inverse = args
    local = [_local(tensor) for tensor in (found, inverse)]
    operator([_local(grad) for grad in grads], *local, **kwargs)
    parts = [grad for grad in grads if isinstance(grad, DTensor) and any(map(_is_cut, grad.placements))]
    for mesh in {grad.device_mesh: None for grad in parts}:
        for dim in range(mesh.ndim):
            dist.all_reduce(local[0], dist.ReduceOp.MAX, group=mesh.get_group(dim))


def _is_cut(placement: Placement) -> bool:
    return not isinstance(placement, Replicate)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
