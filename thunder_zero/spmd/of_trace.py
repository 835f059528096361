"""Types of the values of our own traces, on each axis of the mesh.

In: ``Traces``. Out: ``TraceTypes``. The plain module's lines run once on the CPU, with drawn values in place of the
model's. Our own lines are known: a gather makes a parameter, a reduction sums a gradient::

    w = zero_wait(zero_all_gather(t_w, 'w'))     dp:R tp:S      placed as planned
    y = aten.mm(x, w)                            dp:S tp:P      by experiments (flow.py)
    z = all_reduce(y, 'sum', 2, '3')             dp:S tp:R      by the table of collectives
    y_grad = get_grad(y)                         as y           a scalar's is equal on all ranks

Another rank differs from this one where it looks up its own rows of an embedding, where it takes its own part of an
equal value, and where it draws for its own slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from textwrap import shorten

import torch

from thunder_zero.plan.amounts import WIDTH, size, summed_up
from thunder_zero.plan.mesh import DATA, REPLICATE, SHARD, TENSOR, Mesh
from thunder_zero.schedule.ops import Compute, Reduce, Return, Wait, ends
from thunder_zero.spmd.collectives import NO_SHARE
from thunder_zero.spmd.flow import AxisTypes, Fault, Memo, Walk
from thunder_zero.spmd.lines import RANDOM, Parameter, RecordedLine, Ref, StepRecord, shadow_of
from thunder_zero.spmd.processes import NotChecked
from thunder_zero.spmd.run_trace import TraceRun
from thunder_zero.spmd.told import MEANINGS
from thunder_zero.spmd.verdict import TIMES_TRUE
from thunder_zero.traces.compiled import Traces

LIMIT = 1 << 30  # bytes of values and experiments
COPIES_OF_EXPERIMENTS = 20  # of a line's values, in float64
UNDECIDED = (MEANINGS["V"], MEANINGS["X"], NO_SHARE, TIMES_TRUE)  # said of a value without a law, or of a meant mean


@dataclass(frozen=True, repr=False)
class TraceTypes:
    """What the values of a program are on each axis.

    Attributes:
        values: the types of each value, such as ``"dp:S tp:P"``, keyed by its name in the traces.
        faults: what is wrong between ranks of tensor parallelism.
        gradients: the type of each parameter's gradient between ranks of tensor parallelism, keyed by path.
        not_checked: why there are no types; "" if there are.
        odd_heads: a line that cuts a slice into an odd number of heads, whose halves cannot be exchanged. Types of what
            follows from it may be wrong; "" if there is none.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    not_checked: str = ""
    odd_heads: str = ""

    def __repr__(self) -> str:
        return summed_up(self, self.not_checked or f"{len(self.values)} values, {len(self.faults)} faults")


def types_of_trace(traces: Traces, *, only: Sequence[str] | None = None) -> TraceTypes:
    """Return what each value of a program is on the axes of its mesh. ``only`` names axes (default: all)."""
    axes = [axis.name for axis in traces.plan.mesh.axes if axis.size > 1 and (only is None or axis.name in only)]
    try:
        _require_small(traces)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            reading = _Reading(traces)
            walked = {axis: reading.types_on(axis) for axis in axes}
    except NotChecked as reason:
        return TraceTypes(not_checked=str(reason))
    values = reading.by_value(walked, names_of_axes(traces.plan.mesh))
    on_tensor = walked.get(TENSOR)
    if on_tensor is None:
        return TraceTypes(values)
    gradients = {path: types for path, (types, _) in on_tensor.gradients.items()}
    odd_heads = reading.odd_heads(on_tensor)
    return TraceTypes(values, tuple(reading.faults(on_tensor)), gradients, odd_heads=odd_heads)


def require_right_types(traces: Traces) -> None:
    """Raise RuntimeError if a value of a sliced module is wrong between ranks of tensor parallelism.

    Nothing is raised where a value keeps no law (V), or where ranks have an odd number of heads, such as one: there
    gradients are compared at the first step (``sharded/unsliced.py``).
    """
    if traces.plan.mesh.tensor.size == 1 or traces.backward is None:
        return
    types = types_of_trace(traces, only=(TENSOR,))
    for fault in () if types.odd_heads else types.faults:
        if fault.kind == "error" and not any(words in fault.text for words in UNDECIDED):
            raise RuntimeError(_message(fault))


def _message(fault: Fault) -> str:
    where = f" ({shorten(fault.where, WIDTH, placeholder=' ...')})" if fault.where else ""
    if fault.parameters:
        return (
            f"the gradient of parameter {fault.parameters[0]!r} {fault.text.removeprefix('gradient ')} of tensor "
            f"parallelism{where}; place its module by torch's SequenceParallel, along the dimension of the slices"
        )
    return f"{fault.text}, on ranks of tensor parallelism{where}; sum shares over these ranks once"


def names_of_axes(mesh: Mesh) -> dict[str, str]:
    """Return the printed names of axes."""
    data = {SHARD: SHARD, REPLICATE: REPLICATE}
    if mesh.replicate.size == 1:
        data[SHARD] = "dp"
    elif mesh.shard.size == 1:
        data[REPLICATE] = "dp"
    return {**data, TENSOR: "tp"}


def _require_small(traces: Traces) -> None:
    timeline = traces.lifted
    if traces.facts.symbolic_shapes:
        raise NotChecked("sizes are symbols")
    computes = [op for op in timeline.ops if isinstance(op, Compute)]
    largest = max((sum(map(timeline.nbytes, (*op.reads, *op.writes))) for op in computes), default=0)
    needed = sum(value.nbytes for value in timeline.values.values()) + COPIES_OF_EXPERIMENTS * largest
    if needed > LIMIT:
        raise NotChecked(f"experiments would take {size(needed)}, over {size(LIMIT)}")


class _Reading:
    """What the types of a run say."""

    def __init__(self, traces: Traces) -> None:
        self._traces, self._plan, self._run = traces, traces.plan, TraceRun(traces)

    def types_on(self, axis: str) -> AxisTypes:
        """Return the types on an axis.

        A part that is read alone may be this rank's own, or the same part on all ranks. The second reading is tried if
        the first has a fault.
        """
        memo: Memo = {}
        record = self._record_of_step()
        readings = []
        for own in (True, False) if axis == TENSOR and self._run.own else (True,):
            neighbour = self._neighbour(record, axis, own)
            readings.append(Walk(record, axis, neighbour, None, batches_differ=axis in DATA, memo=memo).run())
            if not readings[-1].faults:
                break
        return min(readings, key=lambda types: sum(fault.kind == "error" for fault in types.faults))

    def faults(self, types: AxisTypes) -> Iterator[Fault]:
        """Yield the faults between ranks of tensor parallelism, with the lines that read the parameters."""
        ends = (op for op in self._traces.lifted.ops if isinstance(op, Return) and not op.backward)
        returned = {name for op in ends for name in op.returned}
        for index, (line, read, letters) in enumerate(self._typed_lines(types)):
            names = self._run.names[index]
            if any(name in returned and letter == "P" for name, letter in zip(names, letters, strict=True)):
                yield Fault(TENSOR, "error", "forward returns a share of a sum that is never summed", line.where, index)
            if line.name in RANDOM and "S" in read and "V" in letters and index not in self._run.of_slices:
                yield Fault(TENSOR, "error", f"{line.name} draws equal masks for different slices", line.where, index)
        for fault in types.faults:
            text = fault.text.replace(f"; sum it over {TENSOR}", "").replace(f" over {TENSOR}", "")
            where = fault.where or next((self._reader_of(path) for path in fault.parameters), "")
            yield replace(fault, text=text, where=where)

    def odd_heads(self, types: AxisTypes) -> str:
        """Return a line that cuts the last dimension of a slice into an odd number of parts; "" if there is none."""
        views = ((line, read[0]) for line, read, _ in self._typed_lines(types) if line.is_view)
        odd = (line for line, read in views if read == "S" and _cuts_oddly(line.inputs[0], line.results[0]))
        return next((f"{line.name} ({line.where})" for line in odd), "")

    def _typed_lines(self, types: AxisTypes) -> Iterator[tuple[RecordedLine, list[str | None], tuple[str, ...]]]:
        """Yield lines with the types of what they read and write."""
        known = {item.ref: "S" if TENSOR in item.placements else "R" for item in self._run.placed.values()}
        for line, letters in zip(self._run.tape.lines, types.lines, strict=True):
            yield line, [known.get(ref) for ref in line.inputs], letters
            known.update(zip((*line.written, *line.results), letters, strict=True))

    def _reader_of(self, path: str) -> str:
        """Return the user's line that reads a parameter first."""
        storages = {item.ref.storage for item in self._run.placed.values() if item.path == path}
        readers = (line for line in self._run.tape.lines if any(ref.storage in storages for ref in line.inputs))
        return next((line.where for line in readers if line.where), "")

    def _record_of_step(self) -> StepRecord:
        gradients = [
            Parameter(path, self._run.tape.ref(self._run.tensors[name]), {}, len(self._run.tape.lines))
            for path, name in self._traces.lifted.gradients
            if name in self._run.tensors
        ]
        parameters = [item for name, item in self._run.placed.items() if item.path in self._plan.by_name]
        buffers = [item for name, item in self._run.placed.items() if item.path not in self._plan.by_name]
        axes = {axis.name: axis.size for axis in self._plan.mesh.axes}
        shadows = tuple(shadow_of(line, (*line.written, *line.results)) for line in self._run.tape.lines)
        lines = tuple(self._run.tape.lines)
        return StepRecord(axes, lines, shadows, self._run.values, tuple(parameters), tuple(gradients), tuple(buffers))

    def _neighbour(self, record: StepRecord, axis: str, own: bool) -> StepRecord:
        """Return what the neighbouring rank would have run."""
        if axis != TENSOR:
            return StepRecord(record.axes, shadows=record.shadows)
        shadows = list(record.shadows)
        for index, shift in self._run.shifted.items():
            first = self._plan.mesh.tensor.place * shift
            own_rows = range(first, first + shift + 1)
            scalars = tuple(
                item + shift if type(item) is int and item in own_rows else item for item in shadows[index].scalars
            )
            shadows[index] = replace(shadows[index], scalars=scalars)
        for index in self._run.of_slices:
            shadows[index] = replace(shadows[index], drawn=("of another slice",))
        for index, line in enumerate(record.lines if own else ()):
            if any(item in self._run.own for item in line.inputs):
                offsets = tuple(item.offset + self._run.own.get(item, 0) for item in line.inputs)
                shadows[index] = replace(shadows[index], offsets=offsets)
        return StepRecord(record.axes, shadows=tuple(shadows))

    def by_value(self, walked: Mapping[str, AxisTypes], names: Mapping[str, str]) -> dict[str, str]:
        """Return the types of each value of the traces, as text."""
        of: dict[str, dict[str, str]] = {}
        for axis, types in walked.items():
            for name, item in self._run.placed.items():
                of.setdefault(name, {})[axis] = "S" if axis in item.placements else "R"
            for written, letters in zip(self._run.names, types.lines, strict=True):
                for written_name, letter in zip(written, letters, strict=True):
                    if written_name is not None:
                        of.setdefault(written_name, {})[axis] = letter
        for alias, name in self._run.aliases.items():
            of[alias] = of.get(name, {})
        texts = {
            name: " ".join(f"{names[axis]}:{letter}" for axis, letter in item.items()) for name, item in of.items()
        }
        return {**texts, **dict(self._scheduled(texts))}

    def _scheduled(self, texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the types of values that the passes have added: copies of values, and parameters gathered again."""
        originals = self._traces.lifted.ops
        of_path = {item.path: texts[name] for name, item in self._run.placed.items()}
        gradients = {path: name for path, name in self._traces.lifted.gradients}
        for op in self._traces.scheduled.timeline.ops:
            if isinstance(op, Compute) and op.repeated and op.number >= 0:
                pairs = zip(op.writes, originals[op.number].writes, strict=True)
                yield from ((copy, texts[name]) for copy, name in pairs if name in texts)
            elif isinstance(op, Wait) and not ends(op, Reduce):
                yield from ((name, of_path[path]) for name, path in zip(op.writes, op.params, strict=True))
            elif isinstance(op, Wait):
                named = zip(op.writes, (gradients.get(path, "") for path in op.params), strict=True)
                yield from ((copy, texts[name]) for copy, name in named if name in texts and copy not in texts)


def _cuts_oddly(source: Ref, view: Ref) -> bool:
    """Return whether a view cuts the last dimension of its source into an odd number of parts."""
    if len(view.shape) <= len(source.shape) or source.shape[-1:] == () or view.shape[-1] > source.shape[-1]:
        return False
    if view.shape[-1] == source.shape[-1]:  # one head, or other dimensions are cut
        return view.shape[-2] == 1 and view.shape.count(1) > source.shape.count(1)
    numbers = accumulate(reversed(view.shape), mul)
    heads = next(
        (size for size, number in zip(reversed(view.shape), numbers, strict=True) if number == source.shape[-1]), 2
    )
    return heads % 2 == 1
