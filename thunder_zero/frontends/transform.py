"""ZeroTransform: Thunder's hook for a module, which shards it, and what runs around each forward.

In: a module that ``thunder.jit`` has wrapped, and the arguments of the transform. Out: the same object as a ZeroModule,
whose parameters are shards. Thunder calls ``transform_module`` once; it is a collective::

    ranks_of            the process groups                            comm/group.py
    make_plan           shape, shard, unit and lifetime of each       plan/make_plan.py
    initial_values      full ones, or this rank's rows                sharded/initial_values/
    State               shards, placeholders, transport               sharded/state.py
    place_parameters    shards into the plain module                  placement.py
    install, adopt      our executors; its class is ZeroModule now    program_transform.py, zero_module.py

Then two hooks run around each forward: ``_before_forward`` ends what a failed step left under way, refuses a model that
was changed, lets ranks agree on stale rows and casts inputs. The hooks for traces are those of the base class,
ProgramTransform.
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
    hooks_stay,
    intact,
    nones_stay,
    place_buffers,
    place_others,
    place_parameters,
    require_intact,
)
from thunder_zero.frontends.program_transform import ProgramTransform
from thunder_zero.frontends.refusals import PARTS, refuse_tools, require_for_slices, require_untransformed
from thunder_zero.frontends.zero_module import ZeroModule, adopt
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded import optimizers
from thunder_zero.sharded.initial_values import InitialValues, Sources, initial_values
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.state import State

from thunder.core.module import ThunderModule
from thunder.core.trace import is_tracing


def transforming(module: nn.Module) -> AbstractContextManager[None]:
    """Tag the collectives of the block as those that shard a module."""
    return doing(f"the transform of {type(module).__name__}")


class ZeroTransform(ProgramTransform):
    """Data parallelism as a Thunder transform: DDP, ZeRO-1, ZeRO-2 or ZeRO-3.

    >>> model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        arguments: process group or mesh, device, initial values, and fields of the policy that differ from it, such as
            ``stage=3`` or ``broadcast_from=0``: see :class:`~thunder_zero.frontends.arguments.Arguments`.

    Raises:
        ValueError: a stage or a field out of range, a module without parameters, a rank that the
            group does not have, a device that does not exist, a mesh whose dimensions do not fit; a parameter or buffer
            on the meta device that nothing gives a value; weights of other names or shapes.
        RuntimeError: no process group; a module that is already transformed; ranks that differ.
        TypeError: a function where a module is needed; not a policy; a field that policies do not have; init that is
            no function, weights that are no mapping.
    """

    def __init__(self, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> None:
        super().__init__()
        self._given = check_arguments(policy, **arguments)
        self._state: State  # transform_module sets the two
        self._intact: list[Check]

    def __repr__(self) -> str:
        return f"ZeroTransform({self.policy})"

    @property
    def policy(self) -> Policy:
        """How the model is sharded."""
        return self._given.policy

    def parts(self) -> tuple[RefusedPart, ...]:
        return (*super().parts(), *PARTS)

    # Thunder's hooks, in the order in which it calls them.

    def transform_module(self, model: ThunderModule) -> None:
        """Shard the module, and put our executors in front of the others."""
        with transforming(plain_of(model)):
            self._shard(model)

    def _shard(self, model: ThunderModule) -> None:
        where, plain = self._given, plain_of(model)
        ranks = ranks_of(where.process_group, where.mesh, where.dp_mesh_dims)
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
            device = device_for(plain, plan, ranks, where.device)
        plan = replace(plan, memory_bytes=memory_bytes(device, ranks.world))
        if self.policy.cpu_offload and device.type == "cpu":
            warnings.warn(
                "cpu_offload changes nothing: the model is on the CPU, so its shards and optimizer state already rest "
                "in host memory",
                stacklevel=2,
            )
        values = initial_values(plain, plan, ranks, device, where.sources)
        self._given = replace(where, sources=Sources())  # a state dict is large, and the transform lives on
        if plan.mesh.is_sliced:
            leave_to_plan(plain)
        self._state = self._take_over(model, plan, ranks, device, values)
        self.used = True
        cast_borders(plain, self.policy.mixed_precision)
        self._adopt(model)
        self._intact = self._checks(model)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)

    def _slices(self, module: nn.Module, ranks: Ranks) -> dict[str, int]:
        """Return the dimensions along which torch slices parameters; Thunder would compute with DTensors."""
        if ranks.tensor is not None:
            raise ValueError(
                f"mesh has a dimension for tensor parallelism, {ranks.tensor.mesh_dim_names}, and Thunder traces no "
                f"DTensors; use thunder_zero.compile(module, ..., mesh=mesh)"
            )
        return {}

    def _adopt(self, model: ThunderModule) -> None:
        """Make the jitted module a sharded one, which Thunder compiles with our executors."""
        calls = ModelRuntime(self._state)
        self.install(model, self._state.plan, calls)
        adopt(model, ZeroModule, self._state, self._given.progress)
        model._calls = calls
        model._entry = self.entry

    def _checks(self, model: ThunderModule) -> list[Check]:
        return [*hooks_stay(plain_of(model)), *intact(model, self._state), *nones_stay(plain_of(model))]

    def _take_over(
        self, model: ThunderModule, plan: Plan, ranks: Ranks, device: torch.device, values: InitialValues
    ) -> State:
        """Make the model's state, and put shards into its modules."""
        state = State(plain_of(model), plan, ranks, device, values.at_rest)
        optimizers.watch(state, plain_of(model))
        place_others(model, values.unplanned, plan.by_name, self._given.device)
        place_parameters(model, state)
        place_buffers(model, state, self._given.device)
        return state

    def _before_forward(self, model: ThunderModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check the model before Thunder reads it: Thunder would fail on a changed one with words of its own. Returns
        the arguments of forward, in the dtypes of compute."""
        if is_tracing():
            raise TypeError(
                f"thunder.jit was given a function that calls {type(plain_of(model)).__name__}, which ZeroTransform "
                f"sharded; call the jitted module from a function that is not jitted"
            )
        refuse_tools(type(plain_of(model)).__name__)
        model._slots.require_at_rest()
        self._state.require_sharded()
        self._state.transport.drain()  # ends the collectives of a failed step
        require_intact(self._intact)
        self._state.same_batch.compare(args, kwargs)
        self._state.agree_on_stale()
        return cast_inputs(type(plain_of(model)).__name__, args, kwargs, self.policy.mixed_precision)

    def _after_forward(self, model: ThunderModule, args: Any, output: Any) -> None:
        """Count the forward; let the host write to offloaded shards, since no backward need follow, which would wait
        for their copies, too."""
        self._state.training_forwards += model.training and torch.is_grad_enabled()
        if self.policy.cpu_offload:
            self._state.copies.wait()
