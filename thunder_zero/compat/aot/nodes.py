"""needed while: torch has no public API for the origin of a captured graph's node.

::

    y = self.layer(x).relu()       variable_of     "y"
                                   module_of       "layer"
                                   argument_of     "x", of the placeholder
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.types import py_sym_types

# An argument of forward: its name, or an item of *args and **kwargs.
ARGUMENT = re.compile(r"L\['(\w+)'\](?:\['(\w+)'\]|\[(\d+)\])?")
MEMBER = re.compile(r"\._(modules|buffers|parameters)\['([^']+)'\]")


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


# The user's names


def users_value(node: fx.Node) -> tuple[int, str] | None:
    """Return (graph number, name) of a node's value in dynamo's graph, or None for a line of backward.

    A checkpoint has its own graph. Dynamo names a value after the user's variable, or after the function that computed
    the value.
    """
    sources = node.meta.get("from_node")
    return (sources[0].graph_id, sources[0].name) if sources else None


def variable_of(node: fx.Node) -> str | None:
    """Return the name of the user's variable that holds a node's value, with dynamo's number.

    None if dynamo named the value after a function, or after a variable in torch's own code, as in ``nn.Sequential``.
    """
    value, callers = users_value(node), _modules_of(node)[:-1]
    is_torchs = bool(callers) and callers[-1][1].__module__.startswith("torch.nn.modules.")
    return None if value is None or is_torchs or value[1] == _function_of(node)[0] else value[1]


def module_of(node: fx.Node) -> str | None:
    """Return the path of the module of torch that computes a node, relative to ``self`` in the user's code."""
    is_torchs = isinstance(_function_of(node)[1], type)
    return _modules_of(node)[-1][0].partition("].")[2] or None if is_torchs else None


def _modules_of(node: fx.Node) -> list[tuple[str, type]]:
    return list((node.meta.get("nn_module_stack") or {}).values())


def _function_of(node: fx.Node) -> tuple[str, Any]:
    """Return the name that dynamo gives a node's value without a variable, and the function that computed the value.

    The function is a class if a module of torch computed the value.
    """
    innermost: tuple[str, Any] = (node.meta.get("source_fn_stack") or (("", None),))[-1]
    return innermost


def argument_of(node: fx.Node) -> str | None:
    """Return the user's name of an input of dynamo's graph, if the input is an argument of forward."""
    match = ARGUMENT.fullmatch(_source_of(node))
    if match is None:
        return None
    return match[2] or (f"{match[1]}_{match[3]}" if match[3] else match[1])


def buffer_of(node: fx.Node) -> str | None:
    """Return the path of an input of dynamo's graph, if the input is a buffer or a parameter."""
    members = MEMBER.findall(_source_of(node))
    return ".".join(name for _, name in members) if members and members[-1][0] != "modules" else None


def _source_of(node: fx.Node) -> str:
    """Return dynamo's expression for an input of its graph, such as ``L['x']``."""
    source = node.meta.get("grapharg")
    return "" if source is None else str(source.source.name)


def names_of_parts(graph: fx.GraphModule) -> Iterator[tuple[tuple[int, str, int | None], str]]:
    """Yield the user's names of the items of tuples that functions of dynamo's graph return.

    A name's key is the id of the graph, the name of the tuple, and the index of the item.
    """
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=operator.getitem):
                value, position = node.args
                if isinstance(value, fx.Node) and isinstance(position, int) and node.name != _function_of(node)[0]:
                    yield (id(module.graph), value.name, position), node.name


# Values


def hint(number: Any) -> int | float | bool | None:
    """Return the value of a symbolic number in the call that dynamo captured, or None if it is unknown."""
    value: int | float | bool | None = number
    if isinstance(number, py_sym_types):
        value = None if number.node.is_nested_int() else number.node.hint
    return value


def is_contiguous(value: Tensor) -> bool:
    if value.layout is not torch.strided:
        return False
    shape, strides = (tuple(map(hint, numbers)) for numbers in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()  # type: ignore[arg-type]


def generator_state(like: Tensor) -> Tensor:
    """Return a fake state of the random generator of a fake tensor's device."""
    state = torch.get_rng_state() if like.device.type == "cpu" else torch.empty(16, dtype=torch.uint8)
    with like.fake_mode:  # type: ignore[attr-defined]  # it is a FakeTensor
        return torch.empty(state.shape, dtype=state.dtype)
