"""Holds the gradients that ``no_sync`` has deferred. Raises before a backward that would be wrong.

A program under ``no_sync`` has ``zero_defer_reduction`` in place of each reduction (``traces/lower.py``). After
``no_sync``, the next backward reduces the sums::

    with model.no_sync():
        loss(model(x0)).backward()      zero_defer_reduction(g0, 'w')     holds g0          no reduction, no .grad
        loss(model(x1)).backward()      zero_defer_reduction(g1, 'w')     holds g0 + g1
    loss(model(x2)).backward()          zero_reduce_scatter(g2, 'w')      reduces g0 + g1 + g2 into .grad
                                        zero_reduce_deferred(('b',))      reduces sums of other parameters

The arguments of backward are known only while it runs, so :func:`refuse_wrong_backward` runs at its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from thunder_zero.compat.torch.autograd import accumulates, node_class
from thunder_zero.sharded.dtensors import Rows


def unreduced(action: str, where: str) -> RuntimeError:
    """Return the error for an action that needs reduced gradients."""
    return RuntimeError(
        f"cannot {action}: no_sync still holds unreduced gradients {where}; run forward and backward of the last "
        f"micro-batch outside of no_sync, or drop them with model.zero_grad()"
    )


class Accumulation:
    """Deferred gradients: full gradients that are not reduced yet, keyed by parameter path.

    Attributes:
        synced: True if the gradients of the current forward will be reduced, False if they will be deferred.
        grew: True if a backward under ``no_sync`` has run since the sums were last reduced.
    """

    def __init__(self, *, synced: bool = True) -> None:
        self.synced = synced
        self._deferred: dict[str, Tensor] = {}
        self.grew = False

    @property
    def paths(self) -> Collection[str]:
        """Return the paths of the parameters with deferred gradients."""
        return self._deferred.keys()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Defer the gradients of forwards inside the block."""
        was_synced, self.synced = self.synced, False
        try:
            yield
        finally:
            self.synced = was_synced

    def defer(self, grad: Tensor, path: str) -> None:
        """Add a full gradient to the parameter's deferred gradient."""
        self.grew = True
        deferred = self.take(path)
        # Cloned, since the gradient may be a view, or other code may write to it.
        self._deferred[path] = grad.clone() if deferred is None else deferred.add_(grad)

    def take(self, path: str) -> Tensor | None:
        """Remove and return a parameter's deferred gradient; None if there is none."""
        return self._deferred.pop(path, None)

    def has_grown(self) -> bool:
        """Return whether a backward under ``no_sync`` has run since this method was last called."""
        grew, self.grew = self.grew, False
        return grew

    def drop(self) -> None:
        """Drop all deferred gradients."""
        self._deferred.clear()
        self.grew = False


LEAF = "torch::autograd::AccumulateGrad"  # the node that adds to the .grad of a parameter or input
ROWS = node_class(Rows)


def refuse_wrong_backward(
    node: Node, tangents: Sequence[Any], model: str, accumulation: Accumulation, *, was_synced: bool
) -> None:
    """Raise RuntimeError before the first collective of a backward that would be wrong:

    - with a DTensor as the gradient of a plain output, since backward computes with plain tensors;
    - with ``create_graph=True``, since the compiled backward has no graph, and a gradient penalty would be ignored;
    - with ``torch.autograd.grad`` or ``inputs=``, if gradients are deferred in this backward or were deferred before.
      Gradients of parameters that are not among the inputs would be added to the deferred gradients, or lost.

    Args:
        node: the backward's node in autograd's graph.
        tangents: the gradients of the forward's plain outputs.
        model: the model's name in the error.
        accumulation: the deferred gradients.
        was_synced: True if the forward's gradients are reduced.
    """
    if any(isinstance(tangent, DTensor) for tangent in tensors_in(tangents)):
        raise RuntimeError(
            f"the loss combines an output of {model} with a DTensor, a number computed from parameters outside of "
            f"forward; add the number as number.full_tensor(), called on all ranks, and compute in forward what "
            f"multiplies the loss or depends on the batch, whose mean full_tensor() does not give"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"cannot differentiate the backward of {model} (create_graph=True, as a gradient penalty or a Hessian "
            f"needs): it is compiled without a graph, so this part of the gradient would be lost; leave create_graph "
            f"out, or call torch.func.grad inside of forward"
        )
    if not (was_synced and not accumulation.paths) and not accumulates(_leaves_of(_inputs_of(node))):
        raise RuntimeError(
            f"torch.autograd.grad, or backward(inputs=...), through {model} in the middle of an accumulation: no_sync "
            f"defers the gradients of all its parameters, so they would be added or lost; call it outside of no_sync "
            f"and before the accumulation begins"
        )


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested collections and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_in(item)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def _inputs_of(node: Node) -> tuple[Node, ...]:
    """Return the nodes of the compiled forward's inputs: one node for all rows, one for each input with a gradient."""
    return tuple({source: None for source, _ in node.next_functions if source is not None})


def _leaves_of(inputs: Iterable[Node]) -> Iterator[Node]:
    """Yield the leaf nodes of the forward's inputs. The node of the rows leads to the nodes of the parameters."""
    for node in inputs:
        candidates = (leaf for leaf, _ in node.next_functions) if isinstance(node, ROWS) else (node,)
        yield from (leaf for leaf in candidates if leaf is not None and leaf.name() == LEAF)
