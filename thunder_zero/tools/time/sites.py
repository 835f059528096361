"""The time of an outer step's exchanges, on a link between sites that all ranks of a site share.

::

    without a delay   compute | forward | backward | optimizer | waits           |
                      site                                     | 1/H of exchanges |      H = sync_every
    with a delay      compute | forward | backward | optimizer |
                      site             | 1/H of exchanges      |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from thunder_zero.plan.amounts import bits_of, duration, size
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.params import Plan
from thunder_zero.tools.devices.device import Device, Lane, Link
from thunder_zero.tools.time.lanes import Span

TCP = 1448 / 1538  # of the bytes on Ethernet, those that a frame carries: without headers, preamble and gap


@dataclass(frozen=True)
class Exchanges:
    """The exchange of each fragment. ``step`` is the seconds of a step of a site alone."""

    outer: Outer
    sent: tuple[int, ...]  # bytes that a site sends in each
    seconds: tuple[float, ...]  # that each takes on the link

    def exposed(self, step: float) -> tuple[float, ...]:
        return tuple(max(0.0, seconds - self.outer.delay * step) for seconds in self.seconds)

    def mean_seconds(self, step: float) -> float:
        return step + sum(self.exposed(step)) / self.outer.sync_every

    def hidden_from(self, step: float) -> int:
        """Return the smallest ``sync_every`` that allows a delay as long as each exchange."""
        return self.outer.fragments * (ceil(max(self.seconds) / step) + 1)  # a delay ends before the next exchange

    def spans(self, op: int, step: float) -> Iterator[Span]:
        """Yield what a step has of each exchange, on average: its time on the link, and the wait of compute.

        The spans of the first fragment have the index ``op``.
        """
        every, wires = self.outer.sync_every, sum(self.seconds) / self.outer.sync_every
        begin = self.mean_seconds(step) - wires if self.outer.delay else step
        on_wire = pairwise(accumulate((seconds / every for seconds in self.seconds), initial=begin))
        waiting = pairwise(accumulate((seconds / every for seconds in self.exposed(step)), initial=step))
        for index, (wire, wait) in enumerate(zip(on_wire, waiting, strict=True), op):
            yield Span(index, Lane.SITE, *wire)
            if wait[1] > wait[0]:
                yield Span(index, Lane.COMPUTE, *wait, waits=Lane.SITE)

    def described(self, step: float) -> str:
        exposed, hidden_from = max(self.exposed(step)), self.hidden_from(step)
        return (
            f"between {self.outer.sites} sites, an exchange of {size(max(self.sent))} takes "
            f"{duration(max(self.seconds))} every {self.outer.interval} steps, "
            f"{f'compute waits {duration(exposed)} for it' if exposed else 'hidden behind compute'}: a step takes "
            f"{duration(self.mean_seconds(step))} on average; hidden from sync_every={hidden_from} on, with "
            f"delay={hidden_from // self.outer.fragments - 1}"
        )


def link_of(between: Link | str | float, device: Device) -> Link:
    """Return a link, or TCP on Ethernet of a rate such as "100 Mbit/s", with the latency between the device's nodes."""
    if isinstance(between, Link):
        return between
    bits = bits_of("between", between) if isinstance(between, str) else between
    return Link(bits / 8 * TCP, device.inter_node.latency_seconds if device.inter_node else 0.0)


def exchanges_of(plan: Plan, outer: Outer, between: Link | str, device: Device) -> Exchanges:
    link, fragments = link_of(between, device), outer.vectors_of(plan)
    sent = tuple(plan.mesh.size() * outer.sent(vectors, outer.sites) for vectors in fragments)
    seconds = (link.seconds(nbytes, 2 * len(vectors)) for nbytes, vectors in zip(sent, fragments, strict=True))
    return Exchanges(outer, sent, tuple(seconds))
