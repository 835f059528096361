"""Reads graphs of dynamo: which inputs are parameters, and when two graphs are equal.

Dynamo makes parameters inputs of its graph, and calls it with those of another submodule where it may, as it guards the
looks of parameters and not which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch.utils._pytree import tree_map

from thunder_zero.compat.aot import argument_of, is_subclass
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.slices import path_of, slice_of

Looks = tuple[str, str, tuple[Any, ...]]
Paths = tuple[str | None, ...]  # of each input: of a parameter, or None


def paths_of(inputs: Sequence[Any]) -> Paths:
    """The paths of those inputs of a graph that are parameters of a sharded model."""
    return tuple(map(path_of, inputs))


def with_slices(graph: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """Let a graph take slices in place of the parameters that are DTensors, of which it makes these; return its inputs.

    So parameters are plain tensors for all that follows, and their gradients, too: torch redistributes what backward
    makes, such as a sum of this rank's part of a sequence alone, as the parameter is placed.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    found = [slice_of(value) for value in inputs]
    for node, part in zip(nodes, found, strict=True):
        if part is not None:
            with graph.graph.inserting_before(first):
                whole = graph.graph.call_function(part.whole, (node, *part.args))
            node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
            node.meta["example_value"] = local(node.meta["example_value"])
    if any(found):
        graph.recompile()
    return [value if part is None else part.taken for value, part in zip(inputs, found, strict=True)]


def replaced(graph: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Return the path of a parameter whose data the graph replaces, as by ``param.data = value``."""
    nodes = graph.graph.find_nodes(op="placeholder")
    for node, path in zip(nodes, paths_of(inputs), strict=True):
        if path is not None and any(user.target is Tensor.set_ for user in node.users):
            return path
    return None


def looks(graph: fx.GraphModule) -> Looks | None:
    """What two graphs have in common that compute the same, whatever dynamo captured them for (training or not); None
    if a graph has tensors of its own, sizes that are symbols, or inputs that are neither numbers nor plain tensors."""
    nodes = graph.graph.nodes
    if any(node.op == "get_attr" for node in nodes):
        return None
    examples = [node.meta["example_value"] for node in nodes if node.op == "placeholder"]
    if any(is_subclass(each) or not isinstance(each, Tensor | int | float | None) for each in examples):
        return None
    if any(isinstance(size, SymInt) for each in examples if isinstance(each, Tensor) for size in each.shape):
        return None  # dynamo guards what torch assumes of symbols while it traces the graph
    inputs = [
        (each.shape, each.dtype, each.device, each.stride(), each.requires_grad) if isinstance(each, Tensor) else each
        for each in examples
    ]
    settings = torch.get_default_dtype(), torch.get_default_device(), tuple(map(_autocast, ("cpu", "cuda")))
    return graph.code, str(inputs), settings


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def shared_memory(inputs: Sequence[Any]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the groups of inputs that overlap in memory: of each input its position, and where it begins.

    Where a graph writes to inputs, PyTorch traces it for the overlaps of its first inputs, which dynamo does not guard.
    """
    spans = []
    for position, value in enumerate(inputs):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.layout is torch.strided:
            size, start = value.element_size(), int(value.storage_offset()) * value.element_size()
            last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
            if value.numel():
                spans.append((value.untyped_storage()._cdata, start, start + (last + 1) * size, position))
    groups: list[list[tuple[int, int]]] = []
    before, end = None, 0
    for storage, start, stop, position in sorted(spans):
        if storage != before or start >= end:
            groups.append([])
            end = 0
        groups[-1].append((position, start))
        before, end = storage, max(end, stop)
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def shapes_of_inputs(graph: fx.GraphModule) -> dict[str, torch.Size]:
    """The shapes of the arguments of forward that are tensors, by their names."""
    named = ((argument_of(node), node.meta["example_value"]) for node in graph.graph.find_nodes(op="placeholder"))
    return {
        name: example.shape
        for name, example in named
        if name is not None and isinstance(example, Tensor) and not isinstance(example, nn.Parameter)
    }


def restoring(returned: Any, markers: Sequence[object], places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Return what makes forward's result of what a phase returns. ``returned`` is that result with markers in the place
    of a graph's outputs, which are at ``places`` among the phase's."""
    at = dict(zip(map(id, markers), places, strict=True))
    return lambda outputs: rebuilt(returned, {marker: outputs[place] for marker, place in at.items()})


def rebuilt(tree: Any, made: Mapping[int, Any]) -> Any:
    """Return a structure with other values in the place of some, by their ids."""
    if is_dataclass(tree) and not isinstance(tree, type) and not isinstance(tree, Mapping):
        names = [field.name for field in fields(tree)]
        return replace(tree, **{name: rebuilt(getattr(tree, name), made) for name in names})
    return tree_map(lambda leaf: made.get(id(leaf), leaf), tree)
