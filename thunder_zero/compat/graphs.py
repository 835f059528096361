"""Makes graphs of dynamo fit for Thunder.

In: a graph that dynamo captured, before it becomes a trace. Out: one that Thunder traces, or trains, as torch does.
``frontends/dynamo`` registers operators when it keeps a graph, and asks for a function's or an operation's replacement
where it copies the nodes of one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import multi_head_attention_forward

from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import (
    ensure_recursive_proxies,
    record_source_loc_in_symbol_header,
    register_general_jit_lookaside,
)
from thunder.core.langctxs import Languages, resolve_language
from thunder.torch import _torch_to_thunder_function_map, register_default_torch_op

# needed while: Thunder fails on its one operator for ``multi_head_attention_forward``.


@cache
def attention_in_python() -> FunctionType:
    """Another function of the same code, which Thunder traces."""
    of = multi_head_attention_forward
    function = FunctionType(of.__code__, of.__globals__, "attention", of.__defaults__)
    function.__module__ = __name__
    return function


# needed while: Thunder does not know all operators that dynamo captures.
# Registers those of a graph that it does not know, as it does with many itself. Torch computes them, and their
# gradients.

THUNDER = resolve_language(Languages.TORCH)  # it knows some methods, such as float, by their names alone
HOMES = (torch, torch.nn.functional, torch._C._nn, torch.special, torch.linalg, torch.fft)


def symbol_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Thunder's symbol for a function of torch; None if it has none."""
    found: Callable[..., Any] | None = _torch_to_thunder_function_map.get(function)
    return found


def has_method(name: str) -> bool:
    """Whether Thunder's proxies of tensors have a method of torch's."""
    found: bool = THUNDER.has_method(name)
    return found


def register(graph: fx.GraphModule) -> None:
    """Register the operators, written in C++, that Thunder does not know; what is written in Python, it traces."""
    methods = vars(torch._C.TensorBase)
    bodies = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]  # checkpoints', too
    for node in (node for body in bodies for node in body.graph.nodes):
        if node.op == "call_function" and isinstance(node.target, BuiltinFunctionType):
            _register(node.target, HOMES)
        elif node.op == "call_method" and node.target in methods and not has_method(node.target):
            _register(methods[node.target], (torch.Tensor,))


def _register(operator: Callable[..., Any], homes: tuple[Any, ...]) -> None:
    name = operator.__name__
    if operator in _torch_to_thunder_function_map or name.endswith("_"):
        return
    for home in homes:
        if getattr(home, name, None) is operator:
            register_default_torch_op(operator, home)
            symbol = _torch_to_thunder_function_map[operator]
            traced = ensure_recursive_proxies(interpreter_needs_wrap(record_source_loc_in_symbol_header(symbol)))
            register_general_jit_lookaside(operator)(traced)
            return


# needed while: Thunder writes over values that backward reads.
# Rewrites operations in place of a graph as out of place, where nobody sees the difference:
#
#     w /= w.sum(-1, keepdim=True)      ->      w = w / w.sum(-1, keepdim=True)

_OPERATORS = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
OPERATORS: dict[Any, Callable[..., Any]] = {
    getattr(operator, f"i{name.removesuffix('_')}"): getattr(operator, name) for name in _OPERATORS.split()
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
