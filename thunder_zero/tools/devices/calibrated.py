"""A measured device: curves over sizes, and the time that collectives take from compute.

::

    seconds         .            a curve is constant below the first size, linear between sizes,
        |       . /              and proportional to the size beyond the last size
        |___ ./
        +-------------- size
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite

from thunder_zero.plan.amounts import duration
from thunder_zero.tools.devices.device import CollectiveTime, Device
from thunder_zero.tools.printing.text import table_of, text_of_table
from thunder_zero.tools.printing.words import WIDTH, count, folded


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve through (size, seconds) points. Sizes increase from point to point, and seconds never decrease."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        numbers = [number for point in self.points for number in point]
        if not numbers or not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"a curve has the points {self.points}; give sizes and seconds, each a number from 0")
        if any(later[0] <= point[0] or later[1] < point[1] for point, later in pairwise(self.points)):
            raise ValueError(f"a curve has the points {self.points}; give ascending sizes that take no less time")

    @staticmethod
    def measured(points: Iterable[tuple[float, float]]) -> Curve:
        """Return a curve through measured points. Noise that makes a larger size faster is removed."""
        sizes, seconds = zip(*sorted(points), strict=True)
        return Curve(tuple(zip(sizes, accumulate(seconds, max), strict=True)))

    def seconds(self, size: float) -> float:
        """Return the seconds that work of this size takes."""
        index = bisect_left(self.points, size, key=lambda point: point[0])
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return size * self.seconds_per_unit if self.points[-1][0] else self.points[-1][1]
        (left, left_seconds), (right, right_seconds) = self.points[index - 1 : index + 1]
        return left_seconds + (right_seconds - left_seconds) * (size - left) / (right - left)

    @property
    def seconds_per_unit(self) -> float:
        """The last point's seconds divided by its size."""
        size, seconds = self.points[-1]
        return seconds / size if size else 0.0


@dataclass(frozen=True, slots=True)
class CollectiveCurves:
    """The times of one kind of collective, as curves over the bytes that the busiest rank sends."""

    launch: Curve  # time that the launch takes from compute
    wire: Curve  # a collective's time on the wire, within a burst of collectives
    finish: Curve  # time that the wait takes from compute after all messages have arrived, for sums and copies
    taken: Curve  # time that the collective takes from compute while it is in flight
    tensor_seconds: float = 0.0  # additional time of a launch for each further tensor in the bucket


@dataclass(frozen=True, repr=False)
class Calibrated(Device):
    """A machine as one rank sees it, measured by :func:`thunder_zero.tools.calibrate`.

    The fields inherited from ``Device`` have the best rates of the curves.

    Attributes:
        products: curves over FLOPs, keyed by class of work (``"matmul"``) and dtype.
        traffic: curves over bytes of memory traffic, keyed by class of work (``"pointwise"``).
        collectives: curves keyed by kind (``"gather"``, ``"scatter"``, ``"all_reduce"``). Empty for a single process.
        ranks: number of ranks in the measured collectives.
        about: versions of the software, and a description of the machine.
    """

    products: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict, hash=False)
    traffic: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    collectives: Mapping[str, CollectiveCurves] = field(default_factory=dict, hash=False)
    ranks: int = 1
    about: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """Return the best rates of the curves as text."""
        rates = [f"{dtype} {count(rate)}FLOP/s" for dtype, rate in self.flops_per_second.items()]
        rates.append(f"memory {count(self.memory_bytes_per_second)}B/s")
        rates += [f"{kind} {count(8 / times.wire.seconds_per_unit)}bit/s" for kind, times in self.collectives.items()]
        processes = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        return folded(f"{self.name}, {processes}, each {', '.join(rates)}")

    def table(self) -> str:
        """Return a table with each curve's times at its first and last size."""
        products = {
            f"{work} {dtype}": curve for work, by_dtype in self.products.items() for dtype, curve in by_dtype.items()
        }
        wires = {f"{kind} on the wire": times.wire for kind, times in self.collectives.items()}
        units = {"FLOP": products, "B": {**self.traffic, **wires}}
        rows = [
            (
                name,
                *(
                    cell
                    for size, time in (curve.points[0], curve.points[-1])
                    for cell in (f"{count(size)}{unit}", duration(time))
                ),
            )
            for unit, curves in units.items()
            for name, curve in curves.items()
        ]
        return text_of_table(table_of(("", "from", "takes", "to", "takes"), rows), WIDTH)

    def seconds(self, flops: float, dtype: str, traffic_bytes: float, work: str = "") -> float:
        """Return the seconds of an operation from its FLOPs, or from its memory traffic if it has no FLOPs.

        Raises:
            ValueError: matrix products of the dtype were not measured.
        """
        if flops:
            self.peak(dtype)
            return self.products.get(work, self.products["matmul"])[dtype].seconds(flops)
        return self.traffic.get(work, self.traffic["pointwise"]).seconds(traffic_bytes)

    def collective(self, kind: str, ranks: int, stride: int, nbytes: float, steps: int, tensors: int) -> CollectiveTime:
        """Return the time of a collective. Raise ValueError if this number of ranks was not measured."""
        if ranks != self.ranks or stride != 1 or kind not in self.collectives:
            raise ValueError(
                f"{self.name} was calibrated with collectives of {_ranks(self.ranks)}, but the step has one of "
                f"{_ranks(ranks)}{f', {stride} apart' if stride > 1 else ''}; calibrate under torchrun with as many"
            )
        times = self.collectives[kind]
        bucket_seconds = max(tensors - 1, 0) * times.tensor_seconds
        curves = (times.wire, times.launch, times.finish, times.taken)
        seconds, launch, finish, taken = (curve.seconds(nbytes) for curve in curves)
        return CollectiveTime(seconds, launch + bucket_seconds, finish, taken)


def _ranks(number: int) -> str:
    return "one rank alone" if number == 1 else f"{number} ranks"
