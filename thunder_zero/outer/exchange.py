"""The messages of an exchange: between ranks of equal place, one at each site.

::

    average       change -> a part for each site, encoded -> that site, which adds the parts in the order of the names
                  mean of a part, encoded -> all sites
    take rows     the reference -> each site that missed exchanges: agreed parameters, states of the outer optimizer

Both go piece by piece, so that a site with a slow link keeps no third one waiting longer than a time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from thunder_zero.compat.torch.groups import lone_group
from thunder_zero.encodings.encoding import Encoding
from thunder_zero.encodings.int8 import Int8
from thunder_zero.outer.meeting import Announcement, Members
from thunder_zero.outer.store import Sites, own_address
from thunder_zero.plan.outer import Vector, pieces_of
from thunder_zero.plan.rows import in_equal_parts

MESSAGE = 4 << 20  # bytes of the largest message: the time-out holds for each


@dataclass(frozen=True, eq=False)
class Exchanged:
    """What an exchange gave to this rank."""

    members: Members
    rows: tuple[Tensor, ...]  # those of the reference, if this site takes them
    means: tuple[Tensor, ...]  # of the changes, float32; empty if no site has a change


@dataclass(frozen=True, eq=False)
class Offer:
    """What this rank brings to an exchange."""

    me: Announcement
    claims: str  # what must be equal at all sites, a sentence each line; "" after the first exchange
    changes: Sequence[Tensor]  # since the last exchange: (n,) float32, this rank's share of each vector
    rows: Sequence[Tensor]  # this rank's own, which are sent or have the shapes to receive


class Peers:
    """One rank's connections to the ranks of its place at other sites, kept while the sites and their lives do."""

    def __init__(self, address: Sites, place: int, wire: Encoding, fragments: Sequence[Sequence[Vector]]) -> None:
        self._address, self._place, self._wire, self._fragments = address, place, wire, fragments
        self._group: ProcessGroup | None = None
        self._of: tuple[str, ...] = ()

    def exchange(self, members: Members, store: TCPStore, offer: Offer, sign: Callable[[], None]) -> Exchanged:
        """Average changes, then give rows to the sites that missed exchanges."""
        names, changes = members.names, offer.changes
        if len(names) == 1:
            return Exchanged(members, (), tuple(changes) if members.contributors else ())
        messages = Messages(self._connected(members, store), sign)
        index, reference = names.index(self._address.name), names.index(members.reference.name)
        senders, receivers = ([names.index(each) for each in who] for who in (members.contributors, members.receivers))
        vectors = self._fragments[members.fragment] if senders else ()
        if index not in senders:  # it adds the others' changes, perhaps of another fragment than its own
            changes = [torch.zeros(vector.elements) for vector in vectors]
        means = [
            messages.average(change, f"{members.turn} {vector.place}", index, senders, self._wire)
            for change, vector in zip(changes, vectors, strict=False)
        ]
        taken = [torch.empty_like(row, device="cpu") for row in offer.rows] if index in receivers else []
        for row, new in zip_longest(offer.rows, taken):  # one at a time, which the reference may copy from a GPU
            if index == reference and receivers:
                for piece in _parts(row.cpu()):
                    messages.trade({receiver: [piece] for receiver in receivers}, {})
            elif index in receivers:
                for piece in _parts(new):
                    messages.trade({}, {reference: [piece]})
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

    def average(self, change: Tensor, key: str, index: int, senders: Sequence[int], wire: Encoding) -> Tensor:
        """Return the mean of the senders' changes, (n,) float32, equal at all sites to the bit.

        Int8 rounds changes at random, seeded by ``key``, which is unbiased, and the mean to nearest.
        """
        sites = self._group.size()
        pieces = pieces_of(len(change), sites)
        means = change.new_empty(len(change) + -len(change) % sites)
        ends = [*accumulate(pieces[:-1]), len(means)]
        for piece, end, mean in zip(change.split(pieces), ends, means.tensor_split(ends[:-1]), strict=True):
            parts = in_equal_parts(piece, sites)
            payloads = [_encoded(part, wire, f"{key} {index} {site} {end}") for site, part in enumerate(parts)]
            self._average_piece(parts[index], payloads, index, senders, wire, mean.view(sites, -1))
        return means[: len(change)]

    def _average_piece(
        self, own: Tensor, payloads: Sequence[Tensor], index: int, senders: Sequence[int], wire: Encoding, out: Tensor
    ) -> None:
        """Add the senders' changes of this site's part in the order of the sites. Write the means of all parts."""
        others = [site for site in range(len(payloads)) if site != index]
        arriving = {site: torch.empty_like(payloads[0]) for site in senders if site != index}
        outgoing = {site: [payloads[site]] for site in others} if index in senders else {}
        self.trade(outgoing, {site: [payload] for site, payload in arriving.items()})
        total, buffer = torch.zeros_like(own), torch.empty_like(own)
        for site in senders:
            total += own if site == index else wire.decode(arriving[site], buffer)
        mean = wire.encode(total.div_(len(senders)))
        means = [mean if site == index else torch.empty_like(mean) for site in range(len(payloads))]
        self.trade({site: [mean] for site in others}, {site: [means[site]] for site in others})
        for part, payload in zip(out, means, strict=True):
            wire.decode(payload, part)


def _encoded(part: Tensor, wire: Encoding, key: str) -> Tensor:
    return wire.encode(part, key=key) if isinstance(wire, Int8) else wire.encode(part)


def _parts(row: Tensor) -> list[Tensor]:
    return list(row.view(-1).split(pieces_of(row.numel(), 1)))


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = (piece for tensor in tensors for piece in tensor.view(-1).view(torch.uint8).split(MESSAGE))
    return [piece for piece in pieces if piece.numel()]
