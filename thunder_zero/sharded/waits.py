"""Times the waits of collectives, and labels them while torch's profiler runs.

On CUDA a :class:`Moment` has an event in the device's stream, so that the clock does not synchronize the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.compat.private import at_end_of_backward, running_backward
from thunder_zero.plan.mesh import SHARD
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.names import launch_label, unit_label, wait_label


@dataclass(frozen=True, slots=True)
class Moment:
    host: float  # seconds, of ``time.perf_counter``
    event: torch.cuda.Event | None  # the same point in the device's stream, if it has one

    def until(self, later: Moment) -> float:
        if self.event is None or later.event is None:
            return later.host - self.host
        later.event.synchronize()
        milliseconds: float = self.event.elapsed_time(later.event)
        return milliseconds / 1000


@dataclass(frozen=True, slots=True)
class Waited:
    path: str  # the path of the bucket's first parameter
    gather: bool  # True for a gather, False for a reduction
    called: Moment  # the start of the wait
    returned: Moment  # the end of the wait


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: list[Waited] | None = None

    def now(self) -> Moment:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        return Moment(time.perf_counter(), event)

    @contextmanager
    def running(self) -> Iterator[list[Waited]]:
        """Yield a list, and add the wait of each collective that is launched inside the block."""
        waits = self._waits = []
        try:
            yield waits
        finally:
            self._waits = None

    def watch(self, handle: Waitable, path: str, *, gather: bool) -> Waitable:
        """Return a handle that also records its wait. If the clock is stopped, return ``handle``."""
        if (waits := self._waits) is None:
            return handle

        def wait() -> tuple[Tensor, ...]:
            called = self.now()
            results = handle.wait()
            waits.append(Waited(path, gather, called, self.now()))
            return results

        return WaitsBy(wait)


NOTHING = nullcontext()


def label_launch(kind: str, paths: Sequence[str], over: str = SHARD) -> AbstractContextManager[object]:
    return record_function(launch_label(kind, paths, over)) if profiler._is_profiler_enabled else NOTHING


class Labels:
    """The labels of one model's waits and of the current unit.

    A unit's label begins after the wait for its gather. The label ends before the wait for another unit's gather, at
    the end of a phase, or after backward has launched the unit's last reduction. A label must end in the profile in
    which it began, since torch's profiler frees the label with that profile.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open: record_function | None = None
        self._unit = ""
        self._pending: set[str] = set()  # parameters of the current unit whose gradients are not computed yet

    def watch(self, handle: Waitable, kind: str, paths: Sequence[str], over: str = SHARD) -> Waitable:
        """Return a handle that also labels its wait. If no profiler runs, return ``handle``."""
        if not profiler._is_profiler_enabled:
            return handle
        unit = self._plan.by_name[paths[0]].unit

        def wait() -> tuple[Tensor, ...]:
            if kind == "gather" and (self._open is None or self._unit != unit):
                self.end()
            with record_function(wait_label(kind, paths, over)):
                results = handle.wait()
            if kind == "gather":
                self.begin(unit)
            return results

        return WaitsBy(wait)

    def begin(self, unit: str) -> None:
        if self._open is not None and unit == self._unit:
            return
        self.end()
        self._unit = unit
        self._pending = {param.path for param in self._plan.params if param.unit == unit and param.requires_grad}
        self._open = record_function(unit_label(unit))
        self._open.__enter__()
        if running_backward() >= 0:  # backward may launch the unit's reductions before it waits for the gather
            at_end_of_backward(self.end)

    def gradients_are_made(self, paths: Iterable[str]) -> None:
        """Record that backward has computed these gradients. End the label after the unit's last gradient."""
        if self._open is not None:
            self._pending.difference_update(paths)
            if not self._pending:
                self.end()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
