"""The sentence about parameters read outside of graphs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from thunder_zero.sharded.placeholders import ValuesNeeded


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
