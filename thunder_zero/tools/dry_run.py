"""``tz.trace``: traces any rank of any world in one process, without a process group.

In: a module and inputs. Out: ``Traces``. ``tz.tools.fit`` and ``tz.tools.plan_training`` trace a module under many
policies, although dynamo captures the module only once.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from thunder_zero.capture.arguments import Fuser, check_arguments, did_you_mean, require_known
from thunder_zero.capture.convert import Converted, convert
from thunder_zero.capture.programs import Mode, program_of
from thunder_zero.capture.refusals import require_unwrapped
from thunder_zero.comm.group import has_groups
from thunder_zero.comm.slices import mesh_and_slices, require_in_plan
from thunder_zero.compat.plans_of_transformers import left_to_plan
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import ZERO3, Policy
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.sharded.casts import cast_inputs, casting_borders
from thunder_zero.sharded.placeholders import placeholder_of, require_plain_tensors, set_tensor
from thunder_zero.tools.devices.device import Device, device_of
from thunder_zero.tools.dry_capture import export, shape_of
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.pipeline import lifted, outlined, shard, thunder_context
from thunder_zero.traces.symbols import JointTrace, Runtime, ZeroExecutor

from thunder.core.module import ThunderModule

if TYPE_CHECKING:
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
    device: Device | str | None = None,
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
        dynamic: True to trace sizes of the arguments as symbols, for :func:`thunder_zero.tools.resized`.
        device: a device such as ``"h100"`` (default: the module's device). The sizes that the policy leaves open and
            the operators of attention depend on ``device``. All other lines depend on the module's device.

    Returns:
        The forward and backward traces, their timeline and the plan.

    Raises:
        TypeError: ``module`` is not a plain module, ``policy`` is not a policy, ``device`` is not a device, or forward
            does not take an argument.
        ValueError: the stage, ``world_size``, ``rank`` or ``replicas`` is out of range, or is given beside a mesh. Or
            the module has no parameters, or has slices that do not fit the mesh.
        RuntimeError: dynamo captures forward as several graphs, or the module is under ``torch.compile`` or DDP.
    """
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
    source = ProgramSource(module, args, kwargs, policy, planned, synced, fuse, device, slices, partial, dynamic)
    return source.under(policy)


CPU = torch.device("cpu")


class ProgramSource:
    """A module that dynamo and AOTAutograd capture once, as for a sharded model. The arguments are those of ``trace``.

    ``slices`` maps paths of sliced parameters to the sliced dimension. The gradients of the parameters in ``partial``
    are summed over tensor-parallel ranks.
    """

    def __init__(
        self,
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
        dynamic: bool = False,
    ) -> None:
        require_known(fuse)
        self._module, self._mesh, self._slices, self._partial = module, mesh, slices or {}, partial
        self._device, self._fuses = None if device is None else device_of(device), fuse is not None
        plan = self._plan(policy, mesh)
        for_gpu = self._device is not None and not self._device.is_measured  # all devices of data sheets are GPUs
        with _replaced_tensors(module, plan), left_to_plan(module):
            inputs = cast_inputs(type(module).__name__, tuple(args), dict(kwargs), plan.policy.mixed_precision)
            args, kwargs = tree_map_only(Tensor, lambda item: shape_of(item) if item.is_meta else item, inputs)
            exported = export(module, args, kwargs, plan, for_gpu=for_gpu, dynamic=dynamic)
        self.joint, self.paths, self._buffers, self._restored = exported
        self._mode = Mode(self.joint.differentiates and torch.is_grad_enabled(), synced)
        self._lifted: dict[object, tuple[JointTrace, Timeline]] = {}

    def under(self, policy: Policy | int, mesh: Mesh | None = None) -> Traces:
        """Return the traces under another policy, and on another mesh if ``mesh`` is given.

        The policy may differ from the captured policy in the stage, in the kept and recomputed units, and in the bytes
        of buckets and in flight.
        """
        executor = ZeroExecutor(self._plan(policy, mesh or self._mesh), Runtime())
        converted, traces = program_of(self.joint, self.paths, executor, self._mode, fuses=self._fuses)
        return self._named(converted, traces)

    def schedule(self, policy: Policy, mesh: Mesh | None = None, *, missing: Collection[str] = ()) -> Traces:
        """Return the traces under another policy without their lines: their operations are neither proved nor written,
        and the traces only take arguments and return results. This takes a fraction of the time of :meth:`under`.

        ``missing`` names tangents that backward does not take.
        """
        mesh = mesh or self._mesh
        plan, key = self._plan(policy, mesh), (policy.stage, policy.keep_unsharded, mesh)
        if key not in self._lifted:
            with thunder_context():
                executor, synced = ZeroExecutor(plan, Runtime()), self._mode.synced
                lowered = shard(self._converted.traced(executor, synced=synced))[-1]
            self._lifted[key] = lowered, lifted(lowered)
        lowered, timeline = self._lifted[key]
        return self._named(self._converted, outlined(lowered, replace(timeline, plan=plan), missing, fuses=self._fuses))

    @cached_property
    def _converted(self) -> Converted:
        with thunder_context():
            return convert(self.joint, self.paths, backward=self._mode.differentiates)

    def _named(self, converted: Converted, traces: Traces) -> Traces:
        """Return traces with the paths of their buffers."""
        names = [proxy.name for proxy in converted.trace.args]
        buffer_paths = {names[position]: path for position, path in self._buffers.items()}
        return replace(traces, others=buffer_paths, restored=self._restored)

    def _plan(self, policy: Policy | int, mesh: Mesh) -> Plan:
        """Return the plan of the module, for the memory of the device, or else of the module's GPU."""
        if not mesh.is_sliced:
            require_plain_tensors(self._module)
        plan = make_plan(self._module, check_arguments(policy).policy, mesh, self._slices, self._partial)
        require_in_plan(self._module, plan)
        memory_bytes = None if self._device is None else self._device.memory_bytes
        on_gpu = next((param.device for param in self._module.parameters() if param.is_cuda), None)
        if memory_bytes is None and on_gpu is not None:
            memory_bytes = torch.cuda.get_device_properties(on_gpu).total_memory
        return replace(plan, memory_bytes=memory_bytes)


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
def _replaced_tensors(module: nn.Module, plan: Plan) -> Iterator[None]:
    """Temporarily put a running model's placeholders into the module, and cast its inputs and outputs.

    Meta tensors get substitutes on the CPU without memory, so that the trace equals the trace of a run.
    """
    originals: list[tuple[str, nn.Parameter | Tensor]] = list(module.named_parameters(remove_duplicate=False))
    originals += module.named_buffers(remove_duplicate=False)
    substitutes: dict[int, Tensor] = {}  # keyed by ``id`` of the original, so that tied parameters stay tied
    with casting_borders(module, plan.policy.mixed_precision):
        for name, original in originals:
            if id(original) not in substitutes:
                substitutes[id(original)] = _substitute(original, plan.by_name.get(name))
            set_tensor(module, name, substitutes[id(original)])
        try:
            yield
        finally:
            for name, original in originals:
                set_tensor(module, name, original)


def _substitute(original: nn.Parameter | Tensor, param: Param | None) -> Tensor:
    """Return the placeholder of a planned parameter, or another tensor with a shape and without values on meta."""
    if param is not None and isinstance(original, nn.Parameter):
        device = CPU if original.is_meta else original.device
        return placeholder_of(param.path, original, param.compute_dtype, device)
    return shape_of(original) if original.is_meta else original


@contextmanager
def fake_mesh(shape: Sequence[int], names: Sequence[str] = ("dp", "tp"), *, rank: int = 0) -> Iterator[DeviceMesh]:
    """Temporarily make a device mesh whose ranks need no processes. Its collectives send nothing.

    Slice and trace the module inside the block. After the block, the traces remain valid, but the module does not.

    >>> with tz.tools.fake_mesh((4, 2)) as mesh:
    ...     traces = tz.trace(parallelize_module(module, mesh["tp"], plan), tokens, mesh=mesh)

    Args:
        shape: number of ranks along each dimension.
        names: names of the dimensions, data dimensions first, as for :func:`thunder_zero.compile`.
        rank: the rank of this process.
    """
    if not 0 <= rank < prod(shape):
        raise ValueError(f"rank is {rank!r}; the mesh has the ranks 0 to {prod(shape) - 1}")
    if has_groups():
        raise RuntimeError("there is a process group; give its ranks' init_device_mesh, or ask in another process")
    dist.init_process_group("fake", rank=rank, world_size=prod(shape))
    try:
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()
