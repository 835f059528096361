"""needed while: Thunder looks builtins up by code that it interprets.

Spares its interpreter most of its work, by answers that take no interpreted code: what a builtin such as ``len`` is,
and that a collection is empty, where Thunder looks ten builtins up; ``nn.Module.__call__`` asks that of eight
collections of hooks. More than half of the time to interpret a module goes there. Neither answer is in a trace or a
guard, so both stay as they are.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from thunder_zero.compat.imports import known

from thunder.core import interpreter

COLLECTIONS = (dict, OrderedDict, list, tuple, set, frozenset)

Ask = Callable[..., Any]
THUNDERS: tuple[Ask, Ask] = (interpreter.globals_lookup, interpreter._default_lookaside_map[bool])


def globals_lookup(globals_dict: Any, name: Any) -> Any:
    """What a global name stands for: a builtin at once, anything else as Thunder finds it."""
    names, wanted = interpreter.unwrap(globals_dict), interpreter.unwrap(name)
    if wanted not in names and names.get("__builtins__") in (builtins, vars(builtins)):
        found = vars(builtins).get(wanted)
        if callable(found):
            return interpreter.wrap_const(found)
    return THUNDERS[0](globals_dict, name)


def is_true(value: Any) -> Any:
    """``bool(value)``: False at once for an empty collection of Python's own, anything else as Thunder finds it."""
    plain = interpreter.unwrap(value)
    if type(plain) in COLLECTIONS and not plain:
        return interpreter.wrap_const(False)
    return THUNDERS[1](value)


def _install(lookup: Ask, truth: Ask) -> None:
    """Make Thunder's interpreter look globals up, and test for truth, with these functions."""
    interpreter.globals_lookup = lookup
    interpreter._default_lookaside_map[bool] = truth


@contextmanager
def left_out() -> Iterator[None]:
    """Thunder interprets as it does alone, inside the block."""
    before = interpreter.globals_lookup, interpreter._default_lookaside_map[bool]
    _install(*THUNDERS)
    try:
        yield
    finally:
        _install(*before)


def install() -> None:
    """Let Thunder's interpreter take the short ways from now on, where it is a version that they are known for."""
    if known("lightning-thunder"):
        _install(globals_lookup, is_true)
