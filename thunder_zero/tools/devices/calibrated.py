"""A device that was measured: curves over sizes, and what collectives take from compute.

::

    seconds         .            a curve: below its first size it takes as long as that one, between two sizes it is on
        |       . /              the line that joins them, beyond the last it is in proportion to the last
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
from thunder_zero.tools.devices.device import Device, Sent
from thunder_zero.tools.printing.text import table_of, text_of_table
from thunder_zero.tools.printing.words import WIDTH, count, folded


@dataclass(frozen=True, slots=True)
class Curve:
    """How long work of a size takes, by points whose sizes ascend, and whose seconds do not descend. A size below the
    first takes as long as the first; between two sizes the time is on the line that joins them; beyond the last it is
    in proportion to the last."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        numbers = [number for point in self.points for number in point]
        if not numbers or not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"a curve has the points {self.points}; give sizes and seconds, each a number from 0")
        if any(later[0] <= one[0] or later[1] < one[1] for one, later in pairwise(self.points)):
            raise ValueError(f"a curve has the points {self.points}; give ascending sizes that take no less time")

    @staticmethod
    def measured(points: Iterable[tuple[float, float]]) -> Curve:
        """Of measured points: noise that makes a larger size faster than a smaller one is cut off."""
        sizes, seconds = zip(*sorted(points), strict=True)
        return Curve(tuple(zip(sizes, accumulate(seconds, max), strict=True)))

    def seconds(self, size: float) -> float:
        """How long work of this size takes."""
        at = bisect_left(self.points, size, key=lambda point: point[0])
        if at == 0:
            return self.points[0][1]
        if at == len(self.points):
            return size * self.seconds_per_unit if self.points[-1][0] else self.points[-1][1]
        (left, before), (right, after) = self.points[at - 1 : at + 1]
        return before + (after - before) * (size - left) / (right - left)

    @property
    def seconds_per_unit(self) -> float:
        """Of the last size."""
        size, seconds = self.points[-1]
        return seconds / size if size else 0.0


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """What a collective of one kind takes, by the bytes that the busiest rank sends.

    Attributes:
        launch: seconds in which its start holds up compute.
        wire: seconds on the wire, of one among several that were launched together.
        finish: seconds in which its wait holds up compute, once all has arrived: sums, copies.
        taken: seconds of the rank's core that it takes from compute while it is under way.
        tensor_seconds: by which each further tensor of a bucket makes the launch longer.
    """

    launch: Curve
    wire: Curve
    finish: Curve
    taken: Curve
    tensor_seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class Calibrated(Device):
    """A machine as :func:`thunder_zero.tools.calibrate` measured it, from one rank's view.

    The numbers that it has in common with other devices are the best of its curves.

    Attributes:
        products: seconds by FLOPs: class of work (``"matmul"``), then dtype.
        traffic: seconds by bytes of traffic with memory: class of work (``"pointwise"``).
        collectives: by kind: ``"gather"``, ``"scatter"``, ``"all_reduce"``; none if one process was measured alone.
        ranks: of the collectives.
        about: versions and machine, in words.
    """

    products: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict, hash=False)
    traffic: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    collectives: Mapping[str, CollectiveTimes] = field(default_factory=dict, hash=False)
    ranks: int = 1
    about: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """The best of the curves, in words."""
        rates = [f"{dtype} {count(rate)}FLOP/s" for dtype, rate in self.flops_per_second.items()]
        rates.append(f"memory {count(self.memory_bytes_per_second)}B/s")
        rates += [f"{kind} {count(8 / one.wire.seconds_per_unit)}bit/s" for kind, one in self.collectives.items()]
        who = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        return folded(f"{self.name}, {who}, each {', '.join(rates)}")

    def table(self) -> str:
        """A line for each curve: how long its first and its last size take."""
        products = {f"{work} {dtype}": curve for work, of in self.products.items() for dtype, curve in of.items()}
        wires = {f"{kind} on the wire": one.wire for kind, one in self.collectives.items()}
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
        """Seconds of one operation: by its FLOPs if it has any, otherwise by its traffic with memory.

        Raises:
            ValueError: products of the dtype were not measured.
        """
        if flops:
            self.peak(dtype)
            return self.products.get(work, self.products["matmul"])[dtype].seconds(flops)
        return self.traffic.get(work, self.traffic["pointwise"]).seconds(traffic_bytes)

    def collective(self, kind: str, ranks: int, stride: int, nbytes: float, steps: int, tensors: int) -> Sent:
        """What a collective takes.

        Raises:
            ValueError: collectives of so many ranks were not measured.
        """
        if ranks != self.ranks or stride != 1 or kind not in self.collectives:
            raise ValueError(
                f"{self.name} was calibrated with collectives of {_ranks(self.ranks)}, but the step has one of "
                f"{_ranks(ranks)}{f', {stride} apart' if stride > 1 else ''}; calibrate under torchrun with as many"
            )
        one = self.collectives[kind]
        more = max(tensors - 1, 0) * one.tensor_seconds
        curves = (one.wire, one.launch, one.finish, one.taken)
        seconds, launch, finish, taken = (curve.seconds(nbytes) for curve in curves)
        return Sent(seconds, launch + more, finish, taken)


def _ranks(number: int) -> str:
    return "one rank alone" if number == 1 else f"{number} ranks"
