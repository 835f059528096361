"""needed while: Thunder looks builtins up by code that it interprets.

Spares Thunder work, by answers that are the same: what a builtin such as ``len`` is, and that a collection is empty,
take no interpreted code, where ``nn.Module.__call__`` alone asks that of eight collections of hooks; more than half of
the time to interpret a module goes there. The signature of a symbol is looked up once, not for each line, and the
arguments of a line are searched once for proxies, not twice. No answer changes a trace or a guard.
"""

from __future__ import annotations

import builtins
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import optree

from thunder_zero.compat.imports import known

from thunder.core import interpreter, symbol
from thunder.core.pytree import OPTREE_NAMESPACE
from thunder.core.symbol import Symbol

SIGNATURES: WeakKeyDictionary[FunctionType, inspect.Signature] = WeakKeyDictionary()
COLLECTIONS = (dict, OrderedDict, list, tuple, set, frozenset)

Ask = Callable[..., Any]


def _now() -> tuple[Ask, Ask, Ask, Ask]:
    """The functions that Thunder uses now, in the order of :func:`_install`."""
    truth: Ask = interpreter._default_lookaside_map[bool]
    return interpreter.globals_lookup, truth, Symbol.normalize, symbol.tree_flatten_with_dataclass


THUNDERS = _now()


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


def normalize(of: Symbol, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a line, by position where they may be, with those that have defaults."""
    assert of.meta is not None
    bound = _signature(of.meta).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _signature(meta: Callable[..., Any]) -> inspect.Signature:
    function = meta.__func__ if isinstance(meta, MethodType) else meta  # whose object, such as a model, may go
    if not isinstance(function, FunctionType):
        return inspect.signature(meta)
    if function not in SIGNATURES:
        SIGNATURES[function] = inspect.signature(meta)
    return SIGNATURES[function]


def flatten(tree: Any) -> Any:
    """The leaves of a tree, and its structure; Thunder first looks for dataclasses, of which a line has hardly any."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=OPTREE_NAMESPACE)
    if any(is_dataclass(leaf) for leaf in leaves):
        return THUNDERS[3](tree)
    return leaves, spec


def _install(lookup: Ask, truth: Ask, bind: Ask, leaves: Ask) -> None:
    """Make Thunder look globals up, test for truth, bind arguments and flatten trees with these functions."""
    interpreter.globals_lookup = lookup
    interpreter._default_lookaside_map[bool] = truth
    Symbol.normalize = bind
    symbol.tree_flatten_with_dataclass = leaves


@contextmanager
def left_out() -> Iterator[None]:
    """Thunder works as it does alone, inside the block."""
    before = _now()
    _install(*THUNDERS)
    try:
        yield
    finally:
        _install(*before)


def install() -> None:
    """Let Thunder take the short ways from now on, where it is a version that they are known for."""
    if known("lightning-thunder"):
        _install(globals_lookup, is_true, normalize, flatten)
