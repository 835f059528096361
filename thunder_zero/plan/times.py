"""Measured times, from which the schedule starts gathers as late as possible. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite


@dataclass(frozen=True, slots=True)
class Times:
    """How long a rank computes from gather to gather, and how fast a gather is.

    A gather is named by the path of the first parameter of its bucket. Equal times have equal ``repr``, so that
    ranks can compare them.

    Attributes:
        forward: seconds computed, without communication, between the wait for this gather and the wait for the next
            one in forward. The last one of a phase needs none. A gather without an entry counts as 0 seconds, so that
            the next one starts too early rather than too late.
        backward: the same in backward.
        bytes_per_second: bytes that a rank sends, and receives, in a second of a gather that has the wire to itself;
            ``math.inf`` where nothing travels.

    Raises:
        ValueError: a time or the speed is out of its range.
    """

    forward: Mapping[str, float] = field(hash=False)
    backward: Mapping[str, float] = field(hash=False)
    bytes_per_second: float

    def __post_init__(self) -> None:
        for phase in ("forward", "backward"):
            object.__setattr__(self, phase, _checked(phase, getattr(self, phase)))
        if not _is_number(self.bytes_per_second) or not self.bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second is {self.bytes_per_second!r}; give the bytes that a rank sends per second, more "
                f"than 0 (math.inf if nothing travels)"
            )
        object.__setattr__(self, "bytes_per_second", float(self.bytes_per_second))


def _checked(phase: str, seconds: object) -> dict[str, float]:
    """A copy in the order of the paths."""
    if not isinstance(seconds, Mapping):
        raise ValueError(f"{phase} is {seconds!r}; give a mapping from paths of parameters to seconds")
    for path, value in seconds.items():
        if not isinstance(path, str):
            raise ValueError(f"{phase} has times for {path!r}; give the path of a parameter")
        if not _is_number(value) or not isfinite(value) or value < 0:
            raise ValueError(f"{phase} of {path!r} is {value!r}; give seconds of compute, 0 or more")
    return {path: float(seconds[path]) for path in sorted(seconds)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
