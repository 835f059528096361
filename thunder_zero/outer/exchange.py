"""The messages of an exchange: between ranks of equal place, one at each site.

::

    take rows     the reference -> each site that missed exchanges: agreed parameters, states of the outer optimizer
    average       change -> a part for each site, encoded -> that site, which adds the parts in the order of the names
                  mean of a part, encoded -> all sites
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from thunder_zero.compat.torch.groups import lone_group
from thunder_zero.encodings.encoding import Encoding
from thunder_zero.encodings.int8 import Int8
from thunder_zero.outer.meeting import Members
from thunder_zero.outer.store import Sites, own_address
from thunder_zero.plan.outer import Vector
from thunder_zero.plan.rows import in_equal_parts

MESSAGE = 4 << 20  # bytes of the largest message: the time-out holds for each


@dataclass(frozen=True, eq=False)
class Exchanged:
    """What an exchange gave to this rank."""

    members: Members
    rows: tuple[Tensor, ...]  # those of the reference, if this site takes them
    means: tuple[Tensor, ...]  # of the changes, float32; empty if no site has a change


@dataclass(frozen=True, eq=False)
class Change:
    """What a vector of parameters has changed since the last exchange: (n,) float32, this rank's share."""

    elements: Tensor
    key: str  # seeds the rounding, equal on the ranks of a site that have equal elements


class Peers:
    """One rank's connections to the ranks of its place at other sites, kept while the sites and their lives do."""

    def __init__(self, address: Sites, place: int, wire: Encoding, fragments: Sequence[Sequence[Vector]]) -> None:
        self._address, self._place, self._wire, self._fragments = address, place, wire, fragments
        self._group: ProcessGroup | None = None
        self._of: tuple[str, ...] = ()

    def exchange(
        self,
        members: Members,
        store: TCPStore,
        changes: Sequence[Change],
        rows: Sequence[Tensor],
        sign: Callable[[], None],
    ) -> Exchanged:
        """Exchange rows and changes. ``rows`` are this rank's own, which are sent or have the shapes to receive."""
        names = members.names
        index, reference = names.index(self._address.name), names.index(members.reference.name)
        receivers = [names.index(name) for name in members.receivers]
        if len(names) == 1:
            own = tuple(change.elements for change in changes)
            return Exchanged(members, (), own if members.contributors else ())
        messages = Messages(self._connected(members, store), sign)
        senders = [names.index(name) for name in members.contributors]
        if index not in senders:  # it adds the others' changes, perhaps of another fragment than its own
            changes = [Change(torch.zeros(vector.elements), "") for vector in self._fragments[members.fragment]]
        means = [messages.average(change, index, senders, self._wire, members.turn) for change in changes if senders]
        taken = [torch.empty_like(row, device="cpu") for row in rows] if index in receivers else []
        for row, new in zip_longest(rows, taken):  # one at a time, which the reference may copy from a GPU
            if index == reference and receivers:
                messages.trade({receiver: [row.cpu()] for receiver in receivers}, {})
            elif index in receivers:
                messages.trade({}, {reference: [new]})
        return Exchanged(members, tuple(taken), tuple(means))

    def _connected(self, members: Members, store: TCPStore) -> ProcessGroup:
        """Return the group of this turn's members. A collective of the ranks of this place."""
        lives = tuple(site.life for site in members.all)
        if self._group is None or self._of != lives:
            self.drop()
            prefix = PrefixStore(f"{members.turn}/place{self._place}", store)
            index = members.names.index(self._address.name)
            self._group = lone_group(prefix, index, len(lives), self._address.timeout, own_address(self._address))
            self._of = lives
        return self._group

    def drop(self) -> None:
        """Close the connections, for example after a failure, when messages may be left in them."""
        self._group, self._of = None, ()


class Messages:
    """Sends and receives tensors between the members of a group, in pieces, waiting for each."""

    def __init__(self, group: ProcessGroup, sign: Callable[[], None]) -> None:
        self._group, self._sign = group, sign

    def trade(self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]]) -> None:
        """Send and receive tensors, keyed by site. Both sides list equal sizes in one order."""
        received = [
            self._group.recv([piece], site, 0) for site, tensors in incoming.items() for piece in _pieces(tensors)
        ]
        sent = [self._group.send([piece], site, 0) for site, tensors in outgoing.items() for piece in _pieces(tensors)]
        for work in (*received, *sent):
            work.wait()
            self._sign()

    def average(self, change: Change, index: int, senders: Sequence[int], wire: Encoding, turn: str) -> Tensor:
        """Return the mean of the senders' changes, (n,) float32, equal at all sites to the bit.

        Each site adds the changes of one part in the order of the sites. Int8 rounds changes at random, which is
        unbiased, and the mean to nearest.
        """
        sites = self._group.size()
        parts = in_equal_parts(change.elements, sites)
        payloads = [_encoded(part, wire, f"{turn} {change.key} {index} {site}") for site, part in enumerate(parts)]
        others = [site for site in range(sites) if site != index]
        arriving = {site: torch.empty_like(payloads[0]) for site in senders if site != index}
        outgoing = {site: [payloads[site]] for site in others} if index in senders else {}
        self.trade(outgoing, {site: [payload] for site, payload in arriving.items()})
        total, buffer = torch.zeros_like(parts[0]), torch.empty_like(parts[0])
        for site in senders:
            total += parts[index] if site == index else wire.decode(arriving[site], buffer)
        mean = wire.encode(total.div_(len(senders)))
        means = [mean if site == index else torch.empty_like(mean) for site in range(sites)]
        self.trade({site: [mean] for site in others}, {site: [means[site]] for site in others})
        averaged = torch.empty_like(parts)
        for part, payload in zip(averaged, means, strict=True):
            wire.decode(payload, part)
        return averaged.view(-1)[: len(change.elements)]


def _encoded(part: Tensor, wire: Encoding, key: str) -> Tensor:
    return wire.encode(part, key=key) if isinstance(wire, Int8) else wire.encode(part)


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = (piece for tensor in tensors for piece in tensor.view(-1).view(torch.uint8).split(MESSAGE))
    return [piece for piece in pieces if piece.numel()]
