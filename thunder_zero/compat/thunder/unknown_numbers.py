"""needed while: Thunder takes a branch by a number that is unknown before the program runs.

Thunder traces ``.item()`` as a number whose value is None, and takes the branch for None. Here an error is raised where
Python reads the number's value::

    if x.sum().item() > 0:      reads its bool    raises
    isinstance(n, int)          reads its type    returns a value
    x.new_full((2,), n)         reads nothing     is a line of the program
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any

from thunder_zero.compat.thunder.patches import Patch, is_ours, refuse
from thunder_zero.compat.thunder.untraceable import THUNDER

from thunder.core import interpreter, jit_ext, prims
from thunder.core.interpreter import do_raise, interpreter_needs_wrap, unwrap, wrap_const
from thunder.core.proxies import IntegerProxy, NumberProxy, numberproxy

UNKNOWN = (
    "forward decides by a number that it takes out of a tensor (.item()), which nobody knows before the program runs"
)
ASK = (
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__hash__", "__str__", "__format__"),
    *("__round__", "__floor__", "__ceil__", "__trunc__", "__divmod__", "make_static_constrained"),
)

_interpret = jit_ext.thunder_general_jit
_convert = prims.convert_element_type.meta
_is = interpreter._default_opcode_handler_map["IS_OP"]


def is_unknown(value: Any) -> bool:
    """Return whether a number is known only when the program runs."""
    return isinstance(value, NumberProxy) and value.value is None


def after_a_number(error: Exception) -> str | None:
    """Return the reason of Thunder's error if forward called ``.item()``; None for another error.

    Thunder handles few uses of an unknown number, and its own messages rarely say so.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    traces = (frame.f_locals["computation_trace"] for frame in frames if frame.f_code is _interpret.__code__)
    took = any(line.sym.name == "item" for trace in traces for line in trace.bound_symbols)
    is_thunders = Path(frames[-1].f_code.co_filename).is_relative_to(THUNDER)
    return UNKNOWN if took and is_thunders else None


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that raises for unknown numbers, and calls ``method`` for other numbers."""

    def refusing(number: Any, *args: Any) -> Any:
        if is_unknown(number) and (error := refuse(UNKNOWN)) is not None:
            raise error
        return method(number, *args)

    return refusing


def _isinstance(value: Any, cls: Any) -> Any:
    """Return ``isinstance(value, cls)``. The class of a number is its Python type."""
    number = unwrap(value)
    if not isinstance(number, NumberProxy):
        return jit_ext._general_jit_isinstance_lookaside(value, cls)
    return wrap_const(issubclass(number.python_type, unwrap(cls)))


def _converted(a: Any, /, dtype: Any) -> Any:
    """Convert a value with Thunder's function. Keep an unknown number unknown."""
    is_known = not is_unknown(a) or not is_ours()  # Thunder would convert None
    return _convert(a, dtype) if is_known else numberproxy(dtype, None, constraint=a.constraint)


def _is_same_object(inst: Any, /, stack: Any, **kwargs: Any) -> Any:
    """Handle the instruction ``is``. Raise inside forward if it compares an unknown number with True or False."""
    pair = [unwrap(stack.getitem_wrapped(index)) for index in (-2, -1)]
    decides = any(map(is_unknown, pair)) and any(isinstance(value, bool) for value in pair)
    if decides and (error := refuse(UNKNOWN)) is not None:
        return do_raise(error)
    return _is(inst, stack=stack, **kwargs)


_methods = {  # (class of numbers, method) -> our method in its place
    (kind, name): _refusing(getattr(kind, name))
    for kind in (NumberProxy, IntegerProxy)
    for name in ASK
    if hasattr(kind, name)
}
PATCHES = (
    *(Patch(kind, name, method) for (kind, name), method in _methods.items()),
    *(Patch(jit_ext._general_jit_lookaside_map, asks, interpreter_needs_wrap(asks)) for asks in _methods.values()),
    Patch(jit_ext._general_jit_lookaside_map, isinstance, _isinstance),
    Patch(interpreter._default_opcode_handler_map, "IS_OP", _is_same_object),
    Patch(prims.convert_element_type, "meta", _converted),
)
