"""needed while: Thunder guards no attribute that is None, a collection or an object.

In: reads of forward while Thunder interprets it. Out: reports of reads that Thunder does not check (``guards.py``)::

    self.mask               an attribute of an object that forward did not create
    def inner(): scale      a value in a closure, a global, a default of a function
    max(self.scales)        the items that a C function reads; reading each item lets Thunder check it
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
# Thunder's interpreter leaves these instructions, such as a comparison of lists, to Python.
NATIVE = ("COMPARE_OP", "DICT_UPDATE", "DICT_MERGE")


def origin_of(value: Any, *steps: Any) -> Any:
    """Return the origin of a value: the arguments, the module, or a constant such as a global.

    Return None if forward computed the value, or if its path from the origin has a step that is not in ``steps``.
    """
    origin = value.provenance
    while origin.inputs:
        if origin.inst in MADE or (steps and origin.inst not in steps):
            return None
        origin = origin.inputs[0]
    return origin.inst


def check_parts(value: Any, visited: set[int]) -> None:
    """Make Thunder check the numbers and strings in an argument or attribute that a C function reads.

    ``visited`` has the ids of the parts that were visited.
    """
    plain = unwrap(value)
    if id(plain) in visited or origin_of(value) not in (*INPUTS, *OF_MODEL) or isinstance(plain, (*CHECKED, *OBJECTS)):
        return
    if _is_global(value):  # globals are compared by value, and Thunder cannot read the parts of some globals
        return
    visited.add(id(plain))
    if isinstance(plain, dict | list | tuple):
        value.track_items()
        items = value.item_wrappers
        parts = items.values() if isinstance(items, dict) else items
    else:
        parts = (_interpret_call(getattr, value, wrap_const(name)) for name in attributes_of(plain))
    for part in parts:
        if isinstance(part, WrappedValue):  # not a signal that the attribute cannot be read
            check_parts(part, visited)


def _is_global(value: Any) -> bool:
    """Return whether a value was read from the globals of a function."""
    origin = value.provenance
    while origin.inputs:
        if origin.inst is PseudoInst.LOAD_ATTR and origin.inputs[1].value == "__globals__":
            return True
        origin = origin.inputs[0]
    return False


# Lookasides, a callback and handlers of instructions


def _note_attribute(wrapped: Any, name: Any) -> None:
    if isinstance(holder := unwrap(wrapped), Proxy):
        return
    for owner, namespace in namespaces_of(holder, unwrap(name)):
        if origin_of(wrapped) in OF_MODEL:
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


def _handle_native(handle: Callable[..., Any], inst: Any, /, stack: Any, **kwargs: Any) -> Any:
    if is_ours():
        for index in (-2, -1):
            check_parts(stack.getitem_wrapped(index), set())
    return handle(inst, stack=stack, **kwargs)


_handlers = interpreter._default_opcode_handler_map
PATCHES = (
    Patch(jit_ext._general_jit_lookaside_map, getattr, _get_attribute),
    Patch(jit_ext._general_jit_lookaside_map, hasattr, _has_attribute),
    Patch(jit_ext.general_jit_callbacks, INTERPRETER_CALLBACKS.GLOBAL_CALLBACK, _read_global),
    *(Patch(_handlers, name, partial(_handle_native, _handlers[name])) for name in NATIVE),
)
