"""Each parameter as it is planned: shape, shard, unit, lifetime, bytes. Frozen data.

Later code asks the plan, never the module, the stage or the process group. In stage 3 on four ranks::

    Param("h.0.weight", shape=(10, 8), unit="h.0", sharded=True, resident=False, kept_unsharded=False, ...)
    plan.shard_shape(param)   (3, 8)          of whose ten rows each rank stores three, the last one with padding
    plan.gather_bytes(param)  288             what this rank sends to gather it once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from thunder_zero.encodings.encoding import Encoding
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
        dtype: of the module's parameter; of the shard, its ``.grad`` and the optimizer's state, unless it rests in a
            ``frozen_format``.
        compute_dtype: of the gathered parameter, which compute reads.
        reduce_dtype: of its gradient on the wire.
        requires_grad: it is trained.
        unit: path of its unit, ``""`` for the root unit.
        sharded: each rank owns rows; otherwise it is replicated.
        resident: sharded, and the full parameter stays in memory at rest too (ZeRO-1).
        kept_unsharded: one gather serves forward and backward; otherwise backward gathers again what forward freed. A
            new plan of ZeRO-3 says False; the schedule chooses some last units (``Policy.reshard_after_forward``).
        gather_per_unit: each unit that uses it in forward gathers it anew.
        gather_format, reduce_format: how it travels, and its gradient; None: in the dtypes above.
        frozen_format: how its rows rest, and travel; None: in the dtypes above.
        sliced: the dimension along which torch's tensor parallelism slices it; None: each rank computes with all of it.
        is_partial: each rank of tensor parallelism makes a part of its gradient, and the sum of these is its gradient.
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
    gather_format: Int8 | None = None
    reduce_format: Int8 | None = None
    frozen_format: NF4 | None = None
    sliced: int | None = None
    is_partial: bool = False

    @property
    def rest_shape(self) -> tuple[int, ...]:
        """Full, unpadded shape of what rests: the parameter's, or its rows as bytes."""
        form = self.frozen_format
        return self.shape if form is None else (self.shape[0], form.nbytes(prod(self.shape[1:])))

    @property
    def rest_dtype(self) -> torch.dtype:
        """Dtype of what rests."""
        return self.dtype if self.frozen_format is None else self.frozen_format.dtype

    @property
    def rest_bytes(self) -> int:
        """Bytes of what rests on all ranks together, without padding."""
        return prod(self.rest_shape) * self.rest_dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter, the first one first."""
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
        """Whether compute reads it in a dtype other than the shard's."""
        return self.compute_dtype is not self.dtype


@dataclass(frozen=True)
class Plan:
    """All parameters of one module, as one rank sees them.

    Attributes:
        policy: what the user asked for.
        mesh: the ranks that train the model.
        params: the parameters, in the order of ``module.named_parameters()``.
        memory_bytes: of the device, or of the smallest one of all ranks; None: host memory.
    """

    policy: Policy
    mesh: Mesh
    params: tuple[Param, ...]
    memory_bytes: int | None = None

    def __repr__(self) -> str:
        """A summary; :attr:`params` has the parameters."""
        copies = f", {count} copies of the model" if (count := self.mesh.replicate.size) > 1 else ""
        full = size(sum(param.full_bytes for param in self.params))
        sharded = sum(param.sharded for param in self.params)
        return (
            f"<Plan of {STAGES[self.policy.stage].name}, {self.mesh}{copies}: "
            f"{len(self.params)} parameters ({full}), {sharded} of them sharded, in {len(self.units)} units>"
        )

    @property
    def ranks(self) -> int:
        """How many ranks train the model."""
        return self.mesh.size()

    def geometry(self, param: Param) -> Geometry:
        """Return the shapes and rows of a parameter, and what its gradient is summed over."""
        return Geometry(self.whole_shape(param), self.mesh, param.sharded, param.sliced, param.is_partial)

    def whole_shape(self, param: Param) -> tuple[int, ...]:
        """Return the shape of a parameter with the slices of all ranks."""
        dim, slices = param.sliced, self.mesh.tensor.size
        return tuple(size * slices if at == dim else size for at, size in enumerate(param.shape))

    def require_unsliced(self, what: str, instead: str) -> None:
        """Refuse what would take slices of torch's tensor parallelism for parameters.

        Raises:
            RuntimeError: there are slices.
        """
        if self.mesh.is_sliced:
            raise RuntimeError(f"{what} knows no slices of torch's tensor parallelism yet; {instead}")

    def resting(self, param: Param) -> Geometry:
        """Return the shapes and rows of what rests of a parameter: its own rows, or each as bytes."""
        form = param.frozen_format
        return self.geometry(param) if form is None else Geometry(param.rest_shape, self.mesh, param.sharded)

    @cached_property
    def by_name(self) -> dict[str, Param]:
        """Parameters by each of their names, aliases included."""
        return {name: param for param in self.params for name in param.names}

    @cached_property
    def padded(self) -> tuple[Param, ...]:
        """The parameters whose shards have padding on this rank."""
        return tuple(param for param in self.params if self.geometry(param).padding)

    @property
    def kept_unsharded(self) -> tuple[str, ...]:
        """Paths of the sharded parameters that one gather serves for forward and backward.

        ZeRO-3 knows them once it has scheduled a step, so ask ``traces_of(model).plan``. They make up whole units;
        forward still frees those that backward does not read (biases).
        """
        return tuple(
            param.path for param in self.params if param.sharded and param.kept_unsharded and not param.resident
        )

    @property
    def units(self) -> tuple[str, ...]:
        """Paths of the units, in the order of their first parameters."""
        return tuple(dict.fromkeys(param.unit for param in self.params))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of a bucket and in flight, units gathered ahead. They do not depend on a rank's inputs, whose shapes
        may differ between ranks: all ranks launch the same."""
        if self.memory_bytes is None:
            return choose(self.policy, on_cpu(self.largest_unit_bytes))
        largest = max(max(param.full_bytes, param.grad_bytes) for param in self.params)
        return choose(self.policy, on_gpu(self.largest_block_bytes, largest, self.memory_bytes - self.state_bytes))

    @cached_property
    def unit_bytes(self) -> Mapping[str, int]:
        """For each unit, bytes of its full parameters or of their gradients, whichever are more."""
        counts: Counter[str] = Counter()
        for param in self.params:
            counts[param.unit] += max(param.full_bytes, param.grad_bytes)
        return counts

    @property
    def largest_unit_bytes(self) -> int:
        """Bytes of the full parameters of the largest unit, or of their gradients."""
        return max(self.unit_bytes.values(), default=0)

    @property
    def largest_block_bytes(self) -> int:
        """The same of the units but the root, if there are others."""
        blocks = {unit: nbytes for unit, nbytes in self.unit_bytes.items() if unit != ROOT} or self.unit_bytes
        return max(blocks.values())

    @cached_property
    def state_bytes(self) -> int:
        """Estimates what rests on the device of each rank: shards, or full parameters where they stay; of those
        that are trained also the gradients and :data:`STATES` tensors of an optimizer.

        ``tz.tools.memory`` has the truth. This leaves out buffers of the module and an optimizer's numbers of steps,
        and counts the shards of ZeRO-1 that are views of full parameters once more.
        """
        total = 0
        for param in self.params:
            tensors = 1 + (1 + STATES) * param.requires_grad if not self.rests_on_host(param) else 0
            total += tensors * prod(self.shard_shape(param)) * param.rest_dtype.itemsize
            total += param.full_bytes * param.resident
        return total

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Paths of the units that backward computes again whole: only their borders are saved."""
        chosen = self.units if self.policy.recompute == "units" else self.policy.recompute_units
        return frozenset(chosen) - {ROOT}

    def may_serve_copies(self, param: Param) -> bool:
        """Whether backward may keep or gather a parameter for recomputed operations alone: biases and the like of units
        that it computes again whole."""
        return param.unit in self.recomputed and len(param.shape) <= 1

    def keeping(self, paths: Container[str]) -> Plan:
        """The plan in which these parameters, too, are kept unsharded from forward to backward."""
        params = (replace(one, kept_unsharded=one.kept_unsharded or one.path in paths) for one in self.params)
        return replace(self, params=tuple(params))

    def shard_shape(self, param: Param) -> tuple[int, ...]:
        """Shape of what rests: this rank's rows with padding, or the full shape."""
        return self.resting(param).at_rest

    def rests_on_host(self, param: Param) -> bool:
        """Whether its shard, its gradient and the optimizer's state rest in host memory (``cpu_offload``)."""
        return self.policy.cpu_offload and param.sharded

    def ranks_over(self, over: str) -> int:
        """Return how many ranks a collective has over an axis."""
        return self.mesh.over(over).size

    def reduced_over(self, param: Param) -> tuple[str, ...]:
        """Return the axes over which the parameter's gradient is reduced, one collective after the other."""
        return self.geometry(param).reduced_over

    def encodes(self, *bucket: Param) -> bool:
        """Return whether something else than rows as they rest is gathered of a bucket: a cast, a copy, or bytes."""
        return any(self.rests_on_host(param) or self.gathers_bytes(param) or self._casts(param) for param in bucket)

    def _casts(self, param: Param) -> bool:
        return param.sharded and param.is_cast and not param.frozen_format

    def gathers_bytes(self, param: Param) -> bool:
        """Return whether its rows are written as bytes when it is gathered; one rank alone sends nothing."""
        return param.gather_format is not None and self.mesh.shard.size > 1

    def gather_encoding(self, param: Param) -> Encoding:
        """Return how its rows travel when it is gathered."""
        form = param.gather_format if self.gathers_bytes(param) else None
        return param.frozen_format or form or Encoding(param.compute_dtype)

    def decodes(self, *bucket: Param) -> bool:
        """Return whether bytes arrive when a bucket is gathered."""
        return any(param.frozen_format or self.gathers_bytes(param) for param in bucket)

    def encodes_gradient(self, over: str, *bucket: Param) -> bool:
        """Return whether something else than what backward made, or than the means so far, is reduced over an axis."""
        return any(self.reduces_bytes(param, over) or self._casts_gradient(param, over) for param in bucket)

    def _casts_gradient(self, param: Param, over: str) -> bool:
        return over == self.reduced_over(param)[0] and param.reduce_dtype is not param.compute_dtype

    def decodes_gradient(self, over: str, *bucket: Param) -> bool:
        """Return whether something else than the means at rest arrives from a reduction over an axis."""
        return any(self.reduces_bytes(param, over) or self._moves_mean(param, over) for param in bucket)

    def _moves_mean(self, param: Param, over: str) -> bool:
        is_moved = param.reduce_dtype is not param.dtype or self.rests_on_host(param)
        return over == self.reduced_over(param)[-1] and is_moved

    def reduces_bytes(self, param: Param, over: str) -> bool:
        """Return whether its gradient is reduced over an axis as bytes."""
        return bool(self.reduce_encoding(param, over).block)

    def reduce_encoding(self, param: Param, over: str = SHARD) -> Encoding:
        """Return how its gradient travels over an axis. With copies of the model a format is that between them."""
        is_last = over == self.reduced_over(param)[-1]
        form = param.reduce_format if is_last and self.ranks_over(over) > 1 else None
        return form or Encoding(param.reduce_dtype)

    def payload_bytes(self, param: Param) -> int:
        """Return the bytes of a rank's rows in the format of gathers: of all rows that are stored, padding included, as
        the blocks of every rank are alike."""
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
        """Return the bytes, in the format of reductions, of the part of a gradient that one rank of an axis adds up:
        its rows, or as many of these as each copy of the model has."""
        rows = prod(self.shard_shape(param))
        return self.reduce_encoding(param, over).nbytes(rows if over == SHARD else -(-rows // self.mesh.replicate.size))

    def reduce_sends(self, param: Param, over: str, rank: int) -> int:
        """Return the bytes that a rank sends to reduce the parameter's gradient once over an axis. In a format those
        are what is traded and, between copies, the means that come back."""
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
        """Return the bytes that this rank receives when the gradient is reduced once: of a reduce-scatter the own rows
        of every other rank; of all else as much as it sends."""
        return sum(self._receives(param, over) for over in self.reduced_over(param))

    def slice_sends(self, collective: str, numel: int) -> int:
        """Return the elements that a rank sends in a collective of torch's over slices, which reads so many."""
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
        if over != SHARD or not param.sharded or self.reduce_encoding(param, over).block:
            return self.reduce_sends(param, over, self.mesh.shard.place)
        return self.geometry(param).numel * (self.mesh.shard.size - 1) * param.reduce_dtype.itemsize

    def gather_work(self, param: Param) -> tuple[int, int]:
        """Return the bytes of memory that the lines which encode and decode a parameter read and write when it is
        gathered: by its cast, or for its format."""
        rows, full = prod(self.shard_shape(param)), self.mesh.shard.size * prod(self.shard_shape(param))
        if param.frozen_format:
            return 0, param.rest_bytes + param.full_bytes  # on one rank alone, too
        if self.gathers_bytes(param):
            payload = self.payload_bytes(param)
            decoded = self.mesh.shard.size * payload + full * param.compute_dtype.itemsize
            return rows * param.dtype.itemsize + payload, decoded
        return (rows * (param.dtype.itemsize + param.compute_dtype.itemsize), 0) if self._casts(param) else (0, 0)

    def reduce_work(self, param: Param, over: str) -> tuple[int, int]:
        """Return the bytes of memory that the lines which encode and decode a gradient read and write when it is
        reduced over an axis. In a format each part is written once and added up once; between copies the sum is
        written once more, and read by all."""
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
