"""needed while: Thunder has no hook around the trace of a model.

Applies this folder's workarounds while Thunder interprets forward of a model of ours, and while it transforms the
trace. ``thunder.jit`` creates two functions for each model, which are wrapped here::

    acquire_initial_trace                      interprets forward; we raise if the trace would be wrong
    apply_transforms_and_build_cache_entry     autodiff, our passes, fusers

A plain ``thunder.jit`` creates other functions, so its models are not affected.
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
    """Follows Thunder's traces of one model. ``findings`` has the reports of the last trace."""

    findings: Findings = field(default_factory=Findings)

    def follow(self, model: ThunderModule) -> None:
        """Apply this folder's workarounds whenever Thunder traces the model."""
        data = compile_data(model)
        wrappers = {"acquire_initial_trace": self._acquire, "apply_transforms_and_build_cache_entry": self._inside}
        for name, wrapper in wrappers.items():
            _cell(data.get_computation_and_inputs, name).cell_contents = partial(wrapper, getattr(data, name))

    def lookups(self) -> tuple[Lookup, ...]:
        """Return the lookups of the last trace, and forget them."""
        return self.findings.lookups.taken()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Replace entries of Thunder's tables inside the block, and collect findings."""
        with replaced(PATCHES), reporting_to(self.findings):
            yield

    def _inside(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.entered():
            return function(*args)

    def _acquire(self, acquire: Callable[..., Any], *args: Any) -> Any:
        """Call Thunder's front end, and raise if its trace would be wrong in the next call.

        Trace twice if forward changes values that it reads, such as a cache that the first trace fills.

        Raises:
            Untraceable: forward branches on values of tensors, draws random numbers, or changes values that it reads.
        """
        changed: dict[str, Any] = {}
        for _ in range(2):
            self.lookups()
            result = self._attempt(partial(self._inside, acquire, *args))
            if not (changed := self.findings.lookups.changed()):
                return result
            if any(isinstance(part, Proxy) for part in tree_iter(list(changed.values()))):
                break  # a second trace would mix its tensors with those of this trace
        raise Untraceable(
            f"forward changes {', '.join(map(repr, changed))}, which it reads, and only calls that compile would do so"
        )

    def _attempt(self, front_end: Callable[[], Any]) -> Any:
        """Call Thunder's front end. Raise the error that our functions reported, even if forward caught it."""
        self.findings.refusal, generator_states = None, opaque_calls.generators()
        try:
            result = front_end()
        except Exception as error:  # forward may have gone on after a refusal
            if self.findings.refusal is None and (reason := numbers.after_a_number(error)) is not None:
                self.findings.refusal = Untraceable(reason)
            if self.findings.refusal is None:
                raise
            raise self.findings.refusal from error
        if (kind := opaque_calls.moved(generator_states)) is not None:
            self.findings.refusal = Untraceable(opaque_calls.draws_by(kind))
        if self.findings.refusal is not None:
            raise self.findings.refusal
        return result


def _cell(function: Any, name: str) -> CellType:
    """Return the cell of a free variable of a function, or of a function that this function wraps."""
    cells: dict[str, CellType] = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        return cells[name]
    wrapped = (cell.cell_contents for cell in cells.values() if isinstance(cell.cell_contents, FunctionType))
    return _cell(next(wrapped), name)
