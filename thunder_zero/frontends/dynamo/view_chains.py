"""Shortens the chains of views that autograd leaves in the joint graph.

::

    t = aten.t(w)                               t = aten.t(w)              # read by forward's product
    ...
    t_1 = aten.t(t)                       ->    mm = aten.mm(grad, w)
    mm = aten.mm(grad, t_1)
    view = aten.view(mm, [8, 16])
    view_1 = aten.view(view, [8, 4, 4])         view_1 = aten.view(mm, [8, 4, 4])

On the host, a view takes as long as the launch of a small product, so an unnecessary view slows every step.
"""

from __future__ import annotations

import torch
from torch import fx

from thunder_zero.compat.aot import is_backward

TRANSPOSES = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)  # a second transpose undoes the first
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)  # the last of a chain decides the shape


def shorten_view_chains(graph: fx.Graph) -> None:
    """Let lines read the root of a chain of views where the shapes are equal, and drop views without readers."""
    views = [node for node in graph.nodes if node.target in (*TRANSPOSES, *RESHAPES)]
    for node in views:
        source, root = node.args[0], None
        if node.target in RESHAPES:
            if source.target in RESHAPES:
                node.args = source.args[0], *node.args[1:]
            root = node.args[0] if _shape(node) == _shape(node.args[0]) else None
        elif (source.target, source.args[1:]) == (node.target, node.args[1:]):
            root = source.args[0]
        if root is not None and _is_replaceable(node, root):
            node.replace_all_uses_with(root)
    for node in reversed(views):
        if not node.users:
            graph.erase_node(node)


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    """Return the shape of a node with symbols as strings, since comparing symbols would add a guard to the graph."""
    return tuple(size if type(size) is int else str(size) for size in node.meta["val"].shape)


def _is_replaceable(node: fx.Node, root: fx.Node) -> bool:
    """Return whether all readers of a node can read the root of its chain instead.

    An output of the graph must stay a separate tensor, unless the root is a gradient that the graph does not return.
    """
    is_output = any(user.op == "output" for user in node.users)
    is_returned = any(user.op == "output" for user in root.users)
    return not is_output or (is_backward(root) and root.op == "call_function" and not is_returned)
