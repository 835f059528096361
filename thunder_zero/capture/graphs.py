"""Reads the graphs that dynamo captures of a model.

Dynamo makes parameters inputs of its graph. It guards shapes and dtypes of parameters, not their identity. So dynamo
may call a graph that it captured in one submodule with the parameters of another submodule of equal shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_zero.capture.compilations import Shapes, Spent
from thunder_zero.capture.programs import GraphPrograms
from thunder_zero.compat import aot
from thunder_zero.compat.aot.nodes import argument_of
from thunder_zero.compat.dynamo import CompiledFrame
from thunder_zero.sharded.placeholders import path_of

GraphKey = tuple[str, str, tuple[Any, ...]]
Paths = tuple[str | None, ...]  # for each input of a graph, the path of a parameter or None


def paths_of(inputs: Sequence[Any]) -> Paths:
    return tuple(map(path_of, inputs))


def replaced_parameter(graph: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Return the path of a parameter whose memory the graph replaces (``param.data = value``), or None."""
    nodes = graph.graph.find_nodes(op="placeholder")
    for node, path in zip(nodes, paths_of(inputs), strict=True):
        if path is not None and any(user.target is Tensor.set_ for user in node.users):
            return path
    return None


def key_of_graph(graph: fx.GraphModule) -> GraphKey | None:
    """Return a key that is equal for graphs that compute equal values, whether gradients are on or off.

    Return None for a graph with constant tensors, symbolic sizes, or inputs that are neither numbers nor plain tensors.
    """
    nodes = graph.graph.nodes
    if any(node.op == "get_attr" for node in nodes):
        return None
    examples = [node.meta["example_value"] for node in nodes if node.op == "placeholder"]
    if any(
        is_traceable_wrapper_subclass(value) or not isinstance(value, Tensor | int | float | None) for value in examples
    ):
        return None
    if any(isinstance(size, SymInt) for value in examples if isinstance(value, Tensor) for size in value.shape):
        return None  # dynamo guards what torch assumes of symbols while it traces the graph
    inputs = [
        (value.shape, value.dtype, value.device, value.stride(), value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for value in examples
    ]
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    settings = torch.get_default_dtype(), torch.get_default_device(), *autocast
    return graph.code, str(inputs), settings


def shared_memory(inputs: Sequence[Any]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return groups of inputs that overlap in memory, as (position, first byte) pairs.

    If a graph writes to inputs, PyTorch's trace is valid only for calls whose inputs overlap as in the first call.
    Dynamo does not guard overlaps.
    """
    spans = []
    for position, value in enumerate(inputs):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.layout is torch.strided:
            size, start = value.element_size(), int(value.storage_offset()) * value.element_size()
            last = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
            if value.numel():
                spans.append((value.untyped_storage()._cdata, start, start + (last + 1) * size, position))
    groups: list[list[tuple[int, int]]] = []
    last_storage, end = None, 0
    for storage, start, stop, position in sorted(spans):
        if storage != last_storage or start >= end:
            groups.append([])
            end = 0
        groups[-1].append((position, start))
        last_storage, end = storage, max(end, stop)
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def shapes_of_inputs(graph: fx.GraphModule) -> dict[str, torch.Size]:
    named = ((argument_of(node), node.meta["example_value"]) for node in graph.graph.find_nodes(op="placeholder"))
    return {
        name: example.shape
        for name, example in named
        if name is not None and isinstance(example, Tensor) and not isinstance(example, nn.Parameter)
    }


@dataclass(frozen=True)
class Graph:
    joint: aot.Joint  # the graph with its backward. Parameters are inputs of the graph.
    frame: CompiledFrame  # the function that dynamo compiled
    name: str  # the function's name, such as "graph 0"
    paths: Paths  # for each input of the captured call, the path of a parameter or None
    key: GraphKey | None  # a key that is equal for graphs that compute equal values; None if unknown
    overlaps: tuple[object, ...]  # the groups of inputs that overlapped in memory in the captured call
    shapes: Shapes  # a mapping from names of inputs to shapes. Dynamo drops the names once it has compiled the graph.
    spent: Spent  # the cost of tracing the graph
    # the compiled programs, keyed by the paths of a call's parameters and those of all frozen parameters
    programs: dict[tuple[Paths, frozenset[str]], GraphPrograms] = field(default_factory=dict)
