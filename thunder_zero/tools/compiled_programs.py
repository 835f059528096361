"""``tz.tools.programs``: lists the compiled programs of a sharded model."""

from __future__ import annotations

from typing import ClassVar

from thunder_zero.capture.compilations import Spent
from thunder_zero.capture.zero_module import captured_forward
from thunder_zero.plan.amounts import size
from thunder_zero.tools.printing.words import PrintedRows

from thunder.core.module import ThunderModule


class Programs(PrintedRows):
    """A row for each program of a model, keyed by column. They print as a table.

    ``"graph"`` is the function that dynamo captured, and ``"inputs"`` maps names to shapes, in which a symbol such as
    ``s27`` stands for any size. ``"kind"`` is ``"training"``, ``"no_sync"`` or ``"forward alone"``. ``"seconds"`` is
    the time to trace and compile without dynamo's capture, and ``"nbytes"`` the growth of the process meanwhile.
    ``"why"`` is dynamo's reason for a new capture; None for the first, and for further programs of a graph.
    """

    forms: ClassVar = {
        "graph": str,
        "kind": str,
        "inputs": lambda shapes: ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()),
        "seconds": "{:.1f} s".format,
        "nbytes": size,
        "why": lambda reason: reason or "",
    }
    has_heads = False

    def __repr__(self) -> str:
        return super().__repr__() or "no programs: the model was not called yet"


def programs(model: ThunderModule) -> Programs:
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
            row = captured.name, kind, captured.shapes, spent.seconds, spent.nbytes, why
            rows.append(dict(zip(Programs.forms, row, strict=True)))
            spent, why = Spent(), None
    return Programs(rows)
