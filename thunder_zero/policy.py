"""What the user asks for: frozen data, and the table of the stages.

``STAGES`` is the one place where a stage is defined; everything else reads its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thunder_zero.precision import MixedPrecision
from thunder_zero.times import Times

if TYPE_CHECKING:
    from torch import nn

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table: how long each tensor of a sharded parameter lives."""

    name: str
    sharded: bool  # the optimizer sees this rank's rows, gradients are reduce-scattered
    resident: bool  # the full parameter is there at rest
    gathered_once: bool  # gathered once; alive from its first use in forward to its last in backward (ZeRO-3: gather_last_units_once)


#                     sharded  resident  kept
STAGES: tuple[Stage, ...] = (
    Stage("DDP", False, True, True),
    Stage("ZeRO-1", True, True, True),
    Stage("ZeRO-2", True, False, True),
    Stage("ZeRO-3", True, False, False),
)


COUNTS = {  # fields that count something, with their units
    "replicate_below_bytes": "bytes",
    "bucket_bytes": "bytes",
    "in_flight_bytes": "bytes",
    "prefetch": "buckets",
}


@dataclass(frozen=True, slots=True)
class Policy:
    """How a module is sharded, and how its collectives are scheduled.

    Attributes:
        stage: 0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3 (Rajbhandari et al., arXiv 1910.02054).
        unit_of: maps the plain module to the paths of the submodules that are units (parameters
            that travel together); parameters outside of them form the root unit. Default: the
            repeated blocks (:func:`thunder_zero.plan.repeated_blocks`).
        ignored: paths of parameters, or of submodules with all of theirs, that are neither sharded, gathered nor
            reduced; each rank trains its own (default none).
        replicate_below_bytes: parameters smaller than this stay full on every rank, and their gradients are all-reduced
            (bytes of the full parameter, default 0: all are sharded).
        mixed_precision: in which dtypes the module computes and its gradients travel (default: in those that its
            parameters have).
        bucket_bytes: collectives of a unit that are launched together, cut at this many bytes of
            full parameters (bytes, default 16 MiB; 0 sends each parameter by itself).
        prefetch: buckets of gathers that are under way while an earlier bucket computes (default 2; 0 starts
            each gather right before its use).
        in_flight_bytes: gathers start ahead of their use while the gathered bytes under way stay
            within this bound, and reductions stay under way while the gradients that they still read,
            and those that are being made, do (bytes, default 32 MiB; 0 starts each gather right before
            its use). One collective may always be under way, however large.
        times: with them, a gather starts after the latest earlier wait from which it can still end before
            compute waits for it, if the wire carries one collective after the other. ``prefetch`` does not
            apply then, ``in_flight_bytes`` does (:func:`thunder_zero.measure_times` makes them; default None).
        gather_per_unit: a parameter that is used by several units in forward (tied weights) is gathered
            once for each of them and freed between, instead of once for all (default False); once, if it is kept.
        gather_last_units_once: ZeRO-3 only: keep the last units of forward gathered for backward, which needs them first, as many
            as do not raise the peak of gathered bytes; ``Plan.gathered_once`` lists them (default True; False keeps nothing).
        gather_once_per_accumulation: ZeRO-2 only: parameters that a forward under ``no_sync`` has gathered stay until the micro-batch
            that reduces has read them, since they do not change in an accumulation (default False: each micro-batch
            gathers). Needs the memory of the gathered model.
        cpu_offload: sharded parameters' shards, and with them gradients and optimizer state, rest in host memory; each
            shard is copied to the device before its gather, its gradient back after the reduction (default False; on
            the CPU it changes nothing, and warns so).
        broadcast_from: rank in the process group whose parameters and buffers all ranks take at
            the start; None (default) requires them to be equal already.
        check_gradients: raise on NaN or Inf in a reduced gradient, on every rank, before the
            optimizer sees it (default False; costs one pass and one small collective a backward). A gradient scaler
            would skip such a step instead: leave this off with one.

    Raises:
        ValueError: a field is out of its range.
    """

    stage: int = 3
    unit_of: Callable[[nn.Module], tuple[str, ...]] | None = None
    ignored: tuple[str, ...] = ()
    replicate_below_bytes: int = 0
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    bucket_bytes: int = 16 * MiB
    prefetch: int = 2
    in_flight_bytes: int = 32 * MiB
    times: Times | None = None
    gather_per_unit: bool = False
    gather_last_units_once: bool = True
    gather_once_per_accumulation: bool = False
    cpu_offload: bool = False
    broadcast_from: int | None = None
    check_gradients: bool = False

    def __post_init__(self) -> None:
        if not _is_count(self.stage) or self.stage >= len(STAGES):
            raise ValueError(f"stage is {self.stage!r}; choose 0 (DDP), 1, 2 or 3 (ZeRO-1, ZeRO-2, ZeRO-3)")
        for name, unit in COUNTS.items():
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give a number of {unit}, 0 or more")
        for name in (
            "gather_per_unit",
            "gather_last_units_once",
            "gather_once_per_accumulation",
            "cpu_offload",
            "check_gradients",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give True or False")
        if not isinstance(self.ignored, tuple) or not all(isinstance(path, str) for path in self.ignored):
            raise ValueError(f"ignored is {self.ignored!r}; give a tuple of paths of parameters or submodules")
        if not isinstance(self.mixed_precision, MixedPrecision):
            raise ValueError(f"mixed_precision is {self.mixed_precision!r}; give a thunder_zero.MixedPrecision")
        if self.times is not None and not isinstance(self.times, Times):
            raise ValueError(f"times is {self.times!r}; give thunder_zero.Times, as measure_times makes them, or None")
        if self.broadcast_from is not None and not _is_count(self.broadcast_from):
            raise ValueError(f"broadcast_from is {self.broadcast_from!r}; give a rank of the process group, or None")
        if self.unit_of is not None and not callable(self.unit_of):
            raise ValueError(f"unit_of is {self.unit_of!r}; give a function from the module to paths of units, or None")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


DDP = Policy(stage=0)
ZERO1 = Policy(stage=1)
ZERO2 = Policy(stage=2)
ZERO3 = Policy(stage=3)
