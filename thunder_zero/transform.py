"""ZeroTransform: Thunder's hooks and what each of them calls, and what its arguments and its models mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from thunder_zero.comm import agree
from thunder_zero.comm.group import device_for, ranks_of
from thunder_zero.module import adopt, transform_of
from thunder_zero.plan import Plan, make_plan
from thunder_zero.policy import Policy
from thunder_zero.runtime.initial_values import Other, Sources, initial_values
from thunder_zero.runtime.optimizer_hooks import is_transformed
from thunder_zero.runtime.shards import is_hollow, set_tensor
from thunder_zero.runtime.state import State
from thunder_zero.schedule import verify
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.state_dict import full_state
from thunder_zero.trace.casts import cast_borders
from thunder_zero.trace.executors import Mend, Schedule
from thunder_zero.trace.insert import insert_synchronize, parameter_inputs, shard_checks
from thunder_zero.trace.lift import lift_halves
from thunder_zero.trace.symbols import Program, Runtime, ZeroExecutor

from thunder import compile_data, compile_stats
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, TraceTag, is_tracing
from thunder.core.transform_common import Transform
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_STAGE = Policy().stage


@dataclass(frozen=True)
class Traces:
    """What runs for one kind of input: both traces, their timeline and the plan.

    Attributes:
        forward: the forward trace, as it runs.
        backward: the backward trace, or None where nothing needs a gradient.
        timeline: both halves, forward first; ``Op.source`` counts the lines of its half's trace.
        plan: what each parameter is.
        synced: gradients are reduced; otherwise that is deferred (``no_sync``).
    """

    forward: TraceCtx
    backward: TraceCtx | None
    timeline: Timeline
    plan: Plan
    synced: bool = True

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
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        stage: 0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3 (default).
        process_group: ranks that share the model; the default group if None.
        mesh: instead of a group, a mesh of one dimension (shard) or two (replicate, shard): with two, the model is
            sharded over the second, and there are as many copies of it as the first is long (hybrid sharding).
        device: where the shards live; where the module's parameters are if None, and the CPU if they are on the meta
            device (the current device, if the group carries no CPU tensors).
        init: gives parameters and buffers on the meta device their values, after ``reset_tensors`` of each module
            that owns some: it is called as ``module.apply(init)`` calls it, with the module's own parameters in full.
        weights: full tensors by their names in the module's state dict (``torch.load(..., mmap=True)``); they become
            the values of the module's parameters and buffers, read one at a time.
        changes: fields of the policy that differ from it, such as ``broadcast_from=0``.

    Raises:
        ValueError: a stage or a field out of range, a module without parameters, a rank that the
            group does not have, a device that is not there, a mesh whose dimensions do not fit; a parameter or buffer
            on the meta device that nothing gives a value; weights of other names or shapes.
        RuntimeError: no process group; a module that is transformed already; ranks that differ.
        TypeError: a function where a module is needed; not a policy; a field that policies do not have; init that is
            no function, weights that are no mapping.
    """

    def __init__(
        self,
        policy: Policy | int | None = None,
        *,
        stage: int = DEFAULT_STAGE,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        init: Callable[[torch.nn.Module], object] | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        **changes: Any,
    ) -> None:
        self.policy = policy_of(policy, stage, changes)
        self.process_group = process_group
        self.mesh = mesh
        self.device = _device_named(device)
        self._sources = sources_of(init, weights)
        self._executor: ZeroExecutor | None = None
        self._forward: TraceCtx | None = None
        self._programs: WeakKeyDictionary[TraceCtx, Program] = WeakKeyDictionary()  # by forward trace

    def __repr__(self) -> str:
        return f"ZeroTransform({self.policy})"

    @property
    def executor(self) -> ZeroExecutor:
        """The symbols of the model, once there is one."""
        if self._executor is None:
            raise TypeError(
                "ZeroTransform shards a module, and thunder.jit was given a function; jit the module alone, and call "
                "what comes back from a function that is not jitted"
            )
        return self._executor

    @property
    def is_installed(self) -> bool:
        """Whether the transform serves a model already."""
        return self._executor is not None

    # Thunder's hooks, in the order in which it calls them.

    def transform_module(self, model: ThunderModule) -> None:
        """Shard the module, and put our executors in front of the others."""
        ranks = ranks_of(self.process_group, self.mesh)
        with agree.all_or_none(ranks.everyone):
            refuse_transformed(model, self)
            inside = ranks.inside
            plan = make_plan(model._model, self.policy, inside.size(), inside.rank(), ranks.replicas)
            device = device_for(model._model, plan, ranks, self.device)
        if self.policy.cpu_offload and device.type == "cpu":
            warnings.warn(
                "cpu_offload changes nothing: the model is on the CPU, so that shards and optimizer state are in host "
                "memory already",
                stacklevel=2,
            )
        values = initial_values(model._model, plan, ranks, device, self._sources)
        self._sources = Sources()  # a state dict is large, and the transform lives as long as the model
        self.state = State(model._model, plan, ranks, device, values.at_rest)
        place(model, self.state, values.others, self.device)
        self.state.pin(model)
        cast_borders(model._model, self.policy.mixed_precision)
        adopt(model, self)
        model.register_forward_pre_hook(_before_forward)
        self.install(model, plan, self.state)

    def transform_traces_pre_prologue(
        self, prologue: TraceCtx, computation: TraceCtx, epilogue: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Synchronise at first use; runs before autodiff."""
        executor = self.executor
        computation = insert_synchronize(computation, parameter_inputs(prologue, computation), executor)
        shard_checks(prologue, executor)
        return prologue, computation, epilogue

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Check what is about to run, and that all ranks are about to run the same."""
        if TraceTag.BACKWARD in trace.tags:
            self._prove(self._forward, trace)
        else:
            self._forward = trace
            self._programs[trace] = self.executor.program
            if _saves_nothing(trace):  # else a backward comes, and both are proved together
                self._prove(trace, None)
        return trace

    def _prove(self, forward: TraceCtx, backward: TraceCtx | None) -> None:
        halves = {"forward without backward": False} if backward is None else {"forward": False, "backward": True}
        refused: verify.ScheduleError | None = None
        try:
            timeline = lift_halves(forward, backward, self.executor)
            if backward is None:
                timeline = replace(timeline, plan=self.executor.plan)  # forward alone keeps nothing
            verify.check(timeline, trained=() if backward is None else self.executor.program.trained)
            lines = {
                program: [
                    f"{op.kind} {', '.join(op.params)}" for op in timeline.ops if op.params and op.backward is half
                ]
                for program, half in halves.items()
            }
        except verify.ScheduleError as error:  # the other ranks hear of it, instead of waiting for this one
            refused, lines = error, {program: [str(error)] for program in halves}
        for program in halves:
            self._runtime.agree_on_schedule(program, lines[program])
        if refused is not None:
            raise refused

    def transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's rows of a plain module's state dict."""
        return full_state.shard(self.state, submodule_name, state_dict)

    def reverse_transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Full parameters of a sharded model's state dict; a collective."""
        return full_state.full(self.state, submodule_name, state_dict)

    def traces(self, entry: Any) -> Traces:
        """What an entry of Thunder's cache runs, with the timeline that is read off it."""
        forward = entry.computation_traces[-1]
        backward = entry.backward_traces[-1] if entry.backward_traces else None
        program = self.program_of(entry)
        timeline = lift_halves(forward, backward, self.executor, program)
        return Traces(forward, backward, timeline, program.plan, program.synced)

    def program_of(self, entry: Any) -> Program:
        """What was found out when an entry of Thunder's cache was compiled."""
        return next(self._programs[trace] for trace in entry.computation_traces if trace in self._programs)

    def install(self, model: ThunderModule, plan: Plan, runtime: Runtime) -> None:
        """Put our executors in front of the others: the symbols first, then the schedule, the mending last."""
        self._runtime = runtime
        executor = self._executor = ZeroExecutor(plan, runtime)
        data = compile_data(model)
        data.executors_list = (executor, Schedule(executor), *data.executors_list, Mend(executor))


def _saves_nothing(forward: TraceCtx) -> bool:
    """Whether a forward trace hands nothing to backward, so that it must end whatever it starts."""
    return TraceTag.AUGMENTED_FORWARD not in forward.tags or not any(forward.bound_symbols[-1].args[1])


def place(model: ThunderModule, state: State, others: Iterable[Other], device: torch.device | None) -> None:
    """Shards into the jitted module, placeholders into the plain one; buffers in the dtype, and with ignored parameters
    on the device, that were asked for, with the values that were made or read for them."""
    for other in others:
        set_value(model, other)
    for param in state.plan.params:
        for name in param.names:
            model._overrides_parameters[name] = state.shards[param.path]
            set_tensor(model._model, name, state.placeholders[param.path])
    if device is not None:
        for name, param in model._model.named_parameters(remove_duplicate=False):
            if name not in state.plan.by_name:
                param.data = param.data.to(device)
    precision = state.plan.policy.mixed_precision
    for name, buffer in list(model._model.named_buffers()):
        dtype = precision.of(name).buffer_dtype if buffer.is_floating_point() else None
        placed = buffer.to(device=device, dtype=dtype)
        if placed is not buffer:
            set_tensor(model._model, name, placed)
            model.set_buffer(name, model._model.get_buffer(name))


def set_value(model: ThunderModule, other: Other) -> None:
    """A value into the tensor of a module, or a tensor that has it in place of one on the meta device."""
    if not other.tensor.is_meta:
        with torch.no_grad():
            other.tensor.copy_(other.value)
        return
    is_parameter = isinstance(other.tensor, torch.nn.Parameter)
    value = torch.nn.Parameter(other.value, other.tensor.requires_grad) if is_parameter else other.value
    for name in other.names:
        set_tensor(model._model, name, value)
        (model._overrides_parameters if is_parameter else model._overrides_buffers)[name] = value


def _before_forward(model: ThunderModule, args: Any) -> None:
    """Before Thunder traces: it would trip over a model that was changed, and say so in its own words."""
    if is_tracing():
        raise TypeError(
            f"thunder.jit was given a function that calls {type(model._model).__name__}, which ZeroTransform sharded; "
            f"call the jitted module from a function that is not jitted"
        )
    transform_of(model).state.check_model()


def policy_of(policy: Policy | int | None, stage: int, changes: dict[str, Any]) -> Policy:
    """The policy that the arguments of ZeroTransform, ``zero`` and Zero mean.

    Raises:
        TypeError: not a policy; a field that policies do not have.
        ValueError: a field out of range; a policy of one stage and another stage.
    """
    known = [field.name for field in fields(Policy)]
    for name, value in changes.items():
        if name not in known:
            raise TypeError(
                f"{name}={value!r} is not a field of thunder_zero.Policy; its fields are {', '.join(known)}"
            )
    if policy is None:
        return Policy(stage=stage, **changes)
    if isinstance(policy, bool) or not isinstance(policy, Policy | int):
        raise TypeError(
            f"policy is {policy!r}; give a thunder_zero.Policy, such as thunder_zero.ZERO3, or a stage 0 to 3"
        )
    chosen = policy if isinstance(policy, Policy) else Policy(stage=policy)
    if stage not in (DEFAULT_STAGE, chosen.stage):
        raise ValueError(f"stage is {stage!r} and the policy's stage is {chosen.stage}; give one of the two")
    return replace(chosen, **changes)


def sources_of(init: object, weights: object) -> Sources:
    """What ``init`` and ``weights`` of ZeroTransform, ``zero`` and Zero mean.

    Raises:
        TypeError: not a function; not a mapping.
    """
    if init is not None and (not callable(init) or isinstance(init, torch.nn.Module)):
        raise TypeError(f"init is {init!r}; give a function of a module that writes its parameters, or None")
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(
            f"weights is a {type(weights).__name__}; give a mapping of names to tensors, such as a state dict from "
            f"torch.load(path, mmap=True), or None"
        )
    return Sources(init, weights)


def _device_named(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device is {device!r}, which torch does not know; give one such as 'cpu' or 'cuda:0'"
        ) from None


DATA_PARALLEL = ZeroTransform | DDPTransform | FSDPTransform


def refuse_transformed(model: ThunderModule, transform: ZeroTransform) -> None:
    """Raise if the module is sharded already, by us, by Thunder or by torch."""
    module = model._model
    name = type(module).__name__
    if isinstance(module, ThunderModule):
        raise RuntimeError(
            f"{type(module._model).__name__} is jitted already, and was given to thunder.jit again; give it the plain "
            f"module, or apply thunder_zero.zero to the jitted one"
        )
    others = [other for other in compile_data(model).transforms if isinstance(other, DATA_PARALLEL)]
    if transform in others:
        others.remove(transform)  # once: a list that names it twice is refused
    if others:
        raise RuntimeError(
            f"{name} is transformed by {type(others[0]).__name__} as well, in the same list of transforms; apply one "
            f"of them, once, to the plain module"
        )
    if vars(module).get("use_ddp") or vars(module).get("use_fsdp"):
        raise RuntimeError(
            f"{name} is transformed already, by thunder.distributed; build a new module for thunder_zero"
        )
    if isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None:
        raise RuntimeError(
            "ZeroTransform was given a graph without parameters, as ThunderFX (thunder.dynamo) makes them, so there is "
            "nothing to shard; compile the module with thunder.jit(module, transforms=[...]) or thunder.compile"
        )
    if isinstance(module, DistributedDataParallel):
        raise RuntimeError(
            "DistributedDataParallel reduces gradients already; give thunder.jit the module inside of it"
        )
    if transform.is_installed or any(map(is_transformed, module.parameters())):
        raise RuntimeError(
            f"{name} is transformed already, by ZeroTransform; use the model that the first transform returned, or "
            f"build a new module and a new ZeroTransform"
        )
    for path, param in module.named_parameters():
        if is_hollow(param):
            raise RuntimeError(
                f"parameter {path!r} is NaN all over: {name} is a copy of a module that was sharded, whose values went "
                f"to the shards; build a new module and load thunder_zero.full_state_dict(model) into it"
            )


def traces_of(model: ThunderModule, synced: bool | None = None) -> Traces:
    """The traces that ran last.

    Args:
        model: a model with ZeroTransform that was called.
        synced: of the kind that reduces gradients, or (False) of the one that runs under ``no_sync``: if another kind
            ran last, what was compiled last of it.

    Raises:
        RuntimeError: the model was not called yet, or not so.
    """
    transform = transform_of(model)
    stats = compile_stats(model)
    entries = list(reversed(stats.interpreter_cache))
    entries.sort(key=lambda entry: entry.computation_traces is not stats.last_traces)
    for entry in entries:
        if synced in (None, transform.program_of(entry).synced):
            return transform.traces(entry)
    if entries:
        raise RuntimeError(f"the model was not called {'outside' if synced else 'inside'} of no_sync yet; call it so")
    raise RuntimeError("the model was not called yet, so there is no trace; call it once, or use thunder_zero.trace")
