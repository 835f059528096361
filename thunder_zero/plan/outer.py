"""The outer step between sites: which units sites exchange when, and the bytes. Frozen data.

Each site trains alone. Sites average what they changed, and an outer optimizer takes the average as its gradient
(DiLoCo, arXiv 2311.08105). The units form ``fragments``, which are exchanged in turn (Streaming DiLoCo, 2501.18512)::

    Outer(sync_every=8, fragments=2, delay=1)

    step       1   2   3   4   5   6   7   8   9  10  11  12
    launch                 0               1               0     units 0, 2, 4 ...; units 1, 3, 5 ...
    apply                      0               1                 beside one step of compute
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from thunder_zero.encodings.encoding import PIECE, Encoding
from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.mesh import ALL, Axis
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import STAGES, is_count

SITE = "site"  # the axis over which sites exchange, beside those of a site's mesh
WIRE = Encoding(torch.float32)
CASTS = WIRE, Encoding(torch.bfloat16)  # beside int8; what 4 bits do to a training was not measured
LEAST = {"sync_every": 1, "fragments": 1, "delay": 0, "sites": 1, "states": 0}  # of each count
MOST = 4  # units of a fragment that are named
PIECE_BETWEEN_SITES = 1 << 22  # elements of a part: long beside a link's latency, short beside a time-out
ACCUMULATED = torch.float32  # the least precision of agreed parameters, since 16 bits would lose small changes


@dataclass(frozen=True, slots=True)
class Vector:
    """Parameters that a rank encodes together.

    Ranks of a site that have equal rows, such as of a scalar, get equal means, since they encode equal vectors and
    round them alike.
    """

    paths: tuple[str, ...]
    elements: int  # that this rank exchanges: its share, with padding, if other ranks have equal rows
    place: str  # equal on the ranks that exchange equal elements, so it seeds the rounding


@dataclass(frozen=True)
class Outer:
    """When sites exchange which units, and how. ``tz.DiLoCo`` has the meaning of its arguments, and only forecasts read
    the last three fields.

    >>> traces = tz.trace(module, tokens, outer=tz.Outer(sync_every=32, wire=tz.Int8(block=64), sites=2))
    """

    sync_every: int = 32
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.5
    wire: Encoding = field(default=WIRE)  # a dtype is taken as a cast to it
    sites: int = 2  # the number of sites that exchange
    states: int = 1  # the number of tensors that the outer optimizer holds of each parameter, such as its momentum
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.wire, torch.dtype):
            object.__setattr__(self, "wire", Encoding(self.wire))
        for name, least in LEAST.items():
            if not is_count(value := getattr(self, name)) or value < least:
                raise ValueError(f"{name} is {value!r}; give a whole number, {least} or more")
        if self.sync_every % self.fragments:
            raise ValueError(
                f"sync_every is {self.sync_every}, and {self.fragments} fragments do not divide it; give a multiple, "
                f"such as {-(-self.sync_every // self.fragments) * self.fragments}"
            )
        if self.delay >= self.interval:
            raise ValueError(
                f"delay is {self.delay}, and a fragment is exchanged every {self.interval} steps; give a smaller delay"
            )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha!r}; give a weight, 0 or more and less than 1")
        if not isinstance(self.wire, Int8) and self.wire not in CASTS:
            raise ValueError(
                f"wire is {self.wire!r}; give torch.float32, torch.bfloat16, or an encoding such as tz.Int8()"
            )

    @property
    def interval(self) -> int:
        """The number of steps between two exchanges."""
        return self.sync_every // self.fragments

    def is_due(self, step: int) -> bool:
        """Return whether an exchange is launched after this step, counted from 1."""
        return step % self.interval == 0

    def paths_of(self, plan: Plan) -> tuple[tuple[str, ...], ...]:
        """Return the paths of the trained parameters of each fragment. Fragment f has units f, f + ``fragments`` ..."""
        trained = [param for param in plan.params if param.requires_grad]
        units = list(dict.fromkeys(param.unit for param in trained))
        if self.fragments > len(units):
            raise ValueError(
                f"fragments is {self.fragments}, and the model trains {len(units)} units; give at most {len(units)}"
            )
        turn = {unit: index % self.fragments for index, unit in enumerate(units)}
        return tuple(
            tuple(param.path for param in trained if turn[param.unit] == fragment) for fragment in range(self.fragments)
        )

    def vectors_of(self, plan: Plan) -> tuple[tuple[Vector, ...], ...]:
        """Return what a rank exchanges of each fragment."""
        return tuple(_vectors(plan, paths) for paths in self.paths_of(plan))

    def sent(self, vectors: Sequence[Vector], sites: int) -> int:
        """Return the bytes that a rank sends to average vectors over sites: parts of its own, then the mean of one."""
        pieces = (piece for vector in vectors for piece in pieces_of(vector.elements, sites))
        return 2 * (sites - 1) * sum(self.wire.nbytes(-(-piece // sites)) for piece in pieces)

    def rows(self, plan: Plan) -> int:
        """Return the bytes of the agreed parameters, or of one state of the outer optimizer, on a rank."""
        return sum(row_bytes(plan, param) for param in plan.params if param.requires_grad)

    def buffers(self, plan: Plan, vectors: Sequence[Vector], *, on_gpu: bool = False) -> int:
        """Return the most bytes of a rank's buffers in the exchange of a fragment, in the memory where it computes.

        These are the changes with the most that averaging, or the outer optimizer's step, adds to them. Vectors are
        averaged piece by piece: the parts as sent and as received, a part's sum, and the mean. Without a GPU, all are
        in one memory.
        """
        if not vectors:  # this rank has no rows of the fragment
            return 0
        copies, item = copies_of(plan).size, ACCUMULATED.itemsize
        whole, means, most = [item * copies * vector.elements for vector in vectors], 0, 0
        for vector in vectors:
            part = -(-max(pieces_of(vector.elements, self.sites)) // self.sites)
            mean, message = item * -(-vector.elements // self.sites) * self.sites, self.wire.nbytes(part)
            padded = item * part * self.sites if vector.elements % self.sites else 0
            encoded = (self.sites + 1) * message if self.wire.dtype is not ACCUMULATED else 0
            decoded = item * min(part, PIECE) * bool(self.wire.block)
            sums = padded + 2 * (self.sites - 1) * message + 2 * item * part + mean
            most = max(most, means + sums + encoded + decoded)
            means += mean
        gathered = max(sum(whole[: index + 1]) + nbytes for index, nbytes in enumerate(whole)) if copies > 1 else 0
        largest = item * max(plan.geometry(plan.by_name[path]).numel for vector in vectors for path in vector.paths)
        stepped = max(gathered, sum(whole) * (copies > 1 or on_gpu) + largest)
        if on_gpu:
            return largest if self.cpu_offload else max(2 * max(whole), stepped)
        return sum(whole) + max(most, means + stepped)

    def turn(self, plan: Plan, fragment: int) -> str:
        """Return which units a fragment has, and when it is exchanged."""
        units = list(dict.fromkeys(plan.by_name[path].unit or "the root" for path in self.paths_of(plan)[fragment]))
        named = ", ".join([*units[:MOST], *[f"{len(units) - MOST} more"] * (len(units) > MOST)])
        part = f"fragment {fragment} of {self.fragments}, {named}" if self.fragments > 1 else "all units"
        applied = f", applied {self.delay} step{'s' * (self.delay > 1)} later" if self.delay else ""
        return f"{part}: every {self.sync_every} steps{applied}"

    @property
    def rounding(self) -> str:
        """By how much the wire may change what a site sends; "" if it has no bound that depends on values alone."""
        return f"a change is off by at most {self.wire.error('at random')}" if isinstance(self.wire, Int8) else ""

    def __str__(self) -> str:
        streamed = f", {self.fragments} fragments" * (self.fragments > 1) + f", delay {self.delay}" * (self.delay > 0)
        return f"every {self.sync_every} steps in {self.wire}{streamed}"


def row_bytes(plan: Plan, param: Param) -> int:
    """Return the bytes of a parameter's agreed rows on a rank."""
    return plan.geometry(param).numel * torch.promote_types(param.dtype, ACCUMULATED).itemsize


def copies_of(plan: Plan) -> Axis:
    """Return the ranks of a site that have equal rows, and share the exchange: replicas, or DDP's ranks."""
    return plan.mesh.replicate if STAGES[plan.policy.stage].sharded else plan.mesh.over(ALL)


def pieces_of(elements: int, sites: int) -> list[int]:
    """Return the elements that are averaged at a time, so that no site waits long for what another waits for."""
    most = sites * PIECE_BETWEEN_SITES
    return [min(most, elements - start) for start in range(0, elements, most)]


def _vectors(plan: Plan, paths: Sequence[str]) -> tuple[Vector, ...]:
    mesh, copies = plan.mesh, copies_of(plan)
    kinds = dict[tuple[bool, bool], list[Param]]()
    for param in filter(lambda param: plan.geometry(param).numel, map(plan.by_name.__getitem__, paths)):
        kinds.setdefault((param.sharded, param.sliced is not None), []).append(param)
    return tuple(
        Vector(
            tuple(param.path for param in params),
            -(-sum(plan.geometry(param).numel for param in params) // copies.size),
            f"{copies.place}/{mesh.shard.place if is_cut else ''}/{mesh.tensor.place if is_sliced else ''}",
        )
        for (is_cut, is_sliced), params in kinds.items()
    )
