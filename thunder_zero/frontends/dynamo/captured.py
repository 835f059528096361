"""Gives a graph of dynamo the module's parameters back, under their paths.

Dynamo makes them inputs of its graph, and calls it with those of another submodule where it may, as it guards the
looks of parameters and not which they are::

    def forward(L_self_parameters_weight_, L_x_):              def forward(self, L_x_):
        y = linear(L_x_, L_self_parameters_weight_)     ->         y = linear(L_x_, self.h.0.weight)

so that Thunder sees a module, whose parameters it traces as it does without dynamo: one for each choice of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import multi_head_attention_forward
from torch.utils.checkpoint import checkpoint

from thunder_zero.compat.dynamo import (
    CHECKPOINT,
    CONTEXT_OF_CHECKPOINT,
    ENTER_AUTOCAST,
    LOG_USAGE,
    SET_GRAD_ENABLED,
    AnyHigherOrder,
)
from thunder_zero.compat.graphs import attention_in_python, replacement
from thunder_zero.compat.lookasides import CONTEXT_FN
from thunder_zero.sharded.placeholders import Placeholder

Looks = tuple[str, str, tuple[Any, ...]]
Paths = tuple[str | None, ...]  # of each input: of a parameter, or None


def paths_of(inputs: Sequence[Any]) -> Paths:
    """The paths of those inputs of a graph that are parameters of a sharded model."""
    return tuple(value.path if isinstance(value, Placeholder) else None for value in inputs)


def looks(graph: fx.GraphModule) -> Looks | None:
    """What two graphs have in common that compute the same, whatever dynamo captured them for (training or not); None
    if a graph has tensors of its own."""
    nodes = graph.graph.nodes
    if any(node.op == "get_attr" for node in nodes):
        return None
    examples = [node.meta["example_value"] for node in nodes if node.op == "placeholder"]
    inputs = [
        (each.shape, each.dtype, each.device, each.stride(), each.requires_grad) if isinstance(each, Tensor) else each
        for each in examples
    ]
    settings = torch.get_default_dtype(), torch.get_default_device(), tuple(map(_autocast, ("cpu", "cuda")))
    return graph.code, str(inputs), settings


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def detached(graph: fx.GraphModule) -> tuple[bool, ...]:
    """Whether each output is a tensor without a gradient in eager: Thunder connects all outputs to its backward."""
    (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    examples = [node.meta.get("example_value") if isinstance(node, fx.Node) else node for node in outputs]
    return tuple(isinstance(example, Tensor) and not example.requires_grad for example in examples)


def written(graph: fx.GraphModule) -> tuple[int, ...]:
    """The positions of the inputs that the graph writes to, where autograd must know of it: a loop that adds to one
    tensor in graph after graph, such as the experts of a mixture."""
    examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    return tuple(
        position
        for position, example in enumerate(examples)
        if isinstance(example, Tensor) and example._version and example.requires_grad
    )


def require_own_memory(inputs: Sequence[Any], positions: Sequence[int], name: str) -> None:
    """Refuse inputs that a graph writes to, and that share memory with others, which would keep what was there."""
    for position in positions:
        memory = inputs[position].untyped_storage().data_ptr()
        for other, value in enumerate(inputs):
            is_other = other != position and isinstance(value, Tensor) and not isinstance(value, Placeholder)
            if is_other and value.untyped_storage().data_ptr() == memory:
                raise RuntimeError(
                    f"forward of {name} writes in place to a tensor of shape {tuple(inputs[position].shape)} that "
                    f"shares its memory with another input of a graph, of shape {tuple(value.shape)}, which would not "
                    f"see it; write to a clone()"
                )


@dataclass(frozen=True)
class Flat:
    """A graph whose parameters are its own, by their paths; its inputs are the others.

    Attributes:
        graph: its placeholders are the inputs, its ``get_attr`` nodes are ``attributes``.
        attributes: by target: parameters, other tensors, and the bodies of checkpoints.
        parameters: the targets that are paths of parameters.
        name: of the module's class, for errors.
    """

    graph: fx.Graph
    attributes: Mapping[str, Tensor | Flat]
    parameters: frozenset[str]
    name: str

    @property
    def placeholders(self) -> list[fx.Node]:
        """The inputs."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @cached_property
    def enables(self) -> bool:
        """Whether it turns gradients on, where dynamo captured it without."""
        switches = [node.args[0] for node in self.graph.nodes if node.target is SET_GRAD_ENABLED]
        return bool(switches) and bool(switches[0])

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The attributes that are tensors."""
        return {target: value for target, value in self.attributes.items() if isinstance(value, Tensor)}

    def module(self, *, empty: bool = False) -> nn.Module:
        """The graph, or nothing (``empty``), as a module for Thunder to interpret. Not a GraphModule: Thunder would
        trace what that does around a forward that fails, and not come to an end."""
        root = nn.Module()
        if empty:
            root.__class__ = type(self.name, (nn.Module,), {})
            return root
        for target, value in self.attributes.items():
            _put(root, target, value.module() if isinstance(value, Flat) else value)
        forward = type(fx.GraphModule(root, self.graph)).forward
        root.__class__ = type(self.name, (nn.Module,), {"forward": forward})
        return root


def with_parameters(graph: fx.GraphModule, inputs: Sequence[Any], name: str) -> Flat:
    """A graph whose parameters are its own; its inputs are the others, in the same order. What it would write to some
    of them (:func:`written`) are further outputs: Thunder would write without autograd."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    parameters: dict[str, Tensor] = {}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, Placeholder):
            parameters[value.path] = value
            env[node] = new.get_attr(value.path)
        else:
            env[node] = new.node_copy(node)
    copies = [placeholders[position] for position in written(graph)]
    for node in copies:
        env[node] = new.call_method("clone", (env[node],))
    others, outputs = _copy(graph, new, env)
    new.output((*outputs, *(env[copy] for copy in copies)))
    return Flat(new, parameters | others, frozenset(parameters), name)


def _body(graph: fx.GraphModule) -> Flat:
    """The body of a checkpoint, rewritten as the graph around it is."""
    new = fx.Graph()
    env = {node: new.node_copy(node) for node in graph.graph.nodes if node.op == "placeholder"}
    attributes, outputs = _copy(graph, new, env)
    new.output(outputs)
    return Flat(new, attributes, frozenset(), "Body")


def _copy(graph: fx.GraphModule, new: fx.Graph, env: dict[fx.Node, fx.Node]) -> tuple[dict[str, Any], Any]:
    """Copy what lies between inputs and outputs; return the attributes that it reads, and the outputs."""
    attributes: dict[str, Any] = {}
    has_gradients = True
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or node.target is LOG_USAGE:
            continue
        if node.op == "get_attr":
            found = attrgetter(node.target)(graph)
            if isinstance(found, fx.GraphModule) and CONTEXT_OF_CHECKPOINT in found.meta:
                raise RuntimeError(CONTEXT_FN)
            attributes[node.target] = _body(found) if isinstance(found, fx.GraphModule) else found
        if node.target is CHECKPOINT:
            env[node] = new.call_function(checkpoint, fx.map_arg(node.args, env.__getitem__), {"use_reentrant": False})
            continue
        _require_known(node)
        env[node] = new.node_copy(node, env.__getitem__)
        if node.target is multi_head_attention_forward:
            env[node].target = attention_in_python()
        elif node.target is SET_GRAD_ENABLED:
            has_gradients = node.args[0]
        elif has_gradients and (other := replacement(node)) is not None:
            env[node].target = other
            env[node.args[0]] = env[node]
    (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    return attributes, fx.map_arg(outputs, env.__getitem__)


def _require_known(node: fx.Node) -> None:
    if isinstance(node.target, AnyHigherOrder):
        raise RuntimeError(
            f"forward calls {node.target.name()}, as dynamo has it, which Thunder cannot trace; for a "
            f"torch.autograd.Function use thunder.jit with ZeroTransform, or write its formula with operators"
        )
    if node.target is ENTER_AUTOCAST and node.args[2] is False and torch.is_autocast_enabled(str(node.args[0])):
        raise RuntimeError(
            "forward turns autocast off inside of an autocast around the model, and Thunder would not follow; "
            "leave out the one around the model, and give compile mixed_precision=thunder_zero.MixedPrecision()"
        )


def shapes_of_inputs(graph: fx.GraphModule) -> dict[str, torch.Size]:
    """The shapes of the inputs that are no parameters, by the Python expressions that dynamo has for them."""
    nodes = [(node, node.meta["example_value"]) for node in graph.graph.nodes if node.op == "placeholder"]
    return {
        str(node.meta["grapharg"].source.name): example.shape
        for node, example in nodes
        if isinstance(example, Tensor) and not isinstance(example, nn.Parameter)
    }


def _put(root: nn.Module, path: str, value: Any) -> None:
    """Put a tensor or a module at a path of a tree of modules."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    put: Callable[[str, Any], None] = root.add_module
    if isinstance(value, Tensor):
        put = root.register_parameter if isinstance(value, nn.Parameter) else root.register_buffer
    put(last, value)
