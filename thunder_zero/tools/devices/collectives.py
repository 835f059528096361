"""What is measured of collectives: through the transport that carries a step's, as a step uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter, sleep

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.handle import Result, Waitable
from thunder_zero.comm.small_collectives import barrier
from thunder_zero.comm.transport import Transport
from thunder_zero.plan import Param
from thunder_zero.tools.devices.compute import seconds_of

CPU = torch.device("cpu")
SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22))  # bytes that the busiest rank sends
COLUMNS = 64
TRAIN = 4  # launched together, as a step's follow each other
BESIDE = 2  # launched together beside compute
ROWS, WIDTH = 256, 1024  # of the products that run beside collectives: 4 MiB, as a step's weights pass through caches
SMALL = 8  # tensors of a bucket of many
TIMES = {"gather": 1, "scatter": 1, "all_reduce": 2}  # how often (W - 1) / W of the bytes are sent


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one collective.

    Attributes:
        launch: of the call that starts it.
        finish: of the wait, once all has arrived.
        train: of several that were launched together, until the last wait has returned.
    """

    launch: float
    finish: float
    train: float


class Collectives:
    """Measures the collectives of a group, on every rank at the same time; each method is a collective.

    Attributes:
        points: kind and bytes sent of each point, in the order in which all ranks measure them.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._transport: Transport = transport_for(group, CPU)
        self._starts = {point: self._start_of(*point) for point in _points()}
        self.points = tuple(self._starts)

    def timed(self, kind: str, sent: int) -> Timed:
        """Collectives of this size, with nothing beside them."""
        start = self._starts[kind, sent]
        barrier(self._group)
        alone, _ = _clocked(lambda: start().wait())
        barrier(self._group)
        launch, handle = _clocked(start)
        sleep(1.3 * alone + 0.002)  # all has arrived
        finish, _ = _clocked(handle.wait)
        barrier(self._group)
        train, _ = _clocked(lambda: [handle.wait() for handle in [start() for _ in range(TRAIN)]])
        return Timed(launch, finish, train)

    def slows_compute(self, kind: str, wire: float, held: float) -> float:
        """Seconds by which one collective of the largest size, which takes ``wire`` seconds, makes compute longer that
        runs meanwhile, beside the ``held`` seconds of its launch and wait."""
        start = self._starts[kind, SIZES[-1]]
        left, right = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
        once = seconds_of(lambda: left @ right, 4)
        times = ceil(1.5 * BESIDE * (wire + held) / once)

        def compute() -> None:
            for _ in range(times):
                left @ right

        def beside() -> None:
            handles = [start() for _ in range(BESIDE)]
            compute()
            for handle in handles:
                handle.wait()

        barrier(self._group)
        alone, _ = _clocked(compute)
        barrier(self._group)
        together, _ = _clocked(beside)
        return (together - alone) / BESIDE - held

    def seconds_a_tensor(self, kind: str) -> float:
        """By how much each further tensor of a bucket makes its launch and wait longer, at the least bytes."""
        one, many = (self._start_of(kind, SIZES[0], tensors) for tensors in (1, SMALL))
        seconds = []
        for start in (one, many):
            barrier(self._group)
            launch, handle = _clocked(start)
            sleep(0.005)
            seconds.append(launch + _clocked(handle.wait)[0])
        return max(seconds[1] - seconds[0], 0.0) / (SMALL - 1)

    def _start_of(self, kind: str, sent: int, tensors: int = 1) -> Callable[[], Waitable]:
        """A function that launches a bucket of which the busiest rank sends so many bytes."""
        world = self._group.size()
        full = sent * world / (TIMES[kind] * (world - 1)) / 4  # elements of float32
        rows = ceil(full / COLUMNS / tensors / world) * world
        params = [_param((rows, COLUMNS)) for _ in range(tensors)]
        shape = (rows // world, COLUMNS) if kind == "gather" else (rows, COLUMNS)
        sources: list[Tensor] = [torch.ones(shape) for _ in params]
        starts: dict[str, Callable[[Sequence[Tensor], Sequence[Param]], Waitable]] = {
            "gather": self._transport.all_gather,
            "scatter": self._transport.reduce_scatter,
            "all_reduce": self._transport.all_reduce,
        }
        return lambda: starts[kind](sources, params)


def _points() -> Iterator[tuple[str, int]]:
    for kind in TIMES:
        for sent in SIZES:
            yield kind, sent


def _param(shape: tuple[int, ...]) -> Param:
    float32 = torch.float32
    return Param("x", (), shape, float32, float32, float32, True, "", True, False, True)


def _clocked(call: Callable[[], Result]) -> tuple[float, Result]:
    start = perf_counter()
    result = call()
    return perf_counter() - start, result
