"""The user's policy, measured times, and the table of stages. Frozen data.

Only ``STAGES`` defines the stages. All other code reads a row of this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING, Any
from zlib import crc32

from thunder_zero.plan.formats import Formats, require_formats
from thunder_zero.plan.precision import MixedPrecision

if TYPE_CHECKING:
    from torch import nn

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table of stages: which tensors are sharded, and how long full parameters live."""

    name: str
    sharded: bool  # the optimizer steps this rank's rows, and gradients are reduce-scattered
    resident: bool  # the full parameter stays in memory between steps
    kept_unsharded: bool  # the full parameter lives from forward to backward; in ZeRO-3 only in the last units


#                     sharded  resident  kept_unsharded
STAGES: tuple[Stage, ...] = (
    Stage("DDP", False, True, True),
    Stage("ZeRO-1", True, True, True),
    Stage("ZeRO-2", True, False, True),
    Stage("ZeRO-3", True, False, False),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Measured times of compute between gathers, and the speed of a gather.

    A gather is named by the path of the first parameter of its bucket. Ranks compare the ``repr`` of their times, which
    contains a checksum of the seconds.

    Attributes:
        forward: a mapping from gathers to seconds of compute, without communication, from the gather's wait to the next
            gather's wait. The last gather of a phase needs no entry. Any other missing entry counts as 0 seconds, so
            that the next gather starts too early rather than too late.
        backward: a mapping like ``forward``, for the gathers of backward.
        bytes_per_second: the speed at which a rank sends, and receives, in a gather that has the wire to itself;
            ``math.inf`` if nothing is sent.
    """

    forward: Mapping[str, float] = field(hash=False)
    backward: Mapping[str, float] = field(hash=False)
    bytes_per_second: float

    def __post_init__(self) -> None:
        for phase in ("forward", "backward"):
            object.__setattr__(self, phase, _check_times(phase, getattr(self, phase)))
        if not _is_number(self.bytes_per_second) or not self.bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second is {self.bytes_per_second!r}; give the bytes that a rank sends per second, more "
                f"than 0 (math.inf if nothing travels)"
            )
        object.__setattr__(self, "bytes_per_second", float(self.bytes_per_second))

    def __repr__(self) -> str:
        seconds = {"forward": self.forward, "backward": self.backward}
        gathers = ", ".join(
            f"{phase}=<{len(by_path)} gathers, {sum(by_path.values()):.3g} s>" for phase, by_path in seconds.items()
        )
        checksum = crc32(repr(seconds).encode())
        return f"Times({gathers}, bytes_per_second={self.bytes_per_second}, <checksum {checksum:08x}>)"


def _check_times(phase: str, seconds: object) -> dict[str, float]:
    if not isinstance(seconds, Mapping):
        raise ValueError(f"{phase} is {seconds!r}; give a mapping from paths of parameters to seconds")
    for path, value in seconds.items():
        if not isinstance(path, str):
            raise ValueError(f"{phase} has times for {path!r}; give the path of a parameter")
        if not _is_number(value) or not isfinite(value) or value < 0:
            raise ValueError(f"{phase} of {path!r} is {value!r}; give seconds of compute, 0 or more")
    return {path: float(seconds[path]) for path in sorted(seconds)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


COUNTS = {  # fields that hold a count, with the word for what is counted
    "replicate_below_bytes": "bytes",
    "bucket_bytes": "bytes",
    "in_flight_bytes": "bytes",
    "prefetch": "units",
}
OPEN = ("bucket_bytes", "prefetch", "in_flight_bytes")  # None: plan/sizes.py chooses
PATHS = {  # fields that hold paths
    "ignored": "paths of parameters or submodules, such as ('router',)",
    "replicated": "patterns of paths of parameters or submodules, such as ('*.bias',)",
    "owned": "patterns of paths of parameters or submodules, such as ('h.*.weight',)",
    "keep_unsharded": "paths of units, such as ('blocks.3',)",
    "recompute_units": "paths of units, such as ('blocks.0',)",
}
SHOWN = 4  # at most this many paths of a field are shown in a repr
RECOMPUTE = ("none", "cheap", "units")
SWITCHES = ("gather_per_unit", "reshard_after_backward", "cpu_offload", "check_gradients", "materialize_grads")


@dataclass(frozen=True, slots=True)
class Policy:
    """How a module is sharded, and how its collectives are scheduled.

    Attributes:
        stage: 0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3 (Rajbhandari et al., arXiv 1910.02054).
        unit_of: a function from the plain module to the paths of its units, the submodules whose parameters are
            gathered together. All other parameters form the root unit. Default: the repeated blocks
            (:func:`thunder_zero.plan.make_plan.repeated_blocks`).
        ignored: paths of parameters, or of submodules with all their parameters, that are not sharded, gathered or
            reduced. Each rank trains its own copy (default none).
        replicated: patterns of paths (``"*.bias"``, as in ``fnmatch``) of parameters, or of submodules with all their
            parameters, that every rank keeps in full. Their gradients are all-reduced (default none).
        owned: ZeRO-1 to 3. Patterns, as of ``replicated``, of matrices (parameters of two dimensions or more), each of
            which one rank steps whole, by ``tz.whole``. Every rank keeps them in full, and only the owner gets their
            gradients. The plan shares the work of a step, as Muon's, among owners (default none).
        replicate_below_bytes: a size in bytes. Every rank keeps smaller parameters in full and all-reduces their
            gradients (default 0: all parameters are sharded).
        mixed_precision: the dtypes of compute and of gradients on the wire (default: the parameters' dtypes).
        bucket_bytes: the bytes of full parameters at which a unit's collectives are split into buckets. 0 gives each
            parameter its own collective (default None: on the CPU 16 MiB; on a GPU the largest unit, at least 16 MiB).
        prefetch: number of units whose gathers may be in flight while an earlier unit computes. 0 starts each gather
            right before its use (default None: 2 on the CPU, 1 on a GPU).
        in_flight_bytes: the bound on bytes in flight. Gathers start ahead of their use while the gathered bytes stay
            within the bound; 0 starts each gather right before its use. Reductions stay in flight while the gradients
            that they read and the gradients being computed stay within the bound. The bytes of gathers ahead of their
            use are added to these gradients, unless only reductions of the last ``prefetch`` units are in flight. A
            single collective of any size may be in flight. (Default None: on the CPU twice the largest unit, 4 to 32
            MiB, and one byte less for gathers; on a GPU the largest unit plus the largest bucket, but at most a quarter
            of the memory that is not state.)
        times: measured times (:func:`thunder_zero.tools.measure_times`), which replace ``prefetch``. Each gather then
            starts at the latest time at which it still ends before compute needs it, if the wire carries one collective
            at a time. ``in_flight_bytes`` still applies (default None).
        gather_per_unit: True to gather a parameter that several units use in forward (tied weights) once for each unit,
            and to free it in between (default False: one gather). It has no effect on a parameter that is kept
            unsharded.
        reshard_after_forward: ZeRO-3 only. True: forward frees all units. None (default): forward keeps the last units,
            which backward needs first, as long as that does not raise the peak of gathered bytes.
            ``Plan.kept_unsharded`` lists them.
        reshard_after_backward: ZeRO-2 only. True (default): each micro-batch gathers the parameters. False: parameters
            gathered under ``no_sync`` stay gathered until the micro-batch that reduces has read them. This takes memory
            for all parameters.
        recompute: the choice of forward's values that are not saved, but computed again in backward. ``"none"``: only
            values that the module checkpoints. ``"cheap"`` (default): results of pointwise operations, casts, norms,
            softmax and other reductions of rows, where that saves memory and adds no gather. ``"units"``: all values
            except the inputs and outputs of units.
        recompute_units: paths of units that are recomputed as with ``"units"``, for any ``recompute`` (default none).
        keep_unsharded: ZeRO-3 only. Paths of units that forward does not free, in addition to the units that
            ``reshard_after_forward=None`` keeps. Each unit saves a gather (default none).
        cpu_offload: True to keep shards, gradients and optimizer state in host memory. Each shard is copied to the
            device before its gather, and its gradient is copied back after the reduction (default False; on a CPU the
            only effect is a warning).
        broadcast_from: the rank in the process group whose parameters and buffers all ranks copy at the start; None
            (default) requires them to be equal already.
        check_gradients: True to raise on NaN or Inf in a reduced gradient, on every rank, before the optimizer's step
            (default False; costs one pass and one small collective per backward). Do not combine it with a gradient
            scaler, which skips such steps.
        materialize_grads: True to let backward read zeros for outputs that the loss leaves out. Its reductions are then
            equal on all ranks, even if the ranks' losses leave out different outputs, and each parameter gets a
            gradient (default False: as in eager mode, a parameter that only such outputs reach gets none).
        gather_format: ZeRO-1 to 3. The format of parameters on the wire: ``Int8()`` sends bytes with a scale for each
            block of elements, about a quarter of the size in float32. All ranks, owners included, compute with the
            decoded values; shards are not rounded. ``nn.Embedding``, ``nn.EmbeddingBag`` and parameters of one
            dimension (biases, norms) are sent unchanged, unless a dict of patterns of paths names them: ``{"*": Int8(),
            "head": None}``. The last pattern that matches decides (default None: all are sent unchanged).
        reduce_format: ZeRO-1 to 3. The format of gradients on the wire: ``Int8()``. Each rank encodes its part of a
            gradient once, with stochastic rounding, which is unbiased. The owner sums in float32 (default None).
        frozen_format: ZeRO-2 and 3. The format of frozen parameters, at rest and on the wire: ``NF4()``, 4 bits per
            element with a scale for each block, about a quarter of the size in bfloat16. It applies to floating-point
            parameters of two dimensions or more that it makes smaller. Embeddings stay unchanged, unless a dict of
            patterns names them, as in ``gather_format`` (default None: frozen parameters stay unchanged).
        shares: a positive number for each data-parallel rank, such as ``(2, 1)`` if rank 0 is twice as fast as rank 1.
            Ranks take batches in proportion (:class:`thunder_zero.ShareSampler`). A reduction weighs each rank's
            gradient by its share, which gives the mean of the whole batch. Rows stay equal (default ``()``: equal).
        passes: functions from timeline to timeline, called in this order before the last built-in pass, ``free``
            (:mod:`thunder_zero.schedule.passes`). Each result is proved (default none).
        transport: a function from a process group and a number to a :class:`thunder_zero.comm.transport.Transport`, for
            example a subclass of ``thunder_zero.comm.pairwise.PairwiseGloo``. Hybrid sharding has three transports,
            which may share a group but have different numbers (default None: by the backend).
    """

    stage: int = 3
    unit_of: Callable[[nn.Module], tuple[str, ...]] | None = None
    ignored: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()
    replicate_below_bytes: int = 0
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    bucket_bytes: int | None = None
    prefetch: int | None = None
    in_flight_bytes: int | None = None
    times: Times | None = None
    gather_per_unit: bool = False
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    recompute: str = "cheap"
    recompute_units: tuple[str, ...] = ()
    keep_unsharded: tuple[str, ...] = ()
    cpu_offload: bool = False
    broadcast_from: int | None = None
    check_gradients: bool = False
    materialize_grads: bool = False
    gather_format: Formats = field(default=None, hash=False)
    reduce_format: Formats = field(default=None, hash=False)
    frozen_format: Formats = field(default=None, hash=False)
    shares: tuple[float, ...] = ()
    passes: tuple[Callable[[Any], Any], ...] = ()
    transport: Callable[[Any, int], Any] | None = None

    def __post_init__(self) -> None:
        if not is_count(self.stage) or self.stage >= len(STAGES):
            raise ValueError(f"stage is {self.stage!r}; choose 0 (DDP), 1, 2 or 3 (ZeRO-1, ZeRO-2, ZeRO-3)")
        for name, unit in COUNTS.items():
            count = getattr(self, name)
            if not is_count(count) and not (count is None and name in OPEN):
                raise ValueError(f"{name} is {count!r}; give a number of {unit}, 0 or more")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give True or False")
        if self.reshard_after_forward is False:
            action = (
                "give stage=2" if self.stage == 3 else f"leave it out in stage {self.stage}, which frees nothing there"
            )
            raise ValueError(f"reshard_after_forward is False, which is ZeRO-2; {action}")
        if not (self.reshard_after_forward is None or self.reshard_after_forward is True):
            raise ValueError(f"reshard_after_forward is {self.reshard_after_forward!r}; give True or None")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}; choose one of {', '.join(map(repr, RECOMPUTE))}")
        for name, example in PATHS.items():
            paths = getattr(self, name)
            if not isinstance(paths, tuple) or not all(isinstance(path, str) for path in paths):
                raise ValueError(f"{name} is {paths!r}; give a tuple of {example}")
        if not isinstance(self.mixed_precision, MixedPrecision):
            raise ValueError(
                f"mixed_precision is {self.mixed_precision!r}; give a thunder_zero.MixedPrecision, such as "
                f"MixedPrecision(torch.bfloat16)"
            )
        if self.times is not None and not isinstance(self.times, Times):
            raise ValueError(
                f"times is {self.times!r}; give thunder_zero.schedule.Times, as measure_times makes them, or None"
            )
        if self.broadcast_from is not None and not is_count(self.broadcast_from):
            raise ValueError(f"broadcast_from is {self.broadcast_from!r}; give a rank of the process group, or None")
        if self.unit_of is not None and not callable(self.unit_of):
            raise ValueError(f"unit_of is {self.unit_of!r}; give a function from the module to paths of units, or None")
        require_formats(self)
        require_shares(self.shares)
        if not isinstance(self.passes, tuple) or not all(map(callable, self.passes)):
            raise ValueError(f"passes is {self.passes!r}; give a tuple of functions from timeline to timeline")
        if self.transport is not None and not callable(self.transport):
            raise ValueError(
                f"transport is {self.transport!r}; give a function that makes a Transport of a process group and "
                f"a number, such as a subclass of thunder_zero.comm.pairwise.PairwiseGloo, or None"
            )

    def __repr__(self) -> str:
        """Show the stage, and each field whose value is not the default. Long tuples of paths are shortened."""
        texts = {"stage": repr(self.stage)}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, tuple) and len(value) > SHOWN:
                texts[item.name] = f"({', '.join(map(repr, value[:SHOWN]))}, ... {len(value) - SHOWN} more)"
            elif value != item.default and value != MixedPrecision():
                texts[item.name] = repr(value)
        return f"Policy({', '.join(f'{name}={text}' for name, text in texts.items())})"


def require_shares(shares: object) -> None:
    """Raise ValueError unless shares are a tuple of finite numbers above 0. It may be empty."""
    if not isinstance(shares, tuple) or not all(
        _is_number(share) and isfinite(share) and share > 0 for share in shares
    ):
        raise ValueError(
            f"shares is {shares!r}; give a tuple with a number above 0 for each data-parallel rank, such as (2, 1)"
        )


def refuse_shares(policy: Policy, library: str) -> None:
    """Raise ValueError if a policy has shares. ``library`` cuts batches."""
    if policy.shares:
        raise ValueError(
            f"shares is {policy.shares}, and {library} gives every rank an equal batch; leave shares out, or write the "
            f"loop yourself, with thunder_zero.ShareSampler"
        )


def is_count(value: object) -> bool:
    """Return whether a value is an int of at least 0, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


DDP = Policy(stage=0)  # gradients are averaged; every rank has all parameters and all optimizer state
ZERO1 = Policy(stage=1)  # the optimizer and its state are sharded
ZERO2 = Policy(stage=2)  # parameters are sharded, too, and stay gathered from forward to backward
ZERO3 = Policy(stage=3)  # parameters are sharded, too, and gathered only for each use
