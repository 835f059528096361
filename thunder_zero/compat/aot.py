"""needed while: AOTAutograd gives its joint graph under private names.

All that ``tz.compile`` asks of AOTAutograd: :func:`export` traces a graph of dynamo, forward and backward in one graph;
:func:`compiled` makes a function of two functions that compute the phases, with PyTorch's own handling of autograd, of
what forward writes to, and of outputs that are views of inputs. Their calling conventions::

    forward([inputs]) -> [outputs, saved tensors, saved numbers]
    backward([saved numbers, saved tensors, tangents]) -> [gradients of inputs]

A tangent is None where nothing differentiated the output.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch._dynamo  # before AOTAutograd's modules, which import each other
from torch import Tensor, fx, nn
from torch._functorch import config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch._aot_autograd.graph_compile import aot_stage2_compile
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import JointWithDescriptors, aot_export_joint_with_descriptors
from torch._functorch.partitioners import cleanup_recompute_tags, must_recompute
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.autograd.graph import Node

ALIASES = (OutputType.alias_of_input, OutputType.is_input)
RUN_AND_SAVE_STATE, RUN_WITH_STATE = run_and_save_rng_state, run_with_rng_state
ARGUMENT = re.compile(r"L\['(\w+)'\]")  # an argument of forward, in dynamo's words
Boxed = Callable[[list[Any]], list[Any]]


class Untraced(Exception):
    """A sentence that says what AOTAutograd does not take."""


class Phases(Protocol):
    """The two phases of a program, as functions; what forward saves, as values that look like it."""

    saved: Sequence[Any]

    def forward(self, args: list[Any]) -> list[Any]:
        """Compute outputs, and what backward reads."""

    def backward(self, args: list[Any]) -> list[Any]:
        """Compute the gradients of inputs."""


@dataclass(frozen=True)
class Joint:
    """A graph of dynamo, with its backward.

    Attributes:
        graph: its placeholders are inputs, then tangents; it returns forward's outputs, then gradients of inputs.
        differentiates: whether there is a backward.
        turns_on: whether forward turns gradients on itself, in a call that has them off.
        names: of the inputs of dynamo's graph.
        outputs: how many outputs forward has, with values of inputs that it writes to.
        mutated: the positions of inputs that forward writes to.
        tokens: how many inputs, the first ones, only order operators that have effects; they have no gradients.
    """

    graph: fx.GraphModule
    differentiates: bool
    turns_on: bool
    outputs: int
    mutated: Sequence[int]
    tokens: int
    names: Sequence[str]
    exported: JointWithDescriptors

    @property
    def results(self) -> Sequence[Any]:
        """What the graph returns: nodes or None."""
        return self._output.args[0]  # type: ignore[return-value]

    @property
    def _output(self) -> fx.Node:
        return self.graph.graph.output_node()

    def tangents(self) -> Mapping[fx.Node, int]:
        """Return the tangents, with the positions of their outputs among forward's."""
        positions = {desc: at for at, desc in enumerate(self._output.meta["desc"][: self.outputs])}
        placeholders = (node for node in self.graph.graph.nodes if node.op == "placeholder")
        given = {node: node.meta["desc"] for node in placeholders}
        return {node: positions[desc.output] for node, desc in given.items() if isinstance(desc, TangentAOTInput)}

    def plain_outputs(self) -> Sequence[int]:
        """Return the positions of the outputs of dynamo's graph among forward's, in their order."""
        descs = self._output.meta["desc"][: self.outputs]
        found = {desc.idx: at for at, desc in enumerate(descs) if isinstance(desc, PlainAOTOutput)}
        return [found[number] for number in sorted(found)]

    def gradients(self) -> Sequence[tuple[Any, int | None]]:
        """Return each gradient, with the position of the input of dynamo's graph that it is of, if it is of one."""
        descs = self._output.meta["desc"][self.outputs :]
        return [(node, _position(desc)) for node, desc in zip(self.results[self.outputs :], descs, strict=True)]


def input_of(node: fx.Node) -> int | None:
    """Return the position of the input of dynamo's graph that a placeholder is; None if it is not a whole one."""
    desc = node.meta.get("desc")
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def users_name(node: fx.Node) -> str | None:
    """Return the name that dynamo has for the value of a node, after the user's variable or the function that made it;
    None for a line of backward."""
    sources = node.meta.get("from_node")
    return sources[0].name if sources else None


def _argument(node: fx.Node) -> str:
    """Return the user's name of an input of dynamo's graph, if it is an argument of forward; or else dynamo's."""
    source = node.meta.get("grapharg")
    found = ARGUMENT.fullmatch(str(source.source.name)) if source is not None else None
    return found[1] if found else node.name


def is_backward(node: fx.Node) -> bool:
    """Return whether autograd made a node for backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_checkpointed(node: fx.Node) -> bool:
    """Return whether a checkpoint says that backward computes a node again."""
    return bool(must_recompute(node))


def let_checkpoints_end(graph: fx.GraphModule) -> None:
    """Take the tag off what one checkpoint hands to the next."""
    cleanup_recompute_tags(graph, is_default_partition=False)


def generator_state(like: Tensor) -> Tensor:
    """Return what the state of the generator of a fake tensor's device looks like."""
    state = torch.get_rng_state() if like.device.type == "cpu" else torch.empty(16, dtype=torch.uint8)
    with like.fake_mode:  # type: ignore[attr-defined]  # it is a FakeTensor
        return torch.empty(state.shape, dtype=state.dtype)


def _position(desc: Any) -> int | None:
    of = desc.grad_of if isinstance(desc, GradAOTOutput) else None
    return of.idx if isinstance(of, PlainAOTInput) else None


def _choose_where_masks_write(graph: fx.GraphModule) -> None:
    """Rewrite ``x[mask] = value`` as a choice, if the value has no dimension for the mask's: its gradient would be one
    of unknown shape, which torch's trace refuses."""
    for node in graph.graph.find_nodes(op="call_function", target=operator.setitem):
        target, mask, value = node.args
        found = [each.meta.get("example_value") if isinstance(each, fx.Node) else each for each in node.args]
        x, index, filled = found
        if not (isinstance(x, Tensor) and isinstance(index, Tensor) and index.dtype is torch.bool and index.dim()):
            continue
        missing = x.dim() - index.dim()
        if not isinstance(filled, Tensor | float | int) or (isinstance(filled, Tensor) and filled.dim() > missing):
            continue
        with graph.graph.inserting_before(node):
            made = [mask]
            for _ in range(missing):
                made.append(graph.graph.call_method("unsqueeze", (made[-1], -1)))
            made.append(graph.graph.call_function(torch.where, (made[-1], value, target)))
            made.append(graph.graph.call_method("copy_", (target, made[-1])))
        for new in made[1:]:
            new.meta["stack_trace"] = node.meta.get("stack_trace")
        graph.graph.erase_node(node)
    graph.recompile()


def export(graph: fx.GraphModule, inputs: Sequence[Any]) -> Joint:
    """Trace a graph of dynamo, while dynamo compiles it; with a backward if an output needs a gradient.

    Raises:
        Untraced: a checkpoint has contexts of another kind than ``create_selective_checkpoint_contexts`` makes.
    """
    _choose_where_masks_write(graph)
    has_none = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    turns_on = has_none and _begin_without_gradients(graph)
    try:
        off = config.patch(backward_pass_autocast="off")  # as in eager mode, where backward runs outside of autocast
        with ExitStack() as stack, _undefined_tensors_avoided(graph), off:
            exported = aot_export_joint_with_descriptors(stack, graph, tuple(inputs))
        if _copy_views_of_parameters(graph, inputs, exported._aot_state.fw_metadata.output_info):
            return export(graph, inputs)
    except AssertionError as error:
        if "`context_fn`" not in str(error):
            raise
        raise Untraced(
            "a checkpoint has a context_fn whose contexts are no TorchDispatchModes, which torch.compile needs; "
            "use torch's create_selective_checkpoint_contexts, or Policy.recompute in place of the checkpoint"
        ) from error
    state, captured = exported._aot_state, exported._aot_graph_capture
    _mark_backward(captured.graph_module)
    meta = state.fw_metadata
    results: Any = captured.graph_module.graph.output_node().args[0]
    outputs = len(meta.tokens) + meta.num_forward_returns if state.needs_autograd else len(results)
    mutated = [at for at, info in enumerate(meta.input_info) if info.mutates_data or info.mutates_metadata]
    names = [_argument(node) for node in graph.graph.nodes if node.op == "placeholder"]
    return Joint(
        graph=captured.graph_module,
        differentiates=state.needs_autograd,
        turns_on=turns_on,
        outputs=outputs,
        mutated=mutated,
        tokens=len(meta.tokens),
        names=names,
        exported=exported,
    )


def _begin_without_gradients(graph: fx.GraphModule) -> bool:
    """Let a graph that turns gradients on begin without: AOTAutograd traces it with gradients on."""
    switches = graph.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    turns_on = any(node.args[0] for node in switches)
    if turns_on:
        first = next(node for node in graph.graph.nodes if node.op != "placeholder")
        with graph.graph.inserting_before(first):
            graph.graph.call_function(torch._C._set_grad_enabled, (False,))
        graph.recompile()
    return turns_on


def _copy_views_of_parameters(graph: fx.GraphModule, inputs: Sequence[Any], infos: Sequence[Any]) -> bool:
    """Let a graph return copies in place of views of parameters: AOTAutograd would make the views anew, of rows."""
    output: Any = graph.graph.output_node()
    results, copied = list(output.args[0]), False
    for position, info in enumerate(infos):
        is_alias = info.output_type in ALIASES and info.base_idx is not None
        if is_alias and isinstance(inputs[info.base_idx], nn.Parameter):
            with graph.graph.inserting_before(output):
                results[position] = graph.graph.call_method("clone", (results[position],))
            copied = True
    if copied:
        output.args = (tuple(results),)
        graph.recompile()
    return copied


def _mark_backward(graph: fx.GraphModule) -> None:
    """Mark what depends on a tangent: torch leaves out the backward of autograd functions that a user wrote."""
    made: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if isinstance(node.meta.get("desc"), TangentAOTInput):
            made.add(node)
        elif node.op == "call_function" and (is_backward(node) or not made.isdisjoint(node.all_input_nodes)):
            node.meta["partitioner_tag"] = "is_backward"
            made.add(node)


@contextmanager
def _undefined_tensors_avoided(graph: fx.GraphModule) -> Iterator[None]:
    """Trace an LSTM of the CPU without mkldnn: its operator saves an undefined tensor, which torch's trace cannot."""
    recurrent = any(getattr(node.target, "__name__", "") in ("lstm", "gru") for node in graph.graph.nodes)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and not recurrent)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def compiled(joint: Joint, phases: Phases, look: Callable[[Node], None]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function of a list of inputs that runs the phases. ``look`` gets the node of each backward before it
    runs, and may raise."""
    exported = joint.exported
    meta = copy.copy(exported._aot_state.fw_metadata)
    meta.bw_donated_idxs = []  # None would refuse retain_graph
    state = replace(exported._aot_state, fw_metadata=meta)

    def partition(graph: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        return _stubs(joint, phases.saved)

    def forward(graph: fx.GraphModule, given: Any) -> Boxed:
        return _boxed(phases.forward)

    def backward(graph: fx.GraphModule, given: Any) -> Boxed:
        return _boxed(phases.backward)

    with torch.no_grad(), config.patch(donated_buffer=False), _watched(look):
        function, _ = aot_stage2_compile(state, exported._aot_graph_capture, partition, forward, backward)
    return function


def _boxed(function: Boxed) -> Boxed:
    """Mark a function as one that empties the list that it is given."""

    def boxed(args: list[Any]) -> list[Any]:
        return function(args)

    vars(boxed)["_boxed_call"] = True
    return boxed


@contextmanager
def _watched(look: Callable[[Node], None]) -> Iterator[None]:
    """Let the autograd function that is made inside give None for a tangent that nobody made, where torch would make
    zeros, and call ``look`` before each backward."""
    factory: Any = runtime_wrappers._AOTDispatchAutogradFunctionFactory
    build = factory.build

    def build_watched(self: Any) -> Any:
        function = build(self)
        forward, backward = function.forward, function.backward

        def forward_watched(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        def backward_watched(ctx: Any, *grads: Any) -> Any:
            look(ctx)
            return backward(ctx, *grads)

        function.forward, function.backward = staticmethod(forward_watched), staticmethod(backward_watched)
        return function

    factory.build = build_watched
    try:
        yield
    finally:
        factory.build = build


def _stubs(joint: Joint, saved: Sequence[Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return graphs of the calling conventions alone, of which AOTAutograd reads what is saved; nothing runs them."""
    forward, backward = fx.Graph(), fx.Graph()
    tangents = joint.tangents()
    placeholders = [node for node in joint.graph.graph.nodes if node.op == "placeholder"]
    inputs = [_copied(forward, node) for node in placeholders if node not in tangents]
    made = forward.call_function(_stub, tuple(inputs))
    outputs = [_item(forward, made, node) for node in joint.results[: joint.outputs]]
    kept = [_item(forward, made, value) for value in saved]
    forward.output((*outputs, *kept)).meta["desc"] = [*joint._output.meta["desc"][: joint.outputs], *[None] * len(kept)]
    for number, value in enumerate(sorted(saved, key=lambda value: isinstance(value, Tensor))):
        backward.placeholder(f"saved_{number}").meta["val"] = value
    given = [_copied(backward, node) for node in tangents]
    made = backward.call_function(_stub, tuple(given))
    grads = tuple(_item(backward, made, node) for node in joint.results[joint.outputs :])
    backward.output(grads).meta["desc"] = list(joint._output.meta["desc"][joint.outputs :])
    return fx.GraphModule(nn.Module(), forward), fx.GraphModule(nn.Module(), backward)


def _stub(*args: Any) -> Any:
    raise AssertionError("a stub does not run")


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.placeholder(node.name)
    new.meta.update(node.meta)
    return new


def _item(graph: fx.Graph, made: fx.Node, of: Any) -> Any:
    """Return a node that looks like another node, or like a value; None, and numbers, stay."""
    if not isinstance(of, fx.Node | Tensor):
        return of
    new = graph.call_function(_stub, (made,))
    new.meta.update(of.meta if isinstance(of, fx.Node) else {"val": of})
    return new
