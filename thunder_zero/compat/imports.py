"""needed while: Thunder's import uses names that newer versions of torch dropped.

Lets Thunder be imported before or after thunder_zero. Thunder's import reads five methods that torch 2.13 dropped. It
also reads ``torch.autograd.Function.apply.__func__``, which is missing since torch 2.15 made ``apply`` a built-in.
Stand-ins exist during the import only, and no program calls the five methods::

    import thunder_zero      inserts a finder in front of Python's finders
    import thunder           adds Tensor.align_as, ... and Function.apply; removes them at the end
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import BuiltinFunctionType, ModuleType
from typing import Any

from looseversion import LooseVersion

DROPPED_METHODS = frozenset(("align_as", "align_to", "has_names", "refine_names", "rename"))
KNOWN = {"torch": "2.13", "lightning-thunder": "0.2.6"}  # versions that need all workarounds of this package
TESTED = {"torch": ("2.13", "2.16"), "lightning-thunder": ("0.2.6", "0.3")}  # (first, below)


def known(package: str) -> bool:
    """Return whether the installed version of torch or Thunder is known to need this package's workarounds."""
    return f"{version(package)}.".startswith(f"{KNOWN[package]}.")


def half_imported(modules: dict[str, Any]) -> bool:
    return "thunder" not in modules and any(name.startswith("thunder.") for name in modules)


def untested(package: str, installed: str) -> str | None:
    first, end = TESTED[package]
    base = installed.partition("+")[0]
    if LooseVersion(first) <= LooseVersion(base) < LooseVersion(end):
        return None
    return (
        f"thunder_zero is tested with {package} >= {first}, < {end}, and this is {installed}; if something fails, "
        f"install a tested version"
    )


def _stand_in(name: str) -> Callable[..., None]:
    def dropped(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"torch {version('torch')} has no Tensor.{name}")

    dropped.__name__ = name  # Thunder compares the name with the one that it registers
    return dropped


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    return super(torch.autograd.Function, cls).apply(*args, **kwargs)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Add what Thunder's import reads to torch inside the block."""
    import torch  # with Thunder, not before: processes that only start others import this module, too

    missing = DROPPED_METHODS - set(dir(torch.Tensor))
    added: list[tuple[Any, str, Any]] = [(torch.Tensor, name, _stand_in(name)) for name in missing]
    if isinstance(torch.autograd.Function.apply, BuiltinFunctionType):
        # Thunder recognises autograd functions by a method in Python, which dynamo cannot trace since torch 2.14.
        added.append((torch.autograd.Function, "apply", classmethod(_apply)))
    for holder, name, value in added:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, _ in added:
            delattr(holder, name)


def let_thunder_import(on_import: Callable[[], None]) -> None:
    """Let a later ``import thunder`` work, and call ``on_import`` once Thunder is imported.

    Thunder is not imported now, since help texts and plans should not wait for the import.
    """
    if half_imported(sys.modules):
        raise ImportError(
            "an earlier `import thunder` failed and left half of it behind; restart Python and "
            "`import thunder_zero` before `import thunder`"
        )
    for package in TESTED:
        if sentence := untested(package, version(package)):
            warnings.warn(sentence, stacklevel=3)
    if "thunder" in sys.modules:
        on_import()
    else:
        sys.meta_path.insert(0, Finder(on_import))


class Finder(MetaPathFinder):
    """A finder that finds Thunder with the other finders, and adds the stand-ins during Thunder's import."""

    def __init__(self, on_import: Callable[[], None]) -> None:
        self._on_import = on_import

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the import spec of Thunder, or None for all other modules."""
        if name != "thunder":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run = partial(_import_with_parts, spec.loader.exec_module, self._on_import)
            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def _import_with_parts(
    import_into: Callable[[ModuleType], None], on_import: Callable[[], None], thunder: ModuleType
) -> None:
    """Import Thunder with the stand-ins in place, and remove our finder."""
    with _stand_ins(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "transformer_engine module not found")  # on every machine without it
        import_into(thunder)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    on_import()
