"""needed while: Thunder takes the result of a C function for a constant.

Thunder interprets Python functions, and calls C functions. Here a call raises if its result may differ in the next call
of forward. A changed state of a random generator also raises::

    str(x)                  a text of a tensor             refused
    random.random()         a random number                refused
    next(self.batches)      an item of an iterator         refused
    max(self.scales)        arguments of a C function      Thunder checks each item (reads.py)
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch

from thunder_zero.compat.thunder.guards import DEFAULTS, Slotted, changes_unseen
from thunder_zero.compat.thunder.patches import Patch, is_ours, note, refuse
from thunder_zero.compat.thunder.reads import INPUTS, OF_MODEL, check_parts, origin_of
from thunder_zero.compat.thunder.unknown_numbers import UNKNOWN, is_unknown

from thunder.core import jit_ext
from thunder.core.interpreter import PseudoInst, do_raise, is_opaque, unwrap
from thunder.core.proxies import TensorProxy

TEXT = (str, repr, format, print)
BY_TYPE = (isinstance, type, callable, id)  # functions whose results depend on types and identities alone
MAKE = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
STEPS = (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR)

_find_lookaside = jit_ext.general_jit_lookaside


def find_lookaside(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return Thunder's lookaside for a call, or raise inside forward if the result is not constant."""
    if (reason := _changes(fn, args)) is not None and (error := refuse(reason)) is not None:
        return do_raise(error)
    if "fn" in kwargs:  # the name of an argument of Thunder's function, which reads no names
        kwargs = {f"{name}_": value for name, value in kwargs.items()}
    if isinstance(fn, FunctionType) and any(isinstance(value, list | dict | set) for value in _defaults(fn)):
        for name in DEFAULTS:
            note(fn, Slotted(fn), name)
    lookaside = _find_lookaside(fn, *args, **kwargs)
    reads_nothing = fn is object.__init__ or getattr(fn, "__name__", "") == "__get__"  # these read no arguments
    if lookaside is None and is_opaque(fn) and not reads_nothing and is_ours():
        for arg in args:
            check_parts(arg, set())
    return lookaside


def _defaults(fn: FunctionType) -> tuple[Any, ...]:
    return (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())


def _changes(fn: Any, args: Sequence[Any]) -> str | None:
    """Return the reason why the result of a call may differ in the next call of forward, or None."""
    values = [unwrap(arg) for arg in args]
    if any(fn is function for function in TEXT) and any(isinstance(value, TensorProxy) for value in values):
        return f"forward makes a text of a tensor ({fn.__name__}), whose values nobody knows before the program runs"
    is_factory = any(fn is function for function in MAKE)
    is_factory = is_factory or getattr(fn, "__qualname__", "").startswith("_VariableFunctions")
    if is_factory and any(map(is_unknown, values)) and not any(isinstance(value, TensorProxy) for value in values):
        return UNKNOWN
    if not isinstance(fn, FunctionType | MethodType) and not any(fn is known for known in BY_TYPE):
        for arg, value in zip(args, values, strict=True):
            origins = INPUTS if not isinstance(value, Iterator) else (*INPUTS, *OF_MODEL)
            if changes_unseen(value) and arg.provenance.inputs and origin_of(arg, *STEPS) in origins:
                name = type(value).__name__
                return f"forward reads a value of type {name}, and every later call would get what it has now"
    kind: Any = type(values[0]) if values else object
    generator = _generator_of(kind)
    if generator and hasattr(kind, getattr(fn, "__name__", "")) and (generator == "NumPy" or is_opaque(fn)):
        return draws_by(generator)
    return None


# Random numbers.


def draws_by(kind: str) -> str:
    """Return the error message for a forward that draws random numbers."""
    return f"forward draws random numbers by {kind}, and every later call would get the first ones"


def generators() -> dict[str, Any]:
    """Return the states of the global generators of ``random`` and ``numpy.random``."""
    states: dict[str, Any] = {"Python": random.getstate()}
    if "numpy" in sys.modules:
        states["NumPy"] = pickle.dumps(sys.modules["numpy"].random.get_state(legacy=False))
    return states


def moved(before: dict[str, Any]) -> str | None:
    """Return the kind of a generator whose state changed, or None."""
    now = generators()
    return next((kind for kind, state in before.items() if now[kind] != state), None)


@cache
def _generator_of(kind: Any) -> str | None:
    """Return the kind of a class of random generators, or None for other classes."""
    if issubclass(kind, random.Random):
        return "Python"
    return "NumPy" if str(kind.__module__).startswith("numpy.random") else None


PATCHES = (Patch(jit_ext, "general_jit_lookaside", find_lookaside),)
