"""ZeroTransform: Thunder's hook that shards a module; ``tz.compile`` is ``thunder.jit`` with it.

In: a module that ``thunder.jit`` has wrapped, and the arguments of the transform. Out: the same object as a ZeroModule,
whose parameters are shards. Thunder calls ``transform_module`` once. This call is a collective::

    ranks_of            the process groups                            comm/group.py
    make_plan           a Param for each parameter: shard, unit, ...  plan/make_plan.py
    initial_values      full values, or this rank's rows              sharded/initial_values/
    State               shards, placeholders, transport               sharded/state.py
    State.place         shards into the plain module                  state.py
    CapturedForward     what a call runs                              forward.py
    ZeroModule.adopt    the class ZeroModule                          zero_module.py
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, NoReturn, Unpack

from torch import nn

from thunder_zero.capture.arguments import Arguments, check_arguments
from thunder_zero.capture.forward import CapturedForward
from thunder_zero.capture.placement import place_buffers, place_unplanned
from thunder_zero.capture.refusals import require_for_slices, require_untransformed
from thunder_zero.capture.zero_module import ZeroModule
from thunder_zero.comm import agree
from thunder_zero.comm.backends import device_for, memory_bytes
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import has_groups, ranks_of
from thunder_zero.comm.slices import partial_of, require_planned, require_whole_ties, slices_of
from thunder_zero.compat.jitted import plain_of
from thunder_zero.compat.plans_of_transformers import leave_to_plan
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded import optimizers
from thunder_zero.sharded.casts import cast_borders
from thunder_zero.sharded.initial_values import Sources, initial_values
from thunder_zero.sharded.quantized import taken
from thunder_zero.sharded.state import State

import thunder
from thunder import compile_data, compile_stats
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform
from thunder.executors.torch_compile import torch_compile_ex


def transforming(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context that tags collectives as the sharding of a module."""
    return doing(f"the transform of {type(module).__name__}")


class ZeroTransform(Transform):
    """Data parallelism as a Thunder transform: DDP, ZeRO-1, ZeRO-2 or ZeRO-3.

    >>> model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        arguments: process group or mesh, device, initial values, and fields of the policy to change, such as
            ``stage=3`` or ``broadcast_from=0``. See :class:`~thunder_zero.capture.arguments.Arguments`.

    Raises:
        ValueError: a stage or a field is out of range, or the module has no parameters. It is also raised if ``device``
            does not exist, the group lacks this rank, or ``mesh`` has unsupported dimensions. It is also raised if a
            tensor on the meta device gets no value, or ``weights`` has other names or shapes than the module.
        RuntimeError: there is no process group, the module is already transformed, or ranks differ.
        TypeError: Thunder was given a function instead of a module, ``policy`` is not a policy, or a field does not
            exist. It is also raised if ``init`` is not a function, or ``weights`` is not a mapping.
    """

    def __init__(self, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> None:
        self._arguments = check_arguments(policy, **arguments)
        self._used = False  # True once this transform has sharded a module

    def __repr__(self) -> str:
        return f"ZeroTransform({self.policy})"

    @property
    def policy(self) -> Policy:
        return self._arguments.policy

    def transform_module(self, model: ThunderModule) -> None:
        with transforming(plain_of(model)), ExitStack() as undone_by_errors:
            self._shard(model, undone_by_errors)

    def transform_traces_pre_prologue(self, *traces: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "ZeroTransform shards a module, and thunder.jit was given a function; jit the module alone, and call "
            "the jitted module from a function that is not jitted"
        )

    def _shard(self, model: ThunderModule, undone_by_errors: ExitStack) -> None:
        arguments, plain = self._arguments, plain_of(model)
        ranks = ranks_of(arguments.process_group, arguments.mesh, arguments.dp_mesh_dims)
        with agree.all_or_none(ranks.world):
            undone_by_errors.enter_context(taken(plain))
            require_untransformed(model, self)
            if self._used:
                raise RuntimeError(
                    f"the ZeroTransform given for {type(plain).__name__} already shards a module; give each module a "
                    f"new ZeroTransform"
                )
            mesh = ranks.planned
            if mesh.is_sliced:
                require_for_slices(self.policy)
            slices = slices_of(plain, ranks)
            plan = make_plan(plain, self.policy, mesh, slices, partial_of(plain, ranks))
            if plan.mesh.is_sliced:
                require_planned(plain, plan)
                require_whole_ties(plain, plan)
            device = device_for(plain, plan, ranks, arguments.device)
        plan = replace(plan, memory_bytes=memory_bytes(device, ranks.world))
        if self.policy.cpu_offload and device.type == "cpu":
            warnings.warn(
                "cpu_offload changes nothing: the model is on the CPU, so its shards and optimizer state already rest "
                "in host memory",
                stacklevel=2,
            )
        values = initial_values(plain, plan, ranks, device, arguments.sources, progress=arguments.progress)
        # A state dict is large, and the transform lives as long as the model.
        self._arguments = replace(arguments, sources=Sources())
        if plan.mesh.is_sliced:
            leave_to_plan(plain)
        state, self._used = State(plain, plan, ranks, device, values.at_rest), True
        optimizers.watch(state, plain)
        place_unplanned(plain, values.unplanned, plan.by_name, arguments.device)
        state.place()
        place_buffers(plain, self.policy.mixed_precision, arguments.device)
        cast_borders(plain, self.policy.mixed_precision)
        data = compile_data(model)
        forward = CapturedForward(
            plain,
            state,
            compile_stats(model),
            dynamic=arguments.dynamic,
            fuses=arguments.fuse is not None or torch_compile_ex in data.executors_list,
            transforms=[other for other in data.transforms if other is not self],
        )
        ZeroModule.adopt(model, forward, state, progress=arguments.progress)


def compile(module: nn.Module, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> ZeroModule:
    """Shard a module, and train PyTorch's joint graph of it.

    >>> model = tz.compile(AutoModelForCausalLM.from_config(config), stage=3)

    This is a shorter spelling of ``thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])``, which raises bad
    arguments on all ranks. See :class:`~thunder_zero.ZeroTransform` for the arguments and the errors.
    """
    if not isinstance(module, nn.Module) or isinstance(module, ThunderModule):
        raise TypeError(f"compile takes a plain torch module, got {type(module).__name__}; pass the module itself")
    try:
        transform = ZeroTransform(policy, **arguments)
    except (TypeError, ValueError):
        if has_groups():
            _refuse_with_all(module, **arguments)
        raise
    model: ZeroModule = thunder.jit(module, transforms=[transform])
    return model


def _refuse_with_all(module: nn.Module, **arguments: Unpack[Arguments]) -> None:
    """Raise the current error inside the collective in which other ranks shard the module, so that all ranks raise."""
    ranks = ranks_of(*(arguments.get(name) for name in ("process_group", "mesh", "dp_mesh_dims")))
    with transforming(module), agree.all_or_none(ranks.world):
        raise
