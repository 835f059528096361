"""needed while: Thunder has no hook around the trace of a model.

Enters this room while Thunder traces a model of ours, and leaves it: when it interprets forward, and when it transforms
what came of that. ``thunder.jit`` makes two functions for each model, in whose places ours stand::

    acquire_initial_trace                      Tracing.acquire: interprets forward, and refuses what would be wrong
    apply_transforms_and_build_cache_entry     autodiff, our passes, fusers

A model of another ``thunder.jit`` has its own two, so nothing of it comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch.utils._pytree import tree_iter

from thunder_zero.compat.thunder import opaque_calls, reads, refused_calls, repairs, shortcuts
from thunder_zero.compat.thunder import unknown_numbers as numbers
from thunder_zero.compat.thunder.guards import Lookup
from thunder_zero.compat.thunder.patches import Findings, Patch, replaced, reporting_to
from thunder_zero.compat.thunder.untraceable import Untraceable

from thunder import compile_data
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy

PATCHES: tuple[Patch, ...] = (
    *(*reads.PATCHES, *opaque_calls.PATCHES, *numbers.PATCHES),
    *(*refused_calls.PATCHES, *repairs.PATCHES, *shortcuts.PATCHES),
)


@dataclass
class Tracing:
    """The traces that Thunder makes of one model, and what was read in the last one."""

    findings: Findings = field(default_factory=Findings)

    def follow(self, model: ThunderModule) -> None:
        """Enter the room whenever Thunder traces this model."""
        data = compile_data(model)
        around = {"acquire_initial_trace": self._acquire, "apply_transforms_and_build_cache_entry": self._inside}
        for name, call in around.items():
            _cell(data.get_computation_and_inputs, name).cell_contents = partial(call, getattr(data, name))

    def lookups(self) -> tuple[Lookup, ...]:
        """Return what forward read in the last trace, once."""
        return self.findings.lookups.taken()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in the room inside the block."""
        with replaced(PATCHES), reporting_to(self.findings):
            yield

    def _inside(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.entered():
            return function(*args)

    def _acquire(self, acquire: Callable[..., Any], *args: Any) -> Any:
        """Call Thunder's front end, unless what it makes would be wrong in the next call.

        What forward fills once, such as a cache of numbers, is not changed by a second attempt.

        Raises:
            Untraceable: forward decides by values, draws random numbers, or changes what it reads.
        """
        changed: dict[str, Any] = {}
        for _ in range(2):
            self.lookups()
            result = self._attempt(partial(self._inside, acquire, *args))
            if not (changed := self.findings.lookups.changed()):
                return result
            if any(isinstance(part, Proxy) for part in tree_iter(list(changed.values()))):
                break  # tensors of this trace, which another one would take for its own
        raise Untraceable(
            f"forward changes {', '.join(map(repr, changed))}, which it reads, and only calls that compile would do so"
        )

    def _attempt(self, front_end: Callable[[], Any]) -> Any:
        self.findings.refusal, drawn = None, opaque_calls.generators()
        try:
            result = front_end()
        except Exception as error:  # maybe of forward, which was refused before, and went on
            if self.findings.refusal is None and (why := numbers.after_a_number(error)) is not None:
                self.findings.refusal = Untraceable(why)
            if self.findings.refusal is None:
                raise
            raise self.findings.refusal from error
        if (kind := opaque_calls.moved(drawn)) is not None:
            self.findings.refusal = Untraceable(opaque_calls.draws_by(kind))
        if self.findings.refusal is not None:
            raise self.findings.refusal
        return result


def _cell(function: Any, name: str) -> CellType:
    """Return a free variable of a function, or of the one that it wraps."""
    cells: dict[str, CellType] = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        return cells[name]
    wrapped = (cell.cell_contents for cell in cells.values() if isinstance(cell.cell_contents, FunctionType))
    return _cell(next(wrapped), name)
