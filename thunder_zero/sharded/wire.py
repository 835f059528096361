"""Sends parameters and gradients in the plan's dtypes and formats, from and to the plan's devices.

::

    encode         shards               ->  payloads of a gather: cast and copied to the device, or bytes
    gather         payloads             ->  full parameters, or the bytes of all ranks
    decode         bytes of all ranks   ->  full parameters; this rank's rows are decoded, too
    encode_grad    gradients            ->  payloads of a reduction: weighed, or bytes for each other rank
    reduce         payloads             ->  means, or the bytes from all ranks for this rank's part
    decode_grad    means, or bytes      ->  means: decoded and added in float32, cast, copied to the shards' device

Casts run on the device, since a copy that also casts makes the host wait. Copies run in the stream of compute, and
``HostCopies`` waits for them. Encoded frozen parameters are sent unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.comm.pairwise import mean_into
from thunder_zero.comm.transport import Transport, outside_autograd
from thunder_zero.encodings.encoding import Encoding, piece_on
from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.mesh import OF_MEANS, SHARD, TENSOR, Axis
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import in_equal_parts, padded, real_rows, rows_in


class HostCopies:
    """The asynchronous copies of one model's offloaded shards, in the stream of compute.

    Copies are asynchronous only if the device is a GPU. If no shard is in host memory, the host never waits.
    """

    def __init__(self, device: torch.device, *, offloaded: bool) -> None:
        self._device = device
        self._are_asynchronous = offloaded and device.type == "cuda"
        self._last: torch.cuda.Event | None = None  # recorded after the last copy

    def note(self) -> None:
        if self._are_asynchronous:
            self._last = torch.cuda.Event()
            self._last.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Make the host wait for all copies, but not for later compute."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


HOST = torch.device("cpu")


def rest_device(param: Param, plan: Plan, device: torch.device) -> torch.device:
    return HOST if plan.rests_on_host(param) else device


def is_staged(param: Param, plan: Plan, device: torch.device) -> bool:
    """Return whether a gather sends a cast, copied or encoded shard instead of the shard."""
    return param.is_cast or rest_device(param, plan, device) != device or plan.decodes(param)


@dataclass(frozen=True, slots=True, eq=False)
class GradientParts:
    """The parts of a gradient before they are added in float32, on an axis of W ranks."""

    own: Tensor  # this rank's part, not encoded, (n,)
    others: Tensor  # the encoded parts to or from the other ranks, in rank order: (W - 1, nbytes), uint8


OnTheWire = Tensor | GradientParts


class Wire:
    """The gathers and reductions of one model, with their encoding and decoding."""

    def __init__(self, transport: TaggedTransport, plan: Plan, device: torch.device) -> None:
        self.transport = transport
        self.copies = HostCopies(device, offloaded=plan.policy.cpu_offload)
        self._plan, self._device = plan, device
        self._uses_formats = True
        self._reduced: Counter[str] = Counter()  # number of reductions, by path
        self._piece = piece_on(device)

    @contextmanager
    def exact(self) -> Iterator[None]:
        old_value, self._uses_formats = self._uses_formats, False
        try:
            yield
        finally:
            self._uses_formats = old_value

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count reductions inside the block, so that they do not change the rounding of later reductions."""
        old_counts = self._reduced.copy()
        try:
            yield
        finally:
            self._reduced = old_counts

    # Gathers. All parameters of a bucket have equal formats, or no format.

    def _gathers_bytes(self, param: Param) -> bool:
        return self._uses_formats and self._plan.gathers_bytes(param)

    def read_by_all(self, rows: Tensor, param: Param) -> Tensor:
        """Return what all ranks decode from this rank's rows."""
        if not self._gathers_bytes(param):
            return rows
        encoding = self._encoding(param)
        payload = encoding.encode(rows, piece=self._piece)
        return encoding.decode(payload, torch.empty(rows.shape, device=rows.device), piece=self._piece)

    def _encoding(self, param: Param) -> Encoding:
        """Return the encoding of rows for a gather. Encoded frozen parameters are only copied."""
        if param.gather_format is not None and self._gathers_bytes(param):
            return param.gather_format
        return Encoding(param.rest_dtype if param.frozen_format else param.compute_dtype)

    @outside_autograd
    def encode(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the payloads of a gather of this rank's rows: bytes, or rows that are cast and copied.

        ``into`` has buffers for all rows with padding. Without a format, this rank's rows are copied into ``into``.
        """
        if into is None or self._gathers_bytes(params[0]):
            sent = [
                self._encoding(param).encode(self._on_device(shard, param), piece=self._piece)
                for shard, param in zip(shards, params, strict=True)
            ]
        else:
            sent = [rows_in(buffer, param, self._plan) for buffer, param in zip(into, params, strict=True)]
            for rows, shard, param in zip(sent, shards, params, strict=True):
                if is_staged(param, self._plan, self._device):
                    rows.copy_(self._on_device(shard, param))
        self.copies.note()
        return tuple(sent)

    def gather(self, sent: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None) -> Waitable:
        """Launch a gather of full parameters (into the buffers ``into``, if given), or of the bytes of all ranks."""
        if self._gathers_bytes(params[0]):
            world = self._plan.mesh.shard.size
            return self.transport.all_gather(sent, [(world * payload.numel(),) for payload in sent])
        return self.transport.all_gather(sent, [param.rest_shape for param in params], into)

    @outside_autograd
    def decode(
        self, arrived: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        if params[0].frozen_format:
            pairs = zip(arrived, params, strict=True)
            return tuple(decode_frozen(payload, param, param.compute_dtype, self._piece) for payload, param in pairs)
        if not self._gathers_bytes(params[0]):
            return tuple(arrived)
        world, fulls = self._plan.mesh.shard.size, []
        for index, (payload, param) in enumerate(zip(arrived, params, strict=True)):
            shape = self._plan.geometry(param).gathered
            full = payload.new_empty(shape, dtype=param.compute_dtype) if into is None else into[index].detach()
            for part, rows in zip(payload.chunk(world), full.chunk(world), strict=True):
                self._encoding(param).decode(part, rows, piece=self._piece)
            fulls.append(full[: param.shape[0]])
        return tuple(fulls)

    def gather_now(self, shards: Sequence[Tensor], params: Sequence[Param]) -> tuple[Tensor, ...]:
        return self.decode(self.gather(self.encode(shards, params), params).wait(), params)

    def _on_device(self, shard: Tensor, param: Param) -> Tensor:
        return shard.detach().to(self._device, non_blocking=True)

    # Reductions, each over one axis of the mesh.

    def _reduces_bytes(self, param: Param, over: str) -> bool:
        return self._uses_formats and self._plan.reduces_bytes(param, over)

    @outside_autograd
    def encode_grad(self, grads: Sequence[Tensor], params: Sequence[Param], over: str = SHARD) -> tuple[OnTheWire, ...]:
        """Return the payloads of a reduction of gradients or intra-replica means: ``grads`` or encoded parts."""
        if self._plan.weighs_gradient(params[0], over):
            grads = self.weighed(grads)
        if not self._reduces_bytes(params[0], over):
            return tuple(grads)
        return tuple(self._encode_parts(grad, param, over) for grad, param in zip(grads, params, strict=True))

    def weighed(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return this rank's gradients times its weight, so that their mean over ranks is that of the whole batch."""
        weight = self._plan.weight
        return tuple(grads) if weight == 1 else tuple(grad * weight for grad in grads)

    def _encode_parts(self, grad: Tensor, param: Param, over: str) -> GradientParts:
        """Split a gradient into a part for each rank of an axis, and encode the parts of the other ranks."""
        encoding, axis = reduce_format_of(param), self._plan.mesh.over(over)
        if over == SHARD:
            is_even = grad.shape == self._plan.geometry(param).gathered
            parts = (grad.contiguous() if is_even else padded(grad, param, self._plan)).view(axis.size, -1)
        else:
            parts = in_equal_parts(grad, axis.size)
        self._reduced[param.path] += 1
        sender = f"{self._plan.mesh.shard.place} {axis.place}"
        key = f"{torch.initial_seed()} {param.path} {self._reduced[param.path]} {sender}"
        others = grad.new_empty((axis.size - 1, encoding.nbytes(parts.shape[1])), dtype=torch.uint8)
        for payload, rank in zip(others.unbind(), axis.peers, strict=True):
            encoding.encode(parts[rank], out=payload, key=key, piece=self._piece)
        return GradientParts(parts[axis.place], others)

    def reduce(self, sent: Sequence[Any], params: Sequence[Param], over: str = SHARD) -> Waitable:
        """Launch the average of gradients over the ranks of an axis.

        The handle returns means, or the input of :meth:`decode_grad`. Within a replica this input is all ranks' parts
        for this rank. Between replicas this input is the encoded means.
        """
        if not self._reduces_bytes(params[0], over):
            if over in OF_MEANS:
                return _reduce_rows(self.transport, self._plan, sent, params, over)
            if params[0].owner is not None and self._plan.mesh.shard.size > 1:
                return self._reduce_to_owners(sent, params)
            return self.transport.reduce_scatter(sent) if params[0].sharded else self.transport.all_reduce(sent, over)
        return self._trade(sent) if over == SHARD else self._average_bytes(sent, params, over)

    def _reduce_to_owners(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Send each gradient to its owner, which averages. The handle returns zeros for the gradients of others."""
        axis = self._plan.mesh.shard
        sent = [grad.contiguous().view(-1) for grad in grads]
        owned = [grad for grad, param in zip(sent, params, strict=True) if param.owner == axis.place]
        incoming = {rank: [torch.empty_like(grad) for grad in owned] for rank in axis.peers}
        outgoing = {
            rank: [grad for grad, param in zip(sent, params, strict=True) if param.owner == rank] for rank in axis.peers
        }
        handle = self.transport.trade(outgoing, incoming, SHARD)

        @outside_autograd
        def wait() -> tuple[Tensor, ...]:
            handle.wait()
            summands = (incoming[rank] if rank != axis.place else owned for rank in range(axis.size))
            means = iter([_mean(parts) for parts in zip(*summands, strict=True)])
            flat = (
                next(means) if param.owner == axis.place else torch.zeros_like(grad)
                for grad, param in zip(sent, params, strict=True)
            )
            return tuple(mean.view(param.shape) for mean, param in zip(flat, params, strict=True))

        return WaitsBy(wait)

    def _trade(self, sent: Sequence[GradientParts]) -> Waitable:
        trade = _Trade(sent, self._plan.mesh.shard)
        handle = self.transport.trade(trade.outgoing, trade.incoming, SHARD)

        def wait() -> tuple[Any, ...]:
            handle.wait()
            return trade.arrived()

        return WaitsBy(wait)

    def _average_bytes(self, sent: Sequence[GradientParts], params: Sequence[Param], over: str) -> Waitable:
        """Send each part to the rank that averages it. Then that rank sends the encoded mean to all ranks."""
        axis = self._plan.mesh.over(over)
        trade = _Trade(sent, axis)

        @outside_autograd
        def send_means(transport: Transport, _: tuple[Tensor, ...]) -> Waitable:
            parts = zip(trade.arrived(), params, strict=True)
            means = [(_average_parts(part, param, axis, self._piece), reduce_format_of(param)) for part, param in parts]
            payloads = [encoding.encode(mean, piece=self._piece) for mean, encoding in means]
            return transport.all_gather(payloads, [(axis.size * payload.numel(),) for payload in payloads])

        return self.transport.in_two(
            lambda transport: transport.trade(trade.outgoing, trade.incoming), send_means, over
        )

    @outside_autograd
    def decode_grad(self, arrived: Sequence[Any], params: Sequence[Param], over: str = SHARD) -> tuple[Tensor, ...]:
        """Return the mean gradients; after the last axis in the shards' dtypes, in flight to the shards' devices."""
        means = list(arrived)
        if self._reduces_bytes(params[0], over):
            means = [self._decode_mean(item, param, over) for item, param in zip(arrived, params, strict=True)]
        if over != self._plan.reduced_over(params[0])[-1]:
            return tuple(means)
        return tuple(
            mean.to(param.dtype).to(rest_device(param, self._plan, self._device), non_blocking=True)
            for mean, param in zip(means, params, strict=True)
        )

    def _decode_mean(self, arrived: Any, param: Param, over: str) -> Tensor:
        """Return the mean of this rank's rows, given the parts of all ranks, or the encoded means of all replicas."""
        shape, axis = self._plan.shard_shape(param), self._plan.mesh.over(over)
        if over == SHARD:
            return _average_parts(arrived, param, axis, self._piece).view(shape)
        mean: Tensor = arrived.new_empty((axis.size, -(-prod(shape) // axis.size)), dtype=torch.float32)
        for part, payload in zip(mean, arrived.chunk(axis.size), strict=True):
            reduce_format_of(param).decode(payload, part, piece=self._piece)
        return mean.view(-1)[: prod(shape)].view(shape)

    def average_now(self, grads: Sequence[Tensor], params: Sequence[Param]) -> tuple[Tensor, ...]:
        for over in self._plan.reduced_over(params[0]):
            handle = self.reduce(self.encode_grad(grads, params, over), params, over)
            grads = self.decode_grad(handle.wait(), params, over)
        return tuple(grads)


class _Trade:
    """The send and receive buffers of an all-to-all: for each gradient, bytes to and from each other rank."""

    def __init__(self, sent: Sequence[GradientParts], axis: Axis) -> None:
        arriving = [torch.empty_like(parts.others) for parts in sent]
        peers = list(enumerate(axis.peers))
        self.outgoing = {rank: [parts.others[index] for parts in sent] for index, rank in peers}
        self.incoming = {rank: [slots[index] for slots in arriving] for index, rank in peers}
        self._parts = tuple(GradientParts(parts.own, slots) for parts, slots in zip(sent, arriving, strict=True))

    def arrived(self) -> tuple[GradientParts, ...]:
        """Return the received parts, and free the sent parts. All messages must have arrived."""
        self.outgoing.clear()
        return self._parts


def reduce_format_of(param: Param) -> Int8:
    assert param.reduce_format is not None, f"the gradient of {param.path} travels as it is"
    return param.reduce_format


def decode_frozen(payload: Tensor, param: Param, dtype: torch.dtype, piece: int | None = None) -> Tensor:
    """Decode rows of a frozen parameter to ``dtype``, ``piece`` elements at a time."""
    assert param.frozen_format is not None, f"parameter {param.path} does not rest as bytes"
    out = payload.new_empty((len(payload), *param.shape[1:]), dtype=dtype)
    return param.frozen_format.decode(payload, out, piece=piece)


def _reduce_rows(
    transport: TaggedTransport, plan: Plan, means: Sequence[Tensor], params: Sequence[Param], over: str
) -> Waitable:
    """Average means over replicas, or sum partial means over slices. Padding is not sent."""
    rows = [real_rows(mean, param, plan) for mean, param in zip(means, params, strict=True)]
    handle = transport.all_reduce(rows, over)
    summands = plan.ranks_over(over) if over == TENSOR else 1

    @outside_autograd
    def wait() -> tuple[Tensor, ...]:
        arrived = [mean.mul_(summands) if summands > 1 else mean for mean in handle.wait()]
        return tuple(_with_padding(mean, rows) for mean, rows in zip(means, arrived, strict=True))

    return WaitsBy(wait)


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of ranks' gradients, added in rank order."""
    mean = torch.empty_like(parts[0])
    mean_into(mean, parts)
    return mean


def _average_parts(parts: GradientParts, param: Param, axis: Axis, piece: int) -> Tensor:
    """Add the parts of all ranks in rank order, and divide the sum by the number of ranks."""
    total, arrived = torch.empty_like(parts.own, dtype=torch.float32), iter(parts.others.unbind())
    for rank in range(axis.size):
        if rank != axis.place:
            reduce_format_of(param).decode(next(arrived), total, add=rank > 0, piece=piece)
        elif rank:
            total.add_(parts.own)
        else:
            total.copy_(parts.own)
    return total.div_(axis.size)


def _with_padding(mean: Tensor, rows: Tensor) -> Tensor:
    """Return rows after the average over replicas, with the padding of the intra-replica mean."""
    if rows.shape == mean.shape:
        return rows  # not copied into the mean, which may alias the gradient
    mean[: len(rows)].copy_(rows)
    return mean
