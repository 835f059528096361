"""Records each operator of a step that runs in one process, below DTensor and FSDP2.

In: a user's step on a mesh without other processes. Out: a ``StepRecord`` of frozen lines, with copies of their inputs.
Collectives send nothing: they fill their outputs with this rank's values. Recording starts at the first forward.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from inspect import currentframe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from thunder_zero.compat.private import HigherOrderOperator, disable_current_modes
from thunder_zero.compat.torch.recording import (
    backward_sequence,
    fakes,
    is_backward,
    next_sequence,
    with_arrived_works,
)
from thunder_zero.spmd.collectives import Collective, Pair, collective_of, fill
from thunder_zero.spmd.lines import RANDOM, SILENT, RecordedLine, Ref, Shadow, StepRecord, shadow_of
from thunder_zero.spmd.processes import NotChecked
from thunder_zero.spmd.tape import Tape, changed_by, tensors_of
from thunder_zero.spmd.watched import WatchedModel, local_of

PACKAGE, TORCH = str(Path(__file__).resolve().parents[1]), str(Path(nn.__file__).resolve().parents[1])
LIMIT = 2 << 30  # bytes of copied values


class StepRecorder(TorchDispatchMode):
    """Records the operators that run inside the block, from the first forward of a module on."""

    def __init__(self, mesh: DeviceMesh, *, keep_values: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh, self._keeps_values = mesh, keep_values
        self._axes = {name: mesh.size(index) for index, name in enumerate(mesh.mesh_dim_names or ())}
        self._tape, self._shadows = Tape(), list[Shadow]()
        self._values: dict[Ref, Tensor] = {}
        self._nbytes, self._seen, self._equalised, self._tracked = 0, set[Ref](), set[int](), set[int]()
        self._of_dtensors: tuple[Any, str] = None, ""  # the last operator of DTensors, and which slices it reads
        self._forward_lines: dict[int, tuple[str, int]] = {}
        self._model = WatchedModel(self._tape, mesh)
        self.hooks, self.outermost = self._model.hooks, self._model.outermost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on plain tensors and record it; leave the operators of subclasses to the subclasses."""
        kwargs, tensors = kwargs or {}, tensors_of((args, kwargs))
        if isinstance(func, HigherOrderOperator) or fakes(types):
            return func(*args, **kwargs)
        if any("__torch_dispatch__" in vars(kind) for kind in types if kind not in (Tensor, nn.Parameter, nn.Buffer)):
            self._track(tensors)  # its local tensor does not require the gradient
            self._of_dtensors = func, str([_slice_of(item) for item in tensors])
            return NotImplemented
        if any(item.is_meta or nn.parameter.is_lazy(item) for item in tensors):
            return func(*args, **kwargs)
        collective = collective_of(func, args, kwargs, self._mesh)
        if not self._model.is_active:
            return self._prepare(func, args, kwargs, collective)
        (where, module), inputs = self._where(), tuple(map(self._tape.ref, tensors))
        self._tape.poll()  # what was freed since the last line
        fresh = () if func.overloadpacket.__name__ in SILENT else self._read(tensors, inputs)
        writes = changed_by(func, args, kwargs)
        self._track(tensors)
        tracked = self._tracked.intersection(ref.storage for ref in inputs)
        arguments = tree_map_only(Tensor, self._tape.ref, (args, kwargs))
        result = func(*args, **kwargs)
        outputs = tensors_of(result)
        if any(item.is_meta for item in outputs):
            return result
        if collective is not None:
            pairs = _send_nothing(collective, func, args, kwargs, outputs)
            result = with_arrived_works(result, outputs)
            writes = [item for _, group in pairs for item in group if any(item is other for other in tensors)]
        results = [item for item in outputs if not _among(item, writes)]
        facts = {"where": where, "backward": is_backward(), "collective": collective, "module": module}
        facts |= {"tracked": tracked, "differentiates": torch.is_grad_enabled()}
        line = self._tape.write(func, arguments, tensors, writes, results, fresh=fresh, **facts)
        self._tape.poll((*tensors, *outputs))
        self._append(line, outputs, [result] if isinstance(result, int | float) else [*map(_number, outputs)])
        return result

    def _read(self, tensors: list[Tensor], inputs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """Copy what a line reads. Return what comes from outside of the record and is read for the first time."""
        fresh = tuple(ref for ref in dict.fromkeys(inputs) if ref.nbytes and not ref.writes and ref not in self._seen)
        self._seen.update(inputs)
        with torch.no_grad(), disable_current_modes():
            for item, ref in zip(tensors, inputs, strict=True) if self._keeps_values or fresh else ():
                if ref not in self._values and (item.untyped_storage().nbytes() or not ref.nbytes):
                    self._nbytes += ref.nbytes
                    if self._nbytes > LIMIT:
                        raise NotChecked(f"the step reads over {LIMIT >> 30} GiB of values; check a smaller model")
                    self._values[ref] = _with_strides(item)
        return tuple(ref for ref in fresh if ref in self._values)

    def _track(self, tensors: list[Tensor]) -> None:
        """Note which storages have gradients."""
        kinds = (Tensor, nn.Parameter, DTensor)
        local = (local_of(item) for item in tensors if item.requires_grad and type(item) in kinds)
        self._tracked.update(self._tape.ref(item).storage for item in local if not item.is_meta)

    def _append(self, line: RecordedLine, outputs: list[Tensor], numbers: list[float]) -> None:
        """Keep a line and its shadow."""
        operator, slices = self._of_dtensors
        if line.operator == operator:
            self._of_dtensors = None, ""
        shadow = replace(
            shadow_of(line, map(self._tape.ref, outputs)),
            fresh=tuple((item.shape, _digest(self._values[item])) for item in line.fresh),
            numbers=tuple(numbers),
            drawn=(*map(_digest, outputs), slices if line.operator == operator else "") if line.name in RANDOM else (),
        )
        if not self._keeps_values:
            self._values.clear()
        self._seen.update(line.results)
        self._shadows.append(shadow)

    def _prepare(self, func: Any, args: Any, kwargs: Any, collective: Collective | None) -> Any:
        """Run an operator of the time before the first forward. Broadcasts make values equal."""
        result = func(*args, **kwargs)
        if collective is not None:
            pairs = _send_nothing(collective, func, args, kwargs, tensors_of(result))
            result = with_arrived_works(result, tensors_of(result))
            if collective.kind in ("broadcast", "all_reduce", "all_gather"):
                self._equalised |= {self._tape.ref(item).storage for _, group in pairs for item in group}
        changed = changed_by(func, args, kwargs)
        read = {self._tape.ref(item).storage for item in tensors_of((args, kwargs)) if not _among(item, changed)}
        if read and read <= self._equalised:  # a copy of a bucket that was broadcast
            self._equalised |= {self._tape.ref(item).storage for item in changed}
        return result

    def _where(self) -> tuple[str, int]:
        """Return the user's line, and the module that computes."""
        if (sequence := backward_sequence()) is not None:
            where, module = self._forward_lines.get(sequence, ("", 0))
            return where or "backward", module
        place = _users_line(), self._model.modules[-1] if self._model.modules else 0
        if not is_backward():
            self._forward_lines[next_sequence() - 1] = place
        return place

    def record(self, model: nn.Module) -> StepRecord:
        """Return the record of the model's step."""
        with disable_current_modes():
            return StepRecord(
                self._axes,
                tuple(self._tape.lines),
                tuple(self._shadows),
                self._values,
                equalised=frozenset(self._equalised),
                loss=_loss_of(self._tape.lines),
                sizes=tuple(self._tape.sizes),
                **self._model.facts(model),
            )


def _loss_of(lines: Sequence[RecordedLine]) -> Ref | None:
    """Return the scalar from which the first backward starts: it begins with a one for each element."""
    first = next((index for index, line in enumerate(lines) if line.backward), 0)
    ones = (line.inputs[0] for line in reversed(lines[:first]) if line.name == "ones_like")
    return next((item for item in ones if not item.shape), None)


def _send_nothing(collective: Collective, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> list[Pair]:
    """Fill a collective's outputs with this rank's values. Return its inputs and outputs."""
    pairs = collective.pairs(func, args, kwargs, outputs)
    with torch.no_grad(), disable_current_modes():
        fill(collective, pairs)
    return pairs


def _number(item: Tensor) -> float:
    return 0.0 if item.dim() or item.is_complex() else float(local_of(item))


def _among(item: Tensor, others: list[Tensor]) -> bool:
    return any(item is other or (item.numel() > 0 and item.data_ptr() == other.data_ptr()) for other in others)


def _with_strides(item: Tensor) -> Tensor:
    """Copy a tensor and keep its strides, so that operators on the copy take the same path."""
    if 0 in item.stride() or not item.numel():
        return item.clone()
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype).copy_(item)


def _slice_of(item: Tensor) -> tuple[int, ...]:
    """Return the coordinates of a DTensor's slice. On a GPU, DTensor draws other numbers for each."""
    if not isinstance(item, DTensor) or (here := item.device_mesh.get_coordinate()) is None:
        return ()
    return tuple(place for place, placement in zip(here, item.placements, strict=True) if placement.is_shard())


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
