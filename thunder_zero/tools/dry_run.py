"""``trace``: the traces of any rank of any world, in one process, without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from thunder_zero.compiled import Traces
from thunder_zero.policy import ZERO3, Policy
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.interpreted import Interpreted

from thunder.extend import Executor


def trace(
    module: nn.Module,
    *args: Any,
    policy: Policy | int = ZERO3,
    world_size: int = 8,
    rank: int = 0,
    replicas: int = 1,
    synced: bool = True,
    executors: Sequence[Executor] | None = None,
    device: Device | str | None = None,
    **kwargs: Any,
) -> Traces:
    """The traces that one rank of ``world_size`` would run for these arguments.

    Needs no process group, no other process and no GPU, allocates no parameters, and does not change
    ``torch.distributed`` or the module.

    Args:
        module: a plain module. If it is on the meta device, the traces are those of a run on the CPU, and only shapes
            and dtypes of tensors among the arguments count. Traces for CUDA need a module on a CUDA device: which
            kernels attention and a fuser take there is asked of the device.
        args, kwargs: the arguments of its forward.
        policy: how to shard: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        world_size: number of ranks that share one copy of the model.
        rank: the rank to trace.
        replicas: copies of the sharded model, each with ``world_size`` ranks (hybrid sharding).
        synced: True: the program outside ``no_sync``; False: the program inside, which defers gradients.
        executors: those of ``thunder.jit``, such as ``[torch_compile_ex]`` (default: Thunder's).
        device: the sizes that the policy leaves open are those for this device, such as ``"h100"``; the
            lines are still those of a run on the module's device, and of one on the CPU for a module on the meta
            device (default: the module's).

    Returns:
        The forward and backward traces, their timeline and the plan.

    Raises:
        TypeError: not a plain module; not a policy; not a device; a field of the policy among the arguments of forward,
            which does not take it.
        ValueError: the stage, ``world_size``, ``rank`` or ``replicas`` is out of range; the module has no parameters.
    """
    interpreted = Interpreted(module, args, kwargs, policy, (world_size, rank, replicas), synced, executors, device)
    return interpreted.under(policy)
