"""Activation checkpoints of the user's code: what they tag is computed again in backward.

A pass on the joint graph, before gathers are placed, so that each copy gets a gather where it needs one::

    relu = aten.relu(mm)                    relu = aten.relu(mm)              # forward's; backward reads no line of it
    ...                              ->     relu_again = aten.relu(mm_again)  # before the first line that reads it
    grad = threshold_backward(g, relu)      grad = threshold_backward(g, relu_again)

A random line is run again with the state that its generator had in forward, or what it made is saved, whichever takes
fewer bytes: masks are equal, as torch promises of a checkpoint.
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
    """Return a graph of dynamo with its backward, which computes again what checkpoints tag; ``paths`` are those of
    the inputs that are parameters."""
    joint = aot.export(graph, inputs)
    if plan.mesh.tensor.size > 1:
        draw_by_slices(joint, graph, paths, plan)
    _compute_again(joint)
    shorten_view_chains(joint.graph.graph)
    return joint


def _compute_again(joint: Joint) -> None:
    """Change the joint graph so that backward computes again what checkpoints tag."""
    graph = joint.graph.graph
    let_checkpoints_end(joint.graph)
    nodes = list(graph.nodes)
    tagged = {node for node in nodes if is_checkpointed(node) and not is_backward(node)}
    for node in _reads_written(joint, nodes) & tagged:
        tagged -= {node, *(user for user in node.users if user.target is operator.getitem)}
    draws: dict[fx.Node, tuple[Any, ...]] = {}  # what runs a random line again, with its state, by what it makes
    for node in [node for node in nodes if node in tagged and _draws(node)]:
        tagged.remove(node)
        if (state := _state_of(node)) is not None:
            target, args = node.target, node.args
            made, saved = _saving(joint, node, state)
            draws[made] = (saved, target, *args)
            tagged.add(made)
        else:
            tagged -= {user for user in node.users if user.target is operator.getitem}
    again: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node, before: fx.Node) -> fx.Node:
        """Return the copy of a node, with copies of what it reads; a node that is saved stays."""
        if node not in tagged:
            return node
        if node not in again:
            read = fx.map_arg(draws.get(node, node.args), lambda each: copy(each, before))
            kwargs = fx.map_arg(node.kwargs, lambda each: copy(each, before))
            target: Any = RUN_WITH_STATE if node in draws else node.target
            with graph.inserting_before(before):
                again[node] = graph.create_node("call_function", target, read, kwargs, f"{node.name}_again")
            again[node].meta = {**node.meta, "partitioner_tag": "is_backward", "recompute": None}
        return again[node]

    for node in nodes:
        if node.op == "call_function" and is_backward(node):
            for read in node.all_input_nodes:
                if (made := copy(read, node)) is not read:
                    node.replace_input_with(read, made)


def _reads_written(joint: Joint, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the lines that read an input that forward writes to, such as a BatchNorm of its statistics: backward would
    read what was written."""
    written = {node for node in nodes if node.op == "placeholder" and input_of(node) in joint.mutated}
    found = set()
    for node in nodes:
        if node.op == "call_function" and not written.isdisjoint(node.all_input_nodes):
            found.add(node)
            if is_view(node.target):
                written.add(node)
    return found


def _draws(node: fx.Node) -> bool:
    return node.op == "call_function" and draws_random_numbers(node.target, node.args, node.kwargs)


def _state_of(node: fx.Node) -> Tensor | None:
    """Return what the state of a random line's generator looks like; None if what the line makes is smaller."""
    value = node.meta["val"]
    made = [each for each in (value if isinstance(value, tuple | list) else [value]) if isinstance(each, Tensor)]
    state = generator_state(made[0]) if made and not node.kwargs else None
    return state if state is not None and state.nbytes < sum(map(_bytes_of, made)) else None


def _bytes_of(value: Tensor) -> int:
    """Return the bytes of a value, as it was in the call that dynamo captured."""
    return prod(int(hint(size) or 0) for size in value.shape) * value.element_size()


def _saving(joint: Joint, node: fx.Node, state: Tensor) -> tuple[fx.Node, fx.Node]:
    """Let a random line return the state of its generator, too. Returns what it made before, and the state."""
    value = node.meta["val"]
    items = []
    with joint.graph.graph.inserting_after(node):
        for position, each in ((1, value), (0, state)):
            item = joint.graph.graph.call_function(operator.getitem, (node, position))
            item.meta = {**node.meta, "val": each}
            items.append(item)
    made, saved = items
    node.replace_all_uses_with(made, lambda user: user not in items)
    target: Any = node.target
    node.args, node.target = (target, *node.args), RUN_AND_SAVE_STATE
    node.meta["val"] = (state, value)
    return made, saved
