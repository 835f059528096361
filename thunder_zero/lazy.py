"""Imports the public names of a package when they are first used (PEP 562).

::

    if TYPE_CHECKING:                                               tz.Policy    ->  imports plan/policy.py
        from thunder_zero.plan.policy import Policy as Policy       tz.Polcy     ->  AttributeError
    look_up, list_names, __all__ = lazy(__name__)

The names are the imports that a type checker reads.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data
from typing import Any

GetAttribute = Callable[[str], Any]
PACKAGES = ("thunder_zero", "thunder_zero.tools", "thunder_zero.schedule")  # an error names the one that has a name
ALWAYS = ("__all__", "__doc__", "__file__", "__name__", "__path__")


def lazy(package: str) -> tuple[GetAttribute, Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package, from its source."""
    blocks = (node for node in ast.parse(get_data(package, "__init__.py") or b"").body if isinstance(node, ast.If))
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    homes = {alias.name: str(line.module) for line in imports for alias in line.names}

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
