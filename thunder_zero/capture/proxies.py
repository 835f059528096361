"""Names and proxies of a trace's values, from PyTorch's joint graph.

In: a node of the joint graph, with its fake tensor or symbol. Out: a name from the user's code, and a proxy in the
trace that is being written. Names are for readers: no code depends on a name::

    q, k = self.qk(x).split(8, -1)          h_0_qk = aten.addmm(h_0_qk_bias, x, h_0_qk_weight_t)
    y = F.silu(q.view(4, 2, 4))       ->    (q, k) = aten.split(h_0_qk, 8, -1); q_view = aten.view(q, [4, 2, 4])
    heads = self.out(y * 2).view(8, 4)      y = aten.silu(q_view); mul = aten.mul(y, 2); heads = aten.addmm(...)

    'h.0.w', FakeTensor(8, 4)         ->    TensorProxy h_0_w, shape (8, 4)
    's0', SymInt                      ->    IntegerProxy s0, whose value is that of the captured call

A value has the name of the user's variable, if there is one. Otherwise it has the first available name of this list:

- the variable of a view of the value, if a single line reads the view, since printing folds the view into its reader
- the path of the torch module whose call returns it
- the function that computes it
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import getitem
from typing import Any

import torch
from torch import SymFloat, Tensor, fx
from torch.types import py_sym_types

from thunder_zero.compat.aot import Joint
from thunder_zero.compat.aot.nodes import hint, is_backward, module_of, users_value, variable_of
from thunder_zero.compat.dynamo import users_line
from thunder_zero.traces.operators import is_view
from thunder_zero.traces.symbols import SymbolicShape, first_free, free_name

from thunder.core.devices import to_device
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import CONSTRAINT, FloatProxy, IntegerProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx

device_of = cache(to_device)  # cached, because it parses a device's name for each value


@dataclass
class Proxies:
    """The proxies of the trace that is being written. ``values`` maps their names to fake values."""

    values: dict[str, Any] = field(default_factory=dict)

    def make(self, name: str, value: Any) -> Any:
        """Return a proxy of a tensor or symbol, with sizes from the captured call, and any other value unchanged."""
        if not isinstance(value, (Tensor, *py_sym_types)):
            return value
        proxy: Proxy
        if isinstance(value, Tensor):
            proxy = TensorProxy(
                free_name(name),
                shape=tuple(map(hint, value.shape)),
                device=device_of(value.device),
                dtype=to_dtype(value.dtype),
                requires_grad=False,
            )
        else:
            kind = FloatProxy if isinstance(value, SymFloat) else IntegerProxy
            proxy = kind(free_name(name), value=hint(value), constraint=CONSTRAINT.DYNAMIC)
        self.values[proxy.name] = value
        return proxy

    def numbers(self, args: Sequence[Any]) -> dict[str, NumberProxy]:
        return {str(self.values[arg.name]): arg for arg in args if isinstance(arg, NumberProxy)}

    def sizes(self, tensors: Sequence[str], numbers: Mapping[str, NumberProxy]) -> dict[str, tuple[int | str, ...]]:
        """Return a mapping from inputs to shapes. A symbolic size becomes the name of the input that is this number."""
        names = {symbol: number.name for symbol, number in numbers.items()}
        return {
            tensor: tuple(
                size if type(size) is int else names.get(str(size), str(size)) for size in self.values[tensor].shape
            )
            for tensor in tensors
        }

    def symbolic_shapes(self, numbers: Mapping[str, NumberProxy]) -> dict[str, SymbolicShape]:
        """Return a mapping from the names of values to their shapes, for shapes with symbols."""
        return {
            name: SymbolicShape(tuple(map(str, value.shape)), numbers)
            for name, value in self.values.items()
            if isinstance(value, Tensor) and any(isinstance(size, py_sym_types) for size in value.shape)
        }


def append(line: BoundSymbol) -> None:
    get_tracectx().bound_symbols.append(line)


def fill(tree: Any, proxies: Mapping[fx.Node, Any]) -> Any:
    """Return arguments with proxies in place of nodes, and in plain collections, since Thunder prints no others."""
    match tree:
        case fx.Node():
            return proxies[tree]
        case slice():
            return slice(*(fill(part, proxies) for part in (tree.start, tree.stop, tree.step)))
        case dict():
            return {key: fill(item, proxies) for key, item in tree.items()}
        case list():
            return [fill(item, proxies) for item in tree]
        case tuple() if type(tree) is not torch.Size:
            return tuple(fill(item, proxies) for item in tree)
    return tree


def source_of(node: fx.Node) -> tuple[str | None, dis.Positions | None]:
    """Return the user's file and position from which a node comes, or (None, None)."""
    if (line := users_line(node.stack_trace or "")) is None:
        return None, None
    return line[0], dis.Positions(line[1], line[1])


UsersValue = tuple[int, str, int | None]  # dynamo's graph, name of a value, index of an item if it is a tuple
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # operators that return their input


def names_of(joint: Joint) -> dict[fx.Node, str]:
    """Return a mapping from nodes to names. Repeated names are numbered. Views without a variable have no name.

    A value that a checkpoint recomputes in backward is named after its original. Any other line of backward has a name
    only if it returns several values: the name of the line of forward whose gradient it computes.
    """
    nodes = [node for node in joint.graph.graph.nodes if node.op == "call_function"]
    forward = _producers([node for node in nodes if not is_backward(node)])
    recomputed = _producers([node for node in nodes if is_backward(node)])
    unnumbered = _unnumbered_names(joint, forward) | {value: value[1] for value in recomputed if value not in forward}
    names: dict[UsersValue, str] = {}
    used: set[str] = set()
    for value, name in unnumbered.items():
        names[value] = first_free(name, used)
        used.add(names[value])
    # A line of forward has the number of the backward lines that compute its gradient.
    values_by_sequence = {node.meta.get("seq_nr"): users_value(node) for node in nodes if not is_backward(node)}
    result = {node: names[value] for value, node in forward.items() if value in names}
    result |= {node: f"{names[value]}_again" for value, node in recomputed.items() if value in names}
    for node in nodes:
        if is_backward(node) and users_value(node) is None and isinstance(node.meta.get("val"), tuple | list):
            original = values_by_sequence.get(node.meta.get("seq_nr"))
            if original and (*original, None) in names:
                result[node] = f"{names[*original, None]}_backward"
    return result


def _producers(nodes: Sequence[fx.Node]) -> dict[UsersValue, fx.Node]:
    """Return the node that computes each value that dynamo names.

    If a function becomes several lines, the last line computes its value. Any other line is preferred to a view that
    printing folds into its reader.
    """
    producers: dict[UsersValue, fx.Node] = {}
    for node in nodes:
        name = users_value(node)
        if name is None or node.target in (*SAME, getitem):
            continue
        value = (*name, None)
        if value not in producers or is_view(producers[value].target) or not _is_folded(node):
            producers[value] = node
    getters = [(node, users_value(node)) for node in nodes if node.target is getitem]
    parts = {
        (*name, node.args[1]): node for node, name in getters if name and producers.get((*name, None)) is node.args[0]
    }
    return producers | parts  # type: ignore[return-value]


def _unnumbered_names(joint: Joint, producers: Mapping[UsersValue, fx.Node]) -> dict[UsersValue, str]:
    variables = {value: variable_of(node) for value, node in producers.items() if value[2] is None}
    variables |= {value: joint.parts.get(value) for value in producers if value[2] is not None}
    modules = dict(_modules(producers))
    unnumbered: dict[UsersValue, str] = {}
    lending: set[UsersValue] = set()  # views that lend their name to their base
    for value, node in producers.items():
        is_view_alone = is_view(node.target) and not isinstance(node.meta.get("val"), tuple | list)
        view = None if variables[value] or is_view_alone else _view_with_name(node, producers)
        if view is not None:
            lending.add(view)
        function = None if is_view_alone or value[2] is not None else value[1]
        name = variables[value] or (view and view[1]) or modules.get(value) or function
        if name and value not in lending:
            unnumbered[value] = name
    return unnumbered


def _modules(producers: Mapping[UsersValue, fx.Node]) -> Iterator[tuple[UsersValue, str]]:
    """Yield (last value of a call, path of the module) for each call of a torch module."""
    whole = [(value, module_of(node)) for value, node in producers.items() if value[2] is None]
    for path, values in groupby(whole, key=lambda pair: pair[1]):
        if path:
            yield [value for value, _ in values][-1], path


def _view_with_name(node: fx.Node, producers: Mapping[UsersValue, fx.Node]) -> UsersValue | None:
    """Follow the folded views of a node. Return the value of the first view that has a variable, or None."""
    while len(readers := _readers(node)) == 1 and _is_folded(readers[0]):
        node = readers[0]
        name = users_value(node)
        if variable_of(node) and name and producers.get((*name, None)) is node:
            return (*name, None)
    return None


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_backward(user) is is_backward(node)]


def _is_folded(node: fx.Node) -> bool:
    """Return whether printing folds a node: a view that a single line of its phase reads."""
    return is_view(node.target) and len(_readers(node)) == 1 and not is_output(node)


def is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
