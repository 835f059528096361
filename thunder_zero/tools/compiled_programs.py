"""``tz.tools.programs``: lists the compiled programs of a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from thunder_zero.capture.compilations import Spent
from thunder_zero.capture.zero_module import captured_forward
from thunder_zero.plan.amounts import size
from thunder_zero.tools.printing.words import aligned

from thunder.core.module import ThunderModule


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """A compiled program of a model, for one kind of call.

    Attributes:
        graph: the name of the function that dynamo captured.
        kind: ``"training"``, ``"no_sync"`` or ``"forward alone"``.
        inputs: a mapping from names of inputs to shapes. A symbol such as ``s27`` stands for any size.
        seconds: wall-clock seconds to trace and compile the program, without the capture by dynamo.
        nbytes: growth of the process's resident memory during this time, in bytes.
        why: dynamo's reason for a new capture. None for the first capture, and for further programs of a graph.
    """

    graph: str
    kind: str
    inputs: Mapping[str, torch.Size]
    seconds: float
    nbytes: int
    why: str | None

    def __repr__(self) -> str:
        return "  ".join(filter(None, self.cells()))

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the program's row in a table."""
        inputs = ", ".join(f"{name} {_shape(shape)}" for name, shape in self.inputs.items())
        return self.graph, self.kind, inputs, f"{self.seconds:.1f} s", size(self.nbytes), self.why or ""


class ProgramTable(tuple[CompiledProgram, ...]):
    """A tuple of programs that prints as a table."""

    def __repr__(self) -> str:
        return aligned(program.cells() for program in self) or "no programs: the model was not called yet"


def programs(model: ThunderModule) -> ProgramTable:
    """Return a model's compiled programs, ordered by their last run.

    >>> print(tz.tools.programs(model))
    graph 0  training  tokens (2, 128)  1.4 s  11.2 MiB
    graph 0  training  tokens (2, s27)  2.3 s  14.0 MiB  tensor 'tokens' size mismatch at index 1. expected 128, ...
    """
    rows = []
    for captured in captured_forward(model).kept.values():
        spent, why = captured.spent, captured.frame.reason()  # count the capture for the first program
        for mode, executable in (item for programs in captured.programs.values() for item in programs.by_mode.items()):
            kind = "forward alone" if not mode.differentiates else "training" if mode.synced else "no_sync"
            spent = spent + executable.spent()
            rows.append(CompiledProgram(captured.name, kind, captured.shapes, spent.seconds, spent.nbytes, why))
            spent, why = Spent(), None
    return ProgramTable(rows)


def _shape(shape: torch.Size) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
