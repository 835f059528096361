"""``tz.trace``: traces any rank of any world in one process, without a process group.

In: a module and inputs. Out: ``Traces``. The module never runs: dynamo captures it once, from tensors without memory.
``tz.tools.fit`` and ``tz.tools.plan_training`` trace it under many policies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.types import py_sym_types
from torch.utils._pytree import tree_map_only

from thunder_zero.capture.arguments import Fuser, check_arguments, did_you_mean, require_known
from thunder_zero.capture.convert import Converted, convert, returned_message, written_message
from thunder_zero.capture.graphs import paths_of, replaced_parameter
from thunder_zero.capture.joint import joint_of, with_slices
from thunder_zero.capture.programs import Mode, named_inputs, program_of, restoring
from thunder_zero.capture.proxies import source_of
from thunder_zero.capture.refusals import require_unwrapped
from thunder_zero.comm.group import has_groups
from thunder_zero.comm.slices import mesh_and_slices, require_in_plan
from thunder_zero.compat import aot, dynamo
from thunder_zero.compat.plans_of_transformers import left_to_plan
from thunder_zero.compat.private import clear_dtensor_caches, dynamo_config
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import ZERO3, Policy
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.sharded.casts import cast_inputs, casting_borders
from thunder_zero.sharded.placeholders import (
    Placeholder,
    path_of,
    placeholder_of,
    require_plain_tensors,
    require_unhooked,
    set_tensor,
    without_memory,
)
from thunder_zero.sharded.quantized import taken
from thunder_zero.sharded.reduce import tensors_in
from thunder_zero.spmd.of_trace import require_right_types
from thunder_zero.tools.devices.device import Device, device_of
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.pipeline import lifted, outlined, shard, thunder_context
from thunder_zero.traces.symbols import JointTrace, Runtime, ZeroExecutor

from thunder.core.module import ThunderModule

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims


CPU = torch.device("cpu")
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
HALF, WIDEST = (torch.float16, torch.bfloat16), 256
# A module's graph with its backward; for each input, the path of a parameter or None; paths of buffers and unplanned
# parameters, by the position of the input; and what builds the result of forward from the outputs of the forward trace
Exported = tuple[aot.Joint, Sequence[str | None], Mapping[int, str], Callable[[Sequence[Any]], Any]]


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
    outer: Outer | None = None,
    **kwargs: Any,
) -> Traces:
    """Return the traces that one of ``world_size`` ranks would run for these arguments.

    The function needs no process group, other process or GPU. It allocates no parameters. It changes neither
    ``torch.distributed`` nor the module.

    Args:
        module: a plain module. A module on the meta device is traced for the CPU, and only shapes and dtypes of tensor
            arguments count. Traces for CUDA need a module on a CUDA device: the kernels of attention and of fusers
            depend on the device.
        world_size: number of ranks of a replica (default: 8).
        replicas: number of replicas of the model, each with ``world_size`` ranks (hybrid sharding).
        mesh, dp_mesh_dims: a mesh in place of ``world_size``, ``rank`` and ``replicas``, as for
            :func:`thunder_zero.compile`. A module sliced by torch's ``parallelize_module`` needs a mesh.
            :func:`thunder_zero.tools.fake_mesh` makes a mesh without processes.
        synced: False for the program under ``no_sync``, which defers gradients.
        fuse: as for :func:`thunder_zero.compile`. The traces have one line for each region that inductor would compile.
        dynamic: True to trace sizes of the arguments as symbols, for :func:`thunder_zero.tools.resized`.
        device: a device such as ``"h100"`` (default: the module's device). The sizes that the policy leaves open and
            the operators of attention depend on ``device``. All other lines depend on the module's device.
        outer: the outer step of one of several sites, each with ``world_size`` ranks.

    Raises:
        RuntimeError: dynamo captures forward as several graphs, or the module is under ``torch.compile`` or DDP, or a
            value is wrong between ranks of tensor parallelism, such as a gradient that nothing sums.
    """
    require_plain("trace", module)
    require_unwrapped(module)
    _refuse_unknown_arguments(module, kwargs)
    planned, slices, partial = planned_mesh(module, world_size, rank, replicas, mesh, dp_mesh_dims)
    with taken(module, restore=True):
        source = ProgramSource(module, args, kwargs, policy, planned, synced, fuse, device, slices, partial, dynamic)
        traces = source.under(policy)
    require_right_types(traces)
    if outer is not None:
        outer.paths_of(traces.plan)  # refuses more fragments than units
    return replace(traces, outer=outer)


def require_plain(name: str, module: object) -> None:
    """Raise TypeError unless the argument of the function ``name`` is a module of torch alone."""
    if not isinstance(module, nn.Module) or isinstance(module, ThunderModule):
        kind = type(module).__name__
        raise TypeError(f"{name} takes a plain torch module, got {kind}; pass the module before thunder.jit")


def planned_mesh(
    module: nn.Module,
    world_size: int | None,
    rank: int,
    replicas: int,
    mesh: DeviceMesh | None,
    dp_mesh_dims: DataParallelMeshDims | None,
) -> tuple[Mesh, Mapping[str, int], Container[str]]:
    """Return the mesh that the arguments describe, the sliced dimensions, and parameters with partial gradients."""
    if mesh is None and dp_mesh_dims is None:
        return Mesh.of(8 if world_size is None else world_size, rank, replicas), {}, ()
    if world_size is not None or rank or replicas != 1:
        raise ValueError("mesh says how many ranks there are; leave out world_size and replicas, and rank")
    return mesh_and_slices(module, mesh, dp_mesh_dims)


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

    def under(self, policy: Policy | int) -> Traces:
        """Return the traces under another policy.

        The policy may differ from the captured policy in the stage, in the kept and recomputed units, and in the bytes
        of buckets and in flight.
        """
        executor = ZeroExecutor(self._plan(policy, self._mesh), Runtime())
        return self._named(program_of(self._converted, executor, self._mode, fuses=self._fuses))

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
        return self._named(outlined(lowered, replace(timeline, plan=plan), missing, fuses=self._fuses))

    @cached_property
    def _converted(self) -> Converted:
        with thunder_context():
            return convert(self.joint, self.paths, backward=self._mode.differentiates)

    def _named(self, traces: Traces) -> Traces:
        names = named_inputs(self.joint, self._converted)
        buffer_paths = {names[position]: path for position, path in self._buffers.items() if position in names}
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

    The names of the dimensions are in the order of :func:`thunder_zero.compile`: data dimensions first.
    """
    if not 0 <= rank < prod(shape):
        raise ValueError(f"rank is {rank!r}; the mesh has the ranks 0 to {prod(shape) - 1}")
    if has_groups():
        raise RuntimeError("there is a process group; give its ranks' init_device_mesh, or ask in another process")
    clear_dtensor_caches()
    dist.init_process_group("fake", rank=rank, world_size=prod(shape))
    try:
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()
        # Meshes of two ranks are equal, so DTensor would give the next rank this rank's sizes of uneven slices.
        clear_dtensor_caches()


def export(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, *, for_gpu: bool, dynamic: bool
) -> Exported:
    """Capture a module's forward. Raise RuntimeError if it is not one graph, or reads a number from a tensor.

    With ``for_gpu``, the GPU's attention kernels are used even if tensors are on the CPU. With ``dynamic``, the
    arguments' sizes are symbols.
    """
    name = type(module).__name__
    captures: list[tuple[aot.Joint, Sequence[Any], Sequence[str | None], Sequence[Any]]] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if message := _refusal(name, graph, inputs):
            return partial(_refuse, message)
        if for_gpu:
            for node in graph.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
                node.target = _attention
            graph.recompile()
        paths, inputs = paths_of(inputs), with_slices(graph, inputs)
        joint = joint_of(graph, inputs, paths, plan)

        def run(*args: Any) -> Sequence[Any]:
            results = [joint.results[position] for position in joint.plain_outputs()]
            values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
            markers = tuple(shape_of(value) if isinstance(value, Tensor) else value for value in values)
            captures.append((joint, inputs, paths, markers))
            return markers

        return run

    capturing = partial(dynamo.capturing, [], (Placeholder, Memoryless))
    captured = dynamo.capture(module, backend, capturing, dynamic=dynamic, whole=True)
    with dynamo_config.patch(specialize_float=True):  # such as the epsilon of a norm
        returned = captured(*args, **kwargs)
    if not captures:
        raise RuntimeError(f"forward of {name} computes nothing with tensors, so there is no trace of it")
    require_unhooked(module.parameters())
    for tensor in tensors_in(returned):
        if (path := path_of(tensor)) is not None:
            raise RuntimeError(returned_message(path))
    joint, inputs, paths, markers = captures[-1]
    names = {id(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    unplanned = ((position, id(value)) for position, value in enumerate(inputs) if not paths[position])
    buffers = {position: names[key] for position, key in unplanned if key in names}
    return joint, paths, buffers, restoring(returned, markers, joint.plain_outputs())


class Memoryless(Tensor):
    """A contiguous tensor without memory, for code that is captured but not run. No operator accepts it."""


def shape_of(tensor: Tensor) -> Tensor:
    """Return a CPU tensor or parameter without memory, with the shape and dtype of ``tensor``."""
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Memoryless
    return without_memory(kind, tensor, tensor.dtype, CPU)


def _refuse(message: str, *inputs: Any) -> NoReturn:
    raise RuntimeError(message)


def _refusal(name: str, graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return why a graph has no trace, or ""."""
    # Here dynamo captures a number that is read from a tensor. In training dynamo breaks the graph there.
    values = ((node, node.meta.get("example_value")) for node in graph.graph.nodes)
    numbers = [node for node, value in values if isinstance(value, py_sym_types) and aot.hint(value) is None]
    if not numbers:
        path = replaced_parameter(graph, inputs)
        return "" if path is None else written_message(path)
    file, positions = source_of(numbers[0])
    where = f" at {file}:{positions.lineno}" if positions else ""
    return (
        f"forward of {name} reads a number from a tensor{where}, where dynamo ends a graph, and a trace shows one "
        f"graph; keep it a tensor, or train a step of tz.compile and read tz.traces_of(model, graph=0)"
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention as torch does on a GPU, also on a machine without one.

    Calls in half precision without a mask use the flash kernel. Other calls use the efficient kernel. Torch chooses
    likewise (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``). On a CPU it would choose other kernels, and for
    dropout the decomposed formula, whose saved values grow with the square of the sequence length.
    """
    if attn_mask is None and query.dtype in HALF and query.shape[-1] <= WIDEST:
        output: Tensor = FLASH(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return output
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    output = EFFICIENT(query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale)[0]
    return output
