"""The gradients that ``no_sync`` has deferred so far, and the guard that refuses wrong backwards.

The forward decides which program runs. Under ``thunder.jit`` each prologue has ``zero_check_call``, which raises in a
program of the other kind (``runtime.py``); Thunder then takes or compiles the one that fits. ``tz.compile`` chooses by
``Mode.synced``. A program under ``no_sync`` has ``zero_defer_reduction`` in the place of each reduction
(``defer_reductions`` in ``traces/pipeline.py``). The next backward whose forward ran outside reduces the sums::

    with model.no_sync():
        loss(model(x0)).backward()      zero_defer_reduction(g0, 'w')     holds g0          no reduction, no .grad
        loss(model(x1)).backward()      zero_defer_reduction(g1, 'w')     holds g0 + g1
    loss(model(x2)).backward()          zero_reduce_scatter(g2, 'w')      reduces g0 + g1 + g2 into .grad
                                        zero_reduce_deferred(('b',))      reduces what this backward does not reach

PyTorch tells what kind of backward runs only while it runs. So :func:`guard` puts a hook on the graph of each
forward's outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from thunder_zero.compat.torch.autograd import accumulates, node_class
from thunder_zero.sharded.dtensors import Rows


def unreduced(action: str, where: str) -> RuntimeError:
    """Return the error for an action that needs reduced gradients."""
    return RuntimeError(
        f"cannot {action}: no_sync still holds unreduced gradients {where}; run forward and backward of the last "
        f"micro-batch outside of no_sync, or drop them with model.zero_grad()"
    )


class Accumulation:
    """Full gradients that wait for their reduction, by the paths of their parameters.

    If ``synced``, the gradients of a forward that runs now are reduced; otherwise they wait.
    """

    def __init__(self, *, synced: bool = True) -> None:
        self.synced = synced
        self._deferred: dict[str, Tensor] = {}
        self._grew = False

    @property
    def paths(self) -> Collection[str]:
        """Return the paths of the parameters with deferred gradients."""
        return self._deferred.keys()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Defer the gradients of forwards inside the block."""
        before, self.synced = self.synced, False
        try:
            yield
        finally:
            self.synced = before

    def defer(self, grad: Tensor, path: str) -> None:
        """Add a full gradient to the parameter's deferred one."""
        self._grew = True
        deferred = self.take(path)
        # Cloned, since the gradient may be a view, or may have another owner.
        self._deferred[path] = grad.clone() if deferred is None else deferred.add_(grad)

    def take(self, path: str) -> Tensor | None:
        """Remove and return a parameter's deferred gradient; None if there is none."""
        return self._deferred.pop(path, None)

    def grew_since_asked(self) -> bool:
        """Return whether a backward under ``no_sync`` has run since the last call."""
        grew, self._grew = self._grew, False
        return grew

    def drop(self) -> None:
        """Drop all deferred gradients."""
        self._deferred.clear()
        self._grew = False


LEAF = "torch::autograd::AccumulateGrad"  # the node that adds to the .grad of a parameter or input
ROWS = node_class(Rows)


def guard(output: Any, node_types: tuple[type, ...], model: str, accumulation: Accumulation) -> None:
    """Make the backward of a forward that has just run raise where it would be wrong.

    It raises a RuntimeError, before any of its collectives, on each rank that runs it:

    - with ``create_graph=True``: the compiled backward has no graph, so a gradient penalty would lose its part;
    - with ``torch.autograd.grad`` or ``inputs=``, if ``no_sync`` defers its gradients or has deferred others. The
      gradients of the parameters left out would be added, or lost, though nobody asked for them.

    Args:
        output: what forward returned.
        node_types: the types of the nodes that connect the output's tensors to the compiled backward.
        model: its name in the error.
        accumulation: the deferred gradients.
    """
    was_synced = accumulation.synced
    nodes = {node for tensor in tensors_in(output) if (node := tensor.grad_fn) is not None}
    for node in nodes:
        if not isinstance(node, node_types):
            continue
        inputs = _inputs_of(node)  # a hook that held the node would keep its saved tensors alive

        def check(gradients: Any, inputs: tuple[Node, ...] = inputs) -> None:
            _refuse(inputs, model, accumulation, was_synced)

        node.register_prehook(check)


def refuse_wrong_backward(node: Node, model: str, accumulation: Accumulation, *, was_synced: bool) -> None:
    """Raise if the backward of a forward would be wrong, as :func:`guard` does, before it runs.

    ``node`` is the node of the backward. ``was_synced`` says whether the forward reduces gradients.
    """
    _refuse(_inputs_of(node), model, accumulation, was_synced)


def _refuse(inputs: Iterable[Node], model: str, accumulation: Accumulation, was_synced: bool) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"cannot differentiate the backward of {model} (create_graph=True, as a gradient penalty or a Hessian "
            f"needs): it is compiled without a graph, so this part of the gradient would be lost; leave create_graph "
            f"out, or under tz.compile call torch.func.grad inside of forward"
        )
    if not (was_synced and not accumulation.paths) and not accumulates(_leaves_of(inputs)):
        raise RuntimeError(
            f"torch.autograd.grad, or backward(inputs=...), through {model} in the middle of an accumulation: no_sync "
            f"defers the gradients of all its parameters, so they would be added or lost; call it outside of no_sync "
            f"and before the accumulation begins"
        )


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a structure of collections and dataclasses."""
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
    """Return the nodes behind the inputs of the compiled forward: one node for all rows, and one for each input that
    requires grad."""
    return tuple({source: None for source, _ in node.next_functions if source is not None})


def _leaves_of(inputs: Iterable[Node]) -> Iterator[Node]:
    """Yield the leaves behind these nodes: parameters, behind their rows, and inputs."""
    for node in inputs:
        candidates = (leaf for leaf, _ in node.next_functions) if isinstance(node, ROWS) else (node,)
        yield from (leaf for leaf in candidates if leaf is not None and leaf.name() == LEAF)
