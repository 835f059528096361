"""Moves all-reduces over tensor-parallel ranks right behind the lines of their gradients.

Each tensor-parallel rank computes a partial sum of a norm's gradient, and torch all-reduces it over ranks. All these
all-reduces are at the end of backward, so ZeRO could not reduce a gradient before the end::

    before    part_1; ..; part_0; ..; sum_1 = all_reduce(part_1); sum_0 = all_reduce(part_0); return sum_1, sum_0
    after     part_1; sum_1 = all_reduce(part_1); ..; part_0; sum_0 = all_reduce(part_0); ..; return sum_1, sum_0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from thunder_zero.compat.aot import is_backward
from thunder_zero.schedule.timeline import Work
from thunder_zero.traces.operators import is_collective, work_of_operator

SUMS = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default)

CHEAP = (Work.VIEW, Work.POINTWISE)  # only such lines of backward move


def with_early_sums(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a joint graph, with sums of gradients as early as their inputs allow.

    Two kinds of lines move with a sum: lines that only the sum reads, and lines from the sum to the returned gradient.
    """
    moving = _moving_nodes(nodes)
    if not moving:
        return list(nodes)
    missing_inputs = {node: len(node.all_input_nodes) for node in moving}

    def with_ready_users(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for user in node.users:
            if user in missing_inputs:
                missing_inputs[user] -= 1
                if not missing_inputs[user]:
                    yield from with_ready_users(user)

    return [ready_node for node in nodes if node not in moving for ready_node in with_ready_users(node)]


def _moving_nodes(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that move: sums on which only gradients depend, and nodes that move with these sums."""
    movable: set[fx.Node] = set()  # nodes on which only returned gradients depend
    for node in reversed(nodes):
        if _may_move(node) and all(user.op == "output" or user in movable for user in node.users):
            movable.add(node)
    moving: set[fx.Node] = set()
    for node in nodes:
        if node in movable and (node.target in SUMS or not moving.isdisjoint(node.all_input_nodes)):
            moving.add(node)
    for node in reversed(nodes):
        if node in movable and moving.issuperset(node.users):
            moving.add(node)
    return moving


def _may_move(node: fx.Node) -> bool:
    """Return whether a node reads a value of backward, has no side effect, and is a view, pointwise or a collective."""
    if node.op != "call_function" or not node.users or not any(map(is_backward, node.all_input_nodes)):
        return False
    return is_collective(node.target) or (work_of_operator(node.target) in CHEAP and not node.is_impure())
