"""ZeroTransform: Thunder's hooks, and what each of them calls. No logic lives here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from thunder_zero import verify
from thunder_zero.plan import Plan, make_plan
from thunder_zero.policy import Policy
from thunder_zero.runtime import checkpoint
from thunder_zero.runtime.executor import Runtime, ZeroExecutor
from thunder_zero.runtime.state import State, is_transformed, process_group
from thunder_zero.timeline import Timeline
from thunder_zero.trace.insert import insert_model_check, insert_synchronize, parameter_inputs, shard_checks
from thunder_zero.trace.lift import lift_halves
from thunder_zero.trace.schedule import Mend, Schedule

from thunder import compile_data, compile_stats
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transform_common import Transform
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Traces:
    """What runs for one kind of input: both traces, their timeline and the plan.

    Attributes:
        forward: the forward trace, as it runs.
        backward: the backward trace, or None where nothing needs a gradient.
        timeline: both halves, forward first; ``Op.source`` counts the lines of its half's trace.
        plan: what each parameter is.
    """

    forward: TraceCtx
    backward: TraceCtx | None
    timeline: Timeline
    plan: Plan

    @property
    def forward_timeline(self) -> Timeline:
        """The forward half."""
        return self.timeline.with_ops(op for op in self.timeline.ops if not op.backward)

    @property
    def backward_timeline(self) -> Timeline:
        """The backward half; empty where there is no backward."""
        return self.timeline.with_ops(op for op in self.timeline.ops if op.backward)


class ZeroTransform(Transform):
    """Data parallelism as a Thunder transform: DDP, ZeRO-1, ZeRO-2 or ZeRO-3.

    >>> model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3; it goes before ``stage``.
        stage: 0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3 (default).
        process_group: ranks that share the model; the default group if None.
        device: where the shards live; where the module's parameters are if None.
        fields: further fields of the policy, such as ``broadcast_from=0``.

    Raises:
        ValueError: a stage or a field out of range, a module without parameters, a rank that the
            group does not have.
        RuntimeError: no process group; a module that is transformed already; ranks that differ.
        TypeError: a function where a module is needed.
    """

    def __init__(
        self,
        policy: Policy | int | None = None,
        *,
        stage: int = 3,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        **fields: Any,
    ) -> None:
        chosen = policy if isinstance(policy, Policy) else Policy(stage=stage if policy is None else policy)
        self.policy = replace(chosen, **fields)
        self.process_group = process_group
        self.device = None if device is None else torch.device(device)
        self._executor: ZeroExecutor | None = None
        self._forward: TraceCtx | None = None

    def __repr__(self) -> str:
        return f"ZeroTransform({self.policy})"

    @property
    def executor(self) -> ZeroExecutor:
        """The symbols of the model, once there is one."""
        if self._executor is None:
            raise TypeError(
                "ZeroTransform shards a module, and thunder.jit was given a function; jit the module, and call the "
                "jitted module in the function"
            )
        return self._executor

    @property
    def is_installed(self) -> bool:
        """Whether the transform serves a model already."""
        return self._executor is not None

    # Thunder's hooks, in the order in which it calls them.

    def transform_module(self, model: ThunderModule) -> None:
        """Shard the module, and put our executors in front of the others."""
        refuse_transformed(model, self)
        group = process_group(self.process_group)
        plan = make_plan(model._model, self.policy, group.size(), group.rank())
        self.state = State.take(model._model, plan, group, self.device)
        place(model, self.state, self.device)
        self.install(model, plan, self.state)

    def transform_traces_pre_prologue(
        self, prologue: TraceCtx, computation: TraceCtx, epilogue: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Synchronise at first use; runs before autodiff."""
        executor = self.executor
        self._runtime.check_model(self._model)
        inputs = parameter_inputs(prologue, computation, executor.plan)
        computation = insert_synchronize(computation, inputs, executor)
        shard_checks(prologue, executor.plan)
        insert_model_check(prologue, executor)
        return prologue, computation, epilogue

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Check what is about to run, half by half, and that all ranks are about to run the same."""
        is_backward = TraceTag.BACKWARD in trace.tags
        if not is_backward:
            self._forward = trace
        timeline = lift_halves(self._forward, trace if is_backward else None, self.executor)
        if is_backward or TraceTag.AUGMENTED_FORWARD not in trace.tags:
            verify.check(timeline)
        half = [op for op in timeline.ops if op.backward is is_backward]
        self._runtime.agree_on_schedule(is_backward, [f"{op.kind} {', '.join(op.params)}" for op in half if op.params])
        return trace

    def transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's rows of a plain module's state dict."""
        return checkpoint.shard(self.state, submodule_name, state_dict)

    def reverse_transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Full parameters of a sharded model's state dict; a collective."""
        return checkpoint.full(self.state, submodule_name, state_dict)

    def install(self, model: ThunderModule, plan: Plan, runtime: Runtime) -> None:
        """Put our executors in front of the others: the symbols first, then the schedule, the mending last."""
        self._runtime, self._model = runtime, model
        executor = self._executor = ZeroExecutor(plan, runtime)
        data = compile_data(model)
        data.executors_list = (executor, Schedule(executor), *data.executors_list, Mend(executor))


def place(model: ThunderModule, state: State, device: torch.device | None) -> None:
    """Shards into the jitted module, placeholders into the plain one, buffers to the device if one was asked for."""
    for param in state.plan.params:
        for name in param.names:
            model._overrides_parameters[name] = state.shards[param.path]
            parent, _, attribute = name.rpartition(".")
            setattr(model._model.get_submodule(parent), attribute, state.placeholders[param.path])
    if device is not None:
        for name, buffer in list(model._model.named_buffers()):
            parent, _, attribute = name.rpartition(".")
            setattr(model._model.get_submodule(parent), attribute, buffer.to(device))
            model.set_buffer(name, model._model.get_buffer(name))


def refuse_transformed(model: ThunderModule, transform: ZeroTransform) -> None:
    """Raise if the module is sharded already, by us or by Thunder."""
    others = [other for other in compile_data(model).transforms if other is not transform]
    for other in others:
        if isinstance(other, ZeroTransform | DDPTransform | FSDPTransform):
            raise RuntimeError(
                f"{type(model._model).__name__} is transformed already, by {type(other).__name__}; apply one of them to "
                f"the plain module"
            )
    if transform.is_installed or any(map(is_transformed, model._model.parameters())):
        raise RuntimeError(
            f"{type(model._model).__name__} is transformed already, by ZeroTransform; use the model that the first "
            f"transform returned, or build a new module"
        )


def transform_of(model: Any) -> ZeroTransform:
    """The ZeroTransform of a jitted model.

    Raises:
        TypeError: not a jitted module, or one without our transform.
    """
    data = compile_data(model) if isinstance(model, ThunderModule) else None
    for transform in data.transforms if data is not None else ():
        if isinstance(transform, ZeroTransform):
            return transform
    raise TypeError(
        f"expected a module jitted with ZeroTransform, got {type(model).__name__}; make one with "
        f"thunder.jit(module, transforms=[thunder_zero.ZeroTransform(...)])"
    )


def traces_of(model: ThunderModule) -> Traces:
    """The traces that ran last.

    Raises:
        RuntimeError: the model was not called yet.
    """
    transform = transform_of(model)
    stats = compile_stats(model)
    for entry in reversed(stats.interpreter_cache):
        if entry.computation_traces is stats.last_traces:
            backward = entry.backward_traces[-1] if entry.backward_traces else None
            return make_traces(entry.computation_traces[-1], backward, transform.executor)
    raise RuntimeError("the model was not called yet, so there is no trace; call it once, or use thunder_zero.trace")


def make_traces(forward: TraceCtx, backward: TraceCtx | None, executor: ZeroExecutor) -> Traces:
    """Both traces with the timeline that is read off them."""
    return Traces(forward, backward, lift_halves(forward, backward, executor), executor.plan)


def full_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the plain module: full, unpadded, under its names, on every rank.

    A collective: all ranks must call it. The tensors are copies, on the device of the shards.

    >>> torch.save(tz.full_state_dict(model), "model.pt")

    Raises:
        TypeError: not a model with ZeroTransform.
    """
    return checkpoint.full_state_dict(transform_of(model).state, model._model.state_dict(), model)
