"""needed while: Thunder looks builtins up by code that it interprets.

Spares Thunder work, by answers that are the same: what a builtin such as ``len`` is, and that a collection is empty,
take no interpreted code, where ``nn.Module.__call__`` alone asks that of eight collections of hooks; more than half of
the time to interpret a module goes there. The arguments of a line are searched once for proxies, not twice. No answer
changes a trace or a guard.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict
from dataclasses import is_dataclass
from typing import Any

import optree

from thunder_zero.compat.imports import known
from thunder_zero.compat.thunder.patches import Patch

from thunder.core import interpreter, symbol
from thunder.core.pytree import OPTREE_NAMESPACE

COLLECTIONS = (dict, OrderedDict, list, tuple, set, frozenset)

_look_up, _is_true = interpreter.globals_lookup, interpreter._default_lookaside_map[bool]
_flatten = symbol.tree_flatten_with_dataclass


def globals_lookup(globals_dict: Any, name: Any) -> Any:
    """What a global name stands for: a builtin at once, anything else as Thunder finds it."""
    names, wanted = interpreter.unwrap(globals_dict), interpreter.unwrap(name)
    if wanted not in names and names.get("__builtins__") in (builtins, vars(builtins)):
        found = vars(builtins).get(wanted)
        if callable(found):
            return interpreter.wrap_const(found)
    return _look_up(globals_dict, name)


def is_true(value: Any) -> Any:
    """``bool(value)``: False at once for an empty collection of Python's own, anything else as Thunder finds it."""
    plain = interpreter.unwrap(value)
    if type(plain) in COLLECTIONS and not plain:
        return interpreter.wrap_const(False)
    return _is_true(value)


def flatten(tree: Any) -> Any:
    """The leaves of a tree, and its structure; Thunder first looks for dataclasses, of which a line has hardly any."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=OPTREE_NAMESPACE)
    if any(is_dataclass(leaf) for leaf in leaves):
        return _flatten(tree)
    return leaves, spec


PATCHES = (
    (
        Patch(interpreter, "globals_lookup", globals_lookup),
        Patch(interpreter._default_lookaside_map, bool, is_true),
        Patch(symbol, "tree_flatten_with_dataclass", flatten),
    )
    if known("lightning-thunder")
    else ()
)
