"""Ranks announce a tag before they communicate, so that none takes one collective for another.

Backends match messages by their order alone. If rank 0 evaluates while rank 1 runs a backward, the gathers of one are
the gathers of the other, and both train on garbage. So before a rank communicates, it announces what it does, its
COLLECTIVE TAG: one message of 256 bytes to each peer. Equal tags mean that the ranks do the same thing; a difference is
an error on both sides::

    rank 0   tag "backward number 12 of model 0"   gathers, reductions    -> the first wait compares
    rank 1   tag "forward number 13 of model 0"    gathers                -> and raises on both

All tags between two ranks travel in one order, whatever model and group they are about: on the default process group
if gloo carries its CPU tensors, else on the model's. An announcement waits for nobody: the first wait after it also
waits for the peers' tags and compares them. Two tags can differ only until then, and the messages of one never meet
those of the other, as gloo matches them by another number (:attr:`CollectiveTag.number`).

Without gloo (NCCL, MPI) an announcement is a collective for which the host waits, and is made only if
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_zero.comm.handle import SENDER, Waitable, in_background
from thunder_zero.comm.lost_ranks import CPU, LostRank, naming_lost_ranks, naming_tag, speaks_gloo
from thunder_zero.comm.transport import PeerBuffers, Shape, Transport
from thunder_zero.compat.torch_gaps import timeout_of
from thunder_zero.plan.mesh import SHARD

BYTES = 256  # of a message: a digest, then as much of the text as fits
DIGEST_BYTES = 16
TAG_BITS = 22
TAG = 0x63746167  # "ctag": users hardly send under it
SOMETHING = "a small collective of thunder_zero"


@dataclass(frozen=True)
class CollectiveTag:
    """What a rank does, as far as it can tell: two ranks with different tags must not communicate.

    Attributes:
        text: as an error calls it: ``"backward number 12 of model 0 (Net) after 12 training forwards"``.
        details: what else has to agree, such as a schedule; only its digest travels.
    """

    text: str
    details: str = ""

    @cached_property
    def digest(self) -> bytes:
        """Tells this tag from all others."""
        return hashlib.sha256(f"{self.text}\n{self.details}".encode()).digest()[:DIGEST_BYTES]

    @property
    def number(self) -> int:
        """Less than 2 ** ``TAG_BITS``; another tag has another number, but for one in four million."""
        return int.from_bytes(self.digest[:4], "big") % (1 << TAG_BITS)

    @cached_property
    def message(self) -> bytes:
        """What travels, ``BYTES`` long."""
        return (self.digest + self.text.encode()[: BYTES - DIGEST_BYTES]).ljust(BYTES, b"\0")


_doing: ContextVar[str] = ContextVar("doing", default="")
_without_tags: WeakSet[ProcessGroup] = WeakSet()
# By group: the sentence of a difference, after which no rank can go on, and messages that peers may still need.
_differences: WeakKeyDictionary[ProcessGroup, tuple[str, object]] = WeakKeyDictionary()
_unconfirmed: WeakKeyDictionary[ProcessGroup, AnnouncedTag] = WeakKeyDictionary()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Small collectives inside of the block have a tag of this text; the outermost block counts."""
    token = _doing.set(_doing.get() or what)
    try:
        yield
    finally:
        _doing.reset(token)


def what_is_done() -> str:
    """The text of the outermost block of :func:`doing`; "" outside."""
    return _doing.get()


def without_tags(group: ProcessGroup) -> None:
    """Collectives of this group have no tags: those of another thread come in no order with the rest."""
    _without_tags.add(group)


def announce(tag: CollectiveTag, group: ProcessGroup) -> AnnouncedTag | None:
    """Tell all ranks of the group where this rank is; None if nothing is left to be compared. Without gloo, only
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` compares, and at once."""
    if group.size() == 1 or group in _without_tags:
        return None
    channel = channel_of(group)
    if channel is None and not is_debugging():
        return None
    require_same_so_far(group)
    if channel is None:
        _compare_now(tag, group)
        return None
    if (before := _unconfirmed.get(channel)) is not None:
        before.confirm()
    return AnnouncedTag(tag, group, channel)


def compare_tags(step: str, group: ProcessGroup) -> str:
    """Wait until all ranks of the group are at the same small collective; the text of the outermost :func:`doing`."""
    tag = CollectiveTag(_doing.get() or SOMETHING, step)
    announced = announce(tag, group)
    if announced is not None:
        announced.confirm()
    return _doing.get()


def is_debugging() -> bool:
    """Whether torch's own switch for checks that cost time, ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, is on."""
    return dist.get_debug_level() is dist.DebugLevel.DETAIL


def channel_of(group: ProcessGroup) -> ProcessGroup | None:
    """The group that carries the tags of these ranks as messages: one for all models, if that can be."""
    world = dist.group.WORLD
    if world is not None and speaks_gloo(world):
        return world
    return group if speaks_gloo(group) else None


def require_same_so_far(group: ProcessGroup) -> None:
    """Raise at once, with the sentence of that difference, if ranks differed before."""
    found = _differences.get(channel_of(group) or group)
    if found is not None:
        raise RuntimeError(found[0])


# Rank, and its number in the channel; what it says; the messages from it and to it.
_Posted = tuple[tuple[int, int], bytearray, dist.Work, dist.Work]


class AnnouncedTag:
    """A tag, announced by messages of gloo, which the peers' tags are still to be compared with."""

    def __init__(self, tag: CollectiveTag, group: ProcessGroup, channel: ProcessGroup) -> None:
        self._tag, self._channel = tag, channel
        self._timeout = timeout_of(group if speaks_gloo(group) else channel, CPU)
        ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        peers = {rank: dist.get_group_rank(channel, rank) for rank in ranks}
        message = torch.frombuffer(bytearray(tag.message), dtype=torch.uint8)
        self._posted: list[_Posted] = []

        def post() -> None:
            with naming_lost_ranks(channel):
                slots = [bytearray(BYTES) for _ in ranks]
                pairs = zip((torch.frombuffer(slot, dtype=torch.uint8) for slot in slots), peers.values(), strict=True)
                # Not dist.irecv and isend, whose checks cost more than the message.
                receives = [channel.recv([slot], peer, TAG) for slot, peer in pairs]
                sends = [channel.send([message], peer, TAG) for peer in peers.values()]
            self._posted += zip(peers.items(), slots, receives, sends, strict=True)

        # The sender thread holds the connection while it writes; gloo's thread would poll for it if this one did.
        self._end_of_post: Callable[[], None] | None = in_background(SENDER, post).result  # None: confirmed
        _unconfirmed[channel] = self

    def confirm(self) -> None:
        """Wait for the peers' tags, once; raise if a peer is elsewhere or lost."""
        if self._end_of_post is None:
            return
        require_same_so_far(self._channel)
        _unconfirmed.pop(self._channel, None)
        with naming_tag(self._tag.text):
            self._end_of_post()
            for (rank, peer), slot, received, sent in self._posted:
                with naming_lost_ranks(self._channel, peer, self._timeout):
                    received.wait(self._timeout)
                    # The peer posted its receive before it sent: it learns of a difference as well.
                    sent.wait(self._timeout)
                _compare(self._tag, rank, bytes(slot), self._channel, self._posted)
        self._end_of_post, self._posted = None, []


def _compare_now(tag: CollectiveTag, group: ProcessGroup) -> None:
    """Announce a tag by a collective for which the host waits."""
    messages = [b""] * group.size()
    with naming_tag(tag.text), naming_lost_ranks(group):
        dist.all_gather_object(messages, tag.message, group=group)
    for rank, message in zip(dist.get_process_group_ranks(group), messages, strict=True):
        _compare(tag, rank, message, group, None)


def _compare(tag: CollectiveTag, rank: int, message: bytes, channel: ProcessGroup, keep: object) -> None:
    """Raise, now and from now on, if a peer's message is not that of this tag."""
    if message == tag.message:
        return
    here, there = dist.get_rank(), rank
    texts = {here: tag.text, there: message[DIGEST_BYTES:].rstrip(b"\0").decode(errors="ignore")}
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


class TaggedTransport:
    """The transports of one model by the axes of its mesh, called ``"model 0 (Net)"`` in tags, which all ranks of
    ``group`` train. Every launch of any of them comes after the tag of what the rank does; without announcements they
    work alone. Launches are as in :class:`thunder_zero.comm.transport.Transport`, ``over`` an axis."""

    def __init__(self, by_axis: Mapping[str, Transport], model: str, group: ProcessGroup, *, announces: bool) -> None:
        self._by_axis = by_axis
        self._model, self._group, self._announces = model, group, announces
        self._counts: Counter[str] = Counter()
        self._tag = CollectiveTag(model)
        self._next: Callable[[], CollectiveTag] | None = None  # what this rank does, until it is announced
        self._announced_tag: AnnouncedTag | None = None
        self._tagged = by_axis  # send under the number of the tag
        self._launches = 0

    def enter(self, tag: CollectiveTag) -> None:
        """From now on this rank is there; peers hear of it if it sends anything there."""
        self._next = lambda: tag

    def enter_phase(self, phase: str, schedule: str, training_forwards: int) -> None:
        """The same for a phase of a step, such as ``"backward"``, with the digest of its launches.

        Its tag has two numbers: how many phases of its kind have sent anything, and after how many forwards in
        training, which may send nothing. The second one differs where a rank has left out a backward.
        """

        def tag() -> CollectiveTag:
            self._counts[phase] += 1
            number = f"{phase} number {self._counts[phase]} of {self._model}"
            forwards = "training forward" if training_forwards == 1 else "training forwards"
            return CollectiveTag(f"{number} after {training_forwards} {forwards}", schedule)

        self._next = tag

    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather inside of a copy of the model."""
        return self._confirmed(self._announced(SHARD).all_gather(shards, shapes, into))

    def reduce_scatter(self, grads: Sequence[Tensor]) -> Waitable:
        """Average inside of a copy of the model; scatter the means."""
        return self._confirmed(self._announced(SHARD).reduce_scatter(grads))

    def all_reduce(self, grads: Sequence[Tensor], over: str = SHARD) -> Waitable:
        """Average over an axis."""
        return self._confirmed(self._announced(over).all_reduce(grads))

    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers, over: str = SHARD) -> Waitable:
        """Send to other ranks of an axis, and receive from them."""
        return self._confirmed(self._announced(over).trade(outgoing, incoming))

    def in_two(
        self,
        first: Callable[[Transport], Waitable],
        second: Callable[[Transport, tuple[Tensor, ...]], Waitable],
        over: str = SHARD,
    ) -> Waitable:
        """Launch twice over an axis, the second time with the results of the first."""
        return self._confirmed(self._announced(over).in_two(first, second))

    @property
    def in_flight(self) -> bool:
        """Whether a handle was launched and has not ended."""
        return any(transport.in_flight for transport in self._by_axis.values())

    def drain(self) -> None:
        """Wait for all that a failed step left in flight; raise if the ranks differ, or failed at different points."""
        require_same_so_far(self._group)
        if self._announces and self.in_flight:
            failed = CollectiveTag(f"the call after {self._tag.text} failed", f"after {self._launches} launches")
            if (announced := announce(failed, self._group)) is not None:
                announced.confirm()
        for transport in self._by_axis.values():
            transport.drain()

    def _announced(self, over: str) -> Transport:
        """The transport of an axis under the number of this tag, which was announced."""
        if self._next is not None and self._announces:
            self._tag = self._next()
            self._announced_tag = announce(self._tag, self._group)
            number = self._tag.number
            self._tagged = {axis: transport.with_tag(number) for axis, transport in self._by_axis.items()}
            self._next, self._launches = None, 0
        self._launches += 1
        return self._tagged[over]

    def _confirmed(self, handle: Waitable) -> Waitable:
        """A handle that compares tags before it waits."""
        if not self._announces:
            return handle
        return _Confirmed(handle, self._tag, self._announced_tag)


class _Confirmed:
    """A handle that compares tags before it waits for another."""

    __slots__ = "_announced", "_handle", "_tag"

    def __init__(self, handle: Waitable, tag: CollectiveTag, announced: AnnouncedTag | None) -> None:
        self._handle, self._tag, self._announced = handle, tag, announced

    def wait(self) -> tuple[Tensor, ...]:
        """Raise if a peer is elsewhere; or else wait as the handle does."""
        if self._announced is not None:
            self._announced.confirm()
        try:
            return self._handle.wait()
        except LostRank as lost:  # as naming_tag, which would cost more, and every wait comes here
            raise lost.at(self._tag.text) from lost.__cause__
