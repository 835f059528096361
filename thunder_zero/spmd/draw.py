"""Draws a record: FLOPs, bytes and storages of each line.

In: a ``StepRecord`` whose storages were polled, and its types. Out: a ``StepPicture``, which processes can send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._pytree import tree_map_only

from thunder_zero.plan.amounts import name_of
from thunder_zero.spmd.collectives import Collective
from thunder_zero.spmd.lines import SILENT, Parameter, RecordedLine, Ref, StepRecord
from thunder_zero.spmd.picture import DrawnLine, StepPicture

ATTENTION: dict[str, tuple[Callable[..., int], int]] = {  # FLOPs from the shapes of so many inputs; torch has no entry
    "_scaled_dot_product_flash_attention_for_cpu": (flop_counter.sdpa_flop_count, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (flop_counter.sdpa_backward_flop_count, 4),
}


class Name(str):
    """Text that is printed without quotes, in lists, too."""

    __slots__ = ()
    __repr__ = str.__str__


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
    reads, writes = (tuple(dict.fromkeys(ref.storage for ref in refs)) for refs in (line.inputs, targets))
    drawn = DrawnLine(
        _code(line, targets),
        line.where if line.where != "backward" else "",
        unit,
        line.backward,
        reads,
        writes,
        _flops(line),
        0 if item else sum(ref.nbytes for ref in {*read, *targets}),
        next((name_of(ref.dtype) for ref in read if ref.dtype.is_floating_point), ""),
        types,
    )
    if item is None:
        return drawn
    sent = sum(_sent(item, *(sum(ref.nbytes for ref in refs) for refs in pair)) for pair in line.pairs)
    return replace(drawn, collective=item.kind, axes=item.axes, ranks=item.size, sent=sent)


def _sent(collective: Collective, read: int, written: int) -> int:
    """Return the bytes that a rank sends on a ring: of a broadcast and a scatter, the first rank."""
    others, size = collective.size - 1, collective.size
    if collective.kind == "all_gather":
        return others * read
    if collective.kind == "all_reduce":
        return 2 * others * read // size
    return written if collective.kind == "broadcast" else others * max(read, written) // size


def _flops(line: RecordedLine) -> int:
    if line.name in ATTENTION:
        of_shapes, number = ATTENTION[line.name]
        return int(of_shapes(*(ref.shape for ref in line.inputs[:number])))
    count = flop_counter.flop_registry.get(line.operator.overloadpacket)
    if count is None:
        return 0
    results: Sequence[Ref | None] = line.results
    if line.name == "convolution_backward":  # its mask says which gradients it computes
        computed = iter(line.results)
        results = [next(computed) if is_computed else None for is_computed in line.args[-1]]
    args, kwargs, results = tree_map_only(Ref, _on_meta, (line.args, line.kwargs, results))
    return int(count(*args, **kwargs, out_val=results[0] if len(results) == 1 else results))


def _on_meta(ref: Ref) -> Any:
    return torch.empty(ref.shape, device="meta")


def _code(line: RecordedLine, targets: Sequence[Ref]) -> str:
    """Return the statement of a line, with the numbers of storages as names."""
    shown = ", ".join(f"t{ref.storage}: {name_of(ref.dtype)}{[*ref.shape]}" for ref in targets)
    args = tree_map_only(Ref, lambda ref: Name(f"t{ref.storage}"), (*line.args, *line.kwargs.values()))
    args = tree_map_only(torch.ScriptObject, lambda _: Name("group"), args)
    return f"{shown}{' = ' if shown else ''}{line.operator.overloadpacket}({', '.join(map(str, args))})"
