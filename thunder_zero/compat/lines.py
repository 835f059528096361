"""needed while: Thunder has no public API for the functions of lines and the shapes of inputs.

In: lines, inputs and traces of Thunder. Out: a line that calls a function of ours, an input of another shape, or a
trace with another signature::

    y = zero_all_gather(w)      this name is bound to a function of the model
    def computation(w):         w has the shape of its rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from thunder.core.codeutils import SigInfo
from thunder.core.dtypes import dtype as ThunderDtype
from thunder.core.dtypes import to_weak_dtype
from thunder.core.proxies import TensorProxy
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
    """Return a line that calls a symbol.

    Args:
        symbol: the symbol to call.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        output: the values that the line writes.
        functions: the functions that the text of the line may call, keyed by name.
        lines: the lines inside a fused region.
    """
    return symbol.bind(*args, output=output, subsymbols=tuple(lines), _call_ctx=dict(functions), **kwargs)


def with_functions(line: BoundSymbol, functions: Mapping[str, Any]) -> BoundSymbol:
    """Return a line whose text calls ``functions``, keyed by name."""
    return line.from_bsym(_call_ctx=dict(functions))


def set_look(proxy: TensorProxy, shape: tuple[int, ...], dtype: ThunderDtype, device: Any, *, is_number: bool) -> None:
    """Set the shape, dtype and device of an input in place, since all lines of a trace share it.

    ``is_number`` is True if the input has no dimensions. For type promotion, Thunder treats the input as a number.
    """
    proxy._shape, proxy._dtype, proxy._device = shape, dtype, device
    proxy._numel = prod(shape)  # Thunder stores it separately
    proxy._true_dtype = to_weak_dtype(dtype) if is_number else dtype


def set_signature(trace: TraceCtx, name: str, args: Iterable[str]) -> None:
    """Set the name and the arguments of the function that a trace prints."""
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(arg, None) for arg in args]
