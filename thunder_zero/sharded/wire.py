"""Sends parameters and gradients as the plan says: in which dtype, from and to which memory.

::

    gather   shards, at rest  ->  cast, copied to the device  ->  transport  ->  full parameters
    reduce   full gradients   ->  transport  ->  means        ->  cast, copied to where the shards rest

    with a format (comm/blocks.py)
    gather   shards  ->  written as bytes  ->  transport  ->  read: full parameters, of which the own rows are read, too
    reduce   full gradients  ->  each other rank's rows written as bytes  ->  traded  ->  read and added up in float32;
             with several copies of the model: exactly inside of a copy, then likewise between copies
    a frozen parameter that rests as bytes (comm/nf4.py)
    gather   the bytes at rest  ->  transport  ->  decoded in the dtype of compute

Shards are cast and copied before the gather, so that only shards are, and a copy lives only while its bytes travel;
gradients after the reduction. On CUDA, shards in host memory are pinned, and casts run on the device, since a copy
that also casts makes the host wait; the copies run in the stream of compute. ``HostCopies`` knows when they have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thunder_zero.comm.blocks import PIECE, PIECE_ON_GPU, read, weyl, write
from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.comm.nf4 import decode, pairs_on
from thunder_zero.comm.transport import Transport, outside_autograd
from thunder_zero.plan import layout
from thunder_zero.plan.encoding import NF4, Encoding, Float8, Int8
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import rows_in


class HostCopies:
    """The copies of one model's offloaded shards, which run in the stream of compute while the host goes on; those to a
    GPU alone are asynchronous. If no shard rests in host memory, the host never waits."""

    def __init__(self, device: torch.device, *, offloaded: bool) -> None:
        self._device = device
        self._are_asynchronous = offloaded and device.type == "cuda"
        self._last: torch.cuda.Event | None = None  # in the stream after the last copy

    def note(self) -> None:
        """Copies were started."""
        if self._are_asynchronous:
            self._last = torch.cuda.Event()
            self._last.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Make the host wait for all copies; not for the compute after them."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


HOST = torch.device("cpu")


def rest_device(param: Param, plan: Plan, device: torch.device) -> torch.device:
    """The device of a parameter's shard, gradient and optimizer state; replicated parameters are never offloaded."""
    return HOST if plan.rests_on_host(param) else device


def is_staged(param: Param, plan: Plan, device: torch.device) -> bool:
    """Whether a cast, a copy or bytes of the shard are gathered instead of the shard itself."""
    return param.is_cast or rest_device(param, plan, device) != device or is_formatted(param.gather_format, plan)


def is_formatted(form: Encoding | None, plan: Plan) -> bool:
    """Whether anything travels in a format: one rank alone sends nothing."""
    return form is not None and plan.world_size > 1


def _casts_or_copies(plan: Plan, device: torch.device) -> bool:
    """Whether any parameter or gradient is cast or copied."""
    return any(is_staged(param, plan, device) or param.reduce_dtype is not param.dtype for param in plan.params)


class Wire:
    """The transport of a model, with the casts and copies of its plan around it."""

    def __init__(self, transport: TaggedTransport, plan: Plan, device: torch.device) -> None:
        self.transport = transport
        self.copies = HostCopies(device, offloaded=plan.policy.cpu_offload)
        self._plan, self._device = plan, device
        self._stages = _casts_or_copies(plan, device)
        self._writes_bytes = plan.ranks > 1
        self._reduced: Counter[str] = Counter()  # how often, by path
        self._piece = PIECE if device.type == "cpu" else PIECE_ON_GPU  # elements that are written or read at a time

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Nothing travels in a format inside of the block; all ranks enter it together."""
        before, self._writes_bytes = self._writes_bytes, False
        try:
            yield
        finally:
            self._writes_bytes = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Reductions inside of the block do not change how later ones are rounded."""
        before = self._reduced.copy()
        try:
            yield
        finally:
            self._reduced = before

    def arrived(self, rows: Tensor, param: Param) -> Tensor:
        """Return what all ranks read of this rank's rows."""
        if param.gather_format is None or not self._writes_bytes or self._plan.world_size == 1:
            return rows
        flat, found = rows.detach().reshape(-1), torch.empty(rows.shape, device=rows.device)
        read(param.gather_format, self._written(param.gather_format, flat), found.view(-1), piece=self._piece)
        return found

    def gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather sharded parameters, in the dtype and on the device of compute; this rank's rows of ``into``, buffers
        with padding, are written, too."""
        if (rests := params[0].frozen_format) is not None:
            return self._gather_frozen(shards, params, rests)
        form = params[0].gather_format
        if form is not None and self._writes_bytes and self._plan.world_size > 1:
            return self._gather_bytes(shards, params, into, form)
        shapes = [param.shape for param in params]
        if self._stages:
            shards = self._staged(shards, params, into)
        return self.transport.all_gather(shards, shapes, into)

    @outside_autograd
    def _gather_bytes(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None, form: Int8 | Float8
    ) -> Waitable:
        world = self._plan.world_size
        payloads = []
        for shard, param in zip(shards, params, strict=True):
            rows = self._on_device(shard, param).reshape(-1)
            payloads.append(self._written(form, rows))
        self.copies.note()
        handle = self.transport.all_gather(payloads, [(world * payload.numel(),) for payload in payloads])

        @outside_autograd
        def wait() -> tuple[Tensor, ...]:
            fulls = []
            for at, (payload, param) in enumerate(zip(handle.wait(), params, strict=True)):
                shape = layout.padded_shape(param.shape, world)
                full = payload.new_empty(shape, dtype=param.compute_dtype) if into is None else into[at].detach()
                for part, rows in zip(payload.chunk(world), full.chunk(world), strict=True):
                    read(form, part, rows.view(-1), piece=self._piece)
                fulls.append(full[: param.shape[0]])
            return tuple(fulls)

        return WaitsBy(wait)

    @outside_autograd
    def _gather_frozen(self, shards: Sequence[Tensor], params: Sequence[Param], form: NF4) -> Waitable:
        """Gather the bytes that rest on each rank, one rank alone included; decode them when they are waited for."""
        staged = [self._on_device(shard, param) for shard, param in zip(shards, params, strict=True)]
        self.copies.note()
        handle = self.transport.all_gather(staged, [param.rest_shape for param in params])

        @outside_autograd
        def wait() -> tuple[Tensor, ...]:
            arrived = zip(handle.wait(), params, strict=True)
            piece = self._piece
            return tuple(decode(form, of, param.shape, param.compute_dtype, piece=piece) for of, param in arrived)

        return WaitsBy(wait)

    @outside_autograd
    def _staged(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """Return what is sent: this rank's rows, cast and copied; in ``into``, if that is given."""
        if into is None:
            staged = [
                self._on_device(shard, param).to(param.compute_dtype)
                for shard, param in zip(shards, params, strict=True)
            ]
        else:
            place = self._plan.world_size, self._plan.rank
            staged = [rows_in(buffer, param, *place) for buffer, param in zip(into, params, strict=True)]
            for rows, shard, param in zip(staged, shards, params, strict=True):
                if is_staged(param, self._plan, self._device):
                    rows.copy_(self._on_device(shard, param))
        self.copies.note()
        return staged

    def _on_device(self, shard: Tensor, param: Param) -> Tensor:
        return shard.detach().to(self._device, non_blocking=True)

    def reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average gradients of sharded parameters, or of replicated ones; the means have the dtypes and devices of the
        shards. A copy to host memory may still run when it has been waited for: ``Calls.wait_offloaded`` waits for all
        of them."""
        form = params[0].reduce_format
        if form is not None and self._writes_bytes:
            reduce = self._reduce_bytes if self._plan.replicas == 1 else self._reduce_across
            handle: Waitable = reduce(grads, params, form)
        else:
            start = self.transport.reduce_scatter if params[0].sharded else self.transport.all_reduce
            handle = start(grads)
        if not self._stages:
            return handle
        places = [(rest_device(param, self._plan, self._device), param.dtype) for param in params]

        @outside_autograd
        def wait() -> tuple[Tensor, ...]:
            means = zip(handle.wait(), places, strict=True)
            return tuple(mean.to(dtype).to(device, non_blocking=True) for mean, (device, dtype) in means)

        return WaitsBy(wait)

    @outside_autograd
    def _reduce_bytes(self, grads: Sequence[Tensor], params: Sequence[Param], form: Int8) -> Waitable:
        world = self._plan.world_size
        padded = [
            _padded(grad, layout.padded_shape(param.shape, world)) for grad, param in zip(grads, params, strict=True)
        ]
        handle = self._exchange([grad.view(world, -1) for grad in padded], params, form, self.transport)

        @outside_autograd
        def wait() -> tuple[Tensor, ...]:
            means = zip(handle.wait(), params, strict=True)
            return tuple(mean.to(param.dtype).view(self._plan.shard_shape(param)) for mean, param in means)

        return WaitsBy(wait)

    def _reduce_across(self, grads: Sequence[Tensor], params: Sequence[Param], form: Int8) -> Waitable:
        """Average exactly inside of a copy of the model, and in bytes between copies: each part of the means goes to
        the rank that adds it up, and the sum of it to all, rounded once more, to nearest."""

        @outside_autograd
        def between(means: Sequence[Tensor], across: Transport) -> Sequence[Tensor]:
            flat = [_parts(mean, across.world_size) for mean in means]
            own = [self._written(form, mean) for mean in self._exchange(flat, params, form, across).wait()]
            arrived = across.all_gather(own, [(across.world_size * payload.numel(),) for payload in own]).wait()
            for parts, payload in zip(flat, arrived, strict=True):
                for part, written in zip(parts, payload.chunk(across.world_size), strict=True):
                    read(form, written, part, piece=self._piece)
            found = (parts.view(-1)[: mean.numel()].view(mean.shape) for parts, mean in zip(flat, means, strict=True))
            return [mean.to(param.dtype) for mean, param in zip(found, params, strict=True)]

        return self.transport.reduce_scatter_then(grads, between)

    def _exchange(
        self, bucket: Sequence[Tensor], params: Sequence[Param], form: Int8, transport: Transport
    ) -> Waitable:
        """Average tensors (ranks, elements) over the ranks of a transport. Each writes the parts of each other rank
        once; an owner adds up its own part, which is exact, and those that it reads, in rank order. The handle has this
        rank's parts of the means, in float32."""
        ranks, own = range(transport.world_size), transport.rank
        outgoing: dict[int, list[Tensor]] = {rank: [] for rank in ranks if rank != own}
        for parts, param in zip(bucket, params, strict=True):
            self._reduced[param.path] += 1
            key = f"{param.path} {self._reduced[param.path]} {self._plan.rank} {own}"
            for rank, payloads in outgoing.items():
                payloads.append(self._written(form, parts[rank], key))
        incoming = {rank: list(map(torch.empty_like, payloads)) for rank, payloads in outgoing.items()}
        handle = transport.trade(outgoing, incoming)

        def wait() -> tuple[Tensor, ...]:
            handle.wait()
            outgoing.clear()
            means = []
            for at, parts in enumerate(bucket):
                total = torch.zeros_like(parts[own], dtype=torch.float32)
                for rank in ranks:
                    if rank == own:
                        total.add_(parts[own])
                    else:
                        read(form, incoming[rank][at], total, add=True, piece=self._piece)
                means.append(total.div_(len(ranks)))
            return tuple(means)

        return WaitsBy(wait)

    def _written(self, form: Int8 | Float8, x: Tensor, key: str = "") -> Tensor:
        """Return the payload of a flat tensor."""
        payload = x.new_empty(form.nbytes(x.numel()), dtype=torch.uint8)
        write(form, x, payload, key, piece=self._piece)
        return payload


def _parts(mean: Tensor, count: int) -> Tensor:
    """Return a mean in float32 as so many flat parts, with zeros at the end; in its own memory, if that is possible."""
    flat = mean.reshape(-1).float()
    missing = -len(flat) % count
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(count, -1)


def _padded(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a gradient, contiguous, with rows of zeros at its end."""
    if grad.shape == shape:
        return grad.contiguous()
    padded = grad.new_zeros(shape)
    padded[: grad.shape[0]] = grad
    return padded


class UnsentWire(Wire):
    """A wire where host memory and the device are both meta; ``on_cpu``: in place of a CPU."""

    def __init__(self, transport: TaggedTransport, plan: Plan, device: torch.device, *, on_cpu: bool) -> None:
        super().__init__(transport, plan, device)
        self._piece = PIECE if on_cpu else PIECE_ON_GPU
        for block in {param.reduce_format.block for param in plan.params if param.reduce_format}:
            weyl(max(self._piece, block), device)
        pairs_on(device)

    def _on_device(self, shard: Tensor, param: Param) -> Tensor:
        return shard.detach().clone() if self._plan.rests_on_host(param) else shard.detach()
