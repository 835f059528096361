"""ZeroTransform: Thunder's hook that shards a module, and the hooks around each forward.

In: a module that ``thunder.jit`` has wrapped, and the arguments of the transform. Out: the same object as a ZeroModule,
whose parameters are shards. Thunder calls ``transform_module`` once. This call is a collective::

    ranks_of            the process groups                            comm/group.py
    make_plan           a Param for each parameter: shard, unit, ...  plan/make_plan.py
    initial_values      full values, or this rank's rows              sharded/initial_values/
    State               shards, placeholders, transport               sharded/state.py
    place_parameters    shards into the plain module                  placement.py
    install, adopt      our executors, the class ZeroModule           program_transform.py, zero_module.py

``_before_forward`` ends the collectives of a failed step, refuses a changed model, lets ranks agree on stale rows, and
casts inputs. ``_after_forward`` counts forwards. The base class, ProgramTransform, has the hooks for traces.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from thunder_zero.comm import agree
from thunder_zero.comm.backends import device_for, memory_bytes
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import Ranks, ranks_of
from thunder_zero.comm.slices import partial_of, require_planned
from thunder_zero.comm.split_ties import require_whole_ties
from thunder_zero.compat.casts import cast_borders, cast_inputs
from thunder_zero.compat.jitted import plain_of
from thunder_zero.compat.plans_of_transformers import leave_to_plan
from thunder_zero.compat.uncapturable import RefusedPart
from thunder_zero.frontends.arguments import Arguments, check_arguments
from thunder_zero.frontends.placement import (
    Check,
    hook_checks,
    module_checks,
    none_buffer_checks,
    place_buffers,
    place_parameters,
    place_unplanned,
    require_intact,
)
from thunder_zero.frontends.program_transform import ProgramTransform
from thunder_zero.frontends.refusals import PARTS, refuse_tools, require_for_slices, require_untransformed
from thunder_zero.frontends.zero_module import ZeroModule, adopt
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded import optimizers
from thunder_zero.sharded.freezing import follow_requires_grad
from thunder_zero.sharded.initial_values import InitialValues, Sources, initial_values
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.state import State

from thunder.core.module import ThunderModule
from thunder.core.trace import is_tracing


def transforming(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context that tags collectives as the sharding of a module."""
    return doing(f"the transform of {type(module).__name__}")


class ZeroTransform(ProgramTransform):
    """Data parallelism as a Thunder transform: DDP, ZeRO-1, ZeRO-2 or ZeRO-3.

    >>> model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        arguments: process group or mesh, device, initial values, and fields of the policy to change, such as
            ``stage=3`` or ``broadcast_from=0``. See :class:`~thunder_zero.frontends.arguments.Arguments`.

    Raises:
        ValueError: a stage or a field is out of range, or the module has no parameters. It is also raised if ``device``
            does not exist, the group lacks this rank, or ``mesh`` has unsupported dimensions. It is also raised if a
            tensor on the meta device gets no value, or ``weights`` has other names or shapes than the module.
        RuntimeError: there is no process group, the module is already transformed, or ranks differ.
        TypeError: Thunder was given a function instead of a module, ``policy`` is not a policy, or a field does not
            exist. It is also raised if ``init`` is not a function, or ``weights`` is not a mapping.
    """

    def __init__(self, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> None:
        super().__init__()
        self._arguments = check_arguments(policy, **arguments)
        self._state: State  # set by transform_module
        self._checks: list[Check]  # set by transform_module

    def __repr__(self) -> str:
        return f"ZeroTransform({self.policy})"

    @property
    def policy(self) -> Policy:
        """The policy of the transform."""
        return self._arguments.policy

    def parts(self) -> tuple[RefusedPart, ...]:
        """Return the kinds of submodules that are refused."""
        return (*super().parts(), *PARTS)

    # Thunder's hooks, in the order in which it calls them.

    def transform_module(self, model: ThunderModule) -> None:
        """Shard the module, and put our executors in front of Thunder's executors."""
        with transforming(plain_of(model)):
            self._shard(model)

    def _shard(self, model: ThunderModule) -> None:
        arguments, plain = self._arguments, plain_of(model)
        ranks = ranks_of(arguments.process_group, arguments.mesh, arguments.dp_mesh_dims)
        with agree.all_or_none(ranks.world):
            require_untransformed(model, self)
            mesh = ranks.planned
            if mesh.is_sliced:
                require_for_slices(self.policy)
            slices = self._slices(plain, ranks)
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
        values = initial_values(plain, plan, ranks, device, arguments.sources)
        # A state dict is large, and the transform lives as long as the model.
        self._arguments = replace(arguments, sources=Sources())
        if plan.mesh.is_sliced:
            leave_to_plan(plain)
        self._state = self._take_over(model, plan, ranks, device, values)
        self.used = True
        cast_borders(plain, self.policy.mixed_precision)
        self._adopt(model)
        self._checks = self._make_checks(model)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)

    def _slices(self, module: nn.Module, ranks: Ranks) -> dict[str, int]:
        """Return no sliced dimensions. Raise ValueError for tensor parallelism, since Thunder traces no DTensors."""
        if ranks.tensor is not None:
            raise ValueError(
                f"mesh has a dimension for tensor parallelism, {ranks.tensor.mesh_dim_names}, and Thunder traces no "
                f"DTensors; use thunder_zero.compile(module, ..., mesh=mesh)"
            )
        return {}

    def _adopt(self, model: ThunderModule) -> None:
        """Make the jitted module a sharded model, which Thunder compiles with our executors."""
        runtime = ModelRuntime(self._state)
        self.install(model, self._state.plan, runtime)
        adopt(model, ZeroModule, self._state, self._arguments.progress)
        model._runtime = runtime
        model._entry = self.entry

    def _take_plan(self, plan: Plan) -> None:
        """Use a plan in which other parameters are trained for the programs that are compiled from now on."""
        self.executor.plan = plan

    def _make_checks(self, model: ThunderModule) -> list[Check]:
        plain = plain_of(model)
        return [*hook_checks(plain), *module_checks(model, self._state), *none_buffer_checks(plain)]

    def _take_over(
        self, model: ThunderModule, plan: Plan, ranks: Ranks, device: torch.device, values: InitialValues
    ) -> State:
        """Return the model's state, and put its shards into the plain module."""
        state = State(plain_of(model), plan, ranks, device, values.at_rest)
        optimizers.watch(state, plain_of(model))
        place_unplanned(model, values.unplanned, plan.by_name, self._arguments.device)
        place_parameters(model, state)
        place_buffers(model, state, self._arguments.device)
        return state

    def _before_forward(self, model: ThunderModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check the model, and return the arguments of forward in the dtypes of compute.

        This runs before Thunder reads the model. Thunder's error about a changed model would not name the change.
        """
        if is_tracing():
            raise TypeError(
                f"thunder.jit was given a function that calls {type(plain_of(model)).__name__}, which ZeroTransform "
                f"sharded; call the jitted module from a function that is not jitted"
            )
        refuse_tools(type(plain_of(model)).__name__)
        model._slots.require_at_rest()
        self._state.require_sharded()
        self._state.transport.drain()  # ends the collectives of a failed step
        require_intact(self._checks)
        if follow_requires_grad(self._state, model._runtime):
            self._take_plan(self._state.plan)
        self._state.same_batch.compare(args, kwargs)
        self._state.agree_on_stale()
        return cast_inputs(type(plain_of(model)).__name__, args, kwargs, self.policy.mixed_precision)

    def _after_forward(self, model: ThunderModule, args: Any, output: Any) -> None:
        """Count the forward, and wait for copies of offloaded shards, so that the host may write to the shards.

        Backward would also wait for the copies, but a forward may have no backward.
        """
        self._state.training_forwards += model.training and torch.is_grad_enabled()
        if self.policy.cpu_offload:
            self._state.copies.wait()
