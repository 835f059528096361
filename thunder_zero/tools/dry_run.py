"""``tz.trace``: traces any rank of any world in one process, without a process group.

In: a module and inputs. Out: ``Traces``. ``tz.tools.fit`` and ``tz.tools.plan_training`` trace a module under many
policies, although dynamo captures the module only once. Only ``trace`` also supports Thunder's front end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from thunder_zero.comm.slices import mesh_and_slices, require_in_plan
from thunder_zero.compat.casts import cast_inputs, casting_borders
from thunder_zero.compat.plans_of_transformers import left_to_plan
from thunder_zero.compat.uncapturable import RefusedPart
from thunder_zero.frontends.arguments import check_arguments, did_you_mean
from thunder_zero.frontends.compiled import Traces
from thunder_zero.frontends.dynamo.compile import Fuser, require_known
from thunder_zero.frontends.dynamo.dry import export
from thunder_zero.frontends.dynamo.programs import Mode, program_of, traces_without
from thunder_zero.frontends.program_transform import ProgramTransform
from thunder_zero.frontends.refusals import PARTS, require_unwrapped
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import ZERO3, Policy
from thunder_zero.sharded.placeholders import placeholder, set_tensor, shape_of
from thunder_zero.sharded.slices import placeholder_of, require_plain_tensors
from thunder_zero.tools.devices.calibrated import Calibrated
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.devices.named import device_of
from thunder_zero.traces.symbols import DryRuntime, ZeroExecutor

import thunder
from thunder import compile_data
from thunder.core.module import ThunderModule
from thunder.extend import Executor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims


def trace(
    module: nn.Module,
    *args: Any,
    policy: Policy | int = ZERO3,
    world_size: int | None = None,
    rank: int = 0,
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    synced: bool = True,
    fuse: Fuser | None = None,
    executors: Sequence[Executor] | None = None,
    device: Device | str | None = None,
    frontend: str = "dynamo",
    dynamic: bool = False,
    **kwargs: Any,
) -> Traces:
    """Return the traces that one of ``world_size`` ranks would run for these arguments.

    The function needs no process group, other process or GPU. It allocates no parameters. It changes neither
    ``torch.distributed`` nor the module.

    Args:
        module: a plain module. A module on the meta device is traced for the CPU, and only shapes and dtypes of tensor
            arguments count. Traces for CUDA need a module on a CUDA device: the kernels of attention and of fusers
            depend on the device.
        args, kwargs: the arguments of the module's forward.
        policy: the sharding: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        world_size: number of ranks of a replica (default: 8).
        rank: the rank to trace.
        replicas: number of replicas of the model, each with ``world_size`` ranks (hybrid sharding).
        mesh, dp_mesh_dims: a mesh in place of ``world_size``, ``rank`` and ``replicas``, as for
            :func:`thunder_zero.compile`. A module sliced by torch's ``parallelize_module`` needs a mesh.
            :func:`thunder_zero.tools.fake_mesh` makes a mesh without processes.
        synced: False for the program under ``no_sync``, which defers gradients.
        fuse: as for :func:`thunder_zero.compile`. The traces have one line for each region that inductor would compile.
        executors: executors of ``thunder.jit``. Only the front end "thunder" takes executors.
        frontend: "dynamo" for the program of :func:`thunder_zero.compile`, "thunder" for the program of
            ``thunder.jit``.
        dynamic: True to trace sizes of the arguments as symbols, for :func:`thunder_zero.tools.resized`. Only the front
            end "dynamo" supports symbols.
        device: a device such as ``"h100"`` (default: the module's device). The sizes that the policy leaves open and
            the operators of attention depend on ``device``. All other lines depend on the module's device.

    Returns:
        The forward and backward traces, their timeline and the plan.

    Raises:
        TypeError: ``module`` is not a plain module, ``policy`` is not a policy, ``device`` is not a device, or forward
            does not take an argument.
        ValueError: the stage, ``world_size``, ``rank`` or ``replicas`` is out of range, or is given beside a mesh. Or
            the module has no parameters, or has slices that do not fit the mesh. Or ``frontend`` is unknown, or does
            not take an argument.
        RuntimeError: dynamo captures forward as several graphs, or the module is under ``torch.compile`` or DDP.
    """
    if frontend not in FRONTENDS:
        raise ValueError(f"frontend is {frontend!r}; choose {' or '.join(map(repr, FRONTENDS))}")
    if dynamic and frontend != "dynamo":
        raise ValueError("dynamic is True, and Thunder's front end has no symbols for sizes; leave it out")
    if fuse is not None and frontend != "dynamo":
        raise ValueError(f"fuse is {fuse!r}, and frontend is {frontend!r}; pass executors= in its place")
    if executors and frontend == "dynamo":
        raise ValueError("executors are those of thunder.jit; pass frontend='thunder', or fuse='inductor'")
    if not isinstance(module, nn.Module) or isinstance(module, ThunderModule):
        raise TypeError(
            f"trace takes a plain torch module, got {type(module).__name__}; pass the module before thunder.jit"
        )
    require_unwrapped(module)
    _refuse_unknown_arguments(module, kwargs)
    planned, slices = Mesh.of(8 if world_size is None else world_size, rank, replicas), dict[str, int]()
    partial: Container[str] = ()
    if mesh is not None or dp_mesh_dims is not None:
        if world_size is not None or rank or replicas != 1:
            raise ValueError("mesh says how many ranks there are; leave out world_size, rank and replicas")
        planned, slices, partial = mesh_and_slices(module, mesh, dp_mesh_dims)
    if slices and frontend != "dynamo":
        raise ValueError("parameters are DTensors, and Thunder's front end traces none; leave out frontend")
    request = TraceRequest(
        module, args, kwargs, policy, planned, synced, device, fuse, executors, dynamic, slices, partial
    )
    return FRONTENDS[frontend](request)


@dataclass(frozen=True)
class TraceRequest:
    """The arguments of :func:`programs_of`, and the other arguments of ``trace`` for Thunder's front end."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    policy: Policy | int
    mesh: Mesh
    synced: bool
    device: Device | str | None
    fuse: Fuser | None = None
    executors: Sequence[Executor] | None = None
    dynamic: bool = False
    slices: Mapping[str, int] = field(default_factory=dict)
    partial: Container[str] = ()

    @property
    def for_gpu(self) -> bool:
        """True if ``device`` is a GPU. Calibrated devices are CPUs; all other devices are GPUs."""
        return self.device is not None and not isinstance(device_of(self.device), Calibrated)

    def plan(self, policy: Policy | int) -> Plan:
        """Return the plan of the module under a policy."""
        if not self.mesh.is_sliced:
            require_plain_tensors(self.module)
        plan = make_plan(self.module, check_arguments(policy).policy, self.mesh, self.slices, self.partial)
        require_in_plan(self.module, plan)
        return replace(plan, memory_bytes=_memory_bytes(self.module, self.device))

    def inputs(self, plan: Plan, materialize: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
        """Return the arguments of forward in compute dtypes. ``materialize`` replaces tensors on the meta device."""
        name, args, kwargs = type(self.module).__name__, tuple(self.args), dict(self.kwargs)
        inputs = cast_inputs(name, args, kwargs, plan.policy.mixed_precision)
        args, kwargs = tree_map_only(Tensor, lambda tensor: materialize(tensor) if tensor.is_meta else tensor, inputs)
        return args, kwargs


def programs_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    policy: Policy | int,
    mesh: Mesh,
    synced: bool = True,
    fuse: Fuser | None = None,
    device: Device | str | None = None,
    slices: Mapping[str, int] | None = None,
    partial: Container[str] = (),
) -> ProgramSource:
    """Capture a module with dynamo, which takes most of the time of a compilation.

    Args:
        module, args, kwargs, policy, synced, fuse, device: as for :func:`trace`.
        mesh: the mesh of the rank.
        slices: a mapping from paths of sliced parameters to the sliced dimension.
        partial: paths of parameters whose gradients are summed over tensor-parallel ranks.
    """
    return ProgramSource(
        TraceRequest(module, args, kwargs, policy, mesh, synced, device, fuse, slices=slices or {}, partial=partial)
    )


CPU = torch.device("cpu")


class ProgramSource:
    """A module that dynamo and AOTAutograd capture once, as in ``tz.compile``."""

    def __init__(self, request: TraceRequest) -> None:
        require_known(request.fuse)
        self._request, plan = request, request.plan(request.policy)
        with _replaced_tensors(request.module, plan, _as_captured), left_to_plan(request.module):
            inputs = request.inputs(plan, shape_of)
            self._exported = export(request.module, *inputs, plan, for_gpu=request.for_gpu, dynamic=request.dynamic)
        self._mode = Mode(self._exported.joint.differentiates and torch.is_grad_enabled(), request.synced)

    def under(self, policy: Policy | int, mesh: Mesh | None = None) -> Traces:
        """Return the traces under another policy, and on another mesh if ``mesh`` is given.

        The policy may differ from the captured policy in the stage, in the kept and recomputed units, and in the bytes
        of buckets and in flight.
        """
        exported, fuses = self._exported, self._request.fuse is not None
        plan = replace(self._request, mesh=mesh or self._request.mesh).plan(policy)
        executor = ZeroExecutor(plan, DryRuntime(self._mode.synced))
        converted, program = program_of(exported.joint, exported.paths, executor, self._mode, fuses=fuses)
        names = [proxy.name for proxy in converted.joint.trace.args]
        buffer_paths = {names[position]: path for position, path in exported.buffers.items()}
        return traces_without(program, fuses=fuses, others=buffer_paths, restored=exported.restored)


class DryTransform(ProgramTransform):
    """A transform that traces the programs of ``ZeroTransform`` without allocating a model's state."""

    def __init__(self, plan: Plan, synced: bool) -> None:
        super().__init__()
        self._plan, self._runtime = plan, DryRuntime(synced)

    def parts(self) -> tuple[RefusedPart, ...]:
        return (*super().parts(), *PARTS)

    def transform_module(self, model: ThunderModule) -> None:
        self.install(model, self._plan, self._runtime)


def _trace_with_dynamo(request: TraceRequest) -> Traces:
    return ProgramSource(request).under(request.policy)


def _trace_with_thunder(request: TraceRequest) -> Traces:
    """Return the traces that Thunder would make in the first call of a jitted module."""
    plan = request.plan(request.policy)
    transform = DryTransform(plan, request.synced)
    with _replaced_tensors(request.module, plan, _as_computed):
        jitted = thunder.jit(request.module, transforms=[transform], executors=request.executors)
        args, kwargs = request.inputs(plan, _without_memory)
        cached, *_ = compile_data(jitted).get_computation_and_inputs(*args, **kwargs)
    return transform.entry(cached).traces()


FRONTENDS: dict[str, Callable[[TraceRequest], Traces]] = {
    "dynamo": _trace_with_dynamo,
    "thunder": _trace_with_thunder,
}


def _memory_bytes(module: nn.Module, device: Device | str | None) -> int | None:
    """Return the memory of ``device``, or else of the module's GPU, in bytes; None for a CPU module."""
    if device is not None:
        return device_of(device).memory_bytes
    on_gpu = next((param.device for param in module.parameters() if param.is_cuda), None)
    return None if on_gpu is None else torch.cuda.get_device_properties(on_gpu).total_memory


def _refuse_unknown_arguments(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Raise if forward does not take an argument. An error from forward would mention neither trace nor Policy."""
    parameters = signature(module.forward, follow_wrapped=False).parameters  # a decorator may take more than forward
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    of_policy = [item.name for item in fields(Policy)]
    of_trace = [item.name for item in signature(trace).parameters.values() if item.kind is item.KEYWORD_ONLY]
    for name in [name for name in kwargs if name not in parameters]:
        change = f"{name}={kwargs[name]!r}"
        policy = repr(kwargs[name]) if name == "stage" else f"dataclasses.replace(thunder_zero.ZERO3, {change})"
        if name in of_policy:
            rest = f", which is a field of Policy; pass policy={policy}"
        else:
            hint = did_you_mean(name, [*of_trace, *of_policy]) or f"it takes {', '.join(parameters) or 'nothing'}"
            rest = f", and neither trace nor Policy knows it; {hint}"
        raise TypeError(f"{type(module).__name__}.forward does not take {change}{rest}")


@contextmanager
def _replaced_tensors(
    module: nn.Module, plan: Plan, substitute: Callable[[str, nn.Parameter | Tensor, Param | None], Tensor]
) -> Iterator[None]:
    """Temporarily replace the module's parameters and buffers, and cast its inputs and outputs.

    Meta tensors get substitutes on the CPU without memory, so that the trace equals the trace of a run.
    """
    originals: list[tuple[str, nn.Parameter | Tensor]] = list(module.named_parameters(remove_duplicate=False))
    originals += module.named_buffers(remove_duplicate=False)
    substitutes: dict[int, Tensor] = {}  # keyed by ``id`` of the original, so that tied parameters stay tied
    with casting_borders(module, plan.policy.mixed_precision):
        for name, original in originals:
            if id(original) not in substitutes:
                substitutes[id(original)] = substitute(name, original, plan.by_name.get(name))
            set_tensor(module, name, substitutes[id(original)])
        try:
            yield
        finally:
            for name, original in originals:
                set_tensor(module, name, original)


def _as_captured(name: str, original: nn.Parameter | Tensor, param: Param | None) -> Tensor:
    """Return the placeholder of a running model for a planned parameter. Return other tensors unchanged."""
    if param is not None and isinstance(original, nn.Parameter):
        return placeholder_of(param.path, original, param.compute_dtype, _device(original))
    return shape_of(original) if original.is_meta else original


def _as_computed(name: str, original: nn.Parameter | Tensor, param: Param | None) -> Tensor:
    """Return a tensor in its compute dtype on the CPU or a GPU. Return a matching tensor unchanged."""
    dtype = original.dtype if param is None else param.compute_dtype
    if dtype is original.dtype and not original.is_meta:
        return original
    if isinstance(original, nn.Parameter):
        return placeholder(name, original, dtype, _device(original))
    return _without_memory(original)


def _device(original: Tensor) -> torch.device:
    return CPU if original.is_meta else original.device


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with the shape of a meta tensor, and with memory for only one element."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
