"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """The ``__getattr__`` and the ``__all__`` of a package.

    Args:
        package: its dotted name.
        names: by module, the names that the package has from it, separated by spaces; none for the module itself.
    """
    homes = {name: (module, name) for module, listed in names.items() for name in listed.split()}
    homes |= {module.rpartition(".")[2]: (module, "") for module, listed in names.items() if not listed}

    def getattribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, inside = homes[name]
        found = getattr(import_module(home), inside) if inside else import_module(home)
        setattr(sys.modules[package], name, found)
        return found

    return getattribute, sorted(homes)
