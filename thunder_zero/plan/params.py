"""The plan of each parameter: shape, shard, unit, lifetime, bytes. Frozen data.

Later code reads the plan, never the module, the stage or the process group. In stage 3 on four ranks::

    Param("h.0.weight", shape=(10, 8), unit="h.0", sharded=True, resident=False, kept_unsharded=False, ...)
    plan.shard_shape(param)   (3, 8)          each rank stores three rows; the last rank pads
    plan.sizes.bucket_bytes   16 MiB          a bucket holds at most so many bytes of full parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from thunder_zero.encodings.encoding import Blocks, Encoding
from thunder_zero.encodings.int8 import Int8
from thunder_zero.encodings.nf4 import NF4
from thunder_zero.plan.amounts import size
from thunder_zero.plan.geometry import Geometry
from thunder_zero.plan.mesh import DATA, SHARD, Mesh
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.plan.sizes import Sizes, choose, on_cpu, on_gpu

if TYPE_CHECKING:
    import torch

ROOT = ""  # path of the root unit
STATES = 2  # optimizer tensors for each parameter, in the shape of its shard; Adam has two


@dataclass(frozen=True, slots=True)
class Param:
    """The plan of one parameter.

    Attributes:
        path: the parameter's first name in ``module.named_parameters()``.
        aliases: the other names of a tied parameter.
        shape: the full, unpadded shape of the parameter in compute, or of this rank's tensor-parallel slice.
        dtype: the dtype of the module's parameter. Its shard, ``.grad`` and optimizer state have the same dtype, unless
            a ``frozen_format`` stores the parameter.
        compute_dtype: the dtype of the gathered parameter, which compute reads.
        reduce_dtype: the dtype of the gradient on the wire.
        requires_grad: True if the parameter is trained.
        unit: the path of the parameter's unit, ``""`` for the root unit.
        sharded: True if each rank owns rows; False if the parameter is replicated.
        owner: the rank, as an index among the ranks of a replica, that alone gets the gradient of a replicated
            parameter; None if all ranks get it.
        resident: True if the parameter is sharded, but also stays in memory in full between steps (ZeRO-1).
        kept_unsharded: True if one gather serves forward and backward; False if forward frees the parameter and
            backward gathers it again. In ZeRO-3, scheduling sets True for some last units
            (``Policy.reshard_after_forward``).
        gather_per_unit: True if each unit that uses the parameter in forward gathers it separately.
        gather_format: the format of the rows on the wire; None means ``compute_dtype``.
        reduce_format: the format of the gradient on the wire; None means ``reduce_dtype``. A frozen parameter has it,
            too, since it may be unfrozen.
        frozen_format: the format of the rows at rest and on the wire; None if the parameter is not stored in a format.
        sliced: the dimension that torch's tensor parallelism slices; None if it slices none.
        uneven: the sizes of all ranks' slices along ``sliced`` if these differ. Empty if they are equal.
        is_partial: True if the gradient is a sum, and each rank of tensor parallelism computes one term.
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
    uneven: tuple[int, ...] = ()
    owner: int | None = None

    @property
    def rest_shape(self) -> tuple[int, ...]:
        """The full, unpadded shape at rest, where the rows may be encoded in ``frozen_format``."""
        fmt = self.frozen_format
        return self.shape if fmt is None else (self.shape[0], fmt.nbytes(prod(self.shape[1:])))

    @property
    def at_rest(self) -> Param:
        """The parameter with its values as they rest: if ``frozen_format`` encodes rows, these are the values."""
        dtype = self.rest_dtype
        return replace(self, shape=self.rest_shape, dtype=dtype, compute_dtype=dtype, frozen_format=None)

    @property
    def rest_dtype(self) -> torch.dtype:
        """The dtype at rest."""
        return self.dtype if self.frozen_format is None else self.frozen_format.dtype

    @property
    def rest_bytes(self) -> int:
        """The bytes at rest on all ranks together, without padding."""
        return prod(self.rest_shape) * self.rest_dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter; the first is its path."""
        return (self.path, *self.aliases)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full, unpadded parameter in ``compute_dtype``, or of the largest slice."""
        return self._largest * self.compute_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the full, unpadded gradient in ``reduce_dtype``, or of the gradient of the largest slice."""
        return self._largest * self.reduce_dtype.itemsize

    @property
    def _largest(self) -> int:
        # All ranks schedule by the largest slice, since they must launch equal collectives.
        if self.sliced is None or not self.uneven:
            return prod(self.shape)
        return prod(self.shape) // self.shape[self.sliced] * self.uneven[0]

    @property
    def is_cast(self) -> bool:
        """True if the dtype in compute differs from the dtype of the shard."""
        return self.compute_dtype is not self.dtype


@dataclass(frozen=True)
class Plan:
    """The plan of all parameters of one module on one rank."""

    policy: Policy  # the user's policy
    mesh: Mesh  # the ranks that train the model
    params: tuple[Param, ...]  # the parameters, in the order of ``module.named_parameters()``
    # bytes of memory of the smallest device among all ranks; None if ranks compute on the CPU
    memory_bytes: int | None = None

    def __repr__(self) -> str:
        """Summarize the plan in one line, without the parameters."""
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

    @cached_property
    def weight(self) -> float:
        """The factor of this rank's gradients before they are averaged: its share, relative to the mean share."""
        shares = self.policy.shares
        return shares[self.mesh.place(DATA)] * len(shares) / sum(shares) if shares else 1.0

    def geometry(self, param: Param) -> Geometry:
        """Return the shapes of a parameter, its rows, and the axes over which its gradient is reduced."""
        return Geometry(self.whole_shape(param), self.mesh, param.sharded, param.sliced, param.is_partial)

    def whole_shape(self, param: Param) -> tuple[int, ...]:
        """Return the shape of a parameter before tensor parallelism slices it."""
        dim, slices = param.sliced, self.mesh.tensor.size
        return tuple(
            sum(param.uneven) or size * slices if index == dim else size for index, size in enumerate(param.shape)
        )

    def resting(self, param: Param) -> Geometry:
        """Return the geometry of a parameter at rest, where its rows may be encoded in ``frozen_format``."""
        fmt = param.frozen_format
        return self.geometry(param) if fmt is None else Geometry(param.rest_shape, self.mesh, param.sharded)

    @cached_property
    def by_name(self) -> dict[str, Param]:
        """A mapping from names, aliases included, to parameters."""
        return {name: param for param in self.params for name in param.names}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The paths of the parameters that are not trained."""
        return frozenset(param.path for param in self.params if not param.requires_grad)

    @cached_property
    def padded(self) -> tuple[Param, ...]:
        """The parameters whose shards have padding on this rank."""
        return tuple(param for param in self.params if self.geometry(param).padding)

    @property
    def kept_unsharded(self) -> tuple[str, ...]:
        """Paths of the sharded parameters that are gathered once for forward and backward. Scheduling a ZeRO-3 step
        adds whole units, so read the paths from ``traces_of(model).plan``. Forward still frees parameters that backward
        does not read (biases)."""
        return tuple(
            param.path for param in self.params if param.sharded and param.kept_unsharded and not param.resident
        )

    @property
    def units(self) -> tuple[str, ...]:
        """Paths of the units, in the order of their first parameters."""
        return tuple(dict.fromkeys(param.unit for param in self.params))

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of buckets, the bounds in flight, and the number of units gathered ahead. All ranks must launch
        equal collectives, so these sizes do not depend on the shapes of inputs, which may differ between ranks."""
        if self.memory_bytes is None:
            return choose(self.policy, on_cpu(max(self.unit_bytes.values(), default=0)))
        largest = max(max(param.full_bytes, param.grad_bytes) for param in self.params)
        return choose(self.policy, on_gpu(self.largest_block_bytes, largest, self.memory_bytes - self.state_bytes))

    @cached_property
    def unit_bytes(self) -> Mapping[str, int]:
        """A mapping from units to bytes: the sum of each parameter's full or gradient size, whichever is larger."""
        counts: Counter[str] = Counter()
        for param in self.params:
            counts[param.unit] += max(param.full_bytes, param.grad_bytes)
        return counts

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of the largest unit except the root, or of the root if it is the only unit."""
        blocks = {unit: nbytes for unit, nbytes in self.unit_bytes.items() if unit != ROOT} or self.unit_bytes
        return max(blocks.values())

    @cached_property
    def state_bytes(self) -> int:
        """An estimate of the bytes at rest on each rank's device. ``tz.tools.memory`` has the exact number.

        It includes shards, resident parameters, and, for trained parameters, gradients and :data:`STATES` optimizer
        tensors. It counts ZeRO-1's shards twice: they are views of the full parameters, which are included, too.
        """
        total = 0
        for param in self.params:
            tensors = 1 + (1 + STATES) * param.requires_grad if not self.rests_on_host(param) else 0
            total += tensors * prod(self.shard_shape(param)) * param.rest_dtype.itemsize
            total += param.full_bytes * param.resident
        return total

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Paths of the units that backward recomputes whole: forward saves only their inputs and outputs."""
        chosen = self.units if self.policy.recompute == "units" else self.policy.recompute_units
        return frozenset(chosen) - {ROOT}

    def may_serve_copies(self, param: Param) -> bool:
        """Return whether backward may gather or keep a parameter only for recomputed operations. The parameter must
        have at most one dimension (a bias), and backward must recompute its unit whole."""
        return param.unit in self.recomputed and len(param.shape) <= 1

    def keeping(self, paths: Container[str]) -> Plan:
        """Return a plan that also keeps the parameters at these paths unsharded from forward to backward."""
        params = (replace(param, kept_unsharded=param.kept_unsharded or param.path in paths) for param in self.params)
        return replace(self, params=tuple(params))

    def training(self, paths: Container[str]) -> Plan:
        """Return a plan in which exactly the parameters at these paths are trained."""
        return replace(self, params=tuple(replace(param, requires_grad=param.path in paths) for param in self.params))

    def shard_shape(self, param: Param) -> tuple[int, ...]:
        """Return the shape at rest: that of this rank's padded rows, or of the full parameter if it is replicated."""
        return self.resting(param).at_rest

    def rests_on_host(self, param: Param) -> bool:
        """Return whether a parameter's shard, gradient and optimizer state rest in host memory (``cpu_offload``)."""
        return self.policy.cpu_offload and param.sharded

    def ranks_over(self, axis: str) -> int:
        """Return the number of ranks of a collective over an axis."""
        return self.mesh.over(axis).size

    def reduced_over(self, param: Param) -> tuple[str, ...]:
        """Return the axes of the collectives that reduce the parameter's gradient, in order."""
        return self.geometry(param).reduced_over

    def encodes(self, *bucket: Param) -> bool:
        """Return whether a bucket is cast, copied from the host, or encoded as bytes before its gather."""
        return any(self.rests_on_host(param) or self.gathers_bytes(param) or self.casts(param) for param in bucket)

    def casts(self, param: Param) -> bool:
        """Return whether a gather sends the parameter's rows in another dtype than they rest in."""
        return param.sharded and param.is_cast and not param.frozen_format

    def gathers_bytes(self, param: Param) -> bool:
        """Return whether a gather sends the parameter's rows encoded as bytes; False on a single rank."""
        return param.gather_format is not None and self.mesh.shard.size > 1

    def gather_encoding(self, param: Param) -> Encoding:
        """Return the encoding of a parameter's rows in a gather."""
        fmt = param.gather_format if self.gathers_bytes(param) else None
        return param.frozen_format or fmt or Encoding(param.compute_dtype)

    def decodes(self, *bucket: Param) -> bool:
        """Return whether a bucket is decoded from bytes after its gather."""
        return any(param.frozen_format or self.gathers_bytes(param) for param in bucket)

    def encodes_gradient(self, axis: str, *bucket: Param) -> bool:
        """Return whether a bucket's gradients are cast, weighed or encoded as bytes before a reduction over an axis."""
        return any(
            self.reduces_bytes(param, axis) or self.casts_gradient(param, axis) or self.weighs_gradient(param, axis)
            for param in bucket
        )

    def weighs_gradient(self, param: Param, axis: str) -> bool:
        """Return whether ranks multiply the parameter's gradient by their :attr:`weight` before a reduction."""
        return axis == self.reduced_over(param)[0] and len(set(self.policy.shares)) > 1

    def casts_gradient(self, param: Param, axis: str) -> bool:
        """Return whether a reduction over an axis casts the parameter's gradient first."""
        return axis == self.reduced_over(param)[0] and param.reduce_dtype is not param.compute_dtype

    def decodes_gradient(self, axis: str, *bucket: Param) -> bool:
        """Return whether a bucket's means are decoded, cast, or moved to the host after a reduction over an axis."""
        return any(self.reduces_bytes(param, axis) or self._moves_mean(param, axis) for param in bucket)

    def _moves_mean(self, param: Param, axis: str) -> bool:
        is_moved = param.reduce_dtype is not param.dtype or self.rests_on_host(param)
        return axis == self.reduced_over(param)[-1] and is_moved

    def reduces_bytes(self, param: Param, axis: str) -> bool:
        """Return whether a parameter's gradient is reduced over an axis as bytes."""
        return bool(self.reduce_encoding(param, axis).block)

    def reduce_encoding(self, param: Param, axis: str = SHARD) -> Encoding:
        """Return the encoding of a parameter's gradient in a reduction over an axis."""
        # A format encodes only the last reduction: the one between replicas, if there are any.
        is_last = axis == self.reduced_over(param)[-1]
        fmt = param.reduce_format if is_last and self.ranks_over(axis) > 1 else None
        return fmt or Encoding(param.reduce_dtype)

    @cached_property
    def known_traffic(self) -> dict[object, Any]:
        """The cache of :func:`thunder_zero.plan.traffic.bucket_traffic`."""
        return {}
