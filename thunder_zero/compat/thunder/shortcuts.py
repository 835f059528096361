"""needed while: Thunder looks builtins up in interpreted code.

Shortens Thunder's work, and changes no trace and no guard. These lookups took more than half of the time to interpret a
module, since ``nn.Module.__call__`` alone reads eight collections of hooks::

    len                     a builtin is found without interpreted code
    if self._hooks:         the truth of an empty collection is found without interpreted code
    a line's arguments      a tree is searched for proxies once, not twice
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
    """Return the value of a global name: a builtin directly, any other value by Thunder's function."""
    namespace, plain_name = interpreter.unwrap(globals_dict), interpreter.unwrap(name)
    if plain_name not in namespace and namespace.get("__builtins__") in (builtins, vars(builtins)):
        builtin = vars(builtins).get(plain_name)
        if callable(builtin):
            return interpreter.wrap_const(builtin)
    return _look_up(globals_dict, name)


def is_true(value: Any) -> Any:
    """Return ``bool(value)``. For an empty Python collection, return False without Thunder's function."""
    plain = interpreter.unwrap(value)
    if type(plain) in COLLECTIONS and not plain:
        return interpreter.wrap_const(False)
    return _is_true(value)


def flatten(tree: Any) -> Any:
    """Return the leaves of a tree, and its structure."""
    # Thunder would search for dataclasses first, which lines rarely have.
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
