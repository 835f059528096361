"""Implements the transport for gloo: each rank sends a peer only the rows that the peer needs.

Gloo's reduce-scatter is an all-reduce that discards most of its result, and it sums in the dtype of the messages.
Messages between pairs of ranks send the fewest bytes possible, directly from and into the tensors' own memory::

    all_gather       local rows -> every peer                            (W - 1) / W of the bytes
    reduce_scatter   every peer's rows -> that peer, which sums          (W - 1) / W
    all_reduce       reduce_scatter of equal parts, all_gather of means  2 (W - 1) / W
                     W = 2: both ranks send everything and sum           2 (W - 1) / W, in one message
    trade            the given tensors -> each peer                      the bytes of the tensors

Padding is never sent, and an empty range needs no message. Sender and receiver derive the messages from shapes and
dtypes alone. Sums run in rank order, half precision is summed in float32, and the division comes last.

SENDER posts receives and sends to gloo. A large send takes milliseconds, until gloo has copied as much as the socket
accepts. Posting a receive sends an announcement, which would wait for earlier sends. So a bucket's receives are posted
before its sends. AVERAGER starts the second part of an all-reduce, or of ``in_two``, when the first part has ended.

Gloo matches messages by tag: between two ranks, the n-th send of a tag matches the n-th receive. Messages that AVERAGER
starts have tags of their own, and so has every phase of a step (``collective_tags.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_zero.comm.handle import AVERAGER, SENDER, BucketPart, Handle, Result, Waitable, in_background
from thunder_zero.comm.lost_ranks import raise_named
from thunder_zero.comm.transport import COMPLEX, FLOATS, PeerBuffers, Shape, Transport, outside_autograd
from thunder_zero.compat.private import chunk_cat, flatten
from thunder_zero.plan import layout

AwaitMessage = Callable[[], object]  # returns when a message has ended
StartMessage = Callable[[Tensor, int, ProcessGroup, int], AwaitMessage]  # :func:`send` or :func:`receive`
# Tensors with fewer bytes to one peer are packed into one message: a smaller message costs more than two copies of its
# bytes. Measured on loopback, docs/performance.md.
PACK_BELOW_BYTES = 64 << 10
TAG = 0x7A000000  # "z", the first of 2 ** 26 tags that users are unlikely to send under
BLOCK = 1 << 16  # elements of half precision summed at a time, so that their float32 sums stay in the cache


class PairwiseGloo(Transport):
    averages = FLOATS | COMPLEX  # torch sums, not the backend

    def __init__(self, group: ProcessGroup, role: int = 0) -> None:
        super().__init__()
        self._group = group
        self._role = role
        self._tag, self._tag_of_means, self._tag_of_second = tags_of(role, 0)
        self._compare: Callable[[], object] = lambda: None
        self.world_size = group.size()
        self.rank = group.rank()
        # Each rank starts with its successor, so that no peer is the first of several ranks.
        self._peers = tuple((self.rank + step) % self.world_size for step in range(1, self.world_size))

    @outside_autograd
    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Handle:
        bucket, parts = self._bucket(), []
        fulls: list[Any] = [None] * len(shards)
        for message in packed_messages(tuple(shapes), shards[0].itemsize, self.world_size, PACK_BELOW_BYTES):
            rows = [shards[index] for index in message.members]
            if into is None and message.is_even:
                parts.append(self._gather_even(bucket, rows, message, fulls))
                continue
            for index in message.members:
                shape = shapes[index]
                fulls[index] = shards[index].new_empty(shape) if into is None else into[index].detach()[: shape[0]]
            parts.append(self._gather(bucket, rows, [fulls[index] for index in message.members], copies=into is None))
        return Handle(bucket.post(parts), fulls, self._pending)

    def _gather_even(
        self, bucket: GlooBucket, shards: Sequence[Tensor], message: PackedMessage, fulls: list[Any]
    ) -> BucketPart:
        """Gather parameters that share a message, if the number of ranks divides the rows of each: one call of torch
        packs all rows, and one call splits the received rows."""
        local_rows = flatten(shards)
        packed = local_rows.new_empty((self.world_size, message.elements))
        rows_of_ranks = packed.unbind()
        rows_of_ranks[self.rank].copy_(local_rows)
        bucket.send(dict.fromkeys(self._peers, local_rows))
        cut = partial(_cut, fulls, message.members, message.shapes, packed, message.sizes, 1)
        return bucket.receive({rank: rows_of_ranks[rank] for rank in self._peers}, cut)

    def _gather(
        self, bucket: GlooBucket, shards: Sequence[Tensor], fulls: Sequence[Tensor], *, copies: bool
    ) -> BucketPart:
        """Gather parameters that share a message. If ``copies``, also copy this rank's rows."""
        parts_of_members = [self._cut_rows(full) for full in fulls]  # [member][rank] -> flat rows of that rank
        local_rows = [
            shard.view(-1)[: parts[self.rank].numel()] for shard, parts in zip(shards, parts_of_members, strict=True)
        ]
        columns = {rank: [parts[rank] for parts in parts_of_members] for rank in self._peers}
        slots = {rank: _one_buffer(column) for rank, column in columns.items()}
        unpack = _unpacking((slots[rank], columns[rank]) for rank in self._peers) if len(shards) > 1 else None
        bucket.send(dict.fromkeys(self._peers, _pack(local_rows)))
        if copies:
            for rows, parts in zip(local_rows, parts_of_members, strict=True):
                bucket.meanwhile(partial(parts[self.rank].copy_, rows))
        return bucket.receive(slots, unpack)

    @outside_autograd
    def reduce_scatter(self, grads: Sequence[Tensor]) -> Handle:
        means: list[Any] = [None] * len(grads)
        bucket, bucket_parts, shapes = self._bucket(), [], tuple([grad.shape for grad in grads])
        for message in packed_messages(shapes, grads[0].itemsize, self.world_size, PACK_BELOW_BYTES):
            members = message.members
            members_grads = [grads[index] for index in members]
            unpack: Callable[[], None] | None
            if message.is_even:
                parts = chunk_cat(members_grads, 0, self.world_size).unbind()
                mean = torch.empty_like(parts[0])
                unpack = partial(_cut, means, members, message.shard_shapes, mean, message.sizes, 0)
            else:
                for index, shape in zip(members, message.shard_shapes, strict=True):
                    means[index] = grads[index].new_empty(shape)
                rows_of_members = [self._cut_rows(grad.contiguous()) for grad in members_grads]
                parts = tuple(
                    _pack([rows_of_ranks[rank] for rows_of_ranks in rows_of_members]) for rank in range(self.world_size)
                )
                flat = [means[index].view(-1) for index in members]
                sizes = [rows_of_ranks[self.rank].numel() for rows_of_ranks in rows_of_members]
                for rows, size in zip(flat, sizes, strict=True):
                    bucket.meanwhile(rows[size:].zero_)  # the padding
                unpadded = [rows[:size] for rows, size in zip(flat, sizes, strict=True)]
                mean = _one_buffer(unpadded)
                unpack = _unpacking([(mean, unpadded)]) if len(members) > 1 else None
            bucket_parts.append(self._reduce(bucket, parts, mean, unpack))
            bucket.send({rank: parts[rank] for rank in self._peers})
        return Handle(bucket.post(bucket_parts), means, self._pending)

    @outside_autograd
    def all_reduce(self, grads: Sequence[Tensor]) -> Handle:
        means: list[Any] = [None] * len(grads)
        bucket, bucket_parts, spreads = self._bucket(), [], []
        shapes, limit = tuple([grad.shape for grad in grads]), PACK_BELOW_BYTES * self.world_size
        for message in packed_messages(shapes, grads[0].itemsize, 1, limit):
            members = message.members
            flat, unpack = flatten([grads[index] for index in members]), None
            if len(members) > 1:
                mean = torch.empty_like(flat)
                unpack = partial(_cut, means, members, message.shapes, mean, message.sizes, 0)
            else:
                means[members[0]] = grads[members[0]].new_empty(message.shapes[0])
                mean = means[members[0]].view(-1)
            if self.world_size == 2:
                bucket.send(dict.fromkeys(self._peers, flat))
                bucket_parts.append(self._reduce(bucket, (flat, flat), mean, unpack))
            else:
                spreads.append(self._reduce_and_spread(bucket, self._cut_rows(flat), mean, unpack))
        posted, *sends = bucket.post(bucket_parts)
        averaged = [part for spread in spreads for part in spread(posted.finish)]
        return Handle([posted, *averaged, *sends], means, self._pending)

    @outside_autograd
    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Handle:
        bucket, bucket_parts = self._bucket(), list[BucketPart]()
        for rank in self._peers:
            for members in messages(incoming.get(rank, ())):
                column = [incoming[rank][index] for index in members]
                buffer = _one_buffer(column)
                unpack = _unpacking([(buffer, column)]) if len(members) > 1 else None
                bucket_parts.append(bucket.receive({rank: buffer}, unpack))
            for members in messages(outgoing.get(rank, ())):
                bucket.send({rank: _pack([outgoing[rank][index] for index in members])})
        return Handle(bucket.post(bucket_parts), (), self._pending)

    def in_two(
        self, first: Callable[[Transport], Waitable], second: Callable[[Transport, tuple[Tensor, ...]], Waitable]
    ) -> Waitable:
        handle, second_transport = first(self), copy(self)
        second_transport._tag = self._tag_of_second
        launched, results = self._average_in_background(lambda: second(second_transport, handle.wait())), list[Tensor]()
        return Handle([BucketPart((lambda: results.extend(launched().wait()),))], results, self._pending)

    def _average_in_background(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Run ``start`` on AVERAGER, after earlier tasks. Return a function that waits for the result."""

        def compare_then_start() -> Result:
            self._compare()  # no message arrives if ranks differ, and later tasks of other models would wait, too
            return start()

        return in_background(AVERAGER, compare_then_start).result

    def with_tag(self, tag: int, compare: Callable[[], object]) -> PairwiseGloo:
        tagged = copy(self)
        tagged._compare = compare
        tagged._tag, tagged._tag_of_means, tagged._tag_of_second = tags_of(self._role, tag)
        return tagged

    def _reduce(
        self, bucket: GlooBucket, parts: Sequence[Tensor], mean: Tensor, then: Callable[[], None] | None
    ) -> BucketPart:
        """Receive a part from each peer, to which the caller sends ``parts``, and write the mean into ``mean``."""
        lowest = min(self._peers)  # its part is summed first or second, so it may be received into ``mean``
        arrived = {rank: mean if rank == lowest else torch.empty_like(mean) for rank in self._peers}
        in_rank_order = [arrived.get(rank, parts[self.rank]) for rank in range(self.world_size)]

        def reduce() -> None:
            mean_into(mean, in_rank_order)
            if then is not None:
                then()

        return bucket.receive(arrived, reduce)

    def _reduce_and_spread(
        self, bucket: GlooBucket, parts: Sequence[Tensor], mean: Tensor, then: Callable[[], None] | None
    ) -> Callable[[AwaitMessage], list[BucketPart]]:
        """Average this rank's part of ``mean``, send it to all peers, and receive the other parts.

        After posting the bucket, call the returned function with a function that waits until posting has ended.
        """
        slots = self._cut_rows(mean)
        other_parts = bucket.receive({rank: slots[rank] for rank in self._peers}, then, self._tag_of_means)
        reduce = self._reduce(bucket, parts, slots[self.rank], None)
        bucket.send({rank: parts[rank] for rank in self._peers})
        sent: list[AwaitMessage] = []

        def spread(posted: AwaitMessage) -> list[BucketPart]:
            def average_then_send() -> None:
                posted()
                reduce.finish()
                messages = dict.fromkeys(self._peers, slots[self.rank])
                sent.extend(self._bucket().start_all(send, messages, self._tag_of_means))

            return [BucketPart((self._average_in_background(average_then_send),)), other_parts, BucketPart(sent)]

        return spread

    def _bucket(self) -> GlooBucket:
        return GlooBucket(self._group, self._tag)

    def _cut_rows(self, tensor: Tensor) -> list[Tensor]:
        """Return views of a contiguous tensor: the flat rows of each rank, in rank order."""
        sizes = _elements_of_ranks(tuple(tensor.shape), self.world_size)
        return list(torch.split_with_sizes(tensor.view(-1), sizes))


class GlooBucket:
    """The messages of one launch. One task of the sender thread posts all receives, then all sends."""

    def __init__(self, group: ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._receives: list[tuple[dict[int, Tensor], int, list[AwaitMessage]]] = []
        self._sends: list[dict[int, Tensor]] = []
        self._sent: list[AwaitMessage] = []
        self._meanwhile: list[Callable[[], object]] = []

    def receive(self, slots: dict[int, Tensor], then: Callable[[], None] | None, tag: int | None = None) -> BucketPart:
        """Receive into buffers, keyed by rank. Return a part that waits for all messages, then calls ``then``."""
        received: list[AwaitMessage] = []
        self._receives.append((slots, self._tag if tag is None else tag, received))
        return BucketPart(received, then)

    def send(self, messages: dict[int, Tensor]) -> None:
        self._sends.append(messages)

    def meanwhile(self, work: Callable[[], object]) -> None:
        self._meanwhile.append(work)

    def post(self, parts: Sequence[BucketPart]) -> list[BucketPart]:
        """Start the messages without blocking the caller. Return the parts of a handle, posting first, sends last."""
        posted = self._begin_to_post()
        for work in self._meanwhile:
            work()
        return [BucketPart((posted,)), *parts, BucketPart(self._sent)]

    def _begin_to_post(self) -> Callable[[], object]:
        """Post on the sender thread. Return a wait for it."""
        return in_background(SENDER, self._post).result

    def start_all(self, start: StartMessage, tensors: dict[int, Tensor], tag: int) -> list[AwaitMessage]:
        """Start messages, keyed by rank. Return a wait for each. Empty tensors need no message."""
        return [start(tensor, rank, self._group, tag) for rank, tensor in tensors.items() if tensor.numel()]

    def _post(self) -> None:
        for slots, tag, received in self._receives:
            received += self.start_all(receive, slots, tag)
        for messages in self._sends:
            self._sent += self.start_all(send, messages, self._tag)


def tags_of(role: int, tag: int) -> tuple[int, int, int]:
    """Return the tags of launches, of the means of an all-reduce, and of the second launch of ``in_two``."""
    first = TAG + 16 * tag + 4 * role
    return first, first + 1, first + 2


def send(message: Tensor, rank: int, group: ProcessGroup, tag: int) -> AwaitMessage:
    return _start(group.send, message, rank, group, tag)


def receive(slot: Tensor, rank: int, group: ProcessGroup, tag: int) -> AwaitMessage:
    return _start(group.recv, slot, rank, group, tag)


def _start(post: Callable[..., dist.Work], tensor: Tensor, rank: int, group: ProcessGroup, tag: int) -> AwaitMessage:
    start = monotonic()
    try:
        # gloo does not send complex numbers. ``dist.isend`` would convert them as well, but its checks are slow.
        work = post([torch.view_as_real(tensor) if tensor.is_complex() else tensor], rank, tag)
    except RuntimeError as error:
        raise_named(error, group, start, rank)
    return partial(_end, work, group, rank)


def _end(work: dist.Work, group: ProcessGroup, rank: int) -> None:
    start = monotonic()
    try:
        work.wait()
    except RuntimeError as error:
        raise_named(error, group, start, rank)


@dataclass(frozen=True, slots=True)
class PackedMessage:
    members: tuple[int, ...]  # the indices of the parameters in the bucket
    shapes: tuple[Shape, ...]
    shard_shapes: tuple[Shape, ...]  # of the message's tensors: a rank's rows with padding, or all rows
    sizes: tuple[int, ...]  # the number of elements of each shard
    elements: int  # the sum of the sizes
    is_even: bool  # True if there are several members, and the number of ranks divides the rows of each member


@cache
def packed_messages(shapes: tuple[Shape, ...], itemsize: int, world_size: int, limit: int) -> tuple[PackedMessage, ...]:
    """Return the messages of a bucket. Parameters below ``limit`` bytes share a message."""
    shards = [layout.shard_shape(shape, world_size) for shape in shapes]
    packed = []
    for members in group_by_size([prod(shape) * itemsize for shape in shards], limit):
        full_shapes, shard_shapes = tuple(shapes[index] for index in members), tuple(shards[index] for index in members)
        sizes = tuple(map(prod, shard_shapes))
        is_even = world_size > 1 and len(members) > 1 and all(shape[0] % world_size == 0 for shape in full_shapes)
        packed.append(PackedMessage(tuple(members), full_shapes, shard_shapes, sizes, sum(sizes), is_even))
    return tuple(packed)


@cache
def _elements_of_ranks(shape: tuple[int, ...], world_size: int) -> list[int]:
    ranges = [layout.row_range(shape[0], world_size, rank) for rank in range(world_size)]
    return [(stop - start) * prod(shape[1:]) for start, stop in ranges]


def group_by_size(nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Return, for each message, the indices of its tensors. Tensors below ``limit`` bytes share a message."""
    small = [index for index, size in enumerate(nbytes) if size < limit]
    large = [[index] for index, size in enumerate(nbytes) if size >= limit]
    return [small, *large] if small else large


def mean_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Sum 1-D ``parts`` in order, half precision in float32. ``out`` may be the first or the second part."""
    first, second, *remaining = parts
    if out.itemsize >= 4:
        torch.add(first, second, out=out)
        for part in remaining:
            out.add_(part)
        out.div_(len(parts))
        return
    for block, *pieces in zip(*(torch.split(tensor, BLOCK) for tensor in (out, *parts)), strict=True):
        total = pieces[0].float()
        for part in pieces[1:]:
            total.add_(part)
        block.copy_(total.div_(len(parts)))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def messages(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return, for each message of a trade, the indices of its tensors, given their shapes and dtypes."""
    return group_by_size([tensor.nbytes for tensor in tensors], PACK_BELOW_BYTES)


def _one_buffer(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


@outside_autograd
def _cut(
    results: list[Any],
    members: Sequence[int],
    shapes: Sequence[Sequence[int]],
    packed: Tensor,
    sizes: Sequence[int],
    dim: int,
) -> None:
    """Split a packed message into new tensors: ``results`` at the indices ``members``."""
    split: Any = torch.split_with_sizes_copy  # torch's stubs lack its return type
    for index, piece, shape in zip(members, split(packed, sizes, dim), shapes, strict=True):
        # Resized in place: a view would hold one more tensor. Most biases need no resize.
        results[index] = piece if piece.shape == shape else piece.resize_(shape)


def _unpacking(arrived: Iterable[tuple[Tensor, Sequence[Tensor]]]) -> Callable[[], None]:
    pairs = list(arrived)

    def unpack() -> None:
        for message, tensors in pairs:
            sizes = [tensor.numel() for tensor in tensors]
            torch.split_with_sizes_copy(message, sizes, out=list(tensors))

    return unpack
