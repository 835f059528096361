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

from thunder_zero.compat.dynamo import users_error

NAME = "thunder_zero_from_file"  # of the file among the modules of Python
PACKAGE, TORCH = Path(__file__).parents[1], Path(nn.__file__).parent


def module_and_inputs(place: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return what the function in ``FILE.py:function`` returns: ``(module, input, ...)``."""
    with _imported(place) as function:
        made = function()
    if not isinstance(made, tuple) or len(made) < 2 or not isinstance(made[0], nn.Module):
        got = [type(part).__name__ for part in made] if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"{place} returns {got}; return a tuple of the module and its inputs: (module, input, ...)")
    return made[0], made[1:]


def function_at(place: str) -> Callable[..., Any]:
    """Return the function in ``FILE.py:function``."""
    with _imported(place) as function:
        return function


@contextmanager
def _imported(place: str) -> Iterator[Callable[..., Any]]:
    """Yield the function of a file, which imports others of its folder, as a script does."""
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
        with naming_the_users_line(place):
            spec.loader.exec_module(module)
            yield _function(module, function, name)
    finally:
        sys.path.remove(folder)


@contextmanager
def naming_the_users_line(place: str) -> Iterator[None]:
    """An error of the code in ``place``, made or traced, becomes a ValueError of one sentence with that code's line:
    the last in the file's folder; or else, where torch's own module refuses its input, that of the module."""
    try:
        yield
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except Exception as error:
        folders = Path(place.rpartition(":")[0]).resolve().parent, TORCH
        raised, lines = users_error(error)
        frames = [frame for frame in lines if not _is_ours(Path(frame.filename))]
        found = ([one for one in frames if Path(one.filename).resolve().is_relative_to(at)] for at in folders)
        last = next((some[-1] for some in found if some), None)
        if last is None:
            raise
        what = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
        raise ValueError(f"{last.filename}:{last.lineno}, in {last.name}, `{last.line}`: {what}") from error


def _is_ours(file: Path) -> bool:
    """A library may lie in the folder of the user's file."""
    installed = "site-packages" in file.parts and not file.is_relative_to(TORCH)
    return installed or file.is_relative_to(PACKAGE)


def _function(module: ModuleType, function: str, file: str) -> Callable[[], Any]:
    found = vars(module).get(function)
    if not isinstance(found, FunctionType):
        known = [name for name, one in vars(module).items() if isinstance(one, FunctionType) and one.__module__ == NAME]
        raise ValueError(f"{file} has no function {function!r}; it has {', '.join(known) or 'none'}")
    return found
