"""Announces a tag before collectives, so that a mismatch raises instead of mixing up messages.

Backends match messages by their order alone. If rank 0 evaluates while rank 1 runs a backward, each rank receives the
other's gathers, and both train on garbage. So before a rank communicates, it announces its COLLECTIVE TAG: a message of
256 bytes to each peer, which names the rank's activity. If the tags of two ranks differ, both ranks raise::

    rank 0   tag "backward number 12 of model 0"   gathers, reductions    -> the first wait compares
    rank 1   tag "forward number 13 of model 0"    gathers                -> and raises on both

Tags between two ranks are sent in one order for all models and groups. An announcement does not block: the first wait
after it also waits for the peers' tags and compares them. Until then two ranks may have different tags, but gloo
matches messages by the number of the tag. A transport that ignores numbers compares tags before it launches.

A tag names what a rank sends, not the graph that sends it. Ranks whose data take different branches have equal tags if
their programs launch equal collectives in one order.

If tags differ, all ranks exchange the whole tags, and the error names the first launch that differs. The models of
these tags raise the error again at their next collective: their launches are never answered, and their counts differ.
Other models are not affected, since no message was mixed up.

On other backends (NCCL, MPI) an announcement is a collective that blocks the host. Ranks launch this collective only if
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from threading import Lock
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_zero.comm.handle import SENDER, Waitable, WaitsBy, in_background
from thunder_zero.comm.lost_ranks import CPU, LostRank, naming_lost_ranks, naming_tag, speaks_gloo
from thunder_zero.comm.transport import PeerBuffers, Shape, Transport
from thunder_zero.compat.torch.groups import timeout_of
from thunder_zero.plan.mesh import SHARD

BYTES = 256  # length of a message: a digest, then the text, cut to fit
DIGEST_BYTES = 16
TAG_BITS = 22
TAG = 0x63746167  # "ctag", a tag that users are unlikely to send under
SOMETHING = "a small collective of thunder_zero"


@dataclass(frozen=True)
class CollectiveTag:
    """The activity of a rank. Two ranks with different tags must not communicate."""

    text: str  # the name in errors: ``"backward number 12 of model 0 (Net) after 12 training forwards"``
    details: str = ""  # additional text that must be equal, such as the digest of a schedule
    models: tuple[str, ...] = ()  # such as ``"model 0 (Net)"``
    launches: Sequence[str] = ()  # of which ``details`` is the digest. Ranks exchange them only if their tags differ.

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.text}\n{self.details}".encode()).digest()[:DIGEST_BYTES]

    @property
    def number(self) -> int:
        """A number below 2 ** ``TAG_BITS``. Two tags share a number with a probability of one in four million."""
        return int.from_bytes(self.digest[:4], "big") % (1 << TAG_BITS)

    @cached_property
    def message(self) -> bytes:
        return (self.digest + self.text.encode()[: BYTES - DIGEST_BYTES]).ljust(BYTES, b"\0")


_activity: ContextVar[CollectiveTag | None] = ContextVar("activity", default=None)
_without_tags: WeakSet[ProcessGroup] = WeakSet()
_differences: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()  # group -> model -> its error
_unconfirmed: WeakKeyDictionary[ProcessGroup, AnnouncedTag] = WeakKeyDictionary()


@contextmanager
def doing(what: str, *models: str) -> Iterator[None]:
    """Tag small collectives inside the block with this activity on models, unless an outer block has tagged them."""
    token = _activity.set(_activity.get() or CollectiveTag(" of ".join((what, *models)), models=models))
    try:
        yield
    finally:
        _activity.reset(token)


def current_activity() -> str:
    activity = _activity.get()
    return "" if activity is None else activity.text


def without_tags(group: ProcessGroup) -> None:
    """Disable tags for a group that another thread uses: its collectives have no order relative to other groups'."""
    _without_tags.add(group)


def announce(tag: CollectiveTag, group: ProcessGroup) -> AnnouncedTag | None:
    """Send this rank's tag to all ranks of the group. Return the announcement, or None if no comparison is pending."""
    if group.size() == 1 or group in _without_tags:
        return None
    channel = channel_of(group)
    if channel is None and not is_debugging():
        return None
    require_same_so_far(tag.models, group)
    if channel is None:
        _compare_now(tag, group)
        return None
    if (previous := _unconfirmed.get(channel)) is not None:
        previous.confirm()
    return AnnouncedTag(tag, group, channel)


def compare_tags(step: str, group: ProcessGroup) -> str:
    """Wait until all ranks of the group reach this small collective. Return the text of the outermost :func:`doing`."""
    announced = announce(replace(_activity.get() or CollectiveTag(SOMETHING), details=step), group)
    if announced is not None:
        announced.confirm()
    return current_activity()


def is_debugging() -> bool:
    return dist.get_debug_level() is dist.DebugLevel.DETAIL


def channel_of(group: ProcessGroup) -> ProcessGroup | None:
    """Return the group that carries the tags of these ranks as messages: the default group if possible."""
    world = dist.group.WORLD
    if world is not None and speaks_gloo(world):
        return world
    return group if speaks_gloo(group) else None


def require_same_so_far(models: Iterable[str], group: ProcessGroup) -> None:
    """Raise the earlier error again if ranks have differed before in one of these models."""
    differences = _differences.get(channel_of(group) or group, {})
    for model in models:
        if model in differences:
            raise RuntimeError(differences[model])


# For each peer: (its global rank, its rank in the channel), the buffer of its message, the receive, the send.
_Posted = tuple[tuple[int, int], bytearray, dist.Work, dist.Work]


class AnnouncedTag:
    """An announced tag that has not been compared with the peers' tags yet. Gloo sends the tag's messages."""

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

        # On the sender thread, which holds the connection while it writes: gloo's thread would poll for it otherwise.
        self._end_of_post: Callable[[], None] | None = in_background(SENDER, post).result  # None: compared
        self._difference: str | None = None
        self._lock = Lock()  # the thread that averages compares tags, too
        _unconfirmed[channel] = self

    def confirm(self) -> None:
        """Wait for the peers' tags, once. Raise if a peer has another tag or is lost."""
        with self._lock:
            if self._end_of_post is not None:
                self._difference = self._compare(self._end_of_post)
                self._end_of_post, self._posted = None, []
        if self._difference is not None:
            raise RuntimeError(self._difference)

    def _compare(self, end_of_post: Callable[[], None]) -> str | None:
        _unconfirmed.pop(self._channel, None)
        tags, differing = {dist.get_rank(): self._tag}, {}
        with naming_tag(self._tag.text):
            end_of_post()
            for (rank, peer), slot, *works in self._posted:
                for work in works:  # the peer posted its receive before it sent
                    self._end(peer, work)
                tags[rank] = self._tag
                if slot != self._tag.message:
                    differing[rank] = peer
            if not differing:
                return None
            # Each of these peers sees the difference, too, once it has all tags, and takes part in the exchange.
            tags |= zip(differing, map(pickle.loads, self._exchange([*differing.values()])), strict=True)
        return _remember(tags, self._channel)

    def _exchange(self, peers: Sequence[int]) -> list[bytes]:
        """Trade whole tags with peers, including launches; return those of the peers, pickled."""
        whole = torch.frombuffer(bytearray(pickle.dumps(self._tag)), dtype=torch.uint8)
        sizes = self._trade(peers, torch.tensor([len(whole)]), [torch.empty(1, dtype=torch.int64) for _ in peers])
        slots = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        return [tag.numpy().tobytes() for tag in self._trade(peers, whole, slots)]

    def _trade(self, peers: Sequence[int], message: Tensor, slots: list[Tensor]) -> list[Tensor]:
        works = [(peer, self._channel.recv([slot], peer, TAG)) for peer, slot in zip(peers, slots, strict=True)]
        works += [(peer, self._channel.send([message], peer, TAG)) for peer in peers]
        for peer, work in works:
            self._end(peer, work)
        return slots

    def _end(self, peer: int, work: dist.Work) -> None:
        with naming_lost_ranks(self._channel, peer, self._timeout):
            work.wait(self._timeout)


def _compare_now(tag: CollectiveTag, group: ProcessGroup) -> None:
    tags = [tag] * group.size()
    with naming_tag(tag.text), naming_lost_ranks(group):
        dist.all_gather_object(tags, tag, group=group)
    if any(other.message != tag.message for other in tags):
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(_remember(dict(zip(ranks, tags, strict=True)), group))


def _remember(tags: Mapping[int, CollectiveTag], channel: ProcessGroup) -> str:
    """Make all later collectives of the models of different tags raise; return the error."""
    difference = difference_of(tags)
    models = (model for tag in tags.values() for model in tag.models)
    _differences[channel] = dict.fromkeys(models, difference) | _differences.get(channel, {})
    return difference


def difference_of(tags: Mapping[int, CollectiveTag]) -> str:
    """Return the error text about the first two ranks with different tags, equal on all ranks."""
    (first, tag), *others = sorted(tags.items(), key=lambda item: item[0])
    second, other = next((rank, other) for rank, other in others if other.message != tag.message)
    remedy = ""
    if tag.text == other.text:
        if tag.text.startswith("backward"):
            remedy = "pass materialize_grads=True if the losses of ranks leave out different outputs, or "
        difference = (
            f"rank {first} and rank {second} are both in {tag.text}, but would send different messages there"
            f"{_first_difference(tag, other, (first, second))}"
        )
    else:
        difference = f"rank {first} is in {tag.text}, rank {second} is in {other.text}"
    return (
        f"the ranks do different things: {difference}; {remedy}correct the script, so that all ranks call every model "
        f"and every function of thunder_zero in the same order and with inputs that take the same path, and restart "
        f"all ranks from the last checkpoint"
    )


def _first_difference(tag: CollectiveTag, other: CollectiveTag, ranks: tuple[int, int]) -> str:
    """Return the first launch that differs, or "": ``(launch 2: all_gather w on rank 0, nothing on rank 1)``."""
    pairs = enumerate(zip_longest(tag.launches, other.launches, fillvalue="nothing"), 1)
    number, pair = next(((number, pair) for number, pair in pairs if pair[0] != pair[1]), (0, ()))
    launches = ", ".join(f"{launch} on rank {rank}" for launch, rank in zip(pair, ranks, strict=False))
    return f" (launch {number}: {launches})" * bool(pair)


class TaggedTransport:
    """The transports of a model, keyed by the axes of its mesh.

    The first launch after ``enter`` or ``enter_phase`` announces the tag, to all ranks of ``group``. Launches are as in
    :class:`thunder_zero.comm.transport.Transport`, with the axis as an additional argument.
    """

    def __init__(
        self, transports: Mapping[str, Transport], model: str, group: ProcessGroup, *, announces: bool
    ) -> None:
        self._transports = transports
        self._model, self._group, self.announces = model, group, announces
        self._counts: Counter[str] = Counter()
        self._tag = CollectiveTag(model)
        self._next_tag: Callable[[], CollectiveTag] | None = None  # returns the tag of the next launch
        self._announced_tag: AnnouncedTag | None = None
        self._tagged = transports  # transports whose messages carry the number of the tag
        self._launches = 0

    def enter(self, tag: CollectiveTag) -> None:
        self._next_tag = lambda: tag

    def enter_phase(
        self, phase: str, schedule: str, training_forwards: int, launches: Sequence[str] = (), note: str = ""
    ) -> None:
        """Set the tag of a phase, such as ``"backward"``. ``schedule`` is the digest of the phase's launches.

        The number of training forwards so far differs between ranks if a rank has skipped a backward.
        """

        def tag() -> CollectiveTag:
            self._counts[phase] += 1
            name = f"{phase} number {self._counts[phase]} of {self._model}"
            forwards = "training forward" if training_forwards == 1 else "training forwards"
            return CollectiveTag(f"{name} after {training_forwards} {forwards}{note}", schedule, launches=launches)

        self._next_tag = tag

    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        return self._confirmed(self._announced(SHARD).all_gather(shards, shapes, into))

    def reduce_scatter(self, grads: Sequence[Tensor]) -> Waitable:
        return self._confirmed(self._announced(SHARD).reduce_scatter(grads))

    def all_reduce(self, grads: Sequence[Tensor], over: str = SHARD) -> Waitable:
        return self._confirmed(self._announced(over).all_reduce(grads))

    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers, over: str = SHARD) -> Waitable:
        return self._confirmed(self._announced(over).trade(outgoing, incoming))

    def in_two(
        self,
        first: Callable[[Transport], Waitable],
        second: Callable[[Transport, tuple[Tensor, ...]], Waitable],
        over: str = SHARD,
    ) -> Waitable:
        return self._confirmed(self._announced(over).in_two(first, second))

    @property
    def averages(self) -> frozenset[torch.dtype]:
        return frozenset.intersection(*(transport.averages for transport in self._transports.values()))

    @property
    def in_flight(self) -> bool:
        return any(transport.in_flight for transport in self._transports.values())

    def drain(self) -> None:
        """Wait for the launches of a failed step. Raise if ranks have different tags, or failed at different points."""
        require_same_so_far((self._model,), self._group)
        if self.announces and self.in_flight:
            text = f"the call after {self._tag.text} failed"
            failed = CollectiveTag(text, f"after {self._launches} launches", (self._model,))
            if (announced := announce(failed, self._group)) is not None:
                announced.confirm()
        for transport in self._transports.values():
            transport.drain()

    def _announced(self, axis: str) -> Transport:
        """Announce the tag at most once. Return the transport of an axis, whose messages carry the tag's number."""
        if self._next_tag is not None and self.announces:
            tag = self._next_tag()
            self._tag = replace(tag, models=(self._model, *tag.models))
            self._announced_tag = announce(self._tag, self._group)
            self._tagged = self._transports
            if (announced := self._announced_tag) is not None:
                number, compare = self._tag.number, announced.confirm
                self._tagged = {name: each.with_tag(number, compare) for name, each in self._transports.items()}
                if any(each.world_size > 1 and self._tagged[name] is each for name, each in self._transports.items()):
                    compare()  # a transport that ignores tags would mix messages up
            self._next_tag, self._launches = None, 0
        self._launches += 1
        return self._tagged[axis]

    def _confirmed(self, handle: Waitable) -> Waitable:
        """Return a handle that compares tags before it waits."""
        if not self.announces:
            return handle
        tag, announced = self._tag, self._announced_tag

        def wait() -> tuple[Tensor, ...]:
            if announced is not None:
                announced.confirm()
            try:
                return handle.wait()
            except LostRank as lost:  # cheaper than naming_tag, for every wait
                raise lost.at(tag.text) from lost.__cause__

        return WaitsBy(wait)
