"""Moves sums of gradients over slices to where their parts are made.

Each rank has a part of the gradient of a norm, and torch sums the parts over ranks with slices. Forward makes the
DTensors of parameters first, so autograd sums their gradients last, and ZeRO could reduce none of them earlier::

    part_1; ..; part_0; ..; sum_1 = all_reduce(part_1); sum_0 = all_reduce(part_0); return sum_1, sum_0
    part_1; sum_1 = all_reduce(part_1); ..; part_0; sum_0 = all_reduce(part_0); ..; return sum_1, sum_0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from thunder_zero.compat.aot import is_backward
from thunder_zero.schedule.timeline import Work
from thunder_zero.traces.operators import is_collective, work_of_operator

SUMS = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default)

CHEAP = (Work.VIEW, Work.POINTWISE)  # work between a gradient and its sum; no other line of backward moves


def with_early_sums(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a joint graph, with sums of gradients as early as their inputs allow.

    Lines that only such a sum reads, and lines between a sum and the returned gradient, move with it.
    """
    moved = _moved(nodes)
    if not moved:
        return list(nodes)
    missing = {node: len(node.all_input_nodes) for node in moved}

    def with_ready_users(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for user in node.users:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    yield from with_ready_users(user)

    return [ready for node in nodes if node not in moved for ready in with_ready_users(node)]


def _moved(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the sums that only gradients read, the nodes that only they read, and the nodes that read them."""
    behind: set[fx.Node] = set()  # nodes that only gradients are made of
    for node in reversed(nodes):
        if _may_move(node) and all(user.op == "output" or user in behind for user in node.users):
            behind.add(node)
    moved: set[fx.Node] = set()
    for node in nodes:
        if node in behind and (node.target in SUMS or not moved.isdisjoint(node.all_input_nodes)):
            moved.add(node)
    for node in reversed(nodes):
        if node in behind and moved.issuperset(node.users):
            moved.add(node)
    return moved


def _may_move(node: fx.Node) -> bool:
    """Return whether a node is a collective, a view or pointwise, reads what backward made, and has no side effect."""
    if node.op != "call_function" or not node.users or not any(map(is_backward, node.all_input_nodes)):
        return False
    return is_collective(node.target) or (work_of_operator(node.target) in CHEAP and not node.is_impure())
