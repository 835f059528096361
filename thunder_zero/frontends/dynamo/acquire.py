"""Evaluates a graph of dynamo node by node as Thunder's symbols: no Python is interpreted.

Thunder's own front end would interpret the code that a graph prints as, which takes more than half of a first step::

    linear = torch._C._nn.linear(l_x_, w, None)      ->      linear = ltorch.linear(l_x_, w, None)

Where a node calls what has no symbol, :func:`interpreted` lets Thunder interpret that graph's code.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import getfile
from keyword import iskeyword
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from thunder_zero.compat.graphs import has_method, symbol_of
from thunder_zero.frontends.dynamo.captured import Flat

from thunder import compile_data, compile_stats
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import get_compile_data
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, tensorproxy
from thunder.core.pytree import tree_iter
from thunder.core.trace import TraceCtx, get_tracectx, tracectx
from thunder.core.update_aliases import _is_inplace_op
from thunder.extend import TemporaryExecutor

PYTHONS = ("_operator", "builtins", "math")  # homes of functions that take proxies as they are
NOT_USERS = tuple(f"{folder}/" for folder in (Path(getfile(torch)).parent, Path(__file__).parents[2]))
TAKEN = frozenset(("torch", "thunder", "Tensor", "C0", "C1", "saved_for_backward", "cotangents"))  # by Thunder's traces
FRAME = re.compile(r'File "(.+)", line (\d+)')


class NoSymbol(Exception):
    """A node calls what Thunder has no symbol for."""


@dataclass(frozen=True)
class Acquired:
    """A graph as Thunder's trace, before any transform.

    Attributes:
        trace: returns each tensor of ``returns`` once.
        positions: of its inputs that are the graph's, by their proxies' names, which are in order.
        paths: of its inputs that are parameters.
        constants: its inputs that are tensors of the graph's own.
        returns: what the graph returns: proxies that the trace returns, and constants.
        enables: called without gradients, it turns them on for a part; what the rest makes has none.
    """

    trace: TraceCtx
    positions: Mapping[str, int]
    paths: Mapping[str, str]
    constants: Mapping[str, Tensor]
    returns: Sequence[Any]
    enables: bool = False

    @cached_property
    def writes(self) -> bool:
        """Whether it writes to a tensor in place."""
        return any(_is_inplace_op(line) for line in self.trace.bound_symbols)


def acquire(flat: Flat, inputs: Sequence[Any]) -> Acquired:
    """Evaluate a graph with inputs that look like these; raises NoSymbol if it calls something that has none."""
    trace = TraceCtx()
    with tracectx(trace):
        given = [_input(str(node.target), value) for node, value in zip(flat.placeholders, inputs, strict=True)]
        own = {target: _input(f"t_{target}", value) for target, value in flat.tensors.items()}
        args = [*given, *own.values()]
        for arg in args:
            prims.unpack_trivial(arg, name=arg.name)
        returns = _evaluate(flat, given, {**flat.attributes, **own})
        trace.set_current_source_location(None, None)
        prims.python_return(tuple({value.name: value for value in returns if isinstance(value, Proxy)}.values()))
    trace._siginfo = SigInfo("computation")
    trace._siginfo.args = [(arg.name, None) for arg in args]
    trace.args = args
    positions = {proxy.name: position for position, proxy in enumerate(given)}
    paths = {proxy.name: target for target, proxy in own.items() if target in flat.parameters}
    constants = {proxy.name: flat.tensors[target] for target, proxy in own.items() if target not in flat.parameters}
    return Acquired(trace, positions, paths, constants, returns, flat.enables)


def interpreted(jitted: ThunderModule, flat: Flat, inputs: Sequence[Any]) -> Acquired:
    """As :func:`acquire`, by Thunder's interpreter."""
    data = compile_data(jitted)
    temporary = next(each for each in data.executors_list if isinstance(each, TemporaryExecutor))
    module = flat.module()
    prologue, trace, epilogue = data.acquire_initial_trace(
        module, tuple(inputs), {}, data, compile_stats(jitted), temporary
    )
    positions: dict[str, int] = {}
    paths: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    inputs_of_trace = {arg.name for arg in trace.args}
    for line in prologue.bound_symbols:
        if line.output is None or line.output.name not in inputs_of_trace:
            continue
        if line.sym is prims.unpack_getitem and line.args[0].name == "args":
            positions[line.output.name] = line.args[1]
        elif line.sym is prims.unpack_parameter:
            paths[line.output.name] = line.args[1]
        elif line.sym is prims.unpack_buffer:
            constants[line.output.name] = module.get_buffer(line.args[1])
    return Acquired(trace, positions, paths, constants, epilogue.bound_symbols[-1].args[0], flat.enables)


def _input(name: str, value: Any) -> TensorProxy:
    if not isinstance(value, Tensor):
        raise NoSymbol(f"an input that is a {type(value).__name__}")
    proxy = tensorproxy(value, name=_free(name.replace(".", "_")), history=None)
    if isinstance(value, nn.Parameter):
        proxy.tags.add(ProxyTag.STATIC_MEMORY_LOCATION)
    return proxy


def _free(name: str) -> str | None:
    """The name, if no other value of the trace has it; None: Thunder finds one."""
    is_taken = name in TAKEN or iskeyword(name) or name.startswith("zero_") or get_tracectx().has_name(name)
    return name if name.isidentifier() and not is_taken else None


def _evaluate(flat: Flat, given: Sequence[Any], values: Mapping[str, Any]) -> Any:
    """What the graph returns for these inputs and attributes; its lines go into the trace."""
    env: dict[fx.Node, Any] = dict(zip(flat.placeholders, given, strict=True))
    for node in flat.graph.nodes:
        if node.op == "get_attr":
            env[node] = values[node.target]
        elif node.op == "output":
            return _filled(node.args[0], env)
        elif node.op != "placeholder":
            get_tracectx().set_current_source_location(*source_of(node))
            env[node] = _named(_call(node, _filled(node.args, env), _filled(node.kwargs, env)), node.name)
    raise AssertionError("a graph ends with its output")


def _filled(tree: Any, env: Mapping[fx.Node, Any]) -> Any:
    """The arguments of a node with values in place of nodes, in Python's own collections: Thunder prints no others."""
    match tree:
        case fx.Node():
            return env[tree]
        case slice():
            return slice(*(_filled(each, env) for each in (tree.start, tree.stop, tree.step)))
        case dict():
            return {key: _filled(each, env) for key, each in tree.items()}
        case list():
            return [_filled(each, env) for each in tree]
        case tuple() if type(tree) is not torch.Size:
            return tuple(_filled(each, env) for each in tree)
    return tree


def _call(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target: Any = node.target
    if target is checkpoint:
        return _checkpoint(*args)
    if node.op == "call_method":
        if has_method(target):
            return getattr(args[0], target)(*args[1:], **kwargs)
        target = getattr(Tensor, target, target)
    return _symbol(target)(*args, **kwargs)


def _symbol(target: Any) -> Callable[..., Any]:
    """What computes a function of torch or Python on Thunder's proxies."""
    found: Callable[..., Any] | None = get_compile_data().executor_lookasides.get(target) or symbol_of(target)
    if found is None and isinstance(target, BuiltinFunctionType | type) and target.__module__ in PYTHONS:
        found = target
    if found is None:
        raise NoSymbol(getattr(target, "__qualname__", str(target)))
    return found


def _checkpoint(body: Flat, *args: Any) -> Any:
    """The lines of a checkpoint's body, tagged as Thunder does: backward computes again what the body only uses."""
    trace = get_tracectx()
    trace.push_scope([])
    if body.tensors:
        raise NoSymbol("a checkpoint whose body has tensors of its own")
    result = _evaluate(body, args, body.attributes)
    lines = trace.pop_scope()
    kept = {proxy.name for proxy in tree_iter((args, result)) if isinstance(proxy, Proxy)}
    for proxy in (proxy for line in lines for proxy in line.flat_proxy_outs):
        if proxy.name not in kept:
            proxy.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
    trace.bound_symbols.extend(lines)
    return result


def _named(value: Any, name: str) -> Any:
    """The value under its node's name, as dynamo took it from the user's variable; in place: its line has it."""
    if isinstance(value, TensorProxy) and value._has_weak_name and (free := _free(name)):
        trace = get_tracectx()
        trace.names.discard(value.name)
        trace.add_name(free)
        value._name, value._has_weak_name = free, False
    return value


def source_of(node: fx.Node) -> tuple[str | None, dis.Positions | None]:
    """The user's file and line that a node comes from: the innermost frame that is neither torch's nor ours."""
    frames = [found for found in FRAME.findall(node.stack_trace or "") if not found[0].startswith(NOT_USERS)]
    if not frames:
        return None, None
    filename, line = frames[-1]
    return filename, dis.Positions(int(line), int(line))
