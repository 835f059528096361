"""needed while: torch has no public API to run two functions as forward and backward of a graph.

In: a joint graph, and two functions that compute its phases. Out: a function of the inputs, for which PyTorch handles
autograd, writes to inputs, and outputs that are views of inputs. The phases have these calling conventions::

    forward([inputs]) -> [outputs, saved tensors, saved numbers]
    backward([saved numbers, saved tensors, tangents]) -> [gradients of inputs]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from thunder_zero.compat.aot.joint import Joint, is_part, output_of, whole_tangent
from thunder_zero.compat.private import (
    JointWithDescriptors,
    SubclassCreationMeta,
    aot_config,
    aot_stage2_compile,
    is_opaque_node,
    replaced,
    runtime_wrappers,
)

Boxed = Callable[[list[Any]], list[Any]]
Check = Callable[[Node, Sequence[Any]], None]


def compiled(
    joint: Joint, phases: Phases, check: Check, *, materialize_grads: bool
) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function of a list of inputs that runs the phases.

    ``check`` gets the node and the tangents of each backward before it runs, and may raise. With
    ``materialize_grads``, backward gets zeros for a missing tangent, else None.
    """
    state, capture = _for_one_program(joint.exported)
    has_objects = capture.maybe_subclass_meta is not None or objects_of(joint)
    wrapped = WithObjects(joint, phases) if has_objects else phases

    def partition(graph: fx.GraphModule, args: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        return _stubs(joint, wrapped.saved)

    def forward(graph: fx.GraphModule, args: Any) -> Boxed:
        return _boxed(wrapped.forward)

    def backward(graph: fx.GraphModule, args: Any) -> Boxed:
        return _boxed(wrapped.backward)

    with torch.no_grad(), aot_config.patch(donated_buffer=False), _checked(check, materialize_grads):
        function: Callable[[list[Any]], Sequence[Any]]
        function, _ = aot_stage2_compile(state, capture, partition, forward, backward)
    return function


def _for_one_program(exported: JointWithDescriptors) -> tuple[Any, Any]:
    """Return copies of the objects that AOTAutograd changes when it compiles."""
    state, capture = exported._aot_state, exported._aot_graph_capture
    meta = _copied_metadata(state.fw_metadata)
    meta.bw_donated_idxs = []  # None would refuse retain_graph
    if capture.maybe_subclass_meta is not None:
        subclasses = copy.copy(capture.maybe_subclass_meta)
        subclasses.fw_metadata = _copied_metadata(subclasses.fw_metadata)
        subclasses.grad_input_metas = list(map(_copied_description, subclasses.grad_input_metas or ()))
        capture = replace(capture, maybe_subclass_meta=subclasses)
    quiet = replace(state.aot_config, enable_log=False)  # logging would print the whole graph
    return replace(state, fw_metadata=meta, aot_config=quiet), capture


def _copied_metadata(meta: Any) -> Any:
    meta = copy.copy(meta)
    meta.dynamic_saved_tensors_idxs = {}  # torch adds positions of one program's saved tensors
    for name in ("subclass_inp_meta", "subclass_fw_graph_out_meta", "subclass_tangent_meta"):
        setattr(meta, name, list(map(_copied_description, getattr(meta, name))))
    return meta


def _copied_description(meta: Any) -> Any:
    """Return a copy of the description of a tensor subclass, and any other description unchanged."""
    if not isinstance(meta, SubclassCreationMeta):
        return meta
    copied = copy.copy(meta)
    copied.attrs = {name: _copied_description(inner) for name, inner in meta.attrs.items()}
    return copied


def _boxed(function: Boxed) -> Boxed:
    def boxed(args: list[Any]) -> list[Any]:
        return function(args)

    vars(boxed)["_boxed_call"] = True
    return boxed


def _checked(check: Check, materialize_grads: bool) -> AbstractContextManager[None]:
    """Make the autograd function that AOTAutograd builds inside the block call ``check`` before each backward."""
    factory: Any = runtime_wrappers._AOTDispatchAutogradFunctionFactory
    build = factory.build

    def build_checked(self: Any) -> Any:
        function = build(self)
        forward, backward = function.forward, function.backward

        def forward_checked(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(materialize_grads)
            return forward(ctx, *args)

        def backward_checked(ctx: Any, *grads: Any) -> Any:
            check(ctx, grads)
            return backward(ctx, *grads)

        function.forward, function.backward = staticmethod(forward_checked), staticmethod(backward_checked)
        return function

    return replaced(factory, "build", build_checked)


def _stubs(joint: Joint, saved: Sequence[Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return graphs with the signatures of the phases. AOTAutograd reads the graphs' metadata, but never runs them."""
    forward, backward = fx.Graph(), fx.Graph()
    inputs = [_copied(forward, node) for node in joint.all_placeholders() if output_of(node) is None]
    call = forward.call_function(_stub, tuple(inputs))
    outputs = [_result(forward, call, node) for node in joint.all_results[: joint.outputs]]
    kept = [_result(forward, call, value) for value in saved]
    forward.output((*outputs, *kept)).meta["desc"] = [*joint.described[: joint.outputs], *[None] * len(kept)]
    for number, value in enumerate(sorted(saved, key=lambda value: isinstance(value, Tensor))):
        backward.placeholder(f"saved_{number}").meta["val"] = value
    tangents = [_copied(backward, node) for node in joint.all_placeholders() if output_of(node) is not None]
    call = backward.call_function(_stub, tuple(tangents))
    grads = tuple(_result(backward, call, node) for node in joint.all_results[joint.outputs :])
    backward.output(grads).meta["desc"] = list(joint.described[joint.outputs :])
    return fx.GraphModule(nn.Module(), forward), fx.GraphModule(nn.Module(), backward)


def _stub(*args: Any) -> Any:
    raise AssertionError("a stub does not run")


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.placeholder(node.name)
    new.meta.update(node.meta)
    return new


def _result(graph: fx.Graph, call: fx.Node, like: Any) -> Any:
    """Return a result of a stub with the metadata of a node or a value. Return None or a number unchanged."""
    if like is None or isinstance(like, int | float):
        return like
    new = graph.call_function(_stub, (call,))
    new.meta.update(like.meta if isinstance(like, fx.Node) else {"val": like})
    return new


class Phases(Protocol):
    """The two phases of a program, as functions. ``saved`` has fakes of the values that forward saves."""

    saved: Sequence[Any]

    def forward(self, args: list[Any]) -> list[Any]:
        """Compute outputs, and the values that backward reads."""

    def backward(self, args: list[Any]) -> list[Any]:
        """Compute the gradients of inputs."""


def objects_of(joint: Joint) -> list[fx.Node]:
    return [node for node in joint.all_placeholders() if is_opaque_node(node) and output_of(node) is None]


class WithObjects:
    """Phases of a graph with tensor subclasses: AOTAutograd passes their meshes to phases, and expects them as results.

    ::

        forward([rows, mesh, x])  ->  phases.forward([rows, x])  ->  [y, mesh]
    """

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
                fake = self._gradients[position].meta["val"]
                gradients[position] = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
        return gradients

    def _flat(self, tangents: Sequence[Any]) -> Iterator[Any]:
        """Yield the tensors of the tangents. Expand torch's None for a missing subclass to a None for each part."""
        values, before, missing = iter(tangents), None, False
        for node, desc in self._tangents:
            whole = whole_tangent(desc)
            value = None if whole == before and missing else next(values)
            if whole != before:
                before, missing = whole, value is None
            if not is_opaque_node(node):
                yield value

    def _filled(self, results: list[Any], nodes: Sequence[Any]) -> list[Any]:
        """Put objects into results: the input's object if there is an equal input, or else the traced object.

        Torch traces equal objects as one node, so the node of an output may also be the node of a tangent.
        """
        for position, node in enumerate(nodes):
            if is_opaque_node(node):
                traced = node.meta["val"]
                results[position] = self._current.get(id(traced), traced.real_obj)
        return results
