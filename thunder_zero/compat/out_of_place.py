"""needed while: Thunder writes over values that backward reads.

Rewrites operations in place of a graph as out of place, where nobody sees the difference::

    w /= w.sum(-1, keepdim=True)      ->      w = w / w.sum(-1, keepdim=True)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
}
_METHODS = (
    "add addcdiv addcmul clamp clamp_max clamp_min div exp index_add index_copy index_fill masked_fill masked_scatter "
    "mul neg pow relu rsqrt scatter scatter_add sigmoid sqrt sub tanh"
)
METHODS = {f"{name}_": name for name in _METHODS.split()}


def replacement(node: fx.Node) -> Any:
    """What computes the same out of place: a function, or a method's name; None if there is none, or if another tensor
    of the graph shares the memory, and is read later."""
    table: dict[Any, Any] = OPERATORS if node.op == "call_function" else METHODS
    other = table.get(node.target) if node.op in ("call_function", "call_method") else None
    if other is None or not isinstance(node.args[0], fx.Node):
        return None
    return None if _is_seen(node) or _promotes(node) else other


def _is_seen(node: fx.Node) -> bool:
    """Whether somebody else sees what it writes: an input has that memory, or a tensor that is read later."""
    order = {other: at for at, other in enumerate(node.graph.nodes)}
    target = node.args[0]
    sharing = [other for other in order if _memory(other) == _memory(target) is not None]
    return any(
        other.op in ("placeholder", "get_attr")
        or (other not in (target, node) and any(order[user] > order[node] for user in other.users))
        for other in sharing
        if order[other] <= order[node]
    )


def _promotes(node: fx.Node) -> bool:
    """Whether a result of its own could have another dtype."""
    values = [_value(arg) for arg in node.all_input_nodes]
    return any(isinstance(value, Tensor) and value.dtype is not _value(node).dtype for value in values)


def _memory(node: Any) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _value(node: Any) -> Any:
    return node.meta.get("example_value")
