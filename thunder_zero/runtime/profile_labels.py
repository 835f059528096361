"""Labels collectives and units by paths of parameters while torch's profiler runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.plan import Plan
from thunder_zero.schedule.names import launch_label, unit_label, wait_label
from thunder_zero.schedule.timeline import Kind

NOTHING = nullcontext()


def launching(kind: Kind, paths: Sequence[str]) -> AbstractContextManager[object]:
    """Inside the block, a launch has its label."""
    return record_function(launch_label(kind, paths)) if profiler._is_profiler_enabled else NOTHING


class Labels:
    """The labels of one model: of its waits, and of the unit that computes.

    A unit's label begins after the wait for its gather. It ends before the wait for another unit's, after forward, or
    where backward has launched the reductions of all of its gradients.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open: record_function | None = None
        self._unit = ""
        self._left: set[str] = set()  # parameters of the open unit whose gradients are not made yet

    def watched(self, handle: Waitable, kind: Kind, paths: Sequence[str]) -> Waitable:
        """The handle; one whose wait is labelled, if a profiler runs."""
        if not profiler._is_profiler_enabled:
            return handle
        unit = self._plan.by_name[paths[0]].unit

        def wait() -> tuple[Tensor, ...]:
            if kind is Kind.GATHER and (self._open is None or self._unit != unit):
                self.end()
            with record_function(wait_label(kind, paths)):
                results = handle.wait()
            if kind is Kind.GATHER:
                self.begin(unit)
            return results

        return WaitsBy(wait)

    def begin(self, unit: str) -> None:
        """The unit computes from here on."""
        if self._open is not None and unit == self._unit:
            return
        self.end()
        self._unit = unit
        self._left = {param.path for param in self._plan.params if param.unit == unit and param.requires_grad}
        self._open = record_function(unit_label(unit))
        self._open.__enter__()

    def gradients_are_made(self, paths: Iterable[str]) -> None:
        """Backward launches the reductions of these, or defers them."""
        if self._open is not None:
            self._left.difference_update(paths)
            if not self._left:
                self.end()

    def end(self) -> None:
        """Nothing of a unit computes from here on, as far as is known."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
