"""The operations of a step: one frozen type for each kind.

::

    Gather   fut0 <- t_w          h.0.w        starts an all-gather of shards (a launch)
    Wait     w    <- fut0         h.0.w        ends a launch: the full parameter, or the mean gradient, can be read
    Compute  y    <- x, w                      runs a line of the plain module's trace
    Reduce   fut1 <- gw           h.0.w        starts an all-reduce or a reduce-scatter, by the plan (a launch)
    Defer    g    <- gw           h.0.w        keeps a gradient for a later backward (``no_sync``)
    Free     w                    h.0.w        drops values after their last use
    Return   y                                 ends a phase

Values are names. All types have ``reads``, ``writes``, ``params`` (paths), ``backward``, ``repeated`` and ``kind``.
A value that a repeated operation writes is a copy, of one that forward freed or did not save.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, TypeAlias, TypeGuard, assert_never

from thunder_zero.plan.mesh import SHARD
from thunder_zero.plan.traffic import Traffic


class Work(StrEnum):
    """Classes of work on the device, heaviest first: a fused region has the class of its heaviest part.

    NONE: collectives, waits, frees. OTHER: an unknown class. VIEW: another shape of the input's memory, if strides
        allow. POINTWISE includes copies and constants. INDEX: reads or writes positions that depend on data. AWAIT:
        waits for an :class:`Exchange`, and gives the memory that it has written.
    """

    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    MATMUL = "matmul"
    OTHER = "other"
    INDEX = "index"
    REDUCTION = "reduction"
    RANDOM = "random"
    POINTWISE = "pointwise"
    VIEW = "view"
    AWAIT = "await"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Gather:
    """Start an all-gather of shards: one for each parameter of the bucket, in the order of ``params``."""

    kind: ClassVar = "gather"
    over: ClassVar = SHARD

    reads: tuple[str, ...]
    handle: str
    params: tuple[str, ...]
    backward: bool = False
    repeated: bool = False

    @property
    def writes(self) -> tuple[str, ...]:
        """The handle."""
        return (self.handle,)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start a reduction of full gradients over an axis of the mesh, in the order of ``params``.

    Over "replicate" and "tensor" it reads the means of another reduction.
    """

    kind: ClassVar = "reduce"
    backward: ClassVar = True
    repeated: ClassVar = False

    reads: tuple[str, ...]
    handle: str
    params: tuple[str, ...]
    over: str = SHARD

    @property
    def writes(self) -> tuple[str, ...]:
        """The handle."""
        return (self.handle,)


Launch: TypeAlias = Gather | Reduce


@dataclass(frozen=True, slots=True)
class Wait:
    """End a launch. It writes a full parameter, or a mean, for each parameter of the launch."""

    kind: ClassVar = "wait"

    launch: Launch
    writes: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """The launch's handle."""
        return (self.launch.handle,)

    @property
    def params(self) -> tuple[str, ...]:
        """The launch's parameters."""
        return self.launch.params

    @property
    def backward(self) -> bool:
        """True if the launch is in backward."""
        return self.launch.backward

    @property
    def repeated(self) -> bool:
        """True if the launch is repeated."""
        return self.launch.repeated


@dataclass(frozen=True, slots=True)
class Defer:
    """Keep a full gradient for a later backward. Backward returns the value written, which is None at run time."""

    kind: ClassVar = "defer"
    backward: ClassVar = True
    repeated: ClassVar = False

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The work of a collective of torch's tensor parallelism."""

    moves: str  # "gather", "scatter", "all_reduce" or "all_to_all"
    traffic: Traffic  # its bytes on the wire

    def __str__(self) -> str:
        return self.moves


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a line."""

    kind: ClassVar = "compute"
    params: ClassVar[tuple[str, ...]] = ()

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    line: object = field(default=None, repr=False, compare=False)  # opaque to passes
    backward: bool = False
    repeated: bool = False
    # True if running it twice gives equal values and has no side effect (not random, nothing in place), so that
    # backward may compute it again
    repeatable: bool = False
    work: Work | Exchange = Work.OTHER
    cheap: bool = False  # True if it is repeatable at little cost: views, pointwise work, reductions of rows
    updates: tuple[str, ...] = ()  # values whose memory it overwrites, and values that may share this memory
    flops: int = 0  # FLOPs of its products, attention and convolutions; 0 for all other work
    # of a fused region: the FLOPs of each operation of forward that it computes again. A written trace does not tell
    repeats: tuple[int, ...] = field(default=(), compare=False)
    number: int = -1  # its index in the lifted timeline, by which passes know it. A copy has its original's

    @property
    def between_slices(self) -> bool:
        """True for a collective of torch's tensor parallelism, and for the wait for one."""
        return self.work is Work.AWAIT or isinstance(self.work, Exchange)


@dataclass(frozen=True, slots=True)
class Free:
    """Drop values after their last use. ``params`` has the gathered parameters whose memory this frees."""

    kind: ClassVar = "free"
    writes: ClassVar[tuple[str, ...]] = ()
    repeated: ClassVar = False

    reads: tuple[str, ...]
    params: tuple[str, ...] = ()
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """End a phase."""

    kind: ClassVar = "return"
    writes: ClassVar[tuple[str, ...]] = ()
    params: ClassVar[tuple[str, ...]] = ()
    repeated: ClassVar = False

    results: tuple[str | None, ...]  # the phase's results in order; None for a result that is not a value of the trace
    backward: bool = False
    saves: tuple[str, ...] = ()  # values that forward saves for backward

    @property
    def returned(self) -> tuple[str, ...]:
        """The results that are values, once each."""
        return tuple(dict.fromkeys(name for name in self.results if name is not None))

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it returns or saves."""
        return tuple(dict.fromkeys((*self.returned, *self.saves)))


Op: TypeAlias = Gather | Reduce | Wait | Defer | Compute | Free | Return


def ends(op: Op, launch: type[Launch]) -> TypeGuard[Wait]:
    """Return whether an operation is the wait that ends a launch of this type."""
    return isinstance(op, Wait) and isinstance(op.launch, launch)


def starts_collective(op: Op) -> bool:
    """Return whether an operation starts a collective, of this package or of torch's tensor parallelism."""
    return isinstance(op, Launch) or (isinstance(op, Compute) and isinstance(op.work, Exchange))


def ends_collective(op: Op) -> bool:
    """Return whether an operation waits for a collective, of this package or of torch's tensor parallelism."""
    return isinstance(op, Wait) or (isinstance(op, Compute) and op.work is Work.AWAIT)


def reading(op: Op, names: Mapping[str, str]) -> Op:
    """Return the operation with its reads renamed. ``names`` maps old names to new names."""
    if names.keys().isdisjoint(op.reads):  # the usual case
        return op
    match op:
        case Wait(launch=launch):
            return replace(op, launch=replace(launch, handle=names[launch.handle]))
        case Return(results=results):
            return replace(op, results=tuple(name if name is None else names.get(name, name) for name in results))
        case _:
            return replace(op, reads=tuple(names.get(name, name) for name in op.reads))


def tied(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the operations, each wait with the launch that writes its handle."""
    launches: dict[str, Launch] = {}
    for op in ops:
        if isinstance(op, Launch):
            launches[op.handle] = op
        elif isinstance(op, Wait) and op.launch is not (launch := launches.get(op.launch.handle, op.launch)):
            op = replace(op, launch=launch)
        yield op


def identities(op: Op) -> tuple[Hashable, ...]:
    """Return what identifies an operation and its copies: a line, or a collective of a parameter, for each."""
    match op:
        case Gather():
            return tuple(("gather", path) for path in op.params)
        case Reduce():
            return tuple(("reduce", path, op.over) for path in op.params)
        case Wait(launch=launch):
            return tuple(("wait", *identity) for identity in identities(launch))  # type: ignore[misc]
        case Defer(params=paths):
            return tuple(("defer", path) for path in paths)
        case Compute(number=number):
            return (("compute", number),)
        case Return():
            return (("return", op.backward),)
        case Free():
            return ()
        case _:
            assert_never(op)
