"""needed while: AOTAutograd passes meshes of DTensors to phases, and expects them as results.

In: phases that take tensors only. Out: phases that take and return tensors and meshes. AOTAutograd splits tensor
subclasses into parts before a phase, and rebuilds them afterwards::

    forward([rows, mesh, x])  ->  phases.forward([rows, x])  ->  [y, mesh]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from thunder_zero.compat.aot.joint import Joint, is_part, output_of, whole_tangent
from thunder_zero.compat.aot.nodes import is_opaque


class Phases(Protocol):
    """The two phases of a program, as functions. ``saved`` has fakes of the values that forward saves."""

    saved: Sequence[Any]

    def forward(self, args: list[Any]) -> list[Any]:
        """Compute outputs, and the values that backward reads."""

    def backward(self, args: list[Any]) -> list[Any]:
        """Compute the gradients of inputs."""


def objects_of(joint: Joint) -> list[fx.Node]:
    """Return the opaque objects among the inputs of a graph."""
    return [node for node in joint.all_placeholders() if is_opaque(node) and output_of(node) is None]


class WithObjects:
    """Phases of a graph with tensor subclasses or opaque objects."""

    def __init__(self, joint: Joint, phases: Phases) -> None:
        self._phases, self._objects, self.saved = phases, objects_of(joint), phases.saved
        placeholders = joint.all_placeholders()
        inputs = [node for node in placeholders if output_of(node) is None]
        self._inputs = [inputs.index(node) for node in self._objects]
        self._current: dict[int, Any] = {}  # id of a traced object -> the object of the last forward
        self._outputs, self._gradients = joint.all_results[: joint.outputs], joint.all_results[joint.outputs :]
        self._parts = [position for position, desc in enumerate(joint.described[joint.outputs :]) if is_part(desc)]
        self._tangents = [(node, node.meta["desc"]) for node in placeholders if node not in inputs]

    def forward(self, args: list[Any]) -> list[Any]:
        """Compute outputs, and the values that backward reads. Add the objects to the results."""
        for node, position in zip(self._objects, self._inputs, strict=True):
            self._current[id(node.meta["val"])] = args[position]
        plain = [arg for position, arg in enumerate(args) if position not in self._inputs]
        args.clear()
        return self._filled(self._phases.forward(plain), self._outputs)

    def backward(self, args: list[Any]) -> list[Any]:
        """Compute the gradients of the inputs, and add the objects. A subclass without a gradient gets zeros."""
        count = len(self.saved)
        plain = [*args[:count], *self._flat(args[count:])]
        args.clear()
        gradients = self._filled(self._phases.backward(plain), self._gradients)
        for position in self._parts:
            if gradients[position] is None:
                gradients[position] = _zeros_like(self._gradients[position].meta["val"])
        return gradients

    def _flat(self, tangents: Sequence[Any]) -> Iterator[Any]:
        """Yield the tensors of the tangents. Expand torch's None for a missing subclass to a None for each part."""
        values, before, missing = iter(tangents), None, False
        for node, desc in self._tangents:
            whole = whole_tangent(desc)
            value = None if whole == before and missing else next(values)
            if whole != before:
                before, missing = whole, value is None
            if not is_opaque(node):
                yield value

    def _filled(self, results: list[Any], nodes: Sequence[Any]) -> list[Any]:
        """Put objects into results: the input's object if there is an equal input, or else the traced object.

        Torch traces equal objects as one node, so the node of an output may also be the node of a tangent.
        """
        for position, node in enumerate(nodes):
            if is_opaque(node):
                traced = node.meta["val"]
                results[position] = self._current.get(id(traced), traced.real_obj)
        return results


def _zeros_like(fake: Tensor) -> Tensor:
    """Return zeros with the shape, dtype and device of a fake tensor."""
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
