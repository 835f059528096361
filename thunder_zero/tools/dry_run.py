"""``trace``: the traces of any rank of any world, in one process, without a process group.

Thunder interprets a module once, and compiles it under many policies: for ``trace`` under one, for ``tz.tools.fit`` and
``tz.tools.plan_training`` under those that they compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from thunder_zero.compat.casts import cast_inputs, casting_borders
from thunder_zero.frontends.arguments import check_arguments
from thunder_zero.frontends.compiled import Traces
from thunder_zero.frontends.dynamo.compile import require_known
from thunder_zero.frontends.dynamo.dry import export
from thunder_zero.frontends.dynamo.programs import Mode, phases_of, scheduled_graph
from thunder_zero.frontends.transform import ZeroTransform
from thunder_zero.plan.params import Plan, make_plan
from thunder_zero.plan.policy import ZERO3, Policy
from thunder_zero.sharded.placeholders import placeholder, set_tensor, shape_of
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.devices.named import device_of
from thunder_zero.traces.executors import JointPass
from thunder_zero.traces.insert import put_inputs_at_rest
from thunder_zero.traces.lift import is_joint, lift_phases
from thunder_zero.traces.symbols import DryRuntime, Program, ZeroExecutor

import thunder
from thunder import compile_data, compile_stats
from thunder.core import langctxs
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import _transform_for_operator_executor_execution, del_last_used
from thunder.extend import Executor, FusionExecutor, TemporaryExecutor, get_always_executors
from thunder.transforms.autodiff import split_into_forward_and_backward


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
    frontend: str = "dynamo",
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
        executors: those of ``compile``, or of ``thunder.jit``, such as ``[torch_compile_ex]``.
        frontend: "dynamo": the program of :func:`thunder_zero.compile`. "thunder": that of ``thunder.jit``.
        device: the sizes that the policy leaves open are those for this device, such as ``"h100"``; the
            lines are still those of a run on the module's device, and of one on the CPU for a module on the meta
            device (default: the module's).

    Returns:
        The forward and backward traces, their timeline and the plan.

    Raises:
        TypeError: not a plain module; not a policy; not a device; a field of the policy among the arguments of forward,
            which does not take it.
        ValueError: the stage, ``world_size``, ``rank`` or ``replicas`` is out of range; the module has no parameters;
            no such front end.
        RuntimeError: dynamo captures forward as several graphs.
    """
    source = programs_of(
        module, args, kwargs, policy, (world_size, rank, replicas), synced, executors, device, frontend=frontend
    )
    return source.under(policy)


@dataclass(frozen=True)
class Asked:
    """What to capture: the arguments of :func:`programs_of`."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    policy: Policy | int
    world: tuple[int, int, int]
    synced: bool
    executors: Sequence[Executor] | None
    device: Device | str | None


class ProgramSource(Protocol):
    """A module and its arguments, captured once."""

    def under(self, policy: Policy | int) -> Traces:
        """The traces under a policy that differs from the first one in its stage, and in what is scheduled: the units
        that are kept or computed again, bytes of buckets and in flight."""


def programs_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    policy: Policy | int,
    world: tuple[int, int, int],
    synced: bool = True,
    executors: Sequence[Executor] | None = None,
    device: Device | str | None = None,
    frontend: str = "dynamo",
) -> ProgramSource:
    """Capture a module by a front end; most of the time that a compilation takes. The arguments are those of
    :func:`trace`; ``world`` is the number of ranks, the rank, and replicas."""
    if frontend not in FRONTENDS:
        raise ValueError(f"frontend is {frontend!r}; choose {' or '.join(map(repr, FRONTENDS))}")
    if not isinstance(module, nn.Module) or isinstance(module, ThunderModule):
        raise TypeError(
            f"trace takes a plain torch module, got {type(module).__name__}; pass the module before thunder.jit"
        )
    _refuse_policy_fields(module, kwargs)
    return FRONTENDS[frontend](Asked(module, args, kwargs, policy, world, synced, executors, device))


CPU = torch.device("cpu")


class _Keep(JointPass):
    """Keeps the joint trace as it is before the schedule, with the facts about its program."""

    kept: tuple[TraceCtx, Program] | None = None

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        self.kept = (_copy(trace), self.executor.program) if is_joint(trace.bound_symbols[-1].args[0]) else None
        return trace


class _DryRun(ZeroTransform):
    """Plans for a rank of a world that does not exist, and does not change the module."""

    def __init__(self, policy: Policy | int, synced: bool, memory_bytes: int | None, *world: int) -> None:
        super().__init__(policy)
        self._world = world
        self._memory_bytes = memory_bytes
        self._synced = synced

    def transform_module(self, model: ThunderModule) -> None:
        plan = make_plan(model._model, self.policy, *self._world)
        self.plan = replace(plan, memory_bytes=self._memory_bytes)
        self.install(model, self.plan, DryRuntime(self._synced))
        executor, *others = compile_data(model).executors_list
        self.keep = _Keep("thunder_zero_keep", executor)
        compile_data(model).executors_list = (executor, self.keep, *others)


class FromDynamo:
    """A module that dynamo and AOTAutograd capture, as ``tz.compile`` does."""

    def __init__(self, asked: Asked) -> None:
        require_known(asked.executors)
        module, args, kwargs = asked.module, tuple(asked.args), dict(asked.kwargs)
        self._memory_bytes, self._fuses = _memory_bytes(module, asked.device), bool(asked.executors)
        self._module, self._world = module, asked.world
        plan = self._plan(asked.policy)
        with _as_captured(module, plan):
            args, kwargs = cast_inputs(type(module).__name__, args, kwargs, plan.policy.mixed_precision)
            args, kwargs = tree_map_only(Tensor, _as_shape, (args, kwargs))
            self._exported = export(module, args, kwargs)
        self._mode = Mode(self._exported.joint.differentiates and torch.is_grad_enabled(), asked.synced)

    def _plan(self, policy: Policy | int) -> Plan:
        plan = make_plan(self._module, check_arguments(policy).policy, *self._world)
        return replace(plan, memory_bytes=self._memory_bytes)

    def under(self, policy: Policy | int) -> Traces:
        """See :class:`ProgramSource`."""
        executor = ZeroExecutor(self._plan(policy), DryRuntime(self._mode.synced))
        exported = self._exported
        converted, scheduled = scheduled_graph(exported.joint, exported.paths, executor, self._mode)
        forward, backward = phases_of(scheduled, executor, self._mode, fuses=self._fuses)
        program = executor.program
        names = [proxy.name for proxy in converted.trace.args]
        return Traces(
            forward,
            backward,
            lift_phases(forward, backward, executor, program),
            program.plan,
            synced=program.synced,
            others={names[position]: path for position, path in exported.buffers.items()},
            restored=exported.restored,
            lifted=program.lifted,
        )


@contextmanager
def _as_captured(module: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside the block, the module has placeholders for parameters, and what is on the meta device stands on the CPU
    without memory; it casts its inputs and outputs."""
    originals: list[tuple[str, nn.Parameter | Tensor]] = list(module.named_parameters(remove_duplicate=False))
    originals += module.named_buffers(remove_duplicate=False)
    made: dict[int, Tensor] = {}  # by original: a tied parameter stays one
    with casting_borders(module, plan.policy.mixed_precision):
        for name, original in originals:
            if id(original) not in made:
                param = plan.by_name.get(name)
                device = CPU if original.is_meta else original.device
                made[id(original)] = (
                    placeholder(param.path, original, param.compute_dtype, device)
                    if param is not None and isinstance(original, nn.Parameter)
                    else _as_shape(original)
                )
            set_tensor(module, name, made[id(original)])
        try:
            yield
        finally:
            for name, original in originals:
                set_tensor(module, name, original)


def _as_shape(tensor: Tensor) -> Tensor:
    return shape_of(tensor) if tensor.is_meta else tensor


class FromThunder:
    """A module that Thunder interprets, as ``thunder.jit`` does."""

    def __init__(self, asked: Asked) -> None:
        module = asked.module
        self._memory_bytes = _memory_bytes(module, asked.device)
        self._module, self._world, self._synced, self._executors = module, asked.world, asked.synced, asked.executors
        self._lowered: dict[tuple[bool, ...], tuple[_DryRun, ThunderModule]] = {}  # by what is sharded
        args, kwargs = tree_map_only(Tensor, _without_memory, (tuple(asked.args), dict(asked.kwargs)))
        transform, jitted = self._jitted(asked.policy)
        with _as_computed(module, transform.plan):
            args, kwargs = cast_inputs(type(module).__name__, args, kwargs, transform.plan.policy.mixed_precision)
            self._acquired = _acquire(jitted, args, kwargs)

    def under(self, policy: Policy | int) -> Traces:
        """See :class:`ProgramSource`. Up to the schedule, policies that shard the same parameters have the same joint
        trace: Thunder makes it once."""
        transform, jitted = self._jitted(policy)
        sharded = tuple(param.sharded for param in transform.plan.params)
        with _as_computed(self._module, transform.plan):
            if sharded in self._lowered:
                return _schedule_again(*self._lowered[sharded], transform.plan, self._acquired)
            found = transform.compiled.traces(_compile(jitted, self._acquired))
        if transform.keep.kept is not None:
            self._lowered[sharded] = transform, jitted
        return found

    def _jitted(self, policy: Policy | int) -> tuple[_DryRun, ThunderModule]:
        transform = _DryRun(policy, self._synced, self._memory_bytes, *self._world)
        return transform, thunder.jit(self._module, transforms=[transform], executors=self._executors)


def _memory_bytes(module: nn.Module, device: Device | str | None) -> int | None:
    """Of the device, or else of the GPU that the module is on; None for host memory."""
    if device is not None:
        return device_of(device).memory_bytes
    on_gpu = next((param.device for param in module.parameters() if param.is_cuda), None)
    return None if on_gpu is None else torch.cuda.get_device_properties(on_gpu).total_memory


def _refuse_policy_fields(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse a field of Policy that forward does not take: Thunder's error would not say where it belongs."""
    parameters = signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in [field.name for field in fields(Policy) if field.name in kwargs and field.name not in parameters]:
        change = f"{name}={kwargs[name]!r}"
        policy = repr(kwargs[name]) if name == "stage" else f"dataclasses.replace(thunder_zero.ZERO3, {change})"
        raise TypeError(
            f"{type(module).__name__}.forward does not take {change}, which is a field of Policy; pass policy={policy}"
        )


@contextmanager
def _as_computed(module: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside the block, the module has parameters in the dtypes of compute, and casts its inputs and outputs. What is
    on the meta device stands on the CPU instead, without memory, so that the trace is that of a run."""
    originals: list[tuple[str, nn.Parameter | Tensor]] = list(module.named_parameters(remove_duplicate=False))
    originals += module.named_buffers(remove_duplicate=False)
    made: dict[int, Tensor] = {}  # by original: a tied parameter stays one
    with casting_borders(module, plan.policy.mixed_precision):
        for name, original in originals:
            if id(original) not in made:
                made[id(original)] = _computed(name, original, plan)
            set_tensor(module, name, made[id(original)])
        try:
            yield
        finally:
            for name, original in originals:
                set_tensor(module, name, original)


def _computed(name: str, original: nn.Parameter | Tensor, plan: Plan) -> Tensor:
    """A tensor of the module as compute sees it: itself, if it needs no cast and is on a real device."""
    param = plan.by_name.get(name)
    dtype = original.dtype if param is None else param.compute_dtype
    if dtype is original.dtype and not original.is_meta:
        return original
    device = CPU if original.is_meta else original.device
    if isinstance(original, nn.Parameter):
        return placeholder(name, original, dtype, device)
    return _without_memory(original)


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that looks like one on the meta device, with the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if tensor.is_meta else tensor


@dataclass(frozen=True, slots=True)
class _Acquired:
    """What Thunder makes of a module and its arguments before the first transform: prologue, computation and epilogue,
    what its cache finds a program by, and the executor with the symbols that the interpreter made."""

    traces: tuple[TraceCtx | None, ...]
    info: Mapping[str, Any]
    ad_hoc: TemporaryExecutor


FRONTENDS: dict[str, Callable[[Asked], ProgramSource]] = {"dynamo": FromDynamo, "thunder": FromThunder}
Made = TypeVar("Made")


def _as_thunder(jitted: ThunderModule, run: Callable[[dict[str, Any]], Made]) -> Made:
    """Run as Thunder compiles: in the module's language, with the information by which its cache finds a program."""

    @langctxs.langctx(compile_data(jitted).langctx)
    @thunder._with_cache_info_ctx
    def inside() -> Made:
        return run(thunder._get_cache_info())

    made: Made = inside()
    return made


def _acquire(jitted: ThunderModule, args: Any, kwargs: Any) -> _Acquired:
    data, stats = compile_data(jitted), compile_stats(jitted)
    (ad_hoc,) = (executor for executor in data.executors_list if isinstance(executor, TemporaryExecutor))

    def acquire(info: dict[str, Any]) -> _Acquired:
        data.populate_cache_info(info, *args, **kwargs)
        info["alias_tensor_indices"] = ""  # arguments without memory may share addresses, but are no aliases
        return _Acquired(data.acquire_initial_trace(data.fn, args, kwargs, data, stats, ad_hoc), info, ad_hoc)

    return _as_thunder(jitted, acquire)


def _compile(jitted: ThunderModule, acquired: _Acquired) -> Any:
    """Thunder's cache entry for what was acquired: a call without its run."""
    data, stats = compile_data(jitted), compile_stats(jitted)
    data.executors_list = tuple(
        acquired.ad_hoc if isinstance(executor, TemporaryExecutor) else executor for executor in data.executors_list
    )

    def compile_entry(info: dict[str, Any]) -> Any:
        info.update(acquired.info)
        return data.apply_transforms_and_build_cache_entry(data, stats, info, *map(_copy, acquired.traces))

    return _as_thunder(jitted, compile_entry)


def _schedule_again(transform: _DryRun, jitted: ThunderModule, plan: Plan, acquired: _Acquired) -> Traces:
    """The traces of another plan, from the joint trace that was kept: what Thunder does from its fusers on."""
    data, stats, executor = compile_data(jitted), compile_stats(jitted), transform.compiled.executor
    assert transform.keep.kept is not None
    kept, program = transform.keep.kept
    executor.plan, executor.program = plan, replace(program, plan=plan)
    put_inputs_at_rest(kept, executor)  # all joint traces share these proxies

    def scheduled(info: dict[str, Any]) -> Any:
        info.update(acquired.info)
        trace: Any = _copy(kept)
        with thunder.compile_data_and_stats(data, stats):
            for one in data.executors_list:
                if isinstance(one, FusionExecutor) and one is not transform.keep:
                    trace = one.fusion_pass(trace)
            trace = _transform_for_operator_executor_execution(trace, get_always_executors())
            forward, backward = split_into_forward_and_backward(trace)
            phases = del_last_used(forward), del_last_used(backward, clear_mutable_collections=True)
            return [transform.transform_trace_post_optimization(phase) for phase in phases]

    forward, backward = _as_thunder(jitted, scheduled)
    _, computation, epilogue = acquired.traces
    entry = SimpleNamespace(  # as Thunder's cache has one
        computation_traces=(computation, forward), backward_traces=(backward,), epilogue_traces=(epilogue,)
    )
    return transform.compiled.traces(entry)


def _copy(trace: TraceCtx | None) -> TraceCtx | None:
    """A trace of the same lines, of which transforms may rewrite some in place, and which may take new names."""
    if trace is None:
        return None
    new = from_trace(trace)
    new.names = set(trace.names)
    new.bound_symbols = [line.from_bsym() for line in trace.bound_symbols]
    return new
