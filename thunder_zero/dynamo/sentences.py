"""Sentences about parameters read outside of graphs, and modules compiled again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from thunder_zero.runtime.placeholders import ValuesNeeded


def outside_of_graphs(module: nn.Module, error: ValuesNeeded, breaks: Sequence[str]) -> str:
    """Why a parameter was read outside of every graph.

    Args:
        module: the plain module.
        error: of the parameter.
        breaks: where dynamo ended graphs, and why, in sentences.
    """
    owner = module.get_submodule(error.path.rpartition(".")[0])
    return (
        f"{type(owner).__name__} reads parameter {error.path!r} outside of the graphs that dynamo captured of "
        f"{type(module).__name__}, where nothing gathers it; {_reason(breaks)}; move the read into code that dynamo "
        f"captures, or put the parameter's module into Policy.ignored"
    )


def _reason(breaks: Sequence[str]) -> str:
    if not breaks:
        return "dynamo did not capture this code (torch.compiler.disable, a dispatch mode, or a function that it skips)"
    return breaks[-1]


def changed(shapes: Sequence[Mapping[str, torch.Size]]) -> str | None:
    """Which input changes from program to program of one function, and what to do; None if shapes do not.

    Args:
        shapes: of each program's inputs, by the expressions that dynamo has for them.
    """
    for name in shapes[-1] if shapes else ():
        found = list(dict.fromkeys(tuple(each[name]) for each in shapes if name in each))
        if len(found) > 1:
            shown = ", ".join(map(str, found[-3:]))
            return (
                f"input {name} had {len(found)} shapes, the last of them {shown}, and each costs a compilation; pad it "
                f"to a few lengths, or sort batches by length"
            )
    return None


def too_many(module: str, most: int, shapes: Sequence[Mapping[str, torch.Size]]) -> str:
    """Why no further program is compiled.

    Args:
        module: name of its class.
        most: programs of one function.
        shapes: of each program's inputs, as for :func:`changed`.
    """
    why = changed(shapes) or "keep what changes from call to call constant (TORCH_LOGS=recompiles names it)"
    return (
        f"{module} was compiled {most} times for one function, and dynamo would run it without a graph now, on this "
        f"rank alone, where nothing gathers parameters; {why}"
    )
