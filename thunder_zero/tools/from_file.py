"""Calls a function of a Python file that makes a module and its inputs: ``FILE.py:function``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

NAME = "thunder_zero_from_file"  # of the file among the modules of Python


def module_and_inputs(place: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """What a function returns: ``(module, input, ...)``.

    Args:
        place: ``FILE.py:function``; the file imports others of its folder, as a script does.

    Raises:
        ValueError: there is no function in ``place``; it returns anything else.
        FileNotFoundError: there is no such file.
        RuntimeError: the file or the function raised an error, which is its cause. So its traceback is printed where
            errors of this function are one sentence.
    """
    name, _, function = place.rpartition(":")
    if not name.endswith(".py") or not function:
        raise ValueError(f"{place!r} names no function; give FILE.py:function, such as model.py:build")
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {name}; give FILE.py:function")
    spec = spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{name} cannot be imported; give a Python file")
    module = module_from_spec(spec)
    sys.modules[NAME] = module  # dataclasses look their module up
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        with _own_errors(place):
            spec.loader.exec_module(module)
        make = _function(module, function, name)
        with _own_errors(place):
            made = make()
    finally:
        sys.path.remove(folder)
    if not isinstance(made, tuple) or len(made) < 2 or not isinstance(made[0], nn.Module):
        got = [type(part).__name__ for part in made] if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"{place} returns {got}; return a tuple of the module and its inputs: (module, input, ...)")
    return made[0], made[1:]


@contextmanager
def _own_errors(place: str) -> Iterator[None]:
    """Tells errors of the file from those of this module."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{place} raised {type(error).__name__}: {error}; its traceback is above") from error


def _function(module: ModuleType, function: str, file: str) -> Callable[[], Any]:
    found = vars(module).get(function)
    if not isinstance(found, FunctionType):
        known = [name for name, one in vars(module).items() if isinstance(one, FunctionType) and one.__module__ == NAME]
        raise ValueError(f"{file} has no function {function!r}; it has {', '.join(known) or 'none'}")
    return found
