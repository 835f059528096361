"""A step to draw: what each line of a record computes, sends, allocates and frees, without values.

In: a ``StepRecord``, whose storages were polled, and its types. Out: a ``StepPicture``, which processes can send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._pytree import tree_map_only

from thunder_zero.plan.amounts import name_of
from thunder_zero.spmd.collectives import Collective
from thunder_zero.spmd.record import SILENT, Parameter, RecordedLine, Ref, StepRecord

ATTENTION: dict[str, Callable[..., int]] = {  # torch counts the FLOPs of these kernels under other names only
    "_scaled_dot_product_flash_attention_for_cpu": flop_counter.sdpa_flop_count,
    "_scaled_dot_product_flash_attention_for_cpu_backward": flop_counter.sdpa_backward_flop_count,
}


@dataclass(frozen=True)
class DrawnLine:
    """A line of a picture.

    Attributes:
        code: its statement; values are named by their storages.
        where: the user's line.
        unit: the block whose module computes.
        backward: whether a backward ran.
        reads, writes: storages.
        flops: of products, attention and convolutions.
        traffic_bytes: that it reads and writes.
        dtype: of the first floating-point value that it reads.
        types: of what it writes, such as ``"dp:S tp:P"``.
        collective: what it launches, if it is a collective.
        sent: bytes that this rank sends in it, on a ring.
    """

    code: str
    where: str
    unit: str
    backward: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: int
    traffic_bytes: int
    dtype: str
    types: str
    collective: Collective | None
    sent: int


@dataclass(frozen=True)
class StepPicture:
    """A step on one rank.

    Attributes:
        axes: the axes of the mesh and their numbers of ranks.
        data: the axes whose ranks have batches of their own.
        lines: the operators that ran, but for views.
        sizes: changes of storages, as (index of the line, storage, bytes from then on); the index -1 is before the
            step.
        parameters, gradients: storages and elements on this rank, keyed by path.
        buffers: storages, keyed by path.
    """

    axes: Mapping[str, int]
    data: tuple[str, ...]
    lines: tuple[DrawnLine, ...]
    sizes: tuple[tuple[int, int, int], ...]
    parameters: Mapping[str, tuple[int, int]]
    gradients: Mapping[str, tuple[int, int]]
    buffers: Mapping[str, tuple[int, int]]


def picture_of(record: StepRecord, types: Mapping[str, Sequence[Sequence[str]]], data: Sequence[str]) -> StepPicture:
    """Return a picture of a record. ``types`` are those of what each line writes, keyed by axis."""
    lines: list[DrawnLine] = []
    places = []  # of each line of the record, in the picture
    for index, line in enumerate(record.lines):
        is_view = line.is_view and line.operator.namespace == "aten"  # FSDP2 copies into what it returns a part of
        if not (is_view or line.name in SILENT or line.operator.namespace == "profiler"):
            letters = zip(*(of_axis[index] for of_axis in types.values()), strict=True)
            texts = (" ".join(f"{axis}:{text}" for axis, text in zip(types, item, strict=True)) for item in letters)
            lines.append(_drawn(line, "; ".join(dict.fromkeys(texts)), record.units.get(line.module, "")))
        places.append(len(lines) - 1)
    places.append(len(lines) - 1)
    older: set[int] = set()  # storages that were there before the step
    made: set[int] = set()
    for line in record.lines:
        older |= {ref.storage for ref in line.inputs} - made
        made |= {ref.storage for ref in line.results}
    sizes = []
    for index, storage, nbytes in record.sizes:
        sizes.append((-1 if storage in older else places[index], storage, nbytes))
        older.discard(storage)
    parameters, gradients, buffers = map(_by_path, (record.parameters, record.gradients, record.buffers))
    return StepPicture(record.axes, tuple(data), tuple(lines), tuple(sizes), parameters, gradients, buffers)


def _by_path(items: Sequence[Parameter]) -> dict[str, tuple[int, int]]:
    return {item.path: (item.ref.storage, prod(item.ref.shape)) for item in items}


def _drawn(line: RecordedLine, types: str, unit: str) -> DrawnLine:
    targets, item = (*line.written, *line.results), line.collective
    read = [ref for ref in line.read if ref not in line.written]
    floats = [name_of(ref.dtype) for ref in read if ref.dtype.is_floating_point]
    traffic = 0 if item else sum(ref.nbytes for ref in {*read, *targets})
    sent = sum(_sent(item, *(sum(ref.nbytes for ref in refs) for refs in pair)) for pair in line.pairs) if item else 0
    storages = (tuple(dict.fromkeys(ref.storage for ref in refs)) for refs in (line.inputs, targets))
    code = _code(line, targets)
    reads, writes = storages
    dtype = floats[0] if floats else ""
    where = line.where if line.where != "backward" else ""
    return DrawnLine(code, where, unit, line.backward, reads, writes, _flops(line), traffic, dtype, types, item, sent)


def _sent(collective: Collective, read: int, written: int) -> int:
    """Return the bytes that a rank sends on a ring: of a broadcast and a scatter, the first rank."""
    others, size = collective.size - 1, collective.size
    if collective.kind == "all_gather":
        return others * read
    if collective.kind == "all_reduce":
        return 2 * others * read // size
    return written if collective.kind == "broadcast" else others * max(read, written) // size


def _flops(line: RecordedLine) -> int:
    count = ATTENTION.get(line.name)
    if count is not None:
        return int(count(*(ref.shape for ref in line.inputs[: 4 if line.backward else 3])))
    count = flop_counter.flop_registry.get(line.operator.overloadpacket)
    if count is None:
        return 0
    args, kwargs, results = tree_map_only(Ref, _on_meta, (line.args, line.kwargs, line.results))
    return int(count(*args, **kwargs, out_val=results[0] if len(results) == 1 else results))


def _on_meta(ref: Ref) -> Any:
    return torch.empty(ref.shape, device="meta")


def _code(line: RecordedLine, targets: Sequence[Ref]) -> str:
    def named(ref: Ref) -> str:
        return f"t{ref.storage}"

    shown = [f"{named(ref)}: {name_of(ref.dtype)}{[*ref.shape]}" for ref in targets]
    args = [_text(value) for value in (*line.args, *line.kwargs.values())]
    return f"{', '.join(shown)}{' = ' if shown else ''}{line.operator.overloadpacket}({', '.join(args)})"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return (
        f"t{value.storage}"
        if isinstance(value, Ref)
        else "group"
        if isinstance(value, torch.ScriptObject)
        else str(value)
    )
