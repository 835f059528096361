"""What a check of a step says: faults, collectives and gradients, as data and as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING

from thunder_zero.plan.amounts import WIDTH, summed_up

if TYPE_CHECKING:  # the caller's process computes nothing
    from thunder_zero.spmd.picture import StepPicture

ENDS = {0: "nothing wrong", 1: "wrong", 2: "cannot say"}
TIMES_TRUE = "x the true one"
MOST = 12  # rows of a table
INDENT = "   "


@dataclass(frozen=True, repr=False)
class Fault:
    """What is wrong, or cannot be said: ``kind`` is ``"error"``, ``"warning"`` or ``"unknown"``."""

    axis: str
    kind: str
    text: str
    where: str = ""
    line: int = 0
    parameters: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return summed_up(self, f"{self.kind} on {self.axis}: {self.text}")


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

    def __str__(self) -> str:
        name = f"{self.kind}({self.op})" if self.op else self.kind
        axes = " and ".join(self.axes) or "no axis"
        return f"{name} over {axes}  {self.dtype}  {self.nbytes:,} B  {self.phase}  {self.where}"


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

    def __str__(self) -> str:
        """Return all but the path, so that alike gradients have one row."""
        types = " ".join(f"{axis}:{letter}" for axis, letter in self.types.items())
        factors = "".join(f", {factor:.4g} x on {axis}" for axis, factor in self.factors.items() if factor != 1)
        return f"{types}  {', '.join(self.reductions) or 'not reduced'}{factors}"


@dataclass(frozen=True)
class Verdict:
    """The result of :func:`thunder_zero.tools.check_step`. It is printed as text.

    Attributes:
        mesh: the axes and their numbers of ranks.
        faults: what is wrong or cannot be said, the first cause first; warnings come last.
        collectives, gradients: those of one rank's step.
        assumed: what the check assumes.
        operators: how many operators ran.
        step: the step as :func:`thunder_zero.tools.report` draws it; None if it was not recorded.
    """

    mesh: Mapping[str, int]
    faults: tuple[Fault, ...]
    collectives: tuple[Sent, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    assumed: tuple[str, ...] = ()
    operators: int = 0
    step: StepPicture | None = None

    @property
    def status(self) -> int:
        """0 if nothing is wrong, 1 if something is wrong, 2 if the check cannot say."""
        kinds = {fault.kind for fault in self.faults}
        return 1 if "error" in kinds else 2 if "unknown" in kinds else 0

    @property
    def has_wrong_factors(self) -> bool:
        """True if a gradient is a multiple of the true one."""
        return any(TIMES_TRUE in fault.text for fault in self.faults)

    def with_factors_of(self, other: Verdict) -> Verdict:
        """Return the verdict with the factors on a mesh of other sizes, which tells ranks from other numbers."""
        faults = tuple(fault for fault in self.faults if TIMES_TRUE not in fault.text)
        return replace(self, faults=faults, gradients=other.gradients)

    def to_json(self) -> str:
        """Return the verdict as JSON, with its status and without the step."""
        data = asdict(replace(self, step=None))
        del data["step"]
        return json.dumps({**data, "status": self.status})

    def __repr__(self) -> str:
        return summed_up(self, self._title())

    def __str__(self) -> str:
        """Return text in 100 columns: what is wrong, and at most 12 lines each of collectives and gradients."""
        alike: dict[str, list[str]] = {}
        for item in self.gradients:
            alike.setdefault(str(item), []).append(item.path)
        lines = [self._title()]
        for number, fault in enumerate(self.faults, 1):
            lines += ["", *_wrapped(f"{number}. {fault.kind} on {fault.axis}: {fault.text}", "")]
            for more in filter(None, (fault.where, _some(fault.parameters))):
                lines += _wrapped(more, INDENT)
        lines += _table(
            "collectives", [f"{count} x {text}" for text, count in Counter(map(str, self.collectives)).items()]
        )
        lines += _table("gradients", [f"{row}  ({_some(paths)})" for row, paths in alike.items()])
        lines += _table("assumed", self.assumed)
        return "\n".join(lines)

    def _title(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{ENDS[self.status]}: checked on these inputs, {self.operators} operators on the mesh {axes}"


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=INDENT)


def _table(title: str, rows: Sequence[str]) -> Iterator[str]:
    if rows:
        yield from ("", title)
        for row in rows[:MOST]:
            yield from wrap(row, WIDTH, initial_indent="  ", subsequent_indent="    ")
    if len(rows) > MOST:
        yield f"  and {len(rows) - MOST} more: to_json() has them"


def _some(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    count = "1 parameter" if len(paths) == 1 else f"{len(paths)} parameters"
    return f"{count}: {', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''}"
