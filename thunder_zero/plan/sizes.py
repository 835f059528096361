"""Sizes of buckets and bounds in flight, from the policy, the units and the device. Frozen data.

On the CPU, with gloo, small buckets are fastest (measured: docs/performance.md). A GPU's compute hides the gather of a
whole unit, and NCCL needs large messages. So on a GPU a unit is one bucket, and its gather starts one unit ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunder_zero.plan.policy import MiB, Policy

SMALL = 16 * MiB  # a bucket on the CPU; on a GPU the bytes of small buckets in flight beside a large bucket
FRACTION = 4  # gathers in flight, or reductions, take at most 1 / FRACTION of the memory that is not state


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of a bucket, and the bounds of the bytes in flight."""

    bucket_bytes: int  # bytes of full parameters in one bucket
    prefetch: int  # number of units whose gathers may be in flight while an earlier unit computes
    in_flight_bytes: int  # bound on the full gradients that are being reduced, or computed for the next reduction
    ahead_bytes: int  # bound on the full parameters gathered ahead of their use


def choose(policy: Policy, defaults: Sizes) -> Sizes:
    """Return the policy's sizes, with defaults for the sizes that are None."""
    in_flight = policy.in_flight_bytes
    return Sizes(
        defaults.bucket_bytes if policy.bucket_bytes is None else policy.bucket_bytes,
        defaults.prefetch if policy.prefetch is None else policy.prefetch,
        defaults.in_flight_bytes if in_flight is None else in_flight,
        defaults.ahead_bytes if in_flight is None else in_flight,
    )


def on_cpu(largest_unit: int) -> Sizes:
    """Return the default sizes on the CPU. The bound in flight is twice the largest unit, clamped to 4 to 32 MiB."""
    in_flight = min(max(2 * largest_unit, 4 * MiB), 32 * MiB)
    # One byte less for gathers: with units of equal size, one is gathered while another computes, but not two.
    return Sizes(bucket_bytes=SMALL, prefetch=2, in_flight_bytes=in_flight, ahead_bytes=in_flight - 1)


def on_gpu(largest_block: int, largest_param: int, left_bytes: int) -> Sizes:
    """Return the default sizes on a GPU.

    A bucket holds the largest unit. The bound in flight is the sum of the largest bucket, the largest unit and small
    buckets, so that each collective overlaps with a unit's compute. The bound is at most a quarter of ``left_bytes``.

    Args:
        largest_block: bytes of the largest unit except the root.
        largest_param: bytes of the largest parameter, which is a bucket by itself.
        left_bytes: bytes of the device's memory that parameters, gradients and optimizer state do not take.
    """
    bucket = max(SMALL, largest_block)
    in_flight = min(largest_block + max(bucket, largest_param) + SMALL, max(left_bytes, 0) // FRACTION)
    return Sizes(bucket, prefetch=1, in_flight_bytes=in_flight, ahead_bytes=in_flight)
