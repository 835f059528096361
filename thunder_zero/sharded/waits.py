"""Watches the waits of collectives: times them, and labels them while torch's profiler runs.

Each collective's handle passes through the model's :class:`Clock`, which returns it unchanged unless the clock runs.
Moments are those of the device that computes: on CUDA they are events in its stream, so that the host runs ahead as
without a clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.comm.small_collectives import all_gather_object
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.names import launch_label, unit_label, wait_label
from thunder_zero.schedule.timeline import Kind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the work of a device."""

    host: float  # seconds, of ``time.perf_counter``
    event: torch.cuda.Event | None  # the same point in the device's stream, if it has one

    def until(self, later: Moment) -> float:
        """Seconds from this moment to a later one."""
        if self.event is None or later.event is None:
            return later.host - self.host
        later.event.synchronize()
        milliseconds: float = self.event.elapsed_time(later.event)
        return milliseconds / 1000


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait that ran."""

    path: str  # the first parameter of the bucket
    gather: bool  # it ended a gather; otherwise a reduction
    called: Moment  # when compute reached it
    returned: Moment  # when compute went on


class Clock:
    """Notes the waits of one model while it runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: list[Waited] | None = None

    def now(self) -> Moment:
        """The point that the device's work has reached."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        return Moment(time.perf_counter(), event)

    @contextmanager
    def running(self) -> Iterator[list[Waited]]:
        """Note the waits of collectives launched inside of the block, in the list that it yields."""
        waits = self._waits = []
        try:
            yield waits
        finally:
            self._waits = None

    def watched(self, handle: Waitable, path: str, *, gather: bool) -> Waitable:
        """The handle; one that notes its wait, while the clock runs."""
        if (waits := self._waits) is None:
            return handle

        def wait() -> tuple[Tensor, ...]:
            called = self.now()
            results = handle.wait()
            waits.append(Waited(path, gather, called, self.now()))
            return results

        return WaitsBy(wait)


Seconds = dict[str, float]


def computed(waits: Sequence[Waited], expected: Sequence[tuple[str, bool, bool]]) -> tuple[Seconds, Seconds]:
    """Seconds of compute from each gather's wait to the next one's, in forward and in backward of one step.

    The last gather of a phase has none. Waits for reductions in between do not count as compute. A path that is the
    first one of several buckets of a phase gets the shortest time.

    Args:
        waits: the waits that ran.
        expected: the waits of one forward and backward, in order: the first path of the bucket, whether it ends a
            gather, whether it is in backward.

    Raises:
        RuntimeError: other waits ran.
    """
    ran = [_name(wait.path, wait.gather) for wait in waits]
    planned = [_name(path, gather) for path, gather, _ in expected]
    for number, (found, wanted) in enumerate(zip_longest(ran, planned)):
        if found != wanted:
            should = "should not run" if wanted is None else f"should end {wanted}"
            did = "it did not run" if found is None else f"it ended {found}"
            raise RuntimeError(
                f"step() did not run one forward and one backward of the model: wait {number} {should}, but {did}; "
                f"give a step that runs each once"
            )
    gathers = [(at, backward) for at, (_, gather, backward) in enumerate(expected) if gather]
    forward, backward = ([at for at, phase in gathers if phase is wanted] for wanted in (False, True))
    return _between(waits, forward), _between(waits, backward)


def _name(path: str, gather: bool) -> str:
    return f"the {'gather' if gather else 'reduction'} of {path}"


def _between(waits: Sequence[Waited], gathers: Sequence[int]) -> Seconds:
    seconds: Seconds = {}
    for at, following in pairwise(gathers):
        spans = [before.returned.until(after.called) for before, after in pairwise(waits[at : following + 1])]
        path = waits[at].path
        seconds[path] = min(sum(spans), seconds.get(path, sum(spans)))
    return seconds


def mean_over_ranks(values: Sequence[float], group: ProcessGroup) -> list[float]:
    """The mean of each value, added up in rank order, so that all ranks get the same bits; a small collective."""
    return [sum(column) / len(column) for column in zip(*all_gather_object(values, group), strict=True)]


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
