"""The time of an outer step's exchanges, on a link between sites that all ranks of a site share.

::

    a step on average, delay 0    compute | forward | backward | optimizer | waits |
                                  site                                     | 1/H of each exchange |
    a step on average, delay 4    compute | forward | backward | optimizer |
                                  site             | 1/H of each exchange  |      hidden behind 4 steps of compute
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil

from thunder_zero.plan.amounts import bits_of, duration, size
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.params import Plan
from thunder_zero.tools.devices.device import Device, Lane, Link
from thunder_zero.tools.time.lanes import Span


@dataclass(frozen=True)
class Exchanges:
    """The exchange of each fragment between sites."""

    outer: Outer
    sent: tuple[int, ...]  # bytes that a site sends in each
    seconds: tuple[float, ...]  # that each takes on the link

    def exposed(self, step: float) -> tuple[float, ...]:
        """Return the seconds that compute waits for each exchange, if a step takes ``step`` seconds without it."""
        return tuple(max(0.0, seconds - self.outer.delay * step) for seconds in self.seconds)

    def mean_seconds(self, step: float) -> float:
        """Return the seconds of a step, on average over ``sync_every`` steps."""
        return step + sum(self.exposed(step)) / self.outer.sync_every

    def hidden_from(self, step: float) -> int:
        """Return the smallest ``sync_every`` with a delay that hides each exchange behind compute."""
        return self.outer.fragments * (self.delay(step) + 1)  # a delay is shorter than the steps between two exchanges

    def delay(self, step: float) -> int:
        """Return the number of steps that the longest exchange takes."""
        return ceil(max(self.seconds) / step)

    @property
    def sent_per_step(self) -> float:
        """The bytes that a site sends in a step, on average."""
        return sum(self.sent) / self.outer.sync_every

    def every(self, steps: int) -> Exchanges:
        """Return the exchanges with another ``sync_every``."""
        return replace(self, outer=replace(self.outer, sync_every=steps))

    def spans(self, op: int, step: float) -> Iterator[Span]:
        """Yield the spans of a step on average: the share of each exchange, and of compute that waits for it.

        ``op`` is the first index after the operations of the timeline.
        """
        share, end = 1 / self.outer.sync_every, self.mean_seconds(step)
        waits = pairwise(accumulate((share * seconds for seconds in self.exposed(step)), initial=step))
        begin = end - share * sum(self.seconds) if self.outer.delay else step
        wires = pairwise(accumulate((share * seconds for seconds in self.seconds), initial=begin))
        for index, (wait, wire) in enumerate(zip(waits, wires, strict=True), op):
            yield Span(index, Lane.SITE, *wire)
            if wait[1] > wait[0]:
                yield Span(index, Lane.COMPUTE, *wait, waits=Lane.SITE)

    def described(self, step: float) -> str:
        """Return the figures for a step that takes ``step`` seconds without exchanges, as text."""
        exposed = max(self.exposed(step))
        hidden = f"compute waits {duration(exposed)} for it" if exposed else "hidden behind compute"
        return (
            f"between {self.outer.sites} sites, an exchange of {size(max(self.sent))} takes "
            f"{duration(max(self.seconds))} every {self.outer.interval} steps, {hidden}: a step takes "
            f"{duration(self.mean_seconds(step))} on average; hidden from sync_every={self.hidden_from(step)} on, "
            f"with delay={self.delay(step)}"
        )


def exchanges_of(plan: Plan, outer: Outer, between: Link | str, device: Device) -> Exchanges:
    """Return the exchanges of an outer step. A rate such as "100 Mbit/s" has the latency between the device's nodes."""
    if isinstance(between, str):
        latency = device.inter_node.latency_seconds if device.inter_node else 0.0
        between = Link(bits_of("between", between) / 8, latency)
    fragments = outer.vectors_of(plan)
    sent = tuple(plan.mesh.size() * outer.sent(vectors, outer.sites) for vectors in fragments)
    pairs = zip(sent, fragments, strict=True)
    return Exchanges(outer, sent, tuple(between.seconds(nbytes, 2 * len(vectors)) for nbytes, vectors in pairs))
