"""needed while: torch has no public API to ask whether a backward adds to ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import Node

from thunder_zero.compat.private import will_engine_execute_node


def accumulates(leaves: Iterable[Node]) -> bool:
    """Return whether the running backward adds to the ``.grad`` of all leaves."""
    try:
        return all(map(will_engine_execute_node, leaves))
    except RuntimeError:  # raised under torch.autograd.grad of a leaf
        return False
