"""ZeroTransform: Thunder's hooks, and what each of them calls."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Unpack

import torch

from thunder_zero.arguments import Arguments, check_arguments
from thunder_zero.comm import agree
from thunder_zero.comm.device import device_for, memory_bytes
from thunder_zero.comm.group import Ranks, ranks_of
from thunder_zero.comm.places import doing
from thunder_zero.compiled import Compiled
from thunder_zero.placement import hooks_inside, links, members, pairs, place_buffers, place_others, place_parameters
from thunder_zero.plan import Plan, make_plan
from thunder_zero.policy import Policy
from thunder_zero.refusals import require_traceable, require_untransformed
from thunder_zero.runtime import dropped, norms, optimizer_hooks, scalers
from thunder_zero.runtime.backward_guard import guard, refuse_function_transforms
from thunder_zero.runtime.calls import Calls
from thunder_zero.runtime.initial_values import Sources, Values, initial_values
from thunder_zero.runtime.intact import Intact
from thunder_zero.runtime.placeholders import is_traced
from thunder_zero.runtime.state import State
from thunder_zero.schedule import verify
from thunder_zero.schedule.fault import ScheduleError
from thunder_zero.schedule.program_name import ProgramName
from thunder_zero.schedule.timeline import Kind, Timeline
from thunder_zero.state_dict import hooks
from thunder_zero.trace import named_members, refused_calls
from thunder_zero.trace.casts import cast_borders, cast_inputs
from thunder_zero.trace.enter import with_enter
from thunder_zero.trace.executors import RepairFusion, ScheduleJointTrace
from thunder_zero.trace.insert import insert_synchronize, module_inputs, shard_checks
from thunder_zero.trace.lift import lift_halves
from thunder_zero.trace.operators.choose import operators
from thunder_zero.trace.random_lines import draw_once
from thunder_zero.trace.symbols import Runtime, ZeroExecutor
from thunder_zero.zero_module import adopt

from thunder import compile_data
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, TraceTag, is_tracing
from thunder.core.transform_common import Transform
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction
from thunder.extend import FusionExecutor

CONNECTED = (ThunderOutputFunction._backward_cls, ThunderFunction._backward_cls)  # their nodes lead to our backward


class ZeroTransform(Transform):
    """Data parallelism as a Thunder transform: DDP, ZeRO-1, ZeRO-2 or ZeRO-3.

    >>> model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        arguments: process group or mesh, device, initial values, and fields of the policy that differ from it, such as
            ``stage=3`` or ``broadcast_from=0``: see :class:`~thunder_zero.arguments.Arguments`.

    Raises:
        ValueError: a stage or a field out of range, a module without parameters, a rank that the
            group does not have, a device that does not exist, a mesh whose dimensions do not fit; a parameter or buffer
            on the meta device that nothing gives a value; weights of other names or shapes.
        RuntimeError: no process group; a module that is already transformed; ranks that differ.
        TypeError: a function where a module is needed; not a policy; a field that policies do not have; init that is
            no function, weights that are no mapping.
    """

    def __init__(self, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> None:
        self._given = check_arguments(policy, **arguments)
        self._compiled: Compiled | None = None
        self._forward: TraceCtx | None = None
        self._plain: torch.nn.Module  # transform_module sets the three
        self._state: State
        self._intact: Intact

    def __repr__(self) -> str:
        return f"ZeroTransform({self.policy})"

    @property
    def policy(self) -> Policy:
        """How the model is sharded."""
        return self._given.policy

    @property
    def used(self) -> bool:
        """Whether it already shards a module."""
        return self._compiled is not None

    @property
    def compiled(self) -> Compiled:
        """The model's symbols and programs.

        Raises:
            TypeError: Thunder has not called ``transform_module``: it was given a function.
        """
        if self._compiled is None:
            raise TypeError(
                "ZeroTransform shards a module, and thunder.jit was given a function; jit the module alone, and call "
                "the jitted module from a function that is not jitted"
            )
        return self._compiled

    # Thunder's hooks, in the order in which it calls them.

    def transform_module(self, model: ThunderModule) -> None:
        """Shard the module, and put our executors in front of the others."""
        with doing(f"the transform of {type(model._model).__name__}"):
            self._shard(model)

    def _shard(self, model: ThunderModule) -> None:
        where, plain = self._given, model._model
        ranks = ranks_of(where.process_group, where.mesh)
        inside = ranks.inside
        with agree.all_or_none(ranks.everyone):
            require_untransformed(model, self)
            plan = make_plan(plain, self.policy, inside.size(), inside.rank(), ranks.replicas)
            device = device_for(plain, plan, ranks, where.device)
        plan = replace(plan, memory_bytes=memory_bytes(device, ranks.everyone))
        if self.policy.cpu_offload and device.type == "cpu":
            warnings.warn(
                "cpu_offload changes nothing: the model is on the CPU, so its shards and optimizer state already rest "
                "in host memory",
                stacklevel=2,
            )
        values = initial_values(plain, plan, ranks, device, where.sources)
        self._given = replace(where, sources=Sources())  # a state dict is large, and the transform lives on
        self._state = self._take_over(model, plan, ranks, device, values)
        ignored = [param for name, param in model.named_parameters() if name not in plan.by_name]
        scalers.watch(self._state, ignored)
        norms.watch()
        dropped.watch()
        self.install(model, plan, Calls(self._state))
        cast_borders(plain, self.policy.mixed_precision)
        adopt(model, self._state, self.compiled)
        places = links(model, self._state), pairs(model), members(model), hooks_inside(model)
        self._intact = Intact(self._state, *places)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)

    def _take_over(self, model: ThunderModule, plan: Plan, ranks: Ranks, device: torch.device, values: Values) -> State:
        """Make the model's state, and put shards and placeholders into its modules."""
        state = State(model._model, plan, ranks, device, values.at_rest)
        optimizer_hooks.watch(state, model._model)
        place_others(model, values.others, plan.by_name, self._given.device)
        place_parameters(model, state)
        place_buffers(model, state, self._given.device)
        return state

    def _before_forward(self, model: ThunderModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check the model before Thunder reads it: Thunder would fail on a changed one with words of its own.

        Returns:
            The arguments of forward, in the dtypes of compute.
        """
        if is_tracing():
            raise TypeError(
                f"thunder.jit was given a function that calls {type(model._model).__name__}, which ZeroTransform "
                f"sharded; call the jitted module from a function that is not jitted"
            )
        refuse_function_transforms(type(model._model).__name__)
        self._state.transport.drain()  # ends the collectives of a failed step
        self._intact.require()
        self._state.agree_on_stale()
        return cast_inputs(type(model._model).__name__, args, kwargs, self.policy.mixed_precision)

    def _after_forward(self, model: ThunderModule, args: Any, output: Any) -> None:
        """Count the forward; guard what is returned; let the host write to offloaded shards, since no backward need
        follow, which would wait for their copies, too."""
        self._state.training_forwards += model.training and torch.is_grad_enabled()
        guard(output, CONNECTED, type(model._model).__name__, self._state.accumulation)
        if self.policy.cpu_offload:
            self._state.copies.wait()

    def transform_traces_pre_prologue(
        self, prologue: TraceCtx, computation: TraceCtx, epilogue: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Synchronise at first use, and draw random numbers once; runs before autodiff."""
        executor = self.compiled.executor
        require_traceable(self._plain)
        computation = draw_once(computation)
        computation = insert_synchronize(computation, module_inputs(prologue, computation), executor)
        shard_checks(prologue, executor)
        return prologue, computation, epilogue

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Prove the traces that will run, and that all ranks will run the same; let each half say what it is."""
        executor = self.compiled.executor
        if TraceTag.BACKWARD in trace.tags:
            self._prove(self._forward, trace)
            return with_enter(trace, ProgramName("backward", executor.program.synced), executor)
        self._forward = trace
        half = "forward"
        if _saves_nothing(trace):  # otherwise a backward follows, and both are proved together
            self._prove(trace, None)
            half = "forward without backward"
        named = with_enter(trace, ProgramName(half, executor.program.synced), executor)
        self.compiled.programs[named] = executor.program
        return named

    def _prove(self, forward: TraceCtx, backward: TraceCtx | None) -> None:
        executor = self.compiled.executor
        halves = {"forward without backward": False} if backward is None else {"forward": False, "backward": True}
        programs = {ProgramName(name, executor.program.synced): half for name, half in halves.items()}
        try:
            timeline = proved_timeline(forward, backward, executor)
        except ScheduleError as error:  # tell the other ranks, which would wait for this one
            for program in programs:
                executor.runtime.agree_on_schedule(program, [str(error)])
            raise
        for program, half in programs.items():
            executor.runtime.agree_on_schedule(program, collective_lines(timeline, half))

    def transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's rows of a plain module's state dict."""
        return hooks.to_rows(self._state, submodule_name, state_dict)

    def reverse_transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Full parameters of a sharded model's state dict; a collective."""
        return hooks.to_full(self._state, submodule_name, state_dict)

    def install(self, model: ThunderModule, plan: Plan, runtime: Runtime) -> None:
        """Put our executors around the others: symbols and schedule first, the repair of fused regions last."""
        named_members.in_order()
        refused_calls.refuse(is_traced)
        self._plain = model._model
        executor = ZeroExecutor(plan, runtime)
        self._compiled = Compiled(executor)
        data = compile_data(model)
        front = operators(data.executors_list)
        others = [other for other in data.executors_list if other not in front]  # tz.Recipe has some, too
        schedule = ScheduleJointTrace(executor)
        repair = RepairFusion(executor, schedule, tuple(one for one in others if isinstance(one, FusionExecutor)))
        data.executors_list = (executor, schedule, *front, *others, repair)


def _saves_nothing(forward: TraceCtx) -> bool:
    """Whether a forward trace saves nothing for backward, so that it must end every collective it starts."""
    return TraceTag.AUGMENTED_FORWARD not in forward.tags or not any(forward.bound_symbols[-1].args[1])


def proved_timeline(forward: TraceCtx, backward: TraceCtx | None, executor: ZeroExecutor) -> Timeline:
    """The timeline of the traces that will run.

    Raises:
        ScheduleError: a collective or a free of it is wrong.
    """
    timeline = lift_halves(forward, backward, executor)
    if backward is None:
        timeline = replace(timeline, plan=executor.plan)  # forward alone frees everything
    verify.check(timeline, trained=() if backward is None else executor.program.trained)
    return timeline


def schedule_lines(timeline: Timeline, backward: bool) -> list[str]:
    """What one half does with parameters, in order, such as ``gather h.0.w, h.0.b``."""
    ops = [op for op in timeline.ops if op.params and op.backward is backward]
    return [f"{op.kind} {', '.join(op.params)}" for op in ops]


def collective_lines(timeline: Timeline, backward: bool) -> list[str]:
    """The same without frees: ranks compare it. With ``recompute="units"`` the shapes of a rank's inputs decide what it
    computes again, and so where it frees a bias."""
    ops = timeline.with_ops(op for op in timeline.ops if op.kind is not Kind.FREE)
    return schedule_lines(ops, backward)
