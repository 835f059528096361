"""Records each operator of a step that runs in one process, below DTensor and FSDP2.

In: a user's step on a mesh without other processes. Out: a ``StepRecord`` of frozen lines, with copies of their inputs.
Collectives send nothing: they fill their outputs with this rank's values. Recording starts at the first forward.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from inspect import currentframe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_zero.compat.private import HigherOrderOperator, StridedShard, disable_current_modes
from thunder_zero.compat.torch.recording import (
    backward_sequence,
    fakes,
    is_backward,
    next_sequence,
    with_arrived_works,
)
from thunder_zero.spmd.collectives import Collective, Pair, axes_of, collective_of, fill
from thunder_zero.spmd.processes import NotChecked

PACKAGE, TORCH = str(Path(__file__).resolve().parents[1]), str(Path(nn.__file__).resolve().parents[1])
LIMIT = 2 << 30  # bytes of copied values
SILENT = frozenset(
    ("resize_", "set_", "record_stream", "detach", "_local_scalar_dense", "item", "is_pinned", "equal", "_assert_async")
)
TRADES = ("send", "recv_", "recv_any_source_")  # between two ranks
RANDOM = frozenset(
    (
        *("bernoulli_", "bernoulli", "rand", "randn", "rand_like", "randn_like", "native_dropout", "uniform_"),
        *("normal_", "randint", "randperm", "exponential_", "multinomial"),
    )
)


@dataclass(frozen=True)
class Ref:
    """A tensor that a line reads or writes: a part of a storage, after so many writes."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    writes: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def place(self) -> tuple[object, ...]:
        """The part of the storage, at any time."""
        return self.storage, self.offset, self.shape, self.stride


@dataclass(frozen=True)
class RecordedLine:
    """An operator that ran.

    Attributes:
        operator: an overload, such as ``torch.ops.aten.mm.default``.
        args, kwargs: its arguments, with ``Ref`` in place of tensors.
        inputs: the tensors among its arguments.
        changes: the positions among the inputs of those that it changes in place.
        written: the changed inputs after the line.
        results: its new outputs.
        fresh: the inputs that no line before has written or read.
        where: the user's line, such as ``"train.py:12: loss.backward()"``.
        backward: whether a backward ran.
        collective: its group and reduction, if it is a collective.
        module: the ``id`` of the module that computes, or whose backward runs; 0 outside of modules.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Ref, ...]
    changes: tuple[int, ...]
    written: tuple[Ref, ...]
    results: tuple[Ref, ...]
    where: str
    backward: bool
    fresh: tuple[Ref, ...] = ()
    collective: Collective | None = None
    module: int = 0

    @property
    def name(self) -> str:
        return str(self.operator.overloadpacket.__name__)

    @property
    def read(self) -> tuple[Ref, ...]:
        """The inputs but for those that the line only fills, by ``copy_`` or as ``out=``."""
        if self.name.endswith("_") and self.name != "copy_":
            return self.inputs
        return tuple(item for index, item in enumerate(self.inputs) if index not in self.changes)

    @property
    def pairs(self) -> list[Pair]:
        """The inputs and outputs of a collective, which may consist of several."""
        if self.collective is None:
            return []
        return self.collective.pairs(self.operator, self.args, self.kwargs, self.results)

    @property
    def is_view(self) -> bool:
        """True if all outputs are parts of inputs that the line does not change."""
        storages = {item.storage for item in self.inputs}
        return bool(self.results) and not self.written and all(item.storage in storages for item in self.results)


@dataclass(frozen=True)
class Parameter:
    """A parameter, or a gradient, of the model: its part on this rank, and how it is placed on the mesh's axes.

    ``placements`` maps axes to the dimension of a slice, ``"replicate"`` or ``"partial"``. ``line`` is the number of
    lines that ran before an optimizer read the gradient. ``pieces`` are those of packed slices, by axis.
    """

    path: str
    ref: Ref
    placements: Mapping[str, int | str]
    line: int = 0
    pieces: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Shadow:
    """One line, as another rank ran it: what decides whether the ranks differ."""

    name: str
    scalars: tuple[Any, ...]
    offsets: tuple[int, ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    fresh: tuple[tuple[tuple[int, ...], str], ...] = ()  # shapes and digests
    drawn: tuple[str, ...] = ()  # digests of random numbers


@dataclass(frozen=True)
class StepRecord:
    """A step on one rank.

    Attributes:
        axes: the axes of the mesh and their numbers of ranks.
        lines: the operators that ran.
        shadows: what decides, for each line, whether another rank differs.
        values: copies of what the lines read.
        parameters, gradients, buffers: of the model.
        slices: gathered parameters of FSDP2, with their placements on the other axes.
        equalised: storages that a collective made equal before the first forward.
        loss: the scalar from which backward started.
        stepped: the parameters that an optimizer stepped.
        foreign: how many tensors an optimizer stepped that are no parameters of the model.
        sizes: changes of storages, as (lines that ran before, storage, bytes from now on). 0 bytes are freed.
        units: the block of each module, keyed by the module's ``id``.
        trades: the user's first line that sends to one other rank, or receives from it; "" if none does.
    """

    axes: Mapping[str, int]
    lines: tuple[RecordedLine, ...] = ()
    shadows: tuple[Shadow, ...] = ()
    values: Mapping[Ref, Tensor] = field(default_factory=dict, repr=False)
    parameters: tuple[Parameter, ...] = ()
    gradients: tuple[Parameter, ...] = ()
    buffers: tuple[Parameter, ...] = ()
    slices: tuple[Parameter, ...] = ()
    equalised: frozenset[int] = frozenset()
    loss: Ref | None = None
    stepped: frozenset[str] = frozenset()
    foreign: int = 0
    sizes: tuple[tuple[int, int, int], ...] = ()
    units: Mapping[int, str] = field(default_factory=dict)
    trades: str = ""

    def for_other_ranks(self) -> StepRecord:
        """Return what types on other ranks need, which processes can send."""
        return StepRecord(self.axes, shadows=self.shadows, parameters=self.parameters)

    @property
    def gradients_by_line(self) -> dict[int, list[Parameter]]:
        """The gradients, by the number of lines that ran before an optimizer, or the end, reads them."""
        result: dict[int, list[Parameter]] = {}
        for item in self.gradients:
            result.setdefault(item.line, []).append(item)
        return result


class Tape:
    """Lines that ran, whose values are parts of numbered storages."""

    def __init__(self) -> None:
        self.lines: list[RecordedLine] = []
        self.storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # living ones, and their numbers
        self._writes: list[int] = []  # of each storage

    def ref(self, item: Tensor) -> Ref:
        """Return what a tensor is now. A freed storage's number is not used again."""
        storage = item.untyped_storage()
        weak, number = self.storages.get(storage._cdata, (None, -1))
        if weak is None or weak() is None:
            number = len(self._writes)
            self._writes.append(0)
            self.storages[storage._cdata] = weakref.ref(storage), number
        shape, stride = tuple(item.shape), tuple(item.stride())
        return Ref(number, int(item.storage_offset()), shape, stride, item.dtype, self._writes[number])

    def write(
        self,
        operator: Any,
        arguments: tuple[Any, Any],
        tensors: Sequence[Tensor],
        changed: Sequence[Tensor],
        results: Sequence[Tensor],
        **facts: Any,
    ) -> RecordedLine:
        """Append a line that has run. ``arguments`` have refs, as of before the line, in place of ``tensors``."""
        inputs = tuple(item for item in tree_leaves(arguments) if isinstance(item, Ref))
        read = {item.storage for item in inputs}
        for item in (*changed, *(item for item in results if self.ref(item).storage not in read)):
            self._writes[self.ref(item).storage] += 1
        changes = tuple(index for index, item in enumerate(tensors) if any(item is other for other in changed))
        written, new = tuple(map(self.ref, changed)), tuple(map(self.ref, results))
        self.lines.append(RecordedLine(operator, *arguments, inputs, changes, written, new, **facts))
        return self.lines[-1]


class StepRecorder(TorchDispatchMode):
    """Records the operators that run inside the block, from the first forward of a module on."""

    def __init__(self, mesh: DeviceMesh, *, keep_values: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh, self._keeps_values = mesh, keep_values
        self._axes = {name: mesh.size(index) for index, name in enumerate(mesh.mesh_dim_names or ())}
        self._tape = Tape()
        self._shadows: list[Shadow] = []
        self._values: dict[Ref, Tensor] = {}
        self._nbytes, self._seen = 0, set[Ref]()
        self._equalised, self._perturbed = set[int](), set[int]()
        self._slices: dict[int, Parameter] = {}
        self._forward_lines: dict[int, tuple[str, int]] = {}
        self._modules: list[int] = []  # that compute, the innermost one last
        self._sizes: dict[int, int] = {}  # of living storages, by number
        self._resized: list[tuple[int, int, int]] = []
        self._optimized: list[Tensor] = []
        self._gradients: dict[int, tuple[Tensor, int]] = {}  # by parameter, and the line at which an optimizer reads it
        self._is_active, self._trades = False, ""

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow modules and optimizers inside the block."""
        handles = [
            register_module_forward_pre_hook(torch.compiler.disable(self._before_forward)),
            register_module_forward_hook(torch.compiler.disable(self._after_forward)),
            register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # what runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on plain tensors and record it; leave the operators of subclasses to the subclasses."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or fakes(types):
            return func(*args, **kwargs)
        if any("__torch_dispatch__" in vars(kind) for kind in types if kind not in (Tensor, nn.Parameter, nn.Buffer)):
            return NotImplemented
        tensors = _tensors((args, kwargs))
        if any(item.is_meta for item in tensors):
            return func(*args, **kwargs)
        collective = collective_of(func, args, kwargs, self._mesh)
        self._trades = self._trades or (_users_line() if func.overloadpacket.__name__ in TRADES else "")
        if not self._is_active:
            return self._prepare(func, args, kwargs, collective)
        (where, module), inputs = self._where(), tuple(map(self._tape.ref, tensors))
        self._poll()  # what was freed since the last line
        fresh = () if func.overloadpacket.__name__ in SILENT else self._read(tensors, inputs)
        writes = changed_by(func, args, kwargs)
        arguments = tree_map_only(Tensor, self._tape.ref, (args, kwargs))
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if any(item.is_meta for item in outputs):
            return result
        if collective is not None:
            pairs = _send_nothing(collective, func, args, kwargs, outputs)
            result = with_arrived_works(result, outputs)
            writes = [item for _, group in pairs for item in group if any(item is other for other in tensors)]
        results = [item for item in outputs if not _among(item, writes)]
        facts = {"where": where, "backward": is_backward(), "collective": collective, "module": module}
        line = self._tape.write(func, arguments, tensors, writes, results, fresh=fresh, **facts)
        self._poll((*tensors, *outputs))
        self._append(line, outputs)
        return result

    def _read(self, tensors: list[Tensor], inputs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """Copy what a line reads. Return what comes from outside of the record and is read for the first time."""
        fresh = tuple(ref for ref in dict.fromkeys(inputs) if ref.nbytes and not ref.writes and ref not in self._seen)
        self._seen.update(inputs)
        with torch.no_grad(), disable_current_modes():
            for item, ref in zip(tensors, inputs, strict=True) if self._keeps_values or fresh else ():
                if ref not in self._values and item.untyped_storage().nbytes():
                    self._nbytes += ref.nbytes
                    if self._nbytes > LIMIT:
                        raise NotChecked(f"the step reads over {LIMIT >> 30} GiB of values; check a smaller model")
                    self._values[ref] = _with_strides(item)
        return tuple(ref for ref in fresh if ref in self._values)

    def _append(self, line: RecordedLine, outputs: list[Tensor]) -> None:
        """Keep a line and its shadow."""
        shadow = replace(
            shadow_of(line, map(self._tape.ref, outputs)),
            fresh=tuple((item.shape, _digest(self._values[item])) for item in line.fresh),
            drawn=tuple(map(_digest, outputs)) if line.name in RANDOM else (),
        )
        if not self._keeps_values:
            self._values.clear()
        self._seen.update(line.results)
        self._shadows.append(shadow)

    def _prepare(self, func: Any, args: Any, kwargs: Any, collective: Collective | None) -> Any:
        """Run an operator of the time before the first forward. Broadcasts make values equal."""
        result = func(*args, **kwargs)
        if collective is not None:
            pairs = _send_nothing(collective, func, args, kwargs, _tensors(result))
            result = with_arrived_works(result, _tensors(result))
            if collective.kind in ("broadcast", "all_reduce", "all_gather"):
                self._equalised |= {self._tape.ref(item).storage for _, group in pairs for item in group}
        return result

    # storages

    def _poll(self, of: Iterable[Tensor] | None = None) -> None:
        """Note which storages have another size (default: of all). FSDP2 and Python free them without an operator."""
        keys = [*self._tape.storages] if of is None else [item.untyped_storage()._cdata for item in of]
        for key in keys if self._keeps_values else ():
            weak, number = self._tape.storages[key]
            storage = weak()
            nbytes = 0 if storage is None else storage.nbytes()
            if self._sizes.get(number, 0) != nbytes:
                self._sizes[number] = nbytes
                self._resized.append((len(self._tape.lines), number, nbytes))
            if storage is None:
                del self._tape.storages[key]

    # the user's line

    def _where(self) -> tuple[str, int]:
        """Return the user's line, and the module that computes."""
        if (sequence := backward_sequence()) is not None:
            where, module = self._forward_lines.get(sequence, ("", 0))
            return where or "backward", module
        place = _users_line(), self._modules[-1] if self._modules else 0
        if not is_backward():
            self._forward_lines[next_sequence() - 1] = place
        return place

    # modules and optimizers

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        with torch.no_grad(), disable_current_modes():
            for item in module.parameters():
                self._perturb(item)
        self._is_active = True
        self._modules.append(id(module))
        self._note_slices(module)

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._modules:  # modules inside may have been left by an exception, as checkpoints do
            del self._modules[self._modules.index(id(module)) :]
        self._note_slices(module)

    def _perturb(self, item: nn.Parameter) -> None:
        """Add noise to a parameter once: zeros and ones would hide faults."""
        local = _local(item)
        if id(item) in self._perturbed or self._tape.lines or local.is_meta or not local.is_floating_point():
            return
        self._perturbed.add(id(item))
        dice = torch.Generator().manual_seed(len(self._perturbed))
        noise = 0.1 * torch.randn(local.shape, generator=dice)
        usual = local.isfinite() & (local.abs() < 1e3)
        local.copy_(torch.where(usual, local, torch.zeros((), dtype=local.dtype)) + noise.to(local.dtype))

    def _note_slices(self, module: nn.Module) -> None:
        """Note how gathered parameters of FSDP2 are sliced on the other axes."""
        for item in module.parameters(recurse=False):
            if isinstance(item, DTensor):
                part = placed("", item, self._tape, self._mesh)
                is_cut = any(isinstance(dim, int) for dim in part.placements.values())
                if is_cut and len(part.placements) < len(self._axes):
                    self._slices[part.ref.storage] = part

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for item in group["params"]:
                self._optimized.append(item)
                if item.grad is not None:
                    self._gradients[id(item)] = item.grad, len(self._tape.lines)

    def record(self, model: nn.Module) -> StepRecord:
        """Return the record of the model's step."""
        with disable_current_modes():
            named = dict(model.named_parameters())
            held = {id(item) for item in named.values()}
            end = len(self._tape.lines)
            grads = {path: self._gradients.get(id(item), (item.grad, end)) for path, item in named.items()}
            place = partial(placed, tape=self._tape, mesh=self._mesh)
            return StepRecord(
                self._axes,
                tuple(self._tape.lines),
                tuple(self._shadows),
                self._values,
                tuple(place(path, item) for path, item in named.items() if not _local(item).is_meta),
                tuple(place(path, grad, line=line) for path, (grad, line) in grads.items() if grad is not None),
                tuple(place(path, item) for path, item in model.named_buffers() if not _local(item).is_meta),
                tuple(self._slices.values()),
                frozenset(self._equalised),
                _loss_of(self._tape.lines),
                frozenset(path for path, item in named.items() if any(item is other for other in self._optimized)),
                sum(id(item) not in held for item in self._optimized),
                tuple(self._resized),
                units_of(model),
                self._trades,
            )


def placed(path: str, item: Tensor, tape: Tape, mesh: DeviceMesh, line: int = 0) -> Parameter:
    """Return a parameter, a gradient or a buffer, with its placements on the axes of a mesh."""
    placements: dict[str, int | str] = {}
    pieces: dict[str, int] = {}
    local = _local(item)
    if isinstance(item, DTensor):
        dims = [placement.dim for placement in item.placements if isinstance(placement, Shard | StridedShard)]
        on_axes = [
            (axis, placement)
            for index, placement in enumerate(item.placements)
            for axis in axes_of(mesh, dist.get_process_group_ranks(item.device_mesh.get_group(index)))
        ]  # a flattened mesh has several axes in one dimension
        for axis, placement in on_axes:
            if isinstance(placement, Replicate | Partial):
                placements[axis] = "replicate" if isinstance(placement, Replicate) else "partial"
            else:
                placements[axis] = placement.dim % max(local.dim(), 1)  # type: ignore[attr-defined]
            if isinstance(placement, StridedShard) and dims.count(placement.dim) == 1:  # else FSDP2's own rows
                pieces[axis] = int(placement.split_factor)
    return Parameter(path, tape.ref(local), placements, line, pieces)


def units_of(model: nn.Module) -> dict[int, str]:
    """Return the outermost block that each module is in: a child of a list or of a sequence of modules."""
    result = {id(model): ""}
    for path, module in model.named_modules():
        for name, child in module.named_children():
            is_block = isinstance(module, nn.ModuleList | nn.Sequential) and not result[id(module)]
            result[id(child)] = f"{path}.{name}".lstrip(".") if is_block else result[id(module)]
    return result


def _loss_of(lines: Sequence[RecordedLine]) -> Ref | None:
    """Return the scalar from which the first backward starts: it begins with a one for each element."""
    first = next((index for index, line in enumerate(lines) if line.backward), 0)
    ones = (line.inputs[0] for line in reversed(lines[:first]) if line.name == "ones_like")
    return next((item for item in ones if not item.shape), None)


def shadow_of(line: RecordedLine, outputs: Iterable[Ref]) -> Shadow:
    """Return what of a line decides whether ranks differ, but for its values."""
    return Shadow(
        str(line.operator),
        tuple(item for item in tree_leaves((line.args, line.kwargs)) if isinstance(item, int | float)),
        tuple(item.offset for item in line.inputs),
        tuple((item.offset, item.shape) for item in outputs),
    )


def changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator changes in place."""
    written = (item.name for item in func._schema.arguments if item.alias_info and item.alias_info.is_write)
    return _tensors([argument_of(func, args, kwargs, name) for name in written])


def argument_of(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument of an operator by its name, or its default, or None."""
    for index, item in enumerate(func._schema.arguments):
        if item.name == name:
            return args[index] if index < len(args) else kwargs.get(name, item.default_value)
    return None


def _send_nothing(collective: Collective, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> list[Pair]:
    """Fill a collective's outputs with this rank's values. Return its inputs and outputs."""
    pairs = collective.pairs(func, args, kwargs, outputs)
    with torch.no_grad(), disable_current_modes():
        fill(collective, pairs)
    return pairs


def _tensors(tree: Any) -> list[Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, Tensor)]


def _among(item: Tensor, others: list[Tensor]) -> bool:
    return any(item is other or (item.numel() > 0 and item.data_ptr() == other.data_ptr()) for other in others)


def _local(item: Tensor) -> Tensor:
    return item._local_tensor if isinstance(item, DTensor) else item


def _with_strides(item: Tensor) -> Tensor:
    """Copy a tensor and keep its strides, so that operators on the copy take the same path."""
    if 0 in item.stride() or not item.numel():
        return item.clone()
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype).copy_(item)


def _digest(item: Tensor) -> str:
    with torch.no_grad(), disable_current_modes():
        data = item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return blake2b(data, digest_size=8).hexdigest()


WRAPPERS = ("/contextlib.py", "/typing_extensions.py")  # files whose functions call the user's, or torch's


def _users_line() -> str:
    """Return the last line outside of torch and of this package, as ``file:line: text``."""
    frame = currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, PACKAGE, "<")) and not name.endswith(WRAPPERS):
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).name}:{frame.f_lineno}: {text}"
        frame = frame.f_back
    return ""
