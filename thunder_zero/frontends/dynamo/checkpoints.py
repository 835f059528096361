"""Lets backward recompute the lines that the user's activation checkpoints tag.

The pass changes the joint graph before gathers are inserted, so that each recomputed line gets the gathers it needs::

    relu = aten.relu(mm)                    relu = aten.relu(mm)              # only forward reads relu
    ...                              ->     relu_again = aten.relu(mm_again)  # right before its first reader
    grad = threshold_backward(g, relu)      grad = threshold_backward(g, relu_again)

Backward reruns a random line with the generator's state from forward. If the state takes more bytes than the line's
result, the result is saved instead. Either way the random masks are equal, as torch promises for checkpoints.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor, fx

from thunder_zero.compat import aot
from thunder_zero.compat.aot import (
    RUN_AND_SAVE_STATE,
    RUN_WITH_STATE,
    Joint,
    generator_state,
    hint,
    input_of,
    is_backward,
    is_checkpointed,
    let_checkpoints_end,
)
from thunder_zero.frontends.dynamo.random_slices import draw_by_slices
from thunder_zero.frontends.dynamo.view_chains import shorten_view_chains
from thunder_zero.plan.params import Plan
from thunder_zero.traces.operators import draws_random_numbers, is_view


def joint_of(graph: fx.GraphModule, inputs: Sequence[Any], paths: Sequence[str | None], plan: Plan) -> Joint:
    """Return the joint graph of dynamo's graph. Its backward recomputes the lines that checkpoints tag.

    ``paths`` has, for each input, the path of a parameter or None.
    """
    joint = aot.export(graph, inputs)
    if plan.mesh.tensor.size > 1:
        draw_by_slices(joint, graph, paths, plan)
    _recompute(joint)
    shorten_view_chains(joint.graph.graph)
    return joint


def _recompute(joint: Joint) -> None:
    """Insert copies of the lines that checkpoints tag, and let backward read the copies."""
    graph = joint.graph.graph
    let_checkpoints_end(joint.graph)
    nodes = list(graph.nodes)
    tagged = {node for node in nodes if is_checkpointed(node) and not is_backward(node)}
    for node in _readers_of_written_inputs(joint, nodes) & tagged:
        tagged -= {node, *(user for user in node.users if user.target is operator.getitem)}
    draw_args: dict[fx.Node, tuple[Any, ...]] = {}  # result of a random line: arguments that rerun the line
    for node in [node for node in nodes if node in tagged and _draws(node)]:
        tagged.remove(node)
        if (state := _state_of(node)) is not None:
            target, args = node.target, node.args
            result, saved_state = _save_state(joint, node, state)
            draw_args[result] = (saved_state, target, *args)
            tagged.add(result)
        else:
            tagged -= {user for user in node.users if user.target is operator.getitem}
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node, before: fx.Node) -> fx.Node:
        """Return a copy of a node, inserted after copies of its inputs, or the node itself if it is saved."""
        if node not in tagged:
            return node
        if node not in copies:
            args = fx.map_arg(draw_args.get(node, node.args), lambda input_node: copy(input_node, before))
            kwargs = fx.map_arg(node.kwargs, lambda input_node: copy(input_node, before))
            target: Any = RUN_WITH_STATE if node in draw_args else node.target
            with graph.inserting_before(before):
                copies[node] = graph.create_node("call_function", target, args, kwargs, f"{node.name}_again")
            copies[node].meta = {**node.meta, "partitioner_tag": "is_backward", "recompute": None}
        return copies[node]

    for node in nodes:
        if node.op == "call_function" and is_backward(node):
            for input_node in node.all_input_nodes:
                if (copied := copy(input_node, node)) is not input_node:
                    node.replace_input_with(input_node, copied)


def _readers_of_written_inputs(joint: Joint, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the lines that read an input that forward writes to, as BatchNorm does with its statistics.

    Backward cannot recompute these lines, because it would read the values that forward wrote.
    """
    written = {node for node in nodes if node.op == "placeholder" and input_of(node) in joint.mutated}
    readers = set()
    for node in nodes:
        if node.op == "call_function" and not written.isdisjoint(node.all_input_nodes):
            readers.add(node)
            if is_view(node.target):
                written.add(node)
    return readers


def _draws(node: fx.Node) -> bool:
    return node.op == "call_function" and draws_random_numbers(node.target, node.args, node.kwargs)


def _state_of(node: fx.Node) -> Tensor | None:
    """Return a fake state of a random line's generator, or None if the line's results are smaller."""
    value = node.meta["val"]
    results = [item for item in (value if isinstance(value, tuple | list) else [value]) if isinstance(item, Tensor)]
    state = generator_state(results[0]) if results and not node.kwargs else None
    return state if state is not None and state.nbytes < sum(map(_bytes_of, results)) else None


def _bytes_of(value: Tensor) -> int:
    """Return the bytes of a value in the call that dynamo captured."""
    return prod(int(hint(size) or 0) for size in value.shape) * value.element_size()


def _save_state(joint: Joint, node: fx.Node, state: Tensor) -> tuple[fx.Node, fx.Node]:
    """Make a random line also return its generator's state, and return the nodes of the result and of the state."""
    value = node.meta["val"]
    items = []
    with joint.graph.graph.inserting_after(node):
        for position, fake in ((1, value), (0, state)):
            item = joint.graph.graph.call_function(operator.getitem, (node, position))
            item.meta = {**node.meta, "val": fake}
            items.append(item)
    result, saved_state = items
    node.replace_all_uses_with(result, lambda user: user not in items)
    target: Any = node.target
    node.args, node.target = (target, *node.args), RUN_AND_SAVE_STATE
    node.meta["val"] = (state, value)
    return result, saved_state
