"""Writes a trace as a Python function, each line once.

In: a trace. Out: a function. Thunder's ``python_callable`` formats each line fifteen times. The function calls torch's
operators by names that are bound here: looking an operator up in ``torch.ops`` and passing its ``__call__`` takes as
long as a view, and most lines are views. Tracebacks show the text.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch

from thunder_zero.traces.operators import bind_operators

import thunder
from thunder.core.baseutils import build_callable, is_base_printable
from thunder.core.codeutils import module_shortname
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx

HEADER = ("from thunder.executors.torchex import no_autocast", "@torch.no_grad()", "@no_autocast")


def function_of(trace: TraceCtx) -> Callable[..., Any]:
    """Return the trace as a function that runs without gradients and without autocast."""
    names: dict[str, Any] = {}  # the globals of the text
    text: list[str] = []
    known: set[Symbol] = set()  # symbols whose names are in ``names``
    signature = trace.siginfo()
    with tracectx(trace):
        text.append(signature.prettyprint(trace=trace, import_ctx=names, object_ctx=names))
        for line in trace.bound_symbols:
            text += _lines(line, names, known)
    names |= {"torch": torch, "thunder": thunder}
    name = signature.name
    source = "\n".join((*HEADER, *text))
    bound_source, operators = bind_operators(source)
    function: Callable[..., Any] = build_callable(name, bound_source, f"thunder.{name}", {**names, **operators})
    filename = unwrap(function).__code__.co_filename
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    return function


def _lines(line: BoundSymbol, names: dict[str, Any], known: set[Symbol]) -> list[str]:
    """Return the text of a line, and add the names that it needs to ``names``. If all arguments are values and plain
    constants, only the line's symbol needs names."""
    parts = line.output, line.args, line.kwargs
    is_plain = all(map(_is_plain, parts)) and not line.header
    if not is_plain or line.sym not in known:
        imports, called, objects = line.gather_ctxs()
        names |= {module_shortname(name): module for name, module in imports.items()} | called | objects
    if not is_plain:
        return list(line.python(indent=1, print_depth=1))
    known.add(line.sym)
    printed = line.sym.python_printer(line, *parts)
    return [f"  {text}" for text in ([printed] if isinstance(printed, str) else printed)]


def _is_plain(part: Any) -> bool:
    if type(part) in (tuple, list):
        return all(map(_is_plain, part))
    if type(part) is dict:
        return all(map(_is_plain, part.values()))
    return isinstance(part, Proxy) or is_base_printable(part)
