"""``tz.tools.calibrate``: measures this machine, and the collectives of the calling ranks.

::

    round 1, 2, ...   measures each point in seconds, on all ranks at the same time
      matmul    float32   131,072 FLOPs        a linear layer's three products, 256 rows by 8
      pointwise           1.5 MiB of traffic   torch.add of two tensors
      gather              64 KiB sent          launch, wait, a burst, and a collective beside compute
    device            takes the median over rounds, then the mean over ranks, as curves over sizes

Other work may run between rounds. ``thunder-zero calibrate`` writes the device to a file.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import cycle, product
from math import ceil
from pathlib import Path
from statistics import mean, median
from time import monotonic, perf_counter, sleep
from timeit import timeit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.lost_ranks import speaks_gloo
from thunder_zero.comm.small_collectives import all_gather_object, barrier, broadcast_object_from_rank_0
from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.amounts import name_of
from thunder_zero.tools.devices.device import Device, Link, Points, is_number, rising, save_device, seconds_at
from thunder_zero.tools.printing.progress import show_status

Call = Callable[[], object]
Key = tuple[str, float]  # a curve's name and a size, such as ("gather launch", bytes sent)
# A point of a curve: the curve's name, FLOPs of a product or bytes of other work, a function that does the work once,
# and the number of trace lines that a run stands for. Each line has this size.
Measure = tuple[str, float, Call, int]

DTYPES = (torch.float32, torch.bfloat16)
LEAST_ROUNDS = 3
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

SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22))  # bytes that the busiest rank sends
SENT_COLUMNS = 64
BURST = 4  # collectives in a burst, as in a step
OVERLAPPED = 2  # collectives launched together while a rank computes
OVERLAPPED_WIDTH = 1024  # width of products beside collectives: 4 MiB weights pass through caches, as in a step
SMALL = 8  # number of tensors in a bucket of small tensors
TIMES = {"gather": 1, "scatter": 1, "all_reduce": 2}  # factors: bytes sent = factor * (W - 1) / W * payload


def calibrate(
    seconds: float = 30.0, *, process_group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES
) -> Device:
    """Measure times of compute and communication on this machine, as curves over sizes, for ``tz.tools.estimate``.

    Without a process group, only this CPU is measured. In a group, every rank calls this function. All ranks compute at
    the same time, since they share caches and memory. Collectives use the same transports as a training step. All ranks
    return equal devices. Use as many torch threads as in training. Nothing else should run on the machine.

    >>> device = tz.tools.calibrate(seconds=10)
    >>> tz.tools.estimate(traces, device, loss=loss, optimizer=torch.optim.AdamW).seconds

    Args:
        seconds: how long to measure. There are at least three rounds, so that a median can ignore a disturbed round.
        process_group: a group of the gloo backend (default: the default group, if any).
    """
    group = _group(process_group)
    with doing("calibrate"):
        with nullcontext() if group is None else all_or_none(group, "to calibrate"):
            _require(seconds, dtypes, group)
        calibration, rounds, go_on, end = Calibration(group, dtypes), 0, True, monotonic() + seconds
        with show_status("calibrating:") as show:
            while go_on:
                rounds += 1
                show(f"round {rounds}, {max(end - monotonic(), 0):.0f} s left")
                calibration.round()
                go_on = rounds < LEAST_ROUNDS or monotonic() < end
                if group is not None:  # all ranks run an equal number of rounds
                    go_on = broadcast_object_from_rank_0(go_on, group)
        return calibration.device()


def _group(requested: ProcessGroup | None) -> ProcessGroup | None:
    """Return the requested group, or else the default group; None for a single rank."""
    if requested is None and not has_groups():
        return None
    group = process_group(requested)
    return group if group.size() > 1 else None


def _require(seconds: float, dtypes: Sequence[torch.dtype], group: ProcessGroup | None) -> None:
    if not is_number(seconds) or seconds <= 0:
        raise ValueError(f"seconds is {seconds!r}; give how long to measure, a number above 0")
    if not dtypes or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"dtypes is {dtypes!r}; give floating-point dtypes, such as [torch.float32]")
    if group is not None and not speaks_gloo(group):
        raise ValueError("calibrate measures CPUs on gloo; give a process group of gloo")


def calibrate_to(out: Path, seconds: float) -> None:
    """Measure a device, write it for :func:`thunder_zero.tools.load_device`, and print it."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"cannot write {out}: there is no folder {out.parent}")
    with ExitStack() as stack:
        if "RANK" in os.environ:  # torchrun sets it
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        device = calibrate(seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_device(device, out)
            print(f"{out}: {device}")


class Calibration:
    """Measurements of one process, or of the ranks of a gloo group. Every rank must call each method."""

    def __init__(self, group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self._group = group
        self._measures = [(measure, enough_times(measure[2])) for measure in measures(dtypes)]
        self._collectives = None if group is None else Collectives(group)
        self._seconds: dict[Key, list[float]] = defaultdict(list)

    def round(self) -> None:
        for (name, work, run, lines), times in self._measures:
            if self._group is not None:
                barrier(self._group)  # ranks share caches and memory, so they compute at the same time
            self._seconds[name, work].append(seconds_of(run, times) / lines)
        collectives = self._collectives
        if collectives is None:
            return
        for kind, sent in product(TIMES, SIZES):
            for name, seconds in collectives.time(kind, sent).items():
                self._seconds[f"{kind} {name}", sent].append(seconds)
        for kind in TIMES:
            self._seconds[f"{kind} tensor", 1].append(collectives.seconds_a_tensor(kind))
            medians = [median(self._seconds[f"{kind} {name}", SIZES[-1]]) for name in ("launch", "finish", "burst")]
            launch, finish, burst = medians
            slowdown = collectives.time_slowdown(kind, burst / BURST, launch + finish)
            self._seconds[f"{kind} taken", SIZES[-1]].append(slowdown)

    def device(self) -> Device:
        """Return the device from medians over rounds, averaged over ranks. All ranks return equal devices."""
        seconds = {key: median(rounds) for key, rounds in self._seconds.items()}
        of_ranks = [seconds] if self._group is None else all_gather_object(seconds, self._group)
        return _measured_device({key: mean(rank[key] for rank in of_ranks) for key in seconds}, len(of_ranks))


def _measured_device(seconds: Mapping[Key, float], ranks: int) -> Device:
    points: dict[str, dict[float, float]] = defaultdict(dict)
    for (name, work), measured in seconds.items():
        points[name][work] = measured
    for kind in TIMES if ranks > 1 else ():
        for name in ("taken", "tensor"):
            points[f"{kind} {name}"][0] = 0.0  # these are proportional
        taken, burst = rising(points[f"{kind} taken"].items()), points.pop(f"{kind} burst")
        held = {sent: points[f"{kind} launch"][sent] + points[f"{kind} finish"][sent] for sent in burst}
        points[f"{kind} wire"] = {
            sent: wire_seconds(elapsed, held[sent], seconds_at(taken, sent), BURST) for sent, elapsed in burst.items()
        }
    curves = {name: rising(curve.items()) for name, curve in points.items()}
    wire = curves.get("gather wire", ((0.0, 0.0), (1e9, 1.0)))
    products = {name.removeprefix("matmul "): curve for name, curve in curves.items() if name.startswith("matmul ")}
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # torchrun's
    return Device(
        name=_cpu(),
        flops_per_second={dtype: _best_rate(curve) for dtype, curve in products.items()},
        memory_bytes_per_second=_best_rate(curves["pointwise"]),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // on_this_machine,
        intra_node=Link(wire[-1][0] / max(wire[-1][1], 1e-9), wire[0][1]),
        devices_per_node=ranks,
        curves=curves,
    )


def wire_seconds(elapsed: float, held: float, taken: float, burst: int) -> float:
    """Return a collective's seconds on the wire, measured in a burst of ``burst`` collectives.

    The burst takes ``elapsed`` seconds. A collective's launch and wait together use the core for ``held`` seconds. Its
    transfer uses the core for ``taken`` seconds. Every launch and wait except one pair overlap with a transfer. Each
    overlapping pair delays the transfer by ``held * taken / wire`` seconds.

    >>> wire_seconds(11.0, held=1.0, taken=0.0, burst=2), wire_seconds(12.0, held=1.0, taken=5.0, burst=2)
    (5.0, 5.0)
    """
    wire = elapsed / burst
    for _ in range(20):
        load = min(taken / wire, 1.0) if wire > 0 else 1.0
        wire = (elapsed - held - load * (burst - 1) * held) / burst
    return max(wire, 0.0)


def _best_rate(curve: Points) -> float:
    return max(work / seconds for work, seconds in curve if work and seconds)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def measures(dtypes: Sequence[torch.dtype]) -> Iterator[Measure]:
    """Yield the points of compute: matrix products in each dtype, and other work in float32."""
    for dtype, name in ((dtype, name_of(dtype)) for dtype in dtypes):
        for width in WIDTHS:
            yield f"matmul {name}", 2 * ROWS * width**2, _products(width, dtype), 3
        attention = partial(F.scaled_dot_product_attention, is_causal=True)
        for length in LENGTHS:  # half of 2 products of queries and keys in forward, 5 in backward
            run = _with_gradients(attention, [(1, HEADS, length, HEAD)] * 3, dtype)
            yield f"attention {name}", 7 * 2 * HEADS * length**2 * HEAD / 2, run, 2
        for side in IMAGES:
            shapes = [(2, CHANNELS, side, side), (CHANNELS, CHANNELS, 3, 3)]
            run = _with_gradients(partial(F.conv2d, padding=1), shapes, dtype)
            yield f"convolution {name}", 2 * 2 * side**2 * 9 * CHANNELS**2, run, 3
    for elements in ELEMENTS:
        yield from _traffic(elements)
    tensor = torch.zeros(8, 8)
    yield "view", 0, lambda: tensor.permute(1, 0), 1


def _products(width: int, dtype: torch.dtype) -> Call:
    """Return a linear layer's matrix products: forward, input gradient, weight gradient."""
    x, weight, gradient = (torch.randn(shape, width).to(dtype) for shape in (ROWS, width, ROWS))
    return lambda: (F.linear(x, weight), gradient @ weight, gradient.t() @ x)


def _with_gradients(operator: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Call:
    """Return a run of an operator and its gradients, with inputs of these shapes."""
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    gradient = torch.randn_like(operator(*inputs))
    return lambda: torch.autograd.grad(operator(*inputs), inputs, gradient)


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
    wire, out = Int8(), torch.empty(elements)
    payload = wire.encode(out.zero_())
    yield "encode", nbytes + payload.nbytes, lambda: wire.encode(next(tensor_pairs)[0], key="calibrate"), 1
    yield "decode", nbytes + payload.nbytes, lambda: wire.decode(payload, out), 1


def seconds_of(run: Call, times: int) -> float:
    return timeit(run, number=times) / times


def enough_times(run: Call) -> int:
    """Return the number of runs that take long enough to measure. The first run is a warm-up."""
    run()
    times = 1
    while (seconds := timeit(run, number=times)) < SHORTEST / 4:
        times *= 2
    return max(1, round(times * SHORTEST / seconds))


class Collectives:
    """Measures a group's collectives. Every rank calls each method."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._transport = group, transport_for(group, torch.device("cpu"))
        self._starts = {point: self._start_of(*point) for point in product(TIMES, SIZES)}

    def time(self, kind: str, sent: int) -> dict[str, float]:
        """Measure collectives of one size without compute. Return seconds keyed by name.

        ``launch`` is the call that starts a collective. ``finish`` is a wait after all messages have arrived. ``burst``
        is the time from the first launch to the end of the last wait of ``BURST`` collectives.
        """
        start = self._starts[kind, sent]
        alone = self._together(lambda: start().wait())
        launch, finish = self._launch_and_finish(start, 1.3 * alone + 0.002)
        burst = self._together(lambda: [handle.wait() for handle in [start() for _ in range(BURST)]])
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

        alone_seconds = self._together(compute)
        return (self._together(overlapped) - alone_seconds) / OVERLAPPED - held

    def seconds_a_tensor(self, kind: str) -> float:
        """Return the seconds that each further tensor adds to the launch and wait of a small bucket."""
        starts = [self._start_of(kind, SIZES[0], tensors) for tensors in (1, SMALL)]
        one, many = (sum(self._launch_and_finish(start, 0.005)) for start in starts)
        return max(many - one, 0.0) / (SMALL - 1)

    def _together(self, run: Call) -> float:
        """Return the seconds of a run that all ranks begin together."""
        barrier(self._group)
        return timeit(run, number=1)

    def _launch_and_finish(self, start: Callable[[], Waitable], pause: float) -> tuple[float, float]:
        """Return the seconds of a launch and of its wait, after a pause in which all messages arrive."""
        barrier(self._group)
        before = perf_counter()
        handle = start()
        launch = perf_counter() - before
        sleep(pause)
        return launch, timeit(handle.wait, number=1)

    def _start_of(self, kind: str, sent: int, tensors: int = 1) -> Callable[[], Waitable]:
        """Return a function that launches a bucket. The busiest rank sends ``sent`` bytes of the bucket."""
        world, transport = self._group.size(), self._transport
        elements = sent * world / (TIMES[kind] * (world - 1)) / 4  # float32 elements of the full payload
        rows = ceil(elements / SENT_COLUMNS / tensors / world) * world
        shapes = [(rows, SENT_COLUMNS)] * tensors
        if kind == "gather":
            return partial(transport.all_gather, [torch.ones(rows // world, SENT_COLUMNS) for _ in shapes], shapes)
        launch = transport.reduce_scatter if kind == "scatter" else transport.all_reduce
        return partial(launch, [torch.ones(shape) for shape in shapes])
