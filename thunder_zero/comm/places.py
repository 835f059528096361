"""Ranks say what they do before they communicate, so that none takes one message for another.

Backends match messages by their order alone. If rank 0 evaluates while rank 1 runs a backward, the gathers of one are
the gathers of the other, and both train on garbage. So before a rank communicates, it announces its PLACE: one message
of 256 bytes to each peer. Equal places mean that the ranks do the same thing; a difference is an error on both sides.

All places between two ranks travel in one order, whatever model and group they are about: on the default process group
if gloo carries its CPU tensors, else on the model's. An announcement waits for nobody: the first wait after it also
waits for the peers' places and compares them. Two places can differ only until then, and the messages of one never meet
those of the other, as they travel under another tag (:attr:`Place.key`).

Without gloo (NCCL, MPI) an announcement is a collective for which the host waits, and is made only if
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from thunder_zero.comm.handle import SENDER, in_background
from thunder_zero.comm.lost_ranks import CPU, at_place, naming_lost_ranks, speaks_gloo, timeout_of

BYTES = 256  # of a message: a digest, then as much of the text as fits
DIGEST_BYTES = 16
KEY_BITS = 22
TAG = 0x706C6163  # "plac": users hardly send under it
SOMETHING = "a small collective of thunder_zero"


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank does, as far as it can tell: two ranks with different places must not communicate.

    Attributes:
        text: as an error calls it: ``"backward number 12 of model 0 (Net) after 12 training forwards"``.
        details: what else has to agree, such as a schedule; only its digest travels.
    """

    text: str
    details: str = ""

    @property
    def digest(self) -> bytes:
        """Tells this place from all others."""
        return hashlib.sha256(f"{self.text}\n{self.details}".encode()).digest()[:DIGEST_BYTES]

    @property
    def key(self) -> int:
        """Less than 2 ** ``KEY_BITS``; another place has another key, but for one in four million."""
        return int.from_bytes(self.digest[:4], "big") % (1 << KEY_BITS)

    def message(self) -> bytes:
        """What travels, ``BYTES`` long."""
        return (self.digest + self.text.encode()[: BYTES - DIGEST_BYTES]).ljust(BYTES, b"\0")


class Meeting(Protocol):
    """An announced place, which the peers' places are compared with."""

    place: Place

    def confirm(self) -> None:
        """Wait for the peers' places, once.

        Raises:
            RuntimeError: a peer is elsewhere.
            LostRank: a peer died or does not answer.
        """


_doing: ContextVar[str] = ContextVar("doing", default="")
_without_places: WeakSet[ProcessGroup] = WeakSet()
# By group: the sentence of a difference, after which no rank can go on, and messages that peers may still need.
_differences: WeakKeyDictionary[ProcessGroup, tuple[str, object]] = WeakKeyDictionary()
_unconfirmed: WeakKeyDictionary[ProcessGroup, _Messages] = WeakKeyDictionary()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Small collectives inside of the block are places of this text; the outermost block counts."""
    token = _doing.set(_doing.get() or what)
    try:
        yield
    finally:
        _doing.reset(token)


def what_is_done() -> str:
    """The text of the outermost block of :func:`doing`; "" outside."""
    return _doing.get()


def without_places(group: ProcessGroup) -> None:
    """Collectives of this group are no places: those of another thread come in no order with the rest."""
    _without_places.add(group)


def announce(place: Place, group: ProcessGroup) -> Meeting | None:
    """Tell all ranks of the group where this rank is; None if nothing is told.

    Raises:
        RuntimeError: ranks differed before; under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` without gloo, they differ now.
    """
    if group.size() == 1 or group in _without_places:
        return None
    if (channel := channel_of(group)) is not None:
        require_same_so_far(group)
        if (before := _unconfirmed.get(channel)) is not None:
            before.confirm()
        return _Messages(place, group, channel)
    if is_debugging():
        require_same_so_far(group)
        return _Gathered(place, group)
    return None


def meet(step: str, group: ProcessGroup) -> str:
    """Before a small collective: wait until all ranks of the group are at the same one.

    Returns:
        The text of the outermost block of :func:`doing`; "" outside.
    """
    place = Place(_doing.get() or SOMETHING, step)
    meeting = announce(place, group)
    if meeting is not None:
        meeting.confirm()
    return _doing.get()


def is_debugging() -> bool:
    """Whether torch's own switch for checks that cost time, ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, is on."""
    return dist.get_debug_level() is dist.DebugLevel.DETAIL


def channel_of(group: ProcessGroup) -> ProcessGroup | None:
    """The group that carries the places of these ranks as messages: one for all models, if that can be."""
    everyone = dist.group.WORLD
    if everyone is not None and speaks_gloo(everyone):
        return everyone
    return group if speaks_gloo(group) else None


def require_same_so_far(group: ProcessGroup) -> None:
    """Raise at once if ranks differed before.

    Raises:
        RuntimeError: the sentence of that difference.
    """
    found = _differences.get(channel_of(group) or group)
    if found is not None:
        raise RuntimeError(found[0])


# Rank, and its number in the channel; what it says; the messages from it and to it.
_Posted = tuple[tuple[int, int], bytearray, dist.Work | None, dist.Work | None]


class _Messages:
    """A place, announced by messages of gloo."""

    def __init__(self, place: Place, group: ProcessGroup, channel: ProcessGroup) -> None:
        self.place = place
        self._channel = channel
        self._timeout = timeout_of(group if speaks_gloo(group) else channel, CPU)
        ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        peers = {rank: dist.get_group_rank(channel, rank) for rank in ranks}
        message = torch.frombuffer(bytearray(place.message()), dtype=torch.uint8)

        def post() -> list[_Posted]:
            with naming_lost_ranks(channel):
                slots = [bytearray(BYTES) for _ in ranks]
                pairs = zip((torch.frombuffer(slot, dtype=torch.uint8) for slot in slots), peers.values(), strict=True)
                receives = [dist.irecv(slot, None, channel, TAG, peer) for slot, peer in pairs]
                sends = [dist.isend(message, None, channel, TAG, peer) for peer in peers.values()]
            return list(zip(peers.items(), slots, receives, sends, strict=True))

        self._posted: Future[list[_Posted]] | None = in_background(SENDER, post)  # None: confirmed
        _unconfirmed[channel] = self

    def confirm(self) -> None:
        """See :meth:`Meeting.confirm`."""
        if self._posted is None:
            return
        require_same_so_far(self._channel)
        _unconfirmed.pop(self._channel, None)
        with at_place(self.place.text):
            posted = self._posted.result()
            for (rank, peer), slot, received, sent in posted:
                assert received is not None, "every rank of the group takes part"
                assert sent is not None, "every rank of the group takes part"
                with naming_lost_ranks(self._channel, peer, self._timeout):
                    received.wait(self._timeout)
                    # The peer posted its receive before it sent: it learns of a difference as well.
                    sent.wait(self._timeout)
                _compare(self.place, rank, bytes(slot), self._channel, posted)
        self._posted = None


class _Gathered:
    """A place, announced by a collective for which the host waits."""

    def __init__(self, place: Place, group: ProcessGroup) -> None:
        self.place = place
        messages = [b""] * group.size()
        with at_place(place.text), naming_lost_ranks(group):
            dist.all_gather_object(messages, place.message(), group=group)
        for rank, message in zip(dist.get_process_group_ranks(group), messages, strict=True):
            _compare(place, rank, message, group, None)

    def confirm(self) -> None:
        """See :meth:`Meeting.confirm`; it has happened."""


def _compare(place: Place, rank: int, message: bytes, channel: ProcessGroup, keep: object) -> None:
    """Raise, now and from now on, if a peer's message is not that of this place."""
    if message == place.message():
        return
    here, there = dist.get_rank(), rank
    texts = {here: place.text, there: message[DIGEST_BYTES:].rstrip(b"\0").decode(errors="ignore")}
    _differences[channel] = difference_of(texts), keep
    raise RuntimeError(_differences[channel][0])


def difference_of(texts: dict[int, str]) -> str:
    """The sentence of a difference between two ranks, the same on both."""
    (one, here), (other, there) = sorted(texts.items())
    if here == there:
        found = f"rank {one} and rank {other} are both in {here}, but would send different messages there"
    else:
        found = f"rank {one} is in {here}, rank {other} is in {there}"
    return (
        f"the ranks do different things: {found}; correct the script, so that all ranks call every model and every "
        f"function of thunder_zero in the same order and with inputs that take the same path, and restart all ranks "
        f"from the last checkpoint"
    )
