"""Measures in rounds, which may alternate with other work, and makes a device of the medians."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from statistics import mean, median
from typing import Any

import torch
from torch.distributed import ProcessGroup

from thunder_zero.comm.small_collectives import all_gather_object, barrier
from thunder_zero.tools.devices.calibrated import Calibrated, Collective
from thunder_zero.tools.devices.collectives import SIZES, TIMES, TRAIN, Collectives
from thunder_zero.tools.devices.compute import enough_times, lines_of, measures, seconds_of
from thunder_zero.tools.devices.curve import Curve
from thunder_zero.tools.devices.device import Link

DTYPES = (torch.float32, torch.bfloat16)
Key = tuple[Any, ...]  # what was measured: such as ("launch", "gather", bytes sent)


class Calibration:
    """Measurements of one machine; with a group, on all its ranks at the same time: each method is then a collective.

    Args:
        group: of gloo; None measures this process alone.
        dtypes: of products.
    """

    def __init__(self, group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._measures = tuple(measures(dtypes))
        self._times = [enough_times(one.run) for one in self._measures]
        self._collectives = None if self._group is None else Collectives(self._group)
        self._found: dict[Key, list[float]] = defaultdict(list)

    def round(self) -> None:
        """Measure each point once."""
        for one, times in zip(self._measures, self._times, strict=True):
            if self._group is not None:
                barrier(self._group)  # ranks share caches and memory
            self._found["compute", *one.key].append(seconds_of(one.run, times) / lines_of(one))
        if self._collectives is not None:
            self._round_of_collectives(self._collectives)

    def _round_of_collectives(self, collectives: Collectives) -> None:
        for kind, sent in collectives.points:
            timed = collectives.timed(kind, sent)
            for name in ("launch", "finish", "train"):
                self._found[name, kind, sent].append(getattr(timed, name))
        for kind in TIMES:
            self._found["tensor", kind].append(collectives.seconds_a_tensor(kind))
            launch, finish, train = (
                median(self._found[name, kind, SIZES[-1]]) for name in ("launch", "finish", "train")
            )
            slower = collectives.slows_compute(kind, train / TRAIN, launch + finish)
            self._found["taken", kind].append(slower)

    def device(self) -> Calibrated:
        """The device, equal on all ranks: of medians over rounds, the mean over ranks.

        Raises:
            RuntimeError: nothing was measured yet.
        """
        if not self._found:
            raise RuntimeError("there is no round of measurements yet; call round() first")
        own = {key: median(seconds) for key, seconds in self._found.items()}
        found = own
        if self._group is not None:
            every = all_gather_object(own, self._group)
            found = {key: mean(of[key] for of in every) for key in every[0]}
        ranks = 1 if self._group is None else self._group.size()
        return measured_device(found, ranks, {"backend": "none" if self._group is None else "gloo", **about()})


def measured_device(found: Mapping[Key, float], ranks: int, about: Mapping[str, str]) -> Calibrated:
    """The device that has these seconds by point."""
    products: dict[str, dict[str, Curve]] = defaultdict(dict)
    traffic: dict[str, Curve] = {}
    for work, dtype in dict.fromkeys(key[1:3] for key in found if key[0] == "compute"):
        curve = Curve.measured((key[3], found[key]) for key in found if key[:3] == ("compute", work, dtype))
        if dtype:
            products[work][dtype] = curve
        else:
            traffic[work] = curve
    collectives = {kind: _collective(kind, found) for kind in TIMES if ("taken", kind) in found}
    return Calibrated(
        name=about["cpu"],
        flops_per_second={dtype: _best_rate(curve) for dtype, curve in products["matmul"].items()},
        memory_bytes_per_second=_best_rate(traffic["pointwise"]),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks,
        inside=_link(collectives),
        devices_per_node=ranks,
        products=products,
        traffic=traffic,
        collectives=collectives,
        ranks=ranks,
        about=about,
    )


def _collective(kind: str, found: Mapping[Key, float]) -> Collective:
    def curve(name: str) -> Curve:
        return Curve.measured((sent, found[name, kind, sent]) for sent in SIZES)

    taken = max(found["taken", kind], 0.0)
    wires = []
    for sent in SIZES:
        launch, finish, train = (found[name, kind, sent] for name in ("launch", "finish", "train"))
        wires.append((sent, wire_seconds(train, launch + finish, taken * sent / SIZES[-1], TRAIN)))
    of_size = Curve(((0.0, 0.0), (SIZES[-1], taken)))
    return Collective(curve("launch"), Curve.measured(wires), curve("finish"), of_size, found["tensor", kind])


def wire_seconds(elapsed: float, held: float, taken: float, train: int) -> float:
    """Seconds on the wire of one of several equal collectives that were launched together, in ``elapsed`` seconds.

    Launches and waits hold up compute for ``held`` seconds each time. Those of all but one run beside the wire, which
    they delay by the share of the core that it asks for.

    >>> wire_seconds(11.0, held=1.0, taken=0.0, train=2), wire_seconds(12.0, held=1.0, taken=5.0, train=2)
    (5.0, 5.0)
    """
    wire = elapsed / train
    for _ in range(20):
        load = min(taken / wire, 1.0) if wire > 0 else 1.0
        wire = (elapsed - held - load * (train - 1) * held) / train
    return max(wire, 0.0)


def _best_rate(curve: Curve) -> float:
    return max(size / seconds for size, seconds in curve.points if size and seconds)


def _link(collectives: Mapping[str, Collective]) -> Link:
    """What the gathers' curve comes to: for those who ask for a link."""
    if not collectives:
        return Link(1e9)
    wire = collectives["gather"].wire
    return Link(1 / max(wire.seconds_per_unit, 1e-15), wire.points[0][1])


def about() -> dict[str, str]:
    """Versions and machine."""
    names = ("torch", "lightning-thunder", "thunder-zero")
    return {
        "cpu": _cpu(_lines("/proc/cpuinfo")),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def _cpu(lines: Iterable[str]) -> str:
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.readlines()
    except OSError:
        return []
