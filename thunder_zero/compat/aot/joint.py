"""needed while: torch has no public API for the inputs and outputs of a joint graph.

In: a trace of :mod:`thunder_zero.compat.aot.export`. Out: the kind of each placeholder (input or tangent) and of each
result (output or gradient)::

    placeholders   x    weight    tangent of y
    results        y    gradient of x (None)    gradient of weight

A tangent is None if nothing differentiated the output. AOTAutograd replaces a tensor subclass, such as a DTensor, by
its inner tensors and objects. The phases get the tensors only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from thunder_zero.compat.private import (
    GradAOTOutput,
    JointWithDescriptors,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
    is_opaque_node,
)


@dataclass(frozen=True)
class Joint:
    """A graph of dynamo, with its backward."""

    # the joint graph. It takes inputs, then tangents. It returns forward's outputs, then gradients of inputs.
    graph: fx.GraphModule
    differentiates: bool  # True if there is a backward
    turns_on: bool  # True if forward itself turns gradients on in a call with gradients off
    # the indices of outputs that forward computes with gradients off, or only from values without history
    without_history: Collection[int]
    # the number of forward's outputs, including new values of mutated inputs. A tensor subclass counts as its inner
    # tensors and objects.
    outputs: int
    mutated: Sequence[int]  # the positions of inputs that forward writes to
    names: Sequence[str]  # the names of the inputs of dynamo's graph
    # the user's names of items of returned tuples, keyed like the result of :func:`names_of_parts`
    parts: Mapping[tuple[int, str, int | None], str]
    exported: JointWithDescriptors  # the result of AOTAutograd's export

    @property
    def results(self) -> Sequence[Any]:
        """The results of the graph: nodes, or None for an opaque object."""
        return [None if is_opaque_node(node) else node for node in self.all_results]

    @property
    def all_results(self) -> Sequence[Any]:
        results: Any = self.graph.graph.output_node().args[0]
        return results  # type: ignore[no-any-return]

    @property
    def described(self) -> Sequence[Any]:
        return self.graph.graph.output_node().meta["desc"]  # type: ignore[no-any-return]

    def tangents(self) -> Mapping[fx.Node, int]:
        """Return a mapping from each tangent to the index of its output among forward's outputs."""
        positions = {desc: position for position, desc in enumerate(self.described[: self.outputs])}
        outputs = {node: output_of(node) for node in self.placeholders()}
        return {node: positions[desc] for node, desc in outputs.items() if desc is not None}

    def placeholders(self) -> Sequence[fx.Node]:
        """Return the inputs and tangents that the phases get, without opaque objects."""
        return [node for node in self.all_placeholders() if not is_opaque_node(node)]

    def all_placeholders(self) -> Sequence[fx.Node]:
        """Return the inputs and tangents, including opaque objects."""
        return [node for node in self.graph.graph.nodes if node.op == "placeholder"]

    @property
    def returns_subclasses(self) -> bool:
        return any(map(is_part, self.described[: self.outputs]))

    def plain_outputs(self) -> Sequence[int]:
        """Return the positions of the outputs of dynamo's graph among forward's outputs, in the order of the graph."""
        if self.returns_subclasses:
            raise RuntimeError(
                "forward returns a tensor subclass, such as a DTensor, which a trace of a model that does not run "
                "cannot show; train a step of tz.compile and read tz.traces_of(model)"
            )
        descs = self.described[: self.outputs]
        positions = {desc.idx: position for position, desc in enumerate(descs) if isinstance(desc, PlainAOTOutput)}
        return [positions[number] for number in sorted(positions)]

    def gradients(self) -> Sequence[tuple[Any, int | None]]:
        """Return (gradient, index) tuples: the index of the input of dynamo's graph, or None for other gradients."""
        descs = self.described[self.outputs :]
        return [(node, _position(desc)) for node, desc in zip(self.results[self.outputs :], descs, strict=True)]

    def subclass_gradients(self) -> Sequence[int]:
        """Return the positions of the inputs of dynamo's graph whose gradients are tensor subclasses."""
        descs = self.described[self.outputs :]
        positions = [_position(desc.base) for desc in descs if is_part(desc)]
        return [position for position in positions if position is not None]


def input_of(node: fx.Node) -> int | None:
    """Return the position of a placeholder among the inputs of dynamo's graph, or None for a part of an input."""
    desc = node.meta.get("desc")
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def output_of(node: fx.Node) -> Any:
    """Return the description of the output whose tangent a placeholder is. Return None for an input."""
    return _described_output(node.meta.get("desc"))


def is_part(desc: Any) -> bool:
    return isinstance(desc, SubclassGetAttrAOTOutput)


def whole_tangent(desc: Any) -> Any:
    """Return the description of the tangent that contains a part."""
    return whole_tangent(desc.base) if isinstance(desc, SubclassGetAttrAOTInput) else desc


def _described_output(desc: Any) -> Any:
    if isinstance(desc, SubclassGetAttrAOTInput):
        whole = _described_output(desc.base)
        return None if whole is None else SubclassGetAttrAOTOutput(whole, desc.attr)
    return desc.output if isinstance(desc, TangentAOTInput) else None


def _position(desc: Any) -> int | None:
    source = desc.grad_of if isinstance(desc, GradAOTOutput) else None
    return source.idx if isinstance(source, PlainAOTInput) else None
