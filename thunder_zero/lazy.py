"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import getsource
from typing import Any

Ask = Callable[[str], Any]


def lazy(package: str) -> tuple[Ask, Callable[[], list[str]], list[str]]:
    """The ``__getattr__``, ``__dir__`` and ``__all__`` of a package, whose names are those that its source imports
    under ``if TYPE_CHECKING``: what a type checker reads is what there is."""
    tree = ast.parse(getsource(sys.modules[package]))
    lines = (line for block in tree.body if isinstance(block, ast.If) for line in block.body)
    homes = {one.name: str(line.module) for line in lines if isinstance(line, ast.ImportFrom) for one in line.names}

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_elsewhere(package, name)}")
        is_module = homes[name] == package
        found = import_module(f"{package}.{name}") if is_module else getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return look_up, lambda: sorted({*homes, "__all__", "__doc__", "__file__", "__name__", "__path__"}), sorted(homes)


def _elsewhere(package: str, name: str) -> str:
    """Which of our packages has the name; nothing of a module, which ``from package import module`` asks for first."""
    if name.startswith("_") or find_spec(f"{package}.{name}") is not None:
        return ""
    others = (f"thunder_zero.{part}" if part else "thunder_zero" for part in ("", "tools", "schedule"))
    found = [other for other in others if other != package and name in import_module(other).__all__]
    return f"; it is {found[0]}.{name}" if found else ""
