"""Reads the graphs that dynamo captures of a model, and keeps them with their programs.

Dynamo makes parameters inputs of its graph. It guards shapes and dtypes of parameters, not their identity. So dynamo
may call a graph that it captured in one submodule with the parameters of another submodule of equal shapes.

Dynamo captures a function again when its guards fail. If shapes change, dynamo makes sizes symbols, so that one graph
serves all shapes. A function that branches on a size or a string has a graph for each value. At most ``MOST`` graphs
are kept for a function and a choice of parameters. Beyond this limit the least recently used graph is dropped with its
programs, and dynamo forgets the graph. A later call that needs the graph captures and compiles it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn

from thunder_zero.capture.compilations import Shapes, Spent
from thunder_zero.capture.programs import Programs
from thunder_zero.compat import aot
from thunder_zero.compat.aot import argument_of, is_subclass
from thunder_zero.compat.dynamo import CompiledFrame
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.slices import path_of, slice_of

MOST = 32  # graphs of one function with the same parameters

GraphKey = tuple[str, str, tuple[Any, ...]]
Paths = tuple[str | None, ...]  # for each input of a graph, the path of a parameter or None


def paths_of(inputs: Sequence[Any]) -> Paths:
    """Return the path of each input that is a parameter of a sharded model, and None for other inputs."""
    return tuple(map(path_of, inputs))


def with_slices(graph: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """Change a graph to take local slices in place of parameters that are DTensors, and return the new inputs.

    The graph's first lines convert the slices to DTensors. So parameters and gradients of the joint graph are plain
    tensors. In backward torch redistributes each gradient to the placement of its parameter, even a gradient that sums
    over a part of the sequence.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    first_line = next(node for node in graph.graph.nodes if node.op != "placeholder")
    slices = [slice_of(value) for value in inputs]
    for node, part in zip(nodes, slices, strict=True):
        if part is not None:
            with graph.graph.inserting_before(first_line):
                dtensor = graph.graph.call_function(part.whole, (node, *part.args))
            node.replace_all_uses_with(dtensor, delete_user_cb=lambda user, dtensor=dtensor: user is not dtensor)
            node.meta["example_value"] = local(node.meta["example_value"])
    if any(slices):
        graph.recompile()
    return [value if part is None else part.taken for value, part in zip(inputs, slices, strict=True)]


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
    if any(is_subclass(value) or not isinstance(value, Tensor | int | float | None) for value in examples):
        return None
    if any(isinstance(size, SymInt) for value in examples if isinstance(value, Tensor) for size in value.shape):
        return None  # dynamo guards what torch assumes of symbols while it traces the graph
    inputs = [
        (value.shape, value.dtype, value.device, value.stride(), value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for value in examples
    ]
    settings = torch.get_default_dtype(), torch.get_default_device(), tuple(map(_autocast, ("cpu", "cuda")))
    return graph.code, str(inputs), settings


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


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
    """Return a mapping from the names of forward's tensor arguments to their shapes."""
    named = ((argument_of(node), node.meta["example_value"]) for node in graph.graph.find_nodes(op="placeholder"))
    return {
        name: example.shape
        for name, example in named
        if name is not None and isinstance(example, Tensor) and not isinstance(example, nn.Parameter)
    }


@dataclass(frozen=True)
class Captured:
    """A graph as dynamo captured it."""

    joint: aot.Joint  # the graph with its backward. Parameters are inputs of the graph.
    frame: CompiledFrame  # the function that dynamo compiled
    name: str  # the function's name, such as "graph 0"
    paths: Paths  # for each input of the captured call, the path of a parameter or None
    key: GraphKey | None  # a key that is equal for graphs that compute equal values; None if unknown
    overlaps: tuple[object, ...]  # the groups of inputs that overlapped in memory in the captured call
    shapes: Shapes  # a mapping from names of inputs to shapes. Dynamo drops the names once it has compiled the graph.
    spent: Spent  # the cost of tracing the graph
    # the compiled programs, keyed by the paths of a call's parameters and those of all frozen parameters
    programs: dict[tuple[Paths, frozenset[str]], Programs] = field(default_factory=dict)


@dataclass
class Graphs:
    """The graphs of one model."""

    # the kept graphs, keyed by number, least recently used first
    captured: dict[int, Captured] = field(default_factory=dict)
    # a mapping from dynamo's numbers of functions to names, in the order of first compilations
    names: dict[int, str] = field(default_factory=dict)
    ran: list[Programs] = field(default_factory=list)  # the programs that the last forward ran, in order
    breaks: list[str] = field(default_factory=list)  # a sentence for each graph break, with the position and the reason
    warned: bool = False  # True once the user was warned that graphs are dropped
    graph_count: int = 0  # the number of graphs captured so far
    program_count: int = 0  # the number of programs compiled so far

    def name_of(self, frame: CompiledFrame) -> str:
        """Return a function's name, such as "graph 0". Functions are numbered by their first compilation."""
        return self.names.setdefault(frame.function, f"graph {len(self.names)}")

    def keep(self, captured: Captured) -> int:
        """Keep a graph, and return its number."""
        self.captured[self.graph_count] = captured
        self.graph_count += 1
        return self.graph_count - 1

    def use(self, number: int) -> Captured:
        """Return a graph, and make it the most recently used one."""
        self.captured[number] = captured = self.captured.pop(number)
        return captured

    def shapes_by_kind(self) -> Iterable[Sequence[Shapes]]:
        """Return the input shapes of each function's graphs with the same parameters, with and without a backward."""
        shapes: dict[tuple[str, Paths, bool], list[Shapes]] = {}
        for captured in self.captured.values():
            if any(captured.paths):
                kind = captured.name, captured.paths, captured.joint.differentiates
                shapes.setdefault(kind, []).append(captured.shapes)
        return shapes.values()

    def drop_oldest(self) -> Iterator[list[Captured]]:
        """Yield all graphs of each function that has too many graphs, then drop the oldest of them."""
        if len(self.captured) <= MOST:  # as in nearly every forward
            return
        kinds: dict[tuple[str, Paths], list[int]] = {}
        for number, captured in self.captured.items():
            kinds.setdefault((captured.name, captured.paths), []).append(number)
        for numbers in kinds.values():
            if len(numbers) > MOST:
                yield [self.captured[number] for number in numbers]
                for number in numbers[: len(numbers) - MOST]:
                    self.captured.pop(number).frame.forget()
