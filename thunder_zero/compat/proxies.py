"""needed while: Thunder takes several times as long to flatten a line's arguments."""

from __future__ import annotations

from types import NoneType
from typing import Any

from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_iter

SEQUENCES = (tuple, list)
PLAIN = {bool, int, float, str, NoneType}  # types of nearly all other arguments


def proxies_in(tree: Any) -> list[Proxy]:
    """The proxies in the arguments or the output of a line, in order; one for each time it is there."""
    found: list[Proxy] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Proxy]) -> None:
    if isinstance(tree, Proxy):
        found.append(tree)
    elif isinstance(tree, SEQUENCES):
        for item in tree:
            if type(item) not in PLAIN:
                _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)
    elif type(tree) not in PLAIN:  # a slice or a dataclass, say
        found += (leaf for leaf in tree_iter(tree) if isinstance(leaf, Proxy))
