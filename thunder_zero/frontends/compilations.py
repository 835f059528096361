"""Says what a model is compiled for, and warns where shapes of inputs change all the time.

In: the arguments of each forward, and how many programs there are before and after it. Out: lines on rank 0's standard
error, a terminal or a log; on every rank one warning, after ``WARN_AFTER`` different shapes::

    compiling Net for (8, 16) ...                                    on a terminal alone, after a second
    compiled forward and backward of Net for (8, 16): 2.3 s          in its place, if it took a second

:func:`too_many` says that programs are dropped, and names what changes in the same words.
"""

from __future__ import annotations

import gc
import inspect
import mmap
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

WARN_AFTER = 4  # different shapes
SECONDS = 1.0  # a compilation that takes less is not mentioned

Shapes = Mapping[str, torch.Size]


@dataclass
class Compilations:
    """The compilations of one model, said on standard error if it ``says`` them.

    Attributes:
        forward: the module's, whose signature names inputs.
        shapes: of the inputs of each forward that compiled something.
        seen: the looks of inputs, for which nobody need look any more.
    """

    name: str
    forward: Callable[..., Any]
    says: bool
    shapes: list[Shapes] = field(default_factory=list)
    warned: bool = False
    seen: set[tuple[Any, ...]] = field(default_factory=set)

    @contextmanager
    def watched(self, made: Callable[[], int], args: Any, kwargs: Any) -> Iterator[None]:
        """A forward, which compiles something if its inputs look new: the number of programs then says whether it did.
        A thread says that it does, once forward takes long."""
        programs, start = made(), time.monotonic()
        if self.says and sys.stderr.isatty() and self._is_new(args, kwargs):
            with self._announced(args, kwargs):  # not each forward: it takes a tenth of a millisecond
                yield
        else:
            yield
        if made() > programs:
            self._end(shapes_of_arguments(self.forward, args, kwargs), time.monotonic() - start)

    @contextmanager
    def _announced(self, args: Any, kwargs: Any) -> Iterator[None]:
        ended = Event()
        announcer = Thread(target=self._announce, args=(ended, args, kwargs), daemon=True)
        announcer.start()
        try:
            yield
        finally:
            ended.set()
            announcer.join()

    def _is_new(self, args: Any, kwargs: Any) -> bool:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        look = (torch.is_grad_enabled(), *(value.shape for value in tensors))
        known = look in self.seen
        self.seen.add(look)
        return not known

    def _announce(self, ended: Event, args: Any, kwargs: Any) -> None:
        if not ended.wait(SECONDS):
            shapes = shapes_of_arguments(self.forward, args, kwargs)
            print(f"compiling {self.name} for {_listed(shapes)} ...", end="\r", file=sys.stderr, flush=True)

    def _end(self, shapes: Shapes, seconds: float) -> None:
        if self.says and seconds >= SECONDS:
            both = "forward and backward" if torch.is_grad_enabled() else "forward"
            what = f"compiled {both} of {self.name} for {_listed(shapes)}: {seconds:.1f} s"
            print(what, file=sys.stderr, flush=True)
        self.shapes.append(shapes)
        self._warn()

    def _warn(self) -> None:
        """Warn once of shapes of inputs that change from compilation to compilation."""
        different = {str(shapes): shapes for shapes in self.shapes}
        if len(different) == WARN_AFTER and not self.warned and (sentence := changed([*different.values()])):
            self.warned = True
            warnings.warn(f"{self.name} was compiled for {WARN_AFTER} shapes: {sentence}", stacklevel=2)


def shapes_of_arguments(forward: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, torch.Size]:
    """The shapes of those arguments that are tensors, by their names in the signature."""
    try:
        bound = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    except TypeError:  # a decorator that takes other arguments than it says
        bound = {f"argument {at}": value for at, value in enumerate(args)} | kwargs
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        parts = {f"{name}_{at}": part for at, part in enumerate(value)} if isinstance(value, tuple) else {name: value}
        flat |= value if isinstance(value, dict) else parts
    return {name: value.shape for name, value in flat.items() if isinstance(value, Tensor)}


def _listed(shapes: Shapes) -> str:
    return ", ".join(str(shape) for shape in dict.fromkeys(map(tuple, shapes.values()))) or "its inputs"


def changed(shapes: Sequence[Shapes]) -> str | None:
    """Which input changes from program to program of one function, and what to do; None if shapes do not. These are by
    the names of arguments, or by the expressions that dynamo has for them."""
    for name in shapes[-1] if shapes else ():
        found = list(dict.fromkeys(tuple(each[name]) for each in shapes if name in each))
        if len(found) > 1:
            shown = ", ".join(map(str, found[-3:]))
            return (
                f"input {name} had {len(found)} shapes, the last of them {shown}, and each costs a compilation; pad it "
                f"to a few lengths, or sort batches by length"
            )
    return None


def too_many(module: str, most: int, shapes: Sequence[Shapes], why: str | None) -> str:
    """Return that programs are dropped, why there are so many, and what to do."""
    what = changed(shapes) or "keep what changes from call to call constant"
    asked = f"; the last was compiled because {why}" if why else ""
    return (
        f"{module} has {most} programs of one function, so the one that ran longest ago is dropped whenever another is "
        f"compiled, and compiled again when it is needed{asked}; {what}; thunder_zero.tools.programs(model) lists them"
    )


@dataclass(frozen=True)
class Spent:
    """What a compilation took.

    Attributes:
        seconds: wall-clock time.
        nbytes: by how much the resident memory of the process grew; 0 where memory that was free sufficed, and where
            the system has no ``/proc``.
    """

    seconds: float = 0.0
    nbytes: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.nbytes + other.nbytes)


@contextmanager
def metered() -> Iterator[Callable[[], Spent]]:
    """Yield a function that says, behind the block, what the block took."""
    start, resident = time.monotonic(), resident_bytes()
    taken: list[Spent] = []
    yield lambda: taken[0]
    taken.append(Spent(time.monotonic() - start, max(0, resident_bytes() - resident)))


def resident_bytes() -> int:
    """Return the resident memory of the process; 0 where the system has no ``/proc``."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside the block: a quarter of a compilation, which makes many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
