"""needed while: AOTAutograd refuses some graphs of dynamo, or gets them wrong.

::

    x[mask] = value         ->  x.copy_(where(mask, value, x))      its gradient has a known shape
    return weight[0]        ->  return weight[0].clone()            AOTAutograd would return a view of rows
    a float that changes    ->  a tensor                            one graph for all values
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from thunder_zero.compat.aot.joint import output_of
from thunder_zero.compat.aot.nodes import is_backward
from thunder_zero.compat.private import (
    OutputType,
    detect_fake_mode,
    set_grad_enabled,
    tensorify_python_scalars,
)

ALIASES = (OutputType.alias_of_input, OutputType.is_input)
IN_PLACE = frozenset(
    ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")
)


# Before the trace


def choose_where_masks_write(graph: fx.GraphModule) -> None:
    """Rewrite ``x[mask] = value`` with ``torch.where``, if the value has no dimension for the mask's dimensions.

    Otherwise the value's gradient would have an unknown shape, which torch cannot trace.
    """
    for node in graph.graph.find_nodes(op="call_function", target=operator.setitem):
        target, mask, value = node.args
        x, index, example = (arg.meta.get("example_value") if isinstance(arg, fx.Node) else arg for arg in node.args)
        if not (isinstance(x, Tensor) and isinstance(index, Tensor) and index.dtype is torch.bool and index.dim()):
            continue
        missing = x.dim() - index.dim()
        if not isinstance(example, Tensor | float | int) or (isinstance(example, Tensor) and example.dim() > missing):
            continue
        added: list[fx.Node] = []
        with graph.graph.inserting_before(node):
            for _ in range(missing):
                added.append(graph.graph.call_method("unsqueeze", (added[-1] if added else mask, -1)))
            added.append(graph.graph.call_function(torch.where, (added[-1] if added else mask, value, target)))
            added.append(graph.graph.call_method("copy_", (target, added[-1])))
        for new in added:
            new.meta["stack_trace"] = node.meta.get("stack_trace")
        graph.graph.erase_node(node)
        graph.recompile()


def begin_without_gradients(graph: fx.GraphModule) -> bool:
    """Turn gradients off at the start of a graph that turns gradients on. Return whether it was such a graph.

    Otherwise AOTAutograd would trace the whole graph with gradients on.
    """
    switches = graph.graph.find_nodes(op="call_function", target=set_grad_enabled)
    turns_on = any(node.args[0] for node in switches)
    if turns_on:
        first = next(node for node in graph.graph.nodes if node.op != "placeholder")
        with graph.graph.inserting_before(first):
            graph.graph.call_function(set_grad_enabled, (False,))
        graph.recompile()
    return turns_on


def outputs_without_history(graph: fx.GraphModule) -> frozenset[int]:
    """Return the indices of outputs that have no autograd history, because gradients are off where they are computed.

    An output that depends only on values without history has no history, either. An in-place operator returns its
    input, with the input's history.
    """
    enabled, detached = True, set[fx.Node]()
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif name.endswith("_") or name in IN_PLACE:
            continue
        elif not enabled or (node.all_input_nodes and detached.issuperset(node.all_input_nodes)):
            detached.add(node)
    outputs: Any = graph.graph.output_node().args[0]
    return frozenset(position for position, node in enumerate(outputs) if node in detached)


def copy_views_of_parameters(graph: fx.GraphModule, inputs: Sequence[Any], infos: Sequence[Any]) -> bool:
    """Replace outputs that are views of parameters by copies. Return whether any output was replaced.

    AOTAutograd would recompute such a view from the parameter's placeholder, which has only this rank's rows. ``infos``
    are its descriptions of the outputs.
    """
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


# After the trace


def compute_with_tensors(graph: fx.GraphModule) -> None:
    """Replace floats, which may change from call to call, by tensors."""
    fakes = detect_fake_mode()
    if fakes is not None and fakes.shape_env is not None:
        tensorify_python_scalars(graph, fakes.shape_env, fakes)


def mark_backward(graph: fx.GraphModule) -> None:
    """Tag lines that depend on a tangent as backward. Torch does not tag the backward of a user's autograd function."""
    backward: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" and output_of(node) is not None:
            backward.add(node)
        elif node.op == "call_function" and (is_backward(node) or not backward.isdisjoint(node.all_input_nodes)):
            node.meta["partitioner_tag"] = "is_backward"
            backward.add(node)
