"""A device that was measured: curves over sizes, and what collectives take from compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thunder_zero.tools.devices.curve import Curve
from thunder_zero.tools.devices.device import Device, Sent


@dataclass(frozen=True, slots=True)
class Collective:
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


@dataclass(frozen=True)
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
    collectives: Mapping[str, Collective] = field(default_factory=dict, hash=False)
    ranks: int = 1
    about: Mapping[str, str] = field(default_factory=dict, hash=False)

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
