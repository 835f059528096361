"""The transport for gloo: each rank sends every other rank exactly the rows that it needs.

gloo's reduce-scatter is an all-reduce that discards most of its result, and it adds up in the dtype of
the messages. Messages between pairs of ranks send the fewest bytes possible, in the background, directly
from and into the tensors' own memory (rows of dim 0 are contiguous)::

    all_gather       own rows -> every peer                              (W - 1) / W of the bytes
    reduce_scatter   every peer's rows -> that peer, which adds up       (W - 1) / W
    all_reduce       reduce_scatter of equal parts, all_gather of means  2 (W - 1) / W
                     W = 2: both send everything and add up              the same, one message
    trade            what each rank names for each other one             those bytes

Padding is never sent, and an empty range needs no message. Both ends derive the messages from shapes and
dtypes alone. Sums run in rank order, half precision is added up in float32, and the division comes last.

Two background threads, which mostly sleep: the sender thread posts receives and sends to gloo. gloo copies as
much as the socket takes before a send returns (milliseconds, for large ones), and posting a receive waits for
that. Posting a receive also sends a message to announce it, so a bucket's receives are posted before its
sends; the announcement would otherwise queue behind their bytes. AVERAGER starts the second part of an
all-reduce when the first has ended, and in hybrid sharding the averaging over copies when the averaging
inside a copy has ended, so that neither depends on a call of ``wait``.

gloo matches messages by tag: of those between two ranks under one tag, the n-th sent is the n-th received. Each
thread sends under its own tag, and every phase of a step under tags of its own (:meth:`PairwiseGloo.with_tag`), so that
messages of ranks that do different things (``collective_tags.py``) never meet. gloo keeps nothing of a
tag that was used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_zero.comm.handle import AVERAGER, SENDER, BucketPart, Handle, Result, in_background
from thunder_zero.comm.lost_ranks import naming_lost_ranks
from thunder_zero.comm.transport import COMPLEX, FLOATS, Launching, PeerBuffers, outside_autograd
from thunder_zero.plan import layout
from thunder_zero.plan.params import Param

Wait = Callable[[], object]  # waits for the end of a message
Message = Callable[[Tensor, int, ProcessGroup, int], Wait]  # starts one: send or receive
# Tensors with fewer bytes to one peer are packed into one message: below this a message costs more than
# two copies of its bytes. Measured on loopback, docs/performance.md.
PACK_BELOW_BYTES = 64 << 10
TAG = 0x7A000000  # "z": users hardly send under it; the 2 ** 25 tags after it are ours as well
BLOCK = 1 << 16  # elements of half precision added up at a time, so that their float32 sums stay in the cache


class PairwiseGloo(Launching):
    """The transport for gloo."""

    averages = FLOATS | COMPLEX  # torch adds up, not the backend

    def __init__(self, group: ProcessGroup, role: int = 0) -> None:
        super().__init__()
        self._group = group
        self._role = role
        self._tag, self._tag_of_means = tags_of(role, 0)
        self._world_size = group.size()
        self._rank = group.rank()
        # Each rank starts with its successor, so that not all send to the same peer at once.
        self._peers = tuple((self._rank + step) % self._world_size for step in range(1, self._world_size))

    @outside_autograd
    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Handle:
        if into is None:
            fulls = [shard.new_empty(param.shape) for shard, param in zip(shards, params, strict=True)]
        else:
            fulls = [full.detach()[: param.shape[0]] for full, param in zip(into, params, strict=True)]
        cuts = [self._cut_rows(full) for full in fulls]  # [member][rank] -> flat rows of that rank
        own = [shard.detach().view(-1)[: cut[self._rank].numel()] for shard, cut in zip(shards, cuts, strict=True)]
        bucket_parts, outgoing = [], []
        for members in messages(shards, self._world_size, sharded=True):
            columns = {rank: [cuts[at][rank] for at in members] for rank in self._peers}
            slots = {rank: _one_buffer(column) for rank, column in columns.items()}
            receives = self._post_receives(slots, self._tag)
            outgoing.append(dict.fromkeys(self._peers, _pack([own[at] for at in members])))
            unpack = _unpacking((slots[rank], columns[rank]) for rank in self._peers) if len(members) > 1 else None
            bucket_parts.append(BucketPart(receives, unpack))
        sends = self._post_sends(outgoing)
        if into is None:
            for rows, cut in zip(own, cuts, strict=True):
                cut[self._rank].copy_(rows)
        return Handle([*bucket_parts, *sends], tuple(fulls), self._pending)

    @outside_autograd
    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Handle:
        shapes = [layout.shard_shape(param.shape, self._world_size) for param in params]
        means = tuple(grad.new_empty(shape) for grad, shape in zip(grads, shapes, strict=True))
        cuts = [self._cut_rows(grad.detach().contiguous()) for grad in grads]
        own = [mean.view(-1)[: cut[self._rank].numel()] for mean, cut in zip(means, cuts, strict=True)]
        bucket_parts, outgoing = [], []
        for members in messages(means, self._world_size, sharded=True):
            parts = [_pack([cuts[at][rank] for at in members]) for rank in range(self._world_size)]
            mean = _one_buffer([own[at] for at in members])
            bucket_parts.append(self._reduce(parts, mean))
            outgoing.append({rank: parts[rank] for rank in self._peers})
            if len(members) > 1:
                bucket_parts.append(BucketPart((), _unpacking([(mean, [own[at] for at in members])])))
        sends = self._post_sends(outgoing)
        for mean, rows in zip(means, own, strict=True):
            mean.view(-1)[rows.numel() :].zero_()
        return Handle([*bucket_parts, *sends], means, self._pending)

    @outside_autograd
    def all_reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Handle:
        means = tuple(grad.new_empty(grad.shape) for grad in grads)
        bucket_parts, outgoing = [], []
        for members in messages(means, self._world_size, sharded=False):
            flat = _pack([grads[at].detach().contiguous().view(-1) for at in members])
            slots = [means[at].view(-1) for at in members]
            mean = _one_buffer(slots)
            if self._world_size == 2:
                parts = [flat, flat]
                bucket_parts.append(self._reduce(parts, mean))
            else:
                parts = self._cut_rows(flat)
                bucket_parts += self._reduce_and_spread(parts, mean)
            outgoing.append({rank: parts[rank] for rank in self._peers})
            if len(members) > 1:
                bucket_parts.append(BucketPart((), _unpacking([(mean, slots)])))
        return Handle([*bucket_parts, *self._post_sends(outgoing)], means, self._pending)

    @outside_autograd
    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Handle:
        bucket_parts = [part for rank in self._peers for part in self._receive_all(rank, incoming.get(rank, ()))]
        packed = [
            {rank: _pack([outgoing[rank][at] for at in members])}
            for rank in self._peers
            for members in messages(outgoing.get(rank, ()), 1, sharded=True)
        ]
        return Handle([*bucket_parts, *self._post_sends(packed)], (), self._pending)

    def run_after(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Run it in AVERAGER, after what was given to it before."""
        return in_background(AVERAGER, start).result

    def with_tag(self, tag: int) -> PairwiseGloo:
        other = copy(self)
        other._tag, other._tag_of_means = tags_of(self._role, tag)
        return other

    def _receive_all(self, rank: int, slots: Sequence[Tensor]) -> Iterable[BucketPart]:
        """Receive what a rank trades, in the messages in which it sends it."""
        for members in messages(slots, 1, sharded=True):
            column = [slots[at] for at in members]
            buffer = _one_buffer(column)
            unpack = _unpacking([(buffer, column)]) if len(members) > 1 else None
            yield BucketPart(self._post_receives({rank: buffer}, self._tag), unpack)

    def _reduce(self, parts: Sequence[Tensor], mean: Tensor) -> BucketPart:
        """Write the mean of all ranks' parts for this rank into ``mean``; the caller sends ``parts[r]`` to rank r."""
        lowest = min(self._peers)  # its part is the first or second one, so it may arrive where the mean is written
        arrived = {rank: mean if rank == lowest else torch.empty_like(mean) for rank in self._peers}
        receives = self._post_receives(arrived, self._tag)
        arrived[self._rank] = parts[self._rank]
        in_rank_order = [arrived[rank] for rank in range(self._world_size)]
        return BucketPart(receives, lambda: mean_into(mean, in_rank_order))

    def _reduce_and_spread(self, parts: Sequence[Tensor], mean: Tensor) -> list[BucketPart]:
        """Average this rank's part of ``mean``, send it to all peers, and receive the other parts."""
        slots = self._cut_rows(mean)
        receives = self._post_receives({rank: slots[rank] for rank in self._peers}, self._tag_of_means)
        reduce = self._reduce(parts, slots[self._rank])
        sent: list[Wait] = []

        def average_then_send() -> None:
            reduce.finish()
            sent.extend(self._send(dict.fromkeys(self._peers, slots[self._rank]), self._tag_of_means))

        averaged = self.run_after(average_then_send)
        return [BucketPart((averaged,)), BucketPart(receives), BucketPart(sent)]

    def _cut_rows(self, tensor: Tensor) -> list[Tensor]:
        """The flat rows of each rank, in rank order; ``tensor`` is contiguous."""
        ranges = [layout.row_range(tensor.shape[0], self._world_size, rank) for rank in range(self._world_size)]
        row = tensor.numel() // max(1, tensor.shape[0])
        return list(tensor.view(-1).split([(stop - start) * row for start, stop in ranges]))  # one call of torch

    def _post_sends(self, outgoing: Sequence[dict[int, Tensor]]) -> list[BucketPart]:
        """Send a bucket's messages, given by rank, in the background; the result's waits wait for their end."""
        sent: list[Wait] = []

        def post() -> None:
            for messages in outgoing:
                sent.extend(self._send(messages, self._tag))

        posted = self._post(post)
        return [BucketPart((posted,)), BucketPart(sent)]

    def _send(self, messages: dict[int, Tensor], tag: int) -> list[Wait]:
        return [self._start(send, message, rank, tag) for rank, message in messages.items() if message.numel()]

    def _post_receives(self, slots: dict[int, Tensor], tag: int) -> Iterable[Wait]:
        """Receive messages, given by rank, in the background; the waits, called in order, return at the end."""
        pairs = [(slot, rank) for rank, slot in slots.items() if slot.numel()]
        received: list[Wait] = []
        posted = self._post(lambda: received.extend(self._start(receive, slot, rank, tag) for slot, rank in pairs))
        return chain((posted,), received)

    def _post(self, task: Callable[[], None]) -> Wait:
        """Run a task that starts messages, after all earlier ones, without blocking the caller."""
        return in_background(SENDER, task).result

    def _start(self, message: Message, tensor: Tensor, rank: int, tag: int) -> Wait:
        return message(tensor, rank, self._group, tag)


def tags_of(role: int, tag: int) -> tuple[int, int]:
    """The tags of a transport's two threads: two transports of a hybrid (roles 0 to 2) may share a group."""
    first = TAG + 8 * tag + 2 * role
    return first, first + 1


def send(message: Tensor, rank: int, group: ProcessGroup, tag: int) -> Wait:
    """Start sending to a rank of the group; nothing else sends messages."""
    with naming_lost_ranks(group, rank):
        work = dist.isend(message, group=group, group_dst=rank, tag=tag)
    return partial(_end, work, group, rank)


def receive(slot: Tensor, rank: int, group: ProcessGroup, tag: int) -> Wait:
    """Start receiving from a rank of the group into ``slot``."""
    with naming_lost_ranks(group, rank):
        work = dist.irecv(slot, group=group, group_src=rank, tag=tag)
    return partial(_end, work, group, rank)


def _end(work: dist.Work | None, group: ProcessGroup, rank: int) -> None:
    assert work is not None, "every rank of the group takes part"
    with naming_lost_ranks(group, rank):
        work.wait()


def messages(tensors: Sequence[Tensor], world_size: int, *, sharded: bool) -> list[list[int]]:
    """The positions of tensors that share a message, for each: large ones have their own, all small ones share one.
    Their order depends on shapes and dtypes only. If not ``sharded``, tensors are cut into one part per rank."""
    parts = 1 if sharded else world_size
    small = [at for at, tensor in enumerate(tensors) if tensor.nbytes < PACK_BELOW_BYTES * parts]
    large = [[at] for at in range(len(tensors)) if at not in set(small)]
    return [small, *large] if small else large


def mean_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the mean of two or more 1-D ``parts`` into ``out``, added up in their order; half precision in float32.
    ``out`` may be the first or the second part."""
    first, second, *others = parts
    if out.itemsize >= 4:
        torch.add(first, second, out=out)
        for other in others:
            out.add_(other)
        out.div_(len(parts))
        return
    for block, *pieces in zip(*(torch.split(tensor, BLOCK) for tensor in (out, *parts)), strict=True):
        total = pieces[0].float()
        for piece in pieces[1:]:
            total.add_(piece)
        block.copy_(total.div_(len(parts)))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """One 1-D message: a single tensor itself, or several concatenated."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _one_buffer(tensors: Sequence[Tensor]) -> Tensor:
    """A 1-D buffer for such a message: a single tensor itself, or new memory for several."""
    return tensors[0] if len(tensors) == 1 else tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def _unpacking(arrived: Iterable[tuple[Tensor, Sequence[Tensor]]]) -> Callable[[], None]:
    """A function that copies each packed message into its tensors."""
    pairs = list(arrived)

    def unpack() -> None:
        for message, tensors in pairs:
            pieces = torch.split(message, [tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece)

    return unpack
