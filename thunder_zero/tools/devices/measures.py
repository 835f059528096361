"""Measures compute and collectives for calibration.

::

    matmul    float32   131,072 FLOPs        a linear layer's three products, 256 rows by 8
    pointwise           1.5 MiB of traffic   torch.add of two tensors
    gather              64 KiB sent          launch, wait, a burst, and a collective beside compute
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, product
from math import ceil
from time import perf_counter, sleep
from timeit import timeit

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.small_collectives import barrier
from thunder_zero.comm.transport import Transport
from thunder_zero.plan.amounts import name_of

Call = Callable[[], object]

ROWS = 256  # tokens of a batch
WIDTHS = (8, 64, 256, 512, 1024, 2048)  # rows and columns of a square weight
LENGTHS = (16, 64, 256, 512)  # tokens of a sequence
HEADS, HEAD = 8, 64  # number of attention heads, and size of a head
IMAGES = (4, 16, 64)  # height and width of an image
CHANNELS = 32
ELEMENTS = tuple(1 << power for power in (6, 12, 16, 18, 20, 22))  # elements of a float32 tensor
COLUMNS = 512  # columns of a tensor whose rows are reduced or looked up
POOL = 16 << 20  # the most elements of equal-sized tensors together
SHORTEST = 0.002  # the least seconds of a measurement


# A point of a curve: the curve's name, FLOPs of a product or bytes of other work, a function that does the work once,
# and the number of trace lines that a run stands for. Each line has this size.
Measure = tuple[str, float, Call, int]


def measures(dtypes: Sequence[torch.dtype]) -> Iterator[Measure]:
    """Yield the points of compute: matrix products in each dtype, and other work in float32."""
    for dtype in dtypes:
        yield from (_product(width, dtype) for width in WIDTHS)
        yield from (_attention(length, dtype) for length in LENGTHS)
        yield from (_convolution(side, dtype) for side in IMAGES)
    for elements in ELEMENTS:
        yield from _traffic(elements)
    tensor = torch.zeros(8, 8)
    yield "view", 0, lambda: tensor.permute(1, 0), 1


def seconds_of(run: Call, times: int) -> float:
    """Return the mean seconds of a run."""
    return timeit(run, number=times) / times


def enough_times(run: Call) -> int:
    """Return the number of runs that take long enough to measure. The first run is a warm-up."""
    run()
    times = 1
    while (seconds := timeit(run, number=times)) < SHORTEST / 4:
        times *= 2
    return max(1, round(times * SHORTEST / seconds))


def _product(width: int, dtype: torch.dtype) -> Measure:
    """Return the measure of a linear layer's matrix products: forward, input gradient, weight gradient."""
    x, weight, gradient = (torch.randn(shape, width).to(dtype) for shape in (ROWS, width, ROWS))

    def run() -> None:
        F.linear(x, weight), gradient @ weight, gradient.t() @ x

    return f"matmul {name_of(dtype)}", 2 * ROWS * width**2, run, 3


def _attention(length: int, dtype: torch.dtype) -> Measure:
    """Return the measure of causal attention: 2 products of queries and keys in forward, 5 in backward."""
    query, key, value = (torch.randn(1, HEADS, length, HEAD).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.randn(1, HEADS, length, HEAD).to(dtype)

    def run() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    return f"attention {name_of(dtype)}", 7 * 2 * HEADS * length**2 * HEAD / 2, run, 2


def _convolution(side: int, dtype: torch.dtype) -> Measure:
    """Return the measure of a 3 x 3 convolution and its gradients of input and weight."""
    image = torch.randn(2, CHANNELS, side, side).to(dtype).requires_grad_()
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3).to(dtype).requires_grad_()
    gradient = torch.randn(2, CHANNELS, side, side).to(dtype)

    def run() -> None:
        torch.autograd.grad(F.conv2d(image, weight, padding=1), (image, weight), gradient)

    return f"convolution {name_of(dtype)}", 2 * 2 * side**2 * 9 * CHANNELS**2, run, 3


def _traffic(elements: int) -> Iterator[Measure]:
    """Yield the measures of work that is limited by memory traffic.

    As in a step, successive runs read different tensors. They cycle through a pool of tensors.
    """
    tensor_count = max(1, min(16, POOL // (2 * elements)))
    tensors, second_tensors = ([torch.randn(elements) for _ in range(tensor_count)] for _ in range(2))
    nbytes, columns = tensors[0].nbytes, min(COLUMNS, elements)
    rows = [tensor.view(-1, columns) for tensor in tensors]
    table = torch.randn(4096, columns)
    indices = torch.randint(4096, (len(rows[0]),))
    tensor_pairs, matrices = cycle(zip(tensors, second_tensors, strict=True)), cycle(rows)
    yield "pointwise", 3 * nbytes, lambda: torch.add(*next(tensor_pairs)), 1
    yield "reduction", 2 * nbytes, lambda: F.layer_norm(next(matrices), (columns,)), 1
    yield "index", 2 * nbytes, lambda: F.embedding(indices, table), 1
    yield "random", nbytes, lambda: torch.rand(elements), 1


CPU = torch.device("cpu")
SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22))  # bytes that the busiest rank sends
SENT_COLUMNS = 64
BURST = 4  # collectives in a burst, as in a step
OVERLAPPED = 2  # collectives launched together while a rank computes
OVERLAPPED_WIDTH = 1024  # width of products beside collectives: 4 MiB weights pass through caches, as in a step
SMALL = 8  # number of tensors in a bucket of small tensors
TIMES = {"gather": 1, "scatter": 1, "all_reduce": 2}  # factors: bytes sent = factor * (W - 1) / W * payload


class Collectives:
    """Measures a group's collectives. Every rank calls each method. ``points`` has (kind, bytes sent) pairs."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._transport: Transport = transport_for(group, CPU)
        self._starts = {point: self._start_of(*point) for point in product(TIMES, SIZES)}
        self.points = tuple(self._starts)

    def time(self, kind: str, sent: int) -> dict[str, float]:
        """Measure collectives of one size without compute. Return seconds keyed by name.

        ``launch`` is the call that starts a collective. ``finish`` is a wait after all messages have arrived. ``burst``
        is the time from the first launch to the end of the last wait of ``BURST`` collectives.
        """
        start = self._starts[kind, sent]
        barrier(self._group)
        alone = timeit(lambda: start().wait(), number=1)
        barrier(self._group)
        launch, finish = _launch_and_finish(start, 1.3 * alone + 0.002)
        barrier(self._group)
        burst = timeit(lambda: [handle.wait() for handle in [start() for _ in range(BURST)]], number=1)
        return {"launch": launch, "finish": finish, "burst": burst}

    def time_slowdown(self, kind: str, wire: float, held: float) -> float:
        """Return the seconds that a concurrent collective of the largest size adds to compute.

        The collective takes ``wire`` seconds on the wire. ``held``, its launch and wait, is left out.
        """
        start = self._starts[kind, SIZES[-1]]
        left, right = torch.ones(ROWS, OVERLAPPED_WIDTH), torch.ones(OVERLAPPED_WIDTH, OVERLAPPED_WIDTH)
        multiply = partial(torch.mm, left, right)
        compute = partial(timeit, multiply, number=ceil(1.5 * OVERLAPPED * (wire + held) / seconds_of(multiply, 4)))

        def overlapped() -> None:
            handles = [start() for _ in range(OVERLAPPED)]
            compute()
            for handle in handles:
                handle.wait()

        barrier(self._group)
        alone_seconds = timeit(compute, number=1)
        barrier(self._group)
        return (timeit(overlapped, number=1) - alone_seconds) / OVERLAPPED - held

    def seconds_a_tensor(self, kind: str) -> float:
        """Return the seconds that each further tensor adds to the launch and wait of a small bucket."""
        start_one, start_many = (self._start_of(kind, SIZES[0], tensors) for tensors in (1, SMALL))
        barrier(self._group)
        seconds_of_one = sum(_launch_and_finish(start_one, 0.005))
        barrier(self._group)
        return max(sum(_launch_and_finish(start_many, 0.005)) - seconds_of_one, 0.0) / (SMALL - 1)

    def _start_of(self, kind: str, sent: int, tensors: int = 1) -> Callable[[], Waitable]:
        """Return a function that launches a bucket. The busiest rank sends ``sent`` bytes of the bucket."""
        world = self._group.size()
        elements = sent * world / (TIMES[kind] * (world - 1)) / 4  # float32 elements of the full payload
        rows = ceil(elements / SENT_COLUMNS / tensors / world) * world
        shapes = [(rows, SENT_COLUMNS)] * tensors
        shape = (rows // world, SENT_COLUMNS) if kind == "gather" else (rows, SENT_COLUMNS)
        sources: list[Tensor] = [torch.ones(shape) for _ in shapes]
        starts: dict[str, Callable[[], Waitable]] = {
            "gather": lambda: self._transport.all_gather(sources, shapes),
            "scatter": lambda: self._transport.reduce_scatter(sources),
            "all_reduce": lambda: self._transport.all_reduce(sources),
        }
        return starts[kind]


def _launch_and_finish(start: Callable[[], Waitable], pause: float) -> tuple[float, float]:
    """Return the seconds of a launch and of its wait, after a pause in which all messages arrive."""
    before = perf_counter()
    handle = start()
    launch = perf_counter() - before
    sleep(pause)
    return launch, timeit(handle.wait, number=1)
