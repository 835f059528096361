"""Creates the proxies of a joint trace from the values of PyTorch's joint graph.

In: a name, and a fake tensor or a symbol of the joint graph. Out: a proxy of the trace that is being written::

    'h.0.w', FakeTensor(8, 4)      ->   TensorProxy h_0_w, shape (8, 4)
    's0', SymInt                   ->   IntegerProxy s0, whose value is that of the captured call
"""

from __future__ import annotations

import dis
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import SymFloat, Tensor, fx
from torch.types import py_sym_types

from thunder_zero.compat.aot import hint
from thunder_zero.compat.dynamo import users_line
from thunder_zero.frontends.dynamo.names import first_free
from thunder_zero.traces.symbols import SymbolicShape

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
        """Return a mapping from symbols to the arguments that are numbers."""
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


def free_name(name: str) -> str:
    """Return an identifier for a name or path, different from the names of values and of our symbols."""
    name = re.sub(r"\W", "_", name)
    name = name if name.isidentifier() and not name.startswith("zero_") else f"_{name}"
    return first_free(name, get_tracectx().names)


def append(line: BoundSymbol) -> None:
    """Append a line to the trace that is being written."""
    get_tracectx().bound_symbols.append(line)


def rename_last(proxy: TensorProxy, name: str) -> TensorProxy:
    """Rename the output of the last line, and return its new proxy."""
    trace = get_tracectx()
    trace.names.discard(proxy.name)
    renamed = proxy.replace_name(free_name(name))
    trace.bound_symbols[-1] = trace.bound_symbols[-1].from_bsym(output=renamed)
    return renamed


def fill(tree: Any, proxies: Mapping[fx.Node, Any]) -> Any:
    """Return the arguments of a node with proxies in place of nodes.

    Collections become plain Python collections, since Thunder can print no other collections.
    """
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
