"""``tz.tools.programs``: lists what a model of ``tz.compile`` has compiled, and what it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from thunder_zero.frontends.compilations import Spent
from thunder_zero.frontends.dynamo.module import graphs_of
from thunder_zero.plan.amounts import size

from thunder.core.module import ThunderModule


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """A compiled program of a model, for calls of one kind.

    Attributes:
        graph: the name of the function that dynamo captured.
        kind: ``"training"``, ``"no_sync"`` or ``"forward alone"``.
        inputs: the shapes of the inputs, by their names; a size that is a symbol, such as ``s27``, may be any number.
        seconds: wall-clock seconds to trace and compile it, without dynamo's part.
        nbytes: by how many bytes the resident memory of the process grew meanwhile.
        why: why dynamo captured the function again, in its words; None if it was captured for the first time, or if
            its graph has an earlier program.
    """

    graph: str
    kind: str
    inputs: Mapping[str, torch.Size]
    seconds: float
    nbytes: int
    why: str | None

    def __repr__(self) -> str:
        return "  ".join(part for part in self.cells() if part)

    def cells(self) -> tuple[str, ...]:
        """Return the program as the cells of a table's row."""
        inputs = ", ".join(f"{name} {_shape(shape)}" for name, shape in self.inputs.items())
        return self.graph, self.kind, inputs, f"{self.seconds:.1f} s", size(self.nbytes), self.why or ""


class ProgramTable(tuple[CompiledProgram, ...]):
    """Programs that print one a line."""

    def __repr__(self) -> str:
        rows = [program.cells() for program in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines) or "no programs: the model was not called yet"


def programs(model: ThunderModule) -> ProgramTable:
    """Return the programs of a model of :func:`thunder_zero.compile`. The program that ran last is the last.

    >>> print(tz.tools.programs(model))
    graph 0  training  tokens (2, 128)  1.4 s  11.2 MiB
    graph 0  training  tokens (2, s27)  2.3 s  14.0 MiB  tensor 'tokens' size mismatch at index 1. expected 128, ...

    Raises:
        TypeError: not a model of ``tz.compile``.
    """
    rows = []
    for captured in graphs_of(model).captured.values():
        spent, why = captured.spent, captured.frame.reason()  # on the first program
        for mode, entry in (item for programs in captured.programs.values() for item in programs.entries.items()):
            kind = "forward alone" if not mode.differentiates else "training" if mode.synced else "no_sync"
            spent = spent + entry.spent()
            rows.append(CompiledProgram(captured.name, kind, captured.shapes, spent.seconds, spent.nbytes, why))
            spent, why = Spent(), None
    return ProgramTable(rows)


def _shape(shape: torch.Size) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
