"""Calls ``FILE.py:function``, a user's function that makes a module and its inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import Parameter, signature
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a process that only starts others computes nothing
    from torch import nn

COLLECTS = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
NAME = "thunder_zero_from_file"  # the file's key in sys.modules
PACKAGE, TORCH = Path(__file__).resolve().parents[1], Path(getattr(find_spec("torch"), "origin", "")).parent / "nn"


def module_and_inputs(place: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call the function in ``FILE.py:function``. Return the module and its positional and keyword inputs."""
    from torch import nn

    result = call(place)
    if not isinstance(result, tuple) or len(result) < 2 or not isinstance(result[0], nn.Module):
        types = [type(part).__name__ for part in result] if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"{place} returns {types}; return a tuple of the module and its inputs: (module, input, ...), or (module, "
            f"(input, ...), {{name: input, ...}})"
        )
    module, *inputs = result
    match inputs:
        case [tuple(args), Mapping() as kwargs]:
            return module, args, dict(kwargs)
    return module, tuple(inputs), {}


def function_at(place: str) -> Callable[..., Any]:
    with _imported(place) as function:
        return function


def call(place: str, *args: Any) -> Any:
    """Call the function in ``FILE.py:function`` with those arguments for which it has parameters without defaults.

    Other processes can import this function.
    """
    with _imported(place) as function:
        named = (item for item in signature(function).parameters.values() if item.kind not in COLLECTS)
        needs = [item.name for item in named if item.default is item.empty]
        if missing := needs[len(args) :]:
            raise ValueError(f"{place} cannot be called without {', '.join(missing)}; give its parameters defaults")
        return function(*args[: len(needs)])


@contextmanager
def _imported(place: str) -> Iterator[Callable[..., Any]]:
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
    sys.modules[NAME] = module  # dataclasses look up their module under this key
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
    """Convert an error from running or tracing the user's code to a ValueError that names the user's line.

    The user's line is the traceback's last line in the folder of ``place``, or else its last line in a torch module.
    """
    try:
        yield
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except Exception as error:
        from thunder_zero.compat.dynamo import users_error

        folders = Path(place.rpartition(":")[0]).resolve().parent, TORCH
        raised, lines = users_error(error)
        files = [(frame, Path(frame.filename).resolve()) for frame in lines]
        frames = [(frame, file) for frame, file in files if not _is_ours(file)]
        inside = ([frame for frame, file in frames if file.is_relative_to(folder)] for folder in folders)
        last = next((group[-1] for group in inside if group), None)
        if last is None:
            raise
        message = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
        raise ValueError(f"{last.filename}:{last.lineno}, in {last.name}, `{last.line}`: {message}") from error


def _is_ours(file: Path) -> bool:
    """Return whether a file belongs to this package or to a library, even if it is below the user's folder."""
    installed = "site-packages" in file.parts and not file.is_relative_to(TORCH)
    return installed or file.is_relative_to(PACKAGE)


def _function(module: ModuleType, function: str, file: str) -> Callable[[], Any]:
    value = vars(module).get(function)
    if not isinstance(value, FunctionType):
        functions = (item for item in vars(module).items() if isinstance(item[1], FunctionType))
        known = [name for name, defined in functions if defined.__module__ == NAME]
        raise ValueError(f"{file} has no function {function!r}; it has {', '.join(known) or 'none'}")
    return value
