"""needed while: torch says by private names alone which backward or function transform runs.

Other things that torch says or does by private names alone: which kernel a convolution takes; many tensors divided in
one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


def is_inside_function_transform() -> bool:
    """Whether ``torch.func`` or ``vmap`` is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def accumulates(leaves: Iterable[Node]) -> bool:
    """Whether the running backward adds to the ``.grad`` of all of these leaves."""
    try:
        return all(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:  # torch.autograd.grad of a leaf
        return False


def running_backward() -> int:
    """The number of the backward that runs on this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def convolution_backend(given: Tensor, weight: Tensor, how: Sequence[Any]) -> str:
    """Torch's own choice for a convolution; ``how`` as ``torch.convolution`` has it, from the stride on."""
    found: Any = torch._C._select_conv_backend(given, weight, None, *how, None)
    return str(found.name)


def divide_all(tensors: tuple[Tensor, ...], divisor: float) -> None:
    """Divide tensors in place, in one call."""
    torch._foreach_div_(tensors, divisor)
