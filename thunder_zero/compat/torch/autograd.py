"""needed while: torch has no public API for the running backward or function transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import Node

from thunder_zero.compat.private import (
    current_graph_task_id,
    peek_interpreter_stack,
    queue_callback,
    will_engine_execute_node,
)


def is_inside_function_transform() -> bool:
    """Return whether ``torch.func`` or ``vmap`` is active."""
    return peek_interpreter_stack() is not None


def accumulates(leaves: Iterable[Node]) -> bool:
    """Return whether the running backward adds to the ``.grad`` of all leaves."""
    try:
        return all(map(will_engine_execute_node, leaves))
    except RuntimeError:  # raised under torch.autograd.grad of a leaf
        return False


def node_class(function: type[torch.autograd.Function]) -> type[Node]:
    """Return the class of the nodes that an autograd function puts into graphs."""
    nodes: type[Node] = function._backward_cls
    return nodes


def running_backward() -> int:
    """Return the number of the backward that runs on this thread, or -1 if no backward runs."""
    number: int = current_graph_task_id()
    return number


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward ends."""
    queue_callback(function)
