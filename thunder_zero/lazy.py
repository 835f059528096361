"""Imports the public names of a package when they are first used (PEP 562).

::

    NAMES = {"thunder_zero.plan.policy": ("Policy", "DDP")}      tz.Policy    ->  imports plan/policy.py
    look_up, list_names, __all__ = lazy(__name__, NAMES)         tz.Polcy     ->  AttributeError

A type checker reads the package's imports under ``if TYPE_CHECKING``. A test compares them with the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

GetAttribute = Callable[[str], Any]
PACKAGES = ("thunder_zero", "thunder_zero.tools", "thunder_zero.schedule")  # an error names the one that has a name
ALWAYS = ("__all__", "__doc__", "__file__", "__name__", "__path__")


def lazy(package: str, names: Mapping[str, tuple[str, ...]]) -> tuple[GetAttribute, Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package, given the names of each module."""
    homes = {name: module for module, exported in names.items() for name in exported}

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_elsewhere(package, name)}")
        is_submodule = homes[name] == package
        value = import_module(f"{package}.{name}") if is_submodule else getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return look_up, lambda: sorted({*homes, *ALWAYS}), sorted(homes)


def _elsewhere(package: str, name: str) -> str:
    """Return the end of an error message: the public package that has a name, or "" if no package has the name."""
    if name.startswith("_") or find_spec(f"{package}.{name}") is not None:  # as in ``from package import module``
        return ""
    others = (other for other in PACKAGES if other != package and name in import_module(other).__all__)
    home = next(others, None)
    return f"; it is {home}.{name}" if home else ""
