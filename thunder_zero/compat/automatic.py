"""needed while: Thunder does not know all operators that dynamo captures.

Registers those of a graph that it does not know, as it does with many itself. Torch computes them, and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import (
    ensure_recursive_proxies,
    record_source_loc_in_symbol_header,
    register_general_jit_lookaside,
)
from thunder.core.langctxs import Languages, resolve_language
from thunder.torch import _torch_to_thunder_function_map, register_default_torch_op

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
    """Register the operators, written in C++, that Thunder does not know; what is written in Python, it traces.

    Args:
        graph: of dynamo.
    """
    methods = vars(torch._C.TensorBase)
    graphs = [
        module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)
    ]  # and checkpoints' bodies
    for node in (node for each in graphs for node in each.nodes):
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
