"""needed while: Thunder guards no attribute that is None, a collection or an object.

Reports what forward reads and Thunder has no check for (``guards.py``): attributes of objects that forward did not
make, what closures hold, globals and defaults of functions. Where a function in C reads an argument, such as ``max`` of
a list, Thunder checks no item; it is made to look at each here, and then does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_zero.compat.thunder.guards import CHECKED, OBJECTS, attributes_of, is_fixed, namespaces_of
from thunder_zero.compat.thunder.patches import Patch, is_ours, note

from thunder.core import interpreter, jit_ext
from thunder.core.interpreter import (
    INTERPRETER_CALLBACKS,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    get_interpreterruntimectx,
    unwrap,
    wrap_const,
)
from thunder.core.proxies import Proxy

INPUTS = (PseudoInst.INPUT_ARGS, PseudoInst.INPUT_KWARGS)
OF_MODEL = (PseudoInst.INPUT_FN, PseudoInst.CONSTANT)
MADE = (PseudoInst.OPAQUE, PseudoInst.LOOKASIDE)

_note_global = jit_ext._general_jit_global_callback
# Of these instructions Thunder's interpreter leaves all to Python, such as a comparison of lists.
WHOLE = ("COMPARE_OP", "DICT_UPDATE", "DICT_MERGE")


def origin_of(of: Any, *steps: Any) -> Any:
    """Return what a value is part of: the arguments, the module, or a constant such as a global; None if forward made
    it, or if it was reached by another step than these."""
    origin = of.provenance
    while origin.inputs:
        if origin.inst in MADE or (steps and origin.inst not in steps):
            return None
        origin = origin.inputs[0]
    return origin.inst


def check_parts(value: Any, seen: set[int]) -> None:
    """Let Thunder check the numbers and strings of an argument or attribute that a function in C reads."""
    of = unwrap(value)
    if id(of) in seen or origin_of(value) not in (*INPUTS, *OF_MODEL) or isinstance(of, (*CHECKED, *OBJECTS)):
        return
    if _is_global(value):  # compared by its values; some Thunder cannot look at
        return
    seen.add(id(of))
    if isinstance(of, dict | list | tuple):
        value.track_items()
        items = value.item_wrappers
        parts = items.values() if isinstance(items, dict) else items
    else:
        parts = (_interpret_call(getattr, value, wrap_const(name)) for name in attributes_of(of))
    for part in parts:
        if isinstance(part, WrappedValue):  # not a signal that the attribute cannot be read
            check_parts(part, seen)


def _is_global(of: Any) -> bool:
    origin = of.provenance
    while origin.inputs:
        if origin.inst is PseudoInst.LOAD_ATTR and origin.inputs[1].value == "__globals__":
            return True
        origin = origin.inputs[0]
    return False


# Lookasides, a callback and handlers of instructions.


def _note_attribute(of: Any, name: Any) -> None:
    if isinstance(holder := unwrap(of), Proxy):
        return
    for owner, namespace in namespaces_of(holder, unwrap(name)):
        if origin_of(of) in OF_MODEL:
            note(owner, namespace, unwrap(name))


def _get_attribute(holder: Any, name: Any, *default: Any) -> Any:
    _note_attribute(holder, name)
    return jit_ext._general_jit_getattr_lookaside(holder, name, *default)


def _has_attribute(holder: Any, name: Any) -> Any:
    _note_attribute(holder, name)
    return jit_ext._general_jit_hasattr_lookaside(holder, name)


def _read_global(value: Any, name: str) -> Any:
    namespace = unwrap(get_interpreterruntimectx().frame_stack[-1].globals)
    if name in namespace and not is_fixed(namespace.get("__name__", "")):
        note(namespace, namespace, name)
    return _note_global(value, name)


def _handle_whole(handle: Callable[..., Any], inst: Any, /, stack: Any, **kwargs: Any) -> Any:
    if is_ours():
        for at in (-2, -1):
            check_parts(stack.getitem_wrapped(at), set())
    return handle(inst, stack=stack, **kwargs)


_handlers = interpreter._default_opcode_handler_map
PATCHES = (
    Patch(jit_ext._general_jit_lookaside_map, getattr, _get_attribute),
    Patch(jit_ext._general_jit_lookaside_map, hasattr, _has_attribute),
    Patch(jit_ext.general_jit_callbacks, INTERPRETER_CALLBACKS.GLOBAL_CALLBACK, _read_global),
    *(Patch(_handlers, name, partial(_handle_whole, _handlers[name])) for name in WHOLE),
)
