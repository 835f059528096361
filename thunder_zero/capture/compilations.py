"""Reports the shapes that a model is compiled for, and warns if input shapes keep changing.

In: the arguments of each forward, the number of programs before and after the forward, and the programs' shapes. Out:
lines on rank 0's standard error, and one warning on every rank after programs for ``WARN_AFTER`` different shapes::

    compiling Net for (8, 16) ...                                    only on a terminal, after a second
    compiled forward and backward of Net for (8, 16): 2.3 s          at the end, if compiling took a second
"""

from __future__ import annotations

import gc
import inspect
import mmap
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

WARN_AFTER = 4  # different shapes
SECONDS = 1.0  # a compilation that takes less is not reported

Shapes = Mapping[str, torch.Size]


@dataclass
class Compilations:
    name: str  # the name of the module's class
    forward: Callable[..., Any]  # the module's forward, whose signature names inputs
    reports: bool  # True if compilations are reported on standard error
    warned: bool = False  # True once the user was warned of changing shapes
    # pairs of grad mode and input shapes of earlier forwards
    known_calls: set[tuple[Any, ...]] = field(default_factory=set)

    @contextmanager
    def watched(
        self,
        count_programs: Callable[[], int],
        list_shapes: Callable[[], Iterable[Sequence[Shapes]]],
        args: Any,
        kwargs: Any,
    ) -> Iterator[None]:
        """Report a forward inside the block if it compiled a new program.

        On a terminal, a thread also reports a long compilation while it runs. ``list_shapes`` returns the input shapes
        of the programs of each kind. A symbolic size stands for all sizes.
        """
        programs, start = count_programs(), time.monotonic()
        if self.reports and sys.stderr.isatty() and self._is_new(args, kwargs):
            with self._announced(args, kwargs):  # not around each forward: a thread costs a tenth of a millisecond
                yield
        else:
            yield
        if count_programs() > programs:
            self._end(shapes_of_arguments(self.forward, args, kwargs), time.monotonic() - start)
            self._warn(list_shapes())

    @contextmanager
    def _announced(self, args: Any, kwargs: Any) -> Iterator[None]:
        ended = Event()

        def announce() -> None:
            if not ended.wait(SECONDS):
                shapes = shapes_of_arguments(self.forward, args, kwargs)
                print(f"compiling {self.name} for {_listed(shapes)} ...", end="\r", file=sys.stderr, flush=True)

        announcer = Thread(target=announce, daemon=True)
        announcer.start()
        try:
            yield
        finally:
            ended.set()
            announcer.join()

    def _is_new(self, args: Any, kwargs: Any) -> bool:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        key = (torch.is_grad_enabled(), *(value.shape for value in tensors))
        is_new = key not in self.known_calls
        self.known_calls.add(key)
        return is_new

    def _end(self, shapes: Shapes, seconds: float) -> None:
        if self.reports and seconds >= SECONDS:
            phases = "forward and backward" if torch.is_grad_enabled() else "forward"
            report = f"compiled {phases} of {self.name} for {_listed(shapes)}: {seconds:.1f} s"
            print(report, file=sys.stderr, flush=True)

    def _warn(self, kinds: Iterable[Sequence[Shapes]]) -> None:
        """Warn once if the shapes of inputs change from program to program of one kind."""
        sentences = (changing_input(shapes, WARN_AFTER) for shapes in kinds)
        if not self.warned and (sentence := next(filter(None, sentences), None)):
            self.warned = True
            warnings.warn(f"{self.name} was compiled for {WARN_AFTER} shapes: {sentence}", stacklevel=2)


def shapes_of_arguments(forward: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, torch.Size]:
    try:
        bound = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    except TypeError:  # a decorated forward may take arguments that its signature lacks
        bound = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        parts = {name: value}
        if isinstance(value, tuple):
            parts = {f"{name}_{index}": part for index, part in enumerate(value)}
        flat |= value if isinstance(value, dict) else parts
    return {name: value.shape for name, value in flat.items() if isinstance(value, Tensor)}


def _listed(shapes: Shapes) -> str:
    return ", ".join(str(shape) for shape in dict.fromkeys(map(tuple, shapes.values()))) or "its inputs"


def changing_input(shapes: Sequence[Shapes], least: int = 3) -> str | None:
    """Return a sentence about an input that has ``least`` or more shapes in different programs, or None.

    A length that becomes a symbol has two programs. ``shapes`` has the input shapes of each program, keyed by argument
    name or by dynamo's expression for the argument.
    """
    for name in shapes[-1] if shapes else ():
        different = list(dict.fromkeys(_sizes(program[name]) for program in shapes if name in program))
        if len(different) >= least:
            shown = ", ".join(different[-3:])
            return (
                f"input {name} had {len(different)} shapes, the last of them {shown}, and each costs a compilation; "
                f"pad it to a few lengths, or sort batches by length"
            )
    return None


def _sizes(shape: torch.Size) -> str:
    """Return a shape as text, with ``*`` in place of each symbol."""
    sizes = [str(size) if isinstance(size, int) else "*" for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def too_many(module: str, limit: int, shapes: Sequence[Shapes], cause: str | None) -> str:
    """Return a warning that programs are dropped. ``cause`` is the reason why dynamo compiled the last program."""
    action = changing_input(shapes) or "keep what changes from call to call constant"
    reason = f"; the last was compiled because {cause}" if cause else ""
    return (
        f"{module} has {limit} programs of one function, so the one that ran longest ago is dropped whenever another "
        f"is compiled, and compiled again when it is needed{reason}; {action}; thunder_zero.tools.programs(model) "
        f"lists them"
    )


@dataclass(frozen=True)
class Spent:
    """The cost of a compilation."""

    seconds: float = 0.0  # wall-clock time
    # the growth of the process's resident memory; 0 if free memory sufficed, or if there is no ``/proc``
    nbytes: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.nbytes + other.nbytes)


@contextmanager
def metered() -> Iterator[Callable[[], Spent]]:
    """Yield a function that returns the cost of the block. Call the function after the block."""
    start, resident = time.monotonic(), resident_bytes()
    taken: list[Spent] = []
    yield lambda: taken[0]
    taken.append(Spent(time.monotonic() - start, max(0, resident_bytes() - resident)))


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes, or 0 if there is no ``/proc``."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block.

    A compilation creates many long-lived objects, and collections would take a quarter of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
