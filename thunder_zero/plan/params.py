"""The plan of each parameter: shape, shard, unit, lifetime, bytes. Frozen data.

Later code asks the plan, never the module, the stage or the process group. In stage 3 on four ranks::

    Param("h.0.weight", shape=(10, 8), unit="h.0", sharded=True, resident=False, kept_unsharded=False, ...)
    plan.shard_shape(param)   (3, 8)          each rank stores three of ten rows, the last one with padding
    plan.gather_bytes(param)  288             what this rank sends to gather it once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from thunder_zero.encodings.encoding import Blocks, Encoding
from thunder_zero.encodings.int8 import Int8
from thunder_zero.encodings.nf4 import NF4
from thunder_zero.plan import layout
from thunder_zero.plan.amounts import size
from thunder_zero.plan.geometry import Geometry
from thunder_zero.plan.mesh import OF_MEANS, REPLICATE, SHARD, Mesh
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.plan.sizes import Sizes, choose, on_cpu, on_gpu

if TYPE_CHECKING:
    import torch

ROOT = ""  # path of the root unit
STATES = 2  # tensors of a shard's shape that an optimizer keeps: those of Adam


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter.

    Attributes:
        path: its first name in ``module.named_parameters()``.
        aliases: its other names, if it is tied.
        shape: full, unpadded shape that compute reads: the parameter's, or that of this rank's slice.
        dtype: dtype of the module's parameter. The shard, its ``.grad`` and the optimizer's state have it too, unless
            the parameter rests in a ``frozen_format``.
        compute_dtype: dtype of the gathered parameter, which compute reads.
        reduce_dtype: dtype of its gradient on the wire.
        requires_grad: True if it is trained.
        unit: path of its unit, ``""`` for the root unit.
        sharded: True if each rank owns rows; False if it is replicated.
        resident: True if it is sharded and yet the full parameter stays in memory at rest (ZeRO-1).
        kept_unsharded: True if one gather serves forward and backward; False if backward gathers again what forward
            freed. In a new plan of ZeRO-3 it is False; the schedule then keeps some last units
            (``Policy.reshard_after_forward``).
        gather_per_unit: True if each unit that uses it in forward gathers it anew.
        gather_format: how it travels; None: in ``compute_dtype``.
        reduce_format: how its gradient travels; None: in ``reduce_dtype``.
        frozen_format: how its rows rest and travel; None: in the dtypes above.
        sliced: the dimension along which torch's tensor parallelism slices it; None if each rank computes with all of
            it.
        is_partial: True if each rank of tensor parallelism computes a part of its gradient, and the parts are summed.
    """

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    requires_grad: bool
    unit: str
    sharded: bool
    resident: bool
    kept_unsharded: bool
    gather_per_unit: bool = False
    gather_format: Blocks | None = None
    reduce_format: Int8 | None = None
    frozen_format: NF4 | None = None
    sliced: int | None = None
    is_partial: bool = False

    @property
    def rest_shape(self) -> tuple[int, ...]:
        """Full, unpadded shape of what rests: the parameter's, or that of its rows as bytes."""
        form = self.frozen_format
        return self.shape if form is None else (self.shape[0], form.nbytes(prod(self.shape[1:])))

    @property
    def rest_dtype(self) -> torch.dtype:
        """Dtype of what rests."""
        return self.dtype if self.frozen_format is None else self.frozen_format.dtype

    @property
    def rest_bytes(self) -> int:
        """Bytes that rest on all ranks together, without padding."""
        return prod(self.rest_shape) * self.rest_dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter; the first is its path."""
        return (self.path, *self.aliases)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full, unpadded parameter as it is gathered."""
        return prod(self.shape) * self.compute_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the full, unpadded gradient as it is reduced."""
        return prod(self.shape) * self.reduce_dtype.itemsize

    @property
    def is_cast(self) -> bool:
        """True if compute reads it in another dtype than the shard's."""
        return self.compute_dtype is not self.dtype


@dataclass(frozen=True)
class Plan:
    """All parameters of one module, as one rank sees them.

    Attributes:
        policy: what the user asked for.
        mesh: the ranks that train the model.
        params: the parameters, in the order of ``module.named_parameters()``.
        memory_bytes: bytes of the device's memory, of the smallest device of all ranks; None for host memory.
    """

    policy: Policy
    mesh: Mesh
    params: tuple[Param, ...]
    memory_bytes: int | None = None

    def __repr__(self) -> str:
        """Summarize the plan in one line; :attr:`params` has the parameters."""
        copies = f", {count} copies of the model" if (count := self.mesh.replicate.size) > 1 else ""
        full = size(sum(param.full_bytes for param in self.params))
        sharded = sum(param.sharded for param in self.params)
        return (
            f"<Plan of {STAGES[self.policy.stage].name}, {self.mesh}{copies}: "
            f"{len(self.params)} parameters ({full}), {sharded} of them sharded, in {len(self.units)} units>"
        )

    @property
    def ranks(self) -> int:
        """The number of ranks that train the model."""
        return self.mesh.size()

    def geometry(self, param: Param) -> Geometry:
        """Return the shapes of a parameter, its rows, and the axes over which its gradient is reduced."""
        return Geometry(self.whole_shape(param), self.mesh, param.sharded, param.sliced, param.is_partial)

    def whole_shape(self, param: Param) -> tuple[int, ...]:
        """Return the shape of a parameter with the slices of all ranks."""
        dim, slices = param.sliced, self.mesh.tensor.size
        return tuple(size * slices if index == dim else size for index, size in enumerate(param.shape))

    def require_unsliced(self, what: str, instead: str) -> None:
        """Refuse a use that would take slices of torch's tensor parallelism for whole parameters.

        Raises:
            RuntimeError: the model is sliced.
        """
        if self.mesh.is_sliced:
            raise RuntimeError(f"{what} knows no slices of torch's tensor parallelism yet; {instead}")

    def resting(self, param: Param) -> Geometry:
        """Return the geometry of a parameter at rest: of its rows, or of their bytes in a format."""
        form = param.frozen_format
        return self.geometry(param) if form is None else Geometry(param.rest_shape, self.mesh, param.sharded)

    @cached_property
    def by_name(self) -> dict[str, Param]:
        """Parameters by all of their names, aliases included."""
        return {name: param for param in self.params for name in param.names}

    @cached_property
    def padded(self) -> tuple[Param, ...]:
        """The parameters whose shards have padding on this rank."""
        return tuple(param for param in self.params if self.geometry(param).padding)

    @property
    def kept_unsharded(self) -> tuple[str, ...]:
        """Paths of the sharded parameters that are gathered once for forward and backward. ZeRO-3 chooses them when it
        schedules a step, so read them from ``traces_of(model).plan``. They make up whole units; forward still frees
        those that backward does not read (biases)."""
        return tuple(
            param.path for param in self.params if param.sharded and param.kept_unsharded and not param.resident
        )

    @property
    def units(self) -> tuple[str, ...]:
        """Paths of the units, in the order of their first parameters."""
        return tuple(dict.fromkeys(param.unit for param in self.params))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of a bucket and in flight, and units gathered ahead. They do not depend on the shapes of inputs, which
        may differ between ranks: all ranks must launch the same."""
        if self.memory_bytes is None:
            return choose(self.policy, on_cpu(self.largest_unit_bytes))
        largest = max(max(param.full_bytes, param.grad_bytes) for param in self.params)
        return choose(self.policy, on_gpu(self.largest_block_bytes, largest, self.memory_bytes - self.state_bytes))

    @cached_property
    def unit_bytes(self) -> Mapping[str, int]:
        """Bytes of each unit's full parameters or of their gradients, whichever are more."""
        counts: Counter[str] = Counter()
        for param in self.params:
            counts[param.unit] += max(param.full_bytes, param.grad_bytes)
        return counts

    @property
    def largest_unit_bytes(self) -> int:
        """Bytes of the largest unit (:attr:`unit_bytes`)."""
        return max(self.unit_bytes.values(), default=0)

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of the largest unit except the root; of the root if it is the only unit."""
        blocks = {unit: nbytes for unit, nbytes in self.unit_bytes.items() if unit != ROOT} or self.unit_bytes
        return max(blocks.values())

    @cached_property
    def state_bytes(self) -> int:
        """Estimate of the bytes that rest on the device of each rank.

        Shards rest there, or full parameters where they stay. Trained parameters add gradients and :data:`STATES`
        tensors of an optimizer. ``tz.tools.memory`` has the exact number: this one leaves out buffers and an
        optimizer's step counts, and counts the shards of ZeRO-1 twice, though they are views of full parameters.
        """
        total = 0
        for param in self.params:
            tensors = 1 + (1 + STATES) * param.requires_grad if not self.rests_on_host(param) else 0
            total += tensors * prod(self.shard_shape(param)) * param.rest_dtype.itemsize
            total += param.full_bytes * param.resident
        return total

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Paths of the units that backward recomputes whole: forward saves only the borders between them."""
        chosen = self.units if self.policy.recompute == "units" else self.policy.recompute_units
        return frozenset(chosen) - {ROOT}

    def may_serve_copies(self, param: Param) -> bool:
        """Return whether backward may gather or keep a parameter only for recomputed operations. It may for biases, and
        other parameters of one dimension, of units that it recomputes whole."""
        return param.unit in self.recomputed and len(param.shape) <= 1

    def keeping(self, paths: Container[str]) -> Plan:
        """Return the plan in which the given parameters, too, are kept unsharded from forward to backward."""
        params = (replace(param, kept_unsharded=param.kept_unsharded or param.path in paths) for param in self.params)
        return replace(self, params=tuple(params))

    def shard_shape(self, param: Param) -> tuple[int, ...]:
        """Return the shape of what rests: this rank's rows with padding, or the full shape."""
        return self.resting(param).at_rest

    def rests_on_host(self, param: Param) -> bool:
        """Return whether a parameter's shard, gradient and optimizer state rest in host memory (``cpu_offload``)."""
        return self.policy.cpu_offload and param.sharded

    def ranks_over(self, over: str) -> int:
        """Return the number of ranks of a collective over an axis."""
        return self.mesh.over(over).size

    def reduced_over(self, param: Param) -> tuple[str, ...]:
        """Return the axes over which the parameter's gradient is reduced, one collective after the other."""
        return self.geometry(param).reduced_over

    def encodes(self, *bucket: Param) -> bool:
        """Return whether a line before the gather of a bucket casts it, copies it from the host, or writes bytes."""
        return any(self.rests_on_host(param) or self.gathers_bytes(param) or self._casts(param) for param in bucket)

    def _casts(self, param: Param) -> bool:
        return param.sharded and param.is_cast and not param.frozen_format

    def gathers_bytes(self, param: Param) -> bool:
        """Return whether a parameter's rows are sent as bytes when it is gathered; one rank alone sends nothing."""
        return param.gather_format is not None and self.mesh.shard.size > 1

    def gather_encoding(self, param: Param) -> Encoding:
        """Return how a parameter's rows travel when it is gathered."""
        form = param.gather_format if self.gathers_bytes(param) else None
        return param.frozen_format or form or Encoding(param.compute_dtype)

    def decodes(self, *bucket: Param) -> bool:
        """Return whether a line after the gather of a bucket decodes bytes."""
        return any(param.frozen_format or self.gathers_bytes(param) for param in bucket)

    def encodes_gradient(self, over: str, *bucket: Param) -> bool:
        """Return whether a line before the reduction of a bucket over an axis casts gradients, or writes bytes."""
        return any(self.reduces_bytes(param, over) or self._casts_gradient(param, over) for param in bucket)

    def _casts_gradient(self, param: Param, over: str) -> bool:
        return over == self.reduced_over(param)[0] and param.reduce_dtype is not param.compute_dtype

    def decodes_gradient(self, over: str, *bucket: Param) -> bool:
        """Return whether a line after the reduction of a bucket over an axis reads bytes, casts means, or moves
        them."""
        return any(self.reduces_bytes(param, over) or self._moves_mean(param, over) for param in bucket)

    def _moves_mean(self, param: Param, over: str) -> bool:
        is_moved = param.reduce_dtype is not param.dtype or self.rests_on_host(param)
        return over == self.reduced_over(param)[-1] and is_moved

    def reduces_bytes(self, param: Param, over: str) -> bool:
        """Return whether a parameter's gradient is reduced over an axis as bytes."""
        return bool(self.reduce_encoding(param, over).block)

    def reduce_encoding(self, param: Param, over: str = SHARD) -> Encoding:
        """Return how a parameter's gradient travels over an axis. A format is for the last axis: between copies, if
        there are any."""
        is_last = over == self.reduced_over(param)[-1]
        form = param.reduce_format if is_last and self.ranks_over(over) > 1 else None
        return form or Encoding(param.reduce_dtype)

    def payload_bytes(self, param: Param) -> int:
        """Return the bytes of a rank's rows as they are gathered. Padding counts, since the blocks of all ranks are
        alike."""
        return self.gather_encoding(param).nbytes(prod(self.shard_shape(param)))

    def gather_sends(self, param: Param, rank: int) -> int:
        """Return the bytes that a rank sends to gather the parameter once."""
        if not param.sharded:
            return 0
        if self.gathers_bytes(param):
            return (self.mesh.shard.size - 1) * self.payload_bytes(param)
        numel = layout.gather_sends(param.rest_shape, self.mesh.shard.size, rank)
        return numel * self.gather_encoding(param).dtype.itemsize

    def gather_bytes(self, param: Param) -> int:
        """Return the bytes that this rank sends to gather the parameter once."""
        return self.gather_sends(param, self.mesh.shard.place)

    def gather_receives(self, param: Param) -> int:
        """Return the bytes that this rank receives when the parameter is gathered once."""
        if self.gathers_bytes(param) or not param.sharded:
            return self.gather_bytes(param)
        return (prod(param.rest_shape) - self.resting(param).numel) * self.gather_encoding(param).dtype.itemsize

    def part_bytes(self, param: Param, over: str) -> int:
        """Return the bytes of the part of an encoded gradient that one rank of an axis sums up. Over ``shard`` it is
        the rank's rows; over ``replicate`` these rows are divided among the copies of the model."""
        rows = prod(self.shard_shape(param))
        return self.reduce_encoding(param, over).nbytes(rows if over == SHARD else -(-rows // self.mesh.replicate.size))

    def reduce_sends(self, param: Param, over: str, rank: int) -> int:
        """Return the bytes that a rank sends to reduce the parameter's gradient once over an axis. In a format it sends
        parts to its peers; between copies of the model, it also sends back the mean of its part."""
        encoding = self.reduce_encoding(param, over)
        if encoding.block:
            return (1 + (over == REPLICATE)) * (self.ranks_over(over) - 1) * self.part_bytes(param, over)
        if over == SHARD and param.sharded:
            numel = layout.scatter_sends(param.shape, self.mesh.shard.size, rank)
        elif over in OF_MEANS:
            numel = layout.all_reduce_sends((self.geometry(param).numel_of(rank),), self.ranks_over(over))
        else:
            numel = layout.all_reduce_sends(param.shape, self.ranks_over(over))
        return numel * encoding.dtype.itemsize

    def reduce_bytes(self, param: Param) -> int:
        """Return the bytes that this rank sends to reduce the parameter's gradient once, over all axes."""
        return sum(self.reduce_sends(param, over, self.mesh.shard.place) for over in self.reduced_over(param))

    def reduce_receives(self, param: Param) -> int:
        """Return the bytes that this rank receives when the gradient is reduced once, over all axes."""
        return sum(self._receives(param, over) for over in self.reduced_over(param))

    def slice_sends(self, collective: str, numel: int) -> int:
        """Return how many elements a rank sends in a collective of torch's tensor parallelism that reads ``numel``
        elements."""
        ranks = self.mesh.tensor.size
        match collective:
            case "all_reduce":
                return layout.all_reduce_sends((numel,), ranks)
            case "all_gather_into_tensor":
                return (ranks - 1) * numel
            case "reduce_scatter_tensor" | "all_to_all_single":
                return numel * (ranks - 1) // ranks
        return 0

    def _receives(self, param: Param, over: str) -> int:
        if over != SHARD or not param.sharded or self.reduce_encoding(param, over).block:  # as much as it sends
            return self.reduce_sends(param, over, self.mesh.shard.place)
        return self.geometry(param).numel * (self.mesh.shard.size - 1) * param.reduce_dtype.itemsize

    def gather_work(self, param: Param) -> tuple[int, int]:
        """Return the bytes of memory that the lines before and after a gather, which encode and decode, read and write.
        A cast counts as encoding."""
        rows, full = prod(self.shard_shape(param)), self.mesh.shard.size * prod(self.shard_shape(param))
        if param.frozen_format:
            return 0, param.rest_bytes + param.full_bytes  # also on one rank alone
        if self.gathers_bytes(param):
            payload = self.payload_bytes(param)
            decoded = self.mesh.shard.size * payload + full * param.compute_dtype.itemsize
            return rows * param.dtype.itemsize + payload, decoded
        return (rows * (param.dtype.itemsize + param.compute_dtype.itemsize), 0) if self._casts(param) else (0, 0)

    def reduce_work(self, param: Param, over: str) -> tuple[int, int]:
        """Return the bytes of memory that the lines before and after a reduction, which encode and decode, read and
        write. In a format each part is written once and summed once. Between copies the sum is written again, and all
        ranks read it."""
        rows, peers = prod(self.shard_shape(param)), self.ranks_over(over) - 1
        mean = rows * param.dtype.itemsize
        if self.reduces_bytes(param, over):
            part = self.part_bytes(param, over)
            if over == SHARD:
                return (peers + 1) * rows * param.compute_dtype.itemsize + peers * part, peers * part + mean
            return mean + peers * part, (2 * peers + 2) * part + mean
        numel = prod(self.geometry(param).in_compute) if over == self.reduced_over(param)[0] else rows
        cast = numel * (param.compute_dtype.itemsize + param.reduce_dtype.itemsize)
        is_cast = over == self.reduced_over(param)[-1] and param.reduce_dtype is not param.dtype
        uncast = rows * param.reduce_dtype.itemsize + mean
        return cast * self._casts_gradient(param, over), uncast * is_cast
