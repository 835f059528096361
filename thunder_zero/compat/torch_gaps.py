"""What torch says or does by private names alone, or gets wrong; nothing of it needs Thunder.

Most functions are a public name, and a type, for what torch has under a private one. Three change what torch does, by
its own registries: :func:`on_failed_steps` and :func:`share_found_inf` for the life of the process,
:func:`refuse_fully_shard` for one module.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer

from thunder_zero.compat.private import (
    REGISTRY_KEY,
    DispatchKeySet,
    c10d_world,
    coalescing_manager,
    current_graph_task_id,
    custom_op_handlers,
    dispatch_keyset_full_after,
    foreach_div_,
    peek_interpreter_stack,
    queue_callback,
    set_pg_timeout,
    will_engine_execute_node,
)

# needed while: torch says by private names alone which backward or function transform runs.
# Likewise it divides many tensors in one call.


IS_PARAM = "_is_param"  # the attribute by which torch knows a DTensor that is a parameter; no user set it


def is_inside_function_transform() -> bool:
    """Whether ``torch.func`` or ``vmap`` is active."""
    return peek_interpreter_stack() is not None


def accumulates(leaves: Iterable[Node]) -> bool:
    """Whether the running backward adds to the ``.grad`` of all of these leaves."""
    try:
        return all(map(will_engine_execute_node, leaves))
    except RuntimeError:  # torch.autograd.grad of a leaf
        return False


def node_class(function: type[torch.autograd.Function]) -> type[Node]:
    """Return the class of the nodes that an autograd function puts into graphs."""
    nodes: type[Node] = function._backward_cls
    return nodes


def running_backward() -> int:
    """The number of the backward that runs on this thread; -1 if none does."""
    number: int = current_graph_task_id()
    return number


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward ends."""
    queue_callback(function)


def divide_all(tensors: tuple[Tensor, ...], divisor: float) -> None:
    """Divide tensors in place, in one call."""
    foreach_div_(tensors, divisor)


# needed while: torch groups collectives by private names alone, and leaves failed ones queued.


@contextmanager
def one_launch(group: ProcessGroup) -> Iterator[Any]:
    """Launch the collectives inside the block as one; yields what has ``wait()`` after it.

    After an exception inside, an interrupt for one, torch would leave what was queued to the group's next collectives,
    which would then never be launched.
    """
    try:
        with coalescing_manager(group, async_ops=True) as launched:
            yield launched
    except BaseException:
        c10d_world.pg_coalesce_state.pop(group, None)
        raise


def let_go_of_groups(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to its process groups, which were destroyed."""
    mesh._pg_registry.clear()


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """Return how long the group's collectives of tensors on a device wait; torch has no public way to ask."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Change how long the group's collectives wait, for which torch has no public way."""
    set_pg_timeout(timeout, group)


# needed while: gloo's thread polls a connection to which another thread writes.
# It is woken by what arrives there. If that takes the core from a thread that is writing, it polls until it loses the
# core again: a third of a step's CPU time where cores are few. Linux can wake a thread without taking a core from
# another one of its kind, which changes nothing but who waits.

GLOO_LOOP = "gloo_tcp_loop"  # the name of the thread


def wait_for_a_core(thread: int) -> None:
    """Let a thread, by the system's number, take no core from another thread when it is woken, on Linux."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it, and the thread may have ended
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def let_gloo_wait_for_a_core() -> None:
    """:func:`wait_for_a_core` for gloo's threads that run now; a second call changes nothing."""
    for thread in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):
            if thread.read_text().strip() == GLOO_LOOP:
                wait_for_a_core(int(thread.parent.name))


# needed while: a thread of gloo that still holds tensors aborts a process that exits.
# Torch joins such a thread when the last reference to a destroyed group goes, and Python stops no thread cleanly later.


def at_exit(function: Callable[..., None], *args: Any) -> None:
    """Call a function when the interpreter exits: what is given later is called earlier."""
    atexit.register(function, *args)


def all_groups() -> list[ProcessGroup]:
    """The process groups that were made and not destroyed."""
    return list(c10d_world.pg_map)


# needed while: torch has no hook for an optimizer's step that fails.
# Every step leaves a range of the profiler by an operator of torch, also when it raises. A kernel of ours in front of
# the operator's own, by torch's own registry, sees the error: nothing of torch is patched.

LEAVE = torch.ops.profiler._record_function_exit._RecordFunction
# torch has no kernel of the operator there. It is passed once a call, in inference mode and without tensors, too.
KEY = torch.DispatchKey.BackendSelect

_libraries: list[torch.library.Library] = []  # a kernel is removed when its library is


def on_failed_steps(explain: Callable[[Optimizer, BaseException], None]) -> None:
    """From now on, for the life of the process, call ``explain`` with the optimizer and the error of a step that
    raises; a second call changes nothing."""
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


def step_alone(optimizer: Optimizer) -> None:
    """Step an optimizer without the hooks that were registered for all optimizers; call its own.

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
_wrapped: list[Any] = []  # our handler, once it is there


def share_found_inf(is_ours: Callable[[Sequence[Tensor]], bool]) -> None:
    """From now on, for the life of the process, ranks share what they find in any gradient of our models.

    Torch's own handler keeps all other lists of gradients. A second call changes nothing.

    Args:
        is_ours: says of a list of gradients whether one of them belongs to a model of ours.
    """
    torchs = custom_op_handlers[UNSCALE]
    if torchs in _wrapped:
        return

    def unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (_unscale if is_ours(args[0]) else torchs)(operator, args, kwargs)

    custom_op_handlers[UNSCALE] = unscale
    _wrapped.append(unscale)


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


# needed while: torch asks by a private name alone whether ``fully_shard`` was applied.


class Composed(dict[str, Any]):
    """What torch reads before ``fully_shard`` changes anything; it raises there. Copies of the module have none."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __contains__(self, function: object) -> bool:
        if function == "fully_shard":
            raise RuntimeError(
                f"fully_shard was given a {self._module} that thunder_zero already shards; leave it out: ZeroTransform "
                f"and compile take its options: stage and reshard_after_forward, mesh, mixed_precision, cpu_offload, "
                f"ignored; unit_of names the units"
            )
        return super().__contains__(function)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return dict, ()


def refuse_fully_shard(model: nn.Module, plain: nn.Module) -> None:
    """Let ``fully_shard`` of the model, of the plain module and of its submodules raise."""
    name = type(plain).__name__
    vars(model)[REGISTRY_KEY] = Composed(name)
    for path, module in plain.named_modules():
        vars(module)[REGISTRY_KEY] = Composed(f"submodule {path!r} of a {name}" if path else name)
