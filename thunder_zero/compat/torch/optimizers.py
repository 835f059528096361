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
# Every step ends a profiler range by calling an operator of torch, also when the step raises. Our kernel, which torch's
# registry puts in front of the operator's own kernel, sees the error. Nothing of torch is patched.

LEAVE = torch.ops.profiler._record_function_exit._RecordFunction
# Torch has no kernel of the operator at this key. Each call passes the key once, also in inference mode and without
# tensors.
KEY = torch.DispatchKey.BackendSelect

_libraries: list[torch.library.Library] = []  # kept, since a kernel goes with its library


def on_failed_steps(explain: Callable[[Optimizer, BaseException], None]) -> None:
    """Call ``explain`` with the optimizer and the error of each failed step, for the life of the process."""

    def leave(keys: DispatchKeySet, record: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and error.__traceback__ is not None:
            optimizer = error.__traceback__.tb_frame.f_locals.get("self")  # a local of the wrapper around all steps
            if isinstance(optimizer, Optimizer):
                explain(optimizer, error)
        # A guard that excludes our key is wrong here, since the operators called next need the key.
        LEAVE.redispatch(keys & dispatch_keyset_full_after(KEY), record)

    library = torch.library.Library(LEAVE.namespace, "IMPL")
    library.impl(LEAVE, leave, KEY.name, with_keyset=True)
    _libraries.append(library)


# needed while: torch wraps each class's ``step`` in the hooks of all optimizers.


def step_alone(optimizer: Optimizer) -> None:
    """Step an optimizer with its own hooks, but without hooks that are registered for all optimizers.

    Torch calls both kinds of hooks in a wrapper around ``step`` of the class, and marks the wrapper as hooked.
    """
    step: Any = type(optimizer).step
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    (step.__wrapped__ if vars(step).get("hooked") else step)(optimizer)
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


# needed while: the first gradient alone decides whether torch shares a scaler's found_inf.
# A scaler skips a step, and lowers its scale, if gradients have NaN or Inf. ``torch.amp.GradScaler`` and its subclasses
# check all gradients of a device and dtype with one operator, for which DTensor has a handler. If the first gradient is
# replicated, torch's handler shares nothing: ranks would find 0 and 1, and their steps and scales would differ.

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def share_found_inf(is_ours: Callable[[Sequence[Tensor]], bool]) -> None:
    """Share found_inf of gradients between ranks, for the life of the process, if ``is_ours`` is true of the gradients.

    Torch's own handler still gets all other lists of gradients.
    """
    torchs = custom_op_handlers[UNSCALE]

    def unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (_unscale if is_ours(args[0]) else torchs)(operator, args, kwargs)

    custom_op_handlers[UNSCALE] = unscale


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run torch's operator on local tensors, then set the flag to its maximum over ranks that share sharded gradients.

    The flag has one element. There is one small all-reduce for each dimension of each mesh.
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
