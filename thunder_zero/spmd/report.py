"""The verdict on a step: what is wrong, the first cause first; its collectives and gradients."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap

from thunder_zero.plan.amounts import name_of
from thunder_zero.spmd.flow import AxisTypes, Fault
from thunder_zero.spmd.operators import FACTORS, MOVES
from thunder_zero.spmd.record import RecordedLine, StepRecord
from thunder_zero.tools.printing.words import WIDTH, summed_up

ORDER = ("error", "unknown", "warning")
History = tuple[tuple[str, str], ...]  # reductions as text, each with its dtype


@dataclass(frozen=True)
class Sent:
    """One collective of a step.

    Attributes:
        kind, op: such as ``"reduce_scatter"`` and ``"sum"``.
        axes: the axes of its group.
        dtype, nbytes: of what it reads, or of what a gather writes.
        phase: ``"forward"`` or ``"backward"``.
        where: the user's line.
    """

    kind: str
    op: str
    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    phase: str
    where: str

    @property
    def name(self) -> str:
        return f"{self.kind}({self.op})" if self.op else self.kind


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter.

    Attributes:
        path: the parameter.
        types: its type on each axis: ``"R"``, ``"S"``, ``"P"``, ``"N"``, ``"V"``.
        factors: on each axis, the factor by which it differs from the true gradient.
        reductions: the reductions that made it, such as ``"reduce_scatter(sum) over dp in float32"``.
    """

    path: str
    types: Mapping[str, str]
    factors: Mapping[str, float]
    reductions: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The result of :func:`thunder_zero.tools.check_step`. It is printed as text.

    Attributes:
        mesh: the axes and their numbers of ranks.
        faults: what is wrong or cannot be said, the first cause first; warnings come last.
        collectives, gradients: those of one rank's step.
        assumed: what the check assumes.
        operators: how many operators ran.
    """

    mesh: Mapping[str, int]
    faults: tuple[Fault, ...]
    collectives: tuple[Sent, ...]
    gradients: tuple[Gradient, ...]
    assumed: tuple[str, ...]
    operators: int

    @property
    def status(self) -> int:
        """0 if nothing is wrong, 1 if something is wrong, 2 if the check cannot say."""
        kinds = {fault.kind for fault in self.faults}
        return 1 if "error" in kinds else 2 if "unknown" in kinds else 0

    def to_json(self) -> str:
        """Return the verdict as JSON, with its status."""
        return json.dumps({**asdict(self), "status": self.status})

    def __repr__(self) -> str:
        return summed_up(self, self._title())

    def __str__(self) -> str:
        """Return text in 100 columns: what is wrong, and at most 12 lines each of collectives and gradients."""
        return "\n".join(self._lines())

    def _title(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{ENDS[self.status]}: checked on these inputs, {self.operators} operators on the mesh {axes}"

    def _lines(self) -> Iterator[str]:
        yield self._title()
        for index, fault in enumerate(self.faults, 1):
            yield ""
            yield from wrap(f"{index}. {fault.kind} on {fault.axis}: {fault.text}", WIDTH, subsequent_indent=INDENT)
            for more in filter(None, (fault.where, _some(fault.parameters))):
                yield from wrap(more, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        for title, rows in (("collectives", self._sent()), ("gradients", self._reduced()), ("assumed", self.assumed)):
            if rows:
                yield ""
                yield title
                for row in rows[:MOST]:
                    yield from wrap(row, WIDTH, initial_indent="  ", subsequent_indent="    ")
                if len(rows) > MOST:
                    yield f"  and {len(rows) - MOST} more: to_json() has them"

    def _sent(self) -> list[str]:
        """Return the collectives, equal ones in one row."""
        counts: Counter[Sent] = Counter(self.collectives)
        return [
            f"{count} x {item.name} over {' and '.join(item.axes) or 'no axis'}  {item.dtype}  {item.nbytes:,} B  "
            f"{item.phase}  {item.where}"
            for item, count in counts.items()
        ]

    def _reduced(self) -> list[str]:
        """Return the gradients, those with equal types and reductions in one row."""
        groups: dict[str, list[str]] = {}
        for item in self.gradients:
            types = " ".join(f"{axis}:{letter}" for axis, letter in item.types.items())
            factors = "".join(f", {factor:.4g} x on {axis}" for axis, factor in item.factors.items() if factor != 1)
            groups.setdefault(f"{types}  {', '.join(item.reductions) or 'not reduced'}{factors}", []).append(item.path)
        return [f"{row}  ({_some(paths)})" for row, paths in groups.items()]


MOST = 12
INDENT = "   "
ENDS = {0: "nothing wrong", 1: "wrong", 2: "cannot say"}


def _some(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    count = "1 parameter" if len(paths) == 1 else f"{len(paths)} parameters"
    return f"{count}: {', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''}"


def verdict_of(
    record: StepRecord, types: Mapping[str, AxisTypes], data: Sequence[str], extra: Sequence[Fault]
) -> Verdict:
    """Return the verdict on a typed record. ``extra`` are faults that need no types."""
    reductions = reductions_of(record)
    by_path = {axis: {item.path: item for item in found.gradients} for axis, found in types.items()}
    gradients = tuple(
        Gradient(
            item.path,
            {axis: found[item.path].type for axis, found in by_path.items()},
            {axis: round(found[item.path].factor, 6) for axis, found in by_path.items()},
            tuple(text for text, _ in reductions[item.ref.storage, item.line]),
        )
        for item in record.gradients
    )
    faults = [*extra, *_equal_batches(types, data), *_optimizer(record), *_precisions(record, reductions)]
    spoiled = {fault.axis for fault in faults if fault.text.startswith("all ranks")}
    faults += [fault for axis, found in types.items() for fault in found.faults if axis not in spoiled]
    faults.sort(key=lambda fault: (ORDER.index(fault.kind), fault.line))
    batches = [f"ranks along {axis} have batches of their own" for axis in data if axis in types]
    batches += [f"ranks along {axis} work on one batch" for axis in types if axis not in data]
    assumed = tuple(dict.fromkeys([*batches, *(text for found in types.values() for text in found.assumed)]))
    return Verdict(dict(record.axes), tuple(faults), tuple(_sent(record)), gradients, assumed, len(record.lines))


def _sent(record: StepRecord) -> Iterator[Sent]:
    for line in record.lines:
        if (item := line.collective) is not None:
            for inputs, outputs in item.pairs(line.operator, line.args, line.kwargs, line.results):
                refs = outputs if item.kind == "all_gather" else inputs
                nbytes = sum(ref.nbytes for ref in refs)
                phase = "backward" if line.backward else "forward"
                yield Sent(item.kind, item.op, item.axes, name_of(outputs[0].dtype), nbytes, phase, line.where)


def reductions_of(record: StepRecord) -> dict[tuple[int, int], History]:
    """Return the reductions of each gradient, as text and dtype, by its storage and the line where it is checked."""
    due: dict[int, list[int]] = {}
    for item in record.gradients:
        due.setdefault(item.line, []).append(item.ref.storage)
    history: dict[int, History] = {}
    result: dict[tuple[int, int], History] = {}
    for index, line in enumerate(record.lines):
        result |= {(storage, index): history.get(storage, ()) for storage in due.get(index, ())}
        _follow_reductions(line, history)
    end = len(record.lines)
    return result | {(storage, end): history.get(storage, ()) for storage in due.get(end, ())}


def _follow_reductions(line: RecordedLine, history: dict[int, History]) -> None:
    if (item := line.collective) is not None:
        for inputs, outputs in item.pairs(line.operator, line.args, line.kwargs, line.results):
            before = _united(history, [ref.storage for ref in inputs])
            dtype = name_of(outputs[0].dtype)
            text = f"{item.kind}({item.op}) over {' and '.join(item.axes) or 'no axis'} in {dtype}"
            after = (*before, (text, dtype)) if item.op in ("sum", "avg") else before
            history.update({ref.storage: after for ref in outputs})
        return
    if line.is_view:
        return
    keeps = line.name in MOVES or line.name in FACTORS or line.name in ("add_", "add")
    sources = [ref.storage for ref in line.inputs] if keeps else []
    for ref in (*line.written, *line.results):
        if before := _united(history, sources):
            history[ref.storage] = before
        elif not line.name.startswith("_record"):
            history.pop(ref.storage, None)


def _united(history: Mapping[int, History], storages: Sequence[int]) -> History:
    return tuple(dict.fromkeys(item for storage in storages for item in history.get(storage, ())))


def _equal_batches(types: Mapping[str, AxisTypes], data: Sequence[str]) -> Iterator[Fault]:
    for axis, found in types.items():
        if axis in data and not found.inputs_differ:
            text = "all ranks of this axis get the same batch; give each rank its own, as a DistributedSampler does"
            yield Fault(axis, "error", text, "", -1)


def _optimizer(record: StepRecord) -> Iterator[Fault]:
    missing = tuple(item.path for item in record.gradients if item.path not in record.stepped)
    if record.foreign and missing:
        text = (
            f"the optimizer steps {len(record.foreign)} tensors that are no parameters of the model, which have stale "
            "values; make the optimizer after fully_shard or parallelize_module"
        )
        yield Fault("every axis", "error", text, "", len(record.lines), missing)


def _precisions(record: StepRecord, reductions: Mapping[tuple[int, int], History]) -> Iterator[Fault]:
    """Warn of gradients whose reductions have several dtypes."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for item in record.gradients:
        found = reductions[item.ref.storage, item.line]
        if len({dtype for _, dtype in found}) > 1:
            groups.setdefault(tuple(text for text, _ in found), []).append(item.path)
    for texts, paths in groups.items():
        text = f"one gradient is summed in two precisions: {', '.join(texts)}"
        yield Fault("every axis", "warning", text, "", len(record.lines), tuple(paths))
