"""needed while: Thunder has no public API for the functions of lines and the signature of a trace.

::

    y = zero_all_gather(w)      this name is bound to a function of the model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thunder.core.codeutils import SigInfo
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx


def bind(
    symbol: Symbol,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    output: Any,
    functions: Mapping[str, Any],
    lines: Iterable[BoundSymbol] = (),
) -> BoundSymbol:
    """Return a line whose text calls ``functions``, keyed by name. A fused region has ``lines`` inside."""
    return symbol.bind(*args, output=output, subsymbols=tuple(lines), _call_ctx=dict(functions), **kwargs)


def with_functions(line: BoundSymbol, functions: Mapping[str, Any]) -> BoundSymbol:
    """Return a line whose text calls ``functions``, keyed by name."""
    return line.from_bsym(_call_ctx=dict(functions))


def set_signature(trace: TraceCtx, name: str, args: Iterable[str]) -> None:
    """Set the name and the arguments of the function that a trace prints."""
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(arg, None) for arg in args]
