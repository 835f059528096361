"""The verdict on a step: what is wrong, the first cause first; its collectives and gradients."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap

from thunder_zero.plan.amounts import WIDTH, name_of, summed_up
from thunder_zero.spmd.flow import AxisTypes, Fault
from thunder_zero.spmd.operators import FACTORS, MOVES
from thunder_zero.spmd.record import RecordedLine, Ref, StepRecord

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
    gradients = []
    for item in record.gradients:
        on_axes = {axis: found.gradients[item.path] for axis, found in types.items()}
        letters = {axis: letter for axis, (letter, _) in on_axes.items()}
        factors = {axis: round(factor, 6) for axis, (_, factor) in on_axes.items()}
        gradients.append(Gradient(item.path, letters, factors, tuple(text for text, _ in reductions[item.path])))
    faults = [*extra, *_equal_batches(types, data), *_optimizer(record), *_precisions(record, reductions)]
    spoiled = {fault.axis for fault in faults if fault.text.startswith("all ranks")}
    faults += [fault for axis, found in types.items() for fault in found.faults if axis not in spoiled]
    faults.sort(key=lambda fault: (ORDER.index(fault.kind), fault.line))
    batches = [f"ranks along {axis} have batches of their own" for axis in data if axis in types]
    batches += [f"ranks along {axis} work on one batch" for axis in types if axis not in data]
    assumed = tuple(dict.fromkeys([*batches, *(text for found in types.values() for text in found.assumed)]))
    return Verdict(dict(record.axes), tuple(faults), tuple(_sent(record)), tuple(gradients), assumed, len(record.lines))


def _sent(record: StepRecord) -> Iterator[Sent]:
    for line in record.lines:
        for inputs, outputs in line.pairs:
            item = line.collective
            assert item is not None
            nbytes = sum(ref.nbytes for ref in (outputs if item.kind == "all_gather" else inputs))
            phase = "backward" if line.backward else "forward"
            yield Sent(item.kind, item.op, item.axes, name_of(outputs[0].dtype), nbytes, phase, line.where)


def reductions_of(record: StepRecord) -> dict[str, History]:
    """Return the reductions of each gradient, as text and dtype."""
    due, history, result = record.gradients_by_line, dict[int, History](), dict[str, History]()
    for index, line in enumerate((*record.lines, None)):
        result |= {item.path: history.get(item.ref.storage, ()) for item in due.get(index, ())}
        if line is not None:
            _follow_reductions(line, history)
    return result


def _follow_reductions(line: RecordedLine, history: dict[int, History]) -> None:
    for inputs, outputs in line.pairs:
        after = _united(history, inputs)
        if line.collective is not None and line.collective.op in ("sum", "avg"):
            dtype = name_of(outputs[0].dtype)
            after = (*after, (f"{line.collective} in {dtype}", dtype))
        history.update({ref.storage: after for ref in outputs})
    if line.collective is not None or line.is_view or line.name.startswith("_record"):
        return
    keeps = line.name in MOVES or line.name in FACTORS or line.name in ("add_", "add")
    before = _united(history, line.inputs) if keeps else ()
    history.update({ref.storage: before for ref in (*line.written, *line.results)})


def _united(history: Mapping[int, History], refs: Sequence[Ref]) -> History:
    return tuple(dict.fromkeys(item for ref in refs for item in history.get(ref.storage, ())))


def _equal_batches(types: Mapping[str, AxisTypes], data: Sequence[str]) -> Iterator[Fault]:
    for axis, found in types.items():
        if axis in data and not found.inputs_differ:
            text = "all ranks of this axis get the same batch; give each rank its own, as a DistributedSampler does"
            yield Fault(axis, "error", text, line=-1)


def _optimizer(record: StepRecord) -> Iterator[Fault]:
    missing = tuple(item.path for item in record.gradients if item.path not in record.stepped)
    if record.foreign and missing:
        text = (
            f"the optimizer steps {record.foreign} tensors that are no parameters of the model, which have stale "
            "values; make the optimizer after fully_shard or parallelize_module"
        )
        yield Fault("every axis", "error", text, line=len(record.lines), parameters=missing)


def _precisions(record: StepRecord, reductions: Mapping[str, History]) -> Iterator[Fault]:
    """Warn of gradients whose reductions have several dtypes."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for item in record.gradients:
        found = reductions[item.path]
        if len({dtype for _, dtype in found}) > 1:
            groups.setdefault(tuple(text for text, _ in found), []).append(item.path)
    for texts, paths in groups.items():
        text = f"one gradient is summed in two precisions: {', '.join(texts)}"
        yield Fault("every axis", "warning", text, line=len(record.lines), parameters=tuple(paths))
