"""Sizes of buckets and bounds in flight, from the policy, the units and the device. Frozen data.

On the CPU, where gloo sends, small buckets travel best (measured: docs/performance.md). A GPU's compute hides the
gather of a whole unit, and NCCL needs large messages: there a unit is one bucket, and one unit is gathered ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunder_zero.plan.policy import MiB, Policy

SMALL = 16 * MiB  # a bucket on the CPU, and the room for small buckets beside large ones on a GPU
SHARE = 4  # in flight is at most one part in so many of the memory that the state leaves; gathers, and reductions


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much travels together, and how much at once.

    Attributes:
        bucket_bytes: of full parameters, that travel together.
        prefetch: units whose gathers may be in flight while an earlier unit computes.
        in_flight_bytes: of full gradients that wait for the wire, or are made meanwhile.
        ahead_bytes: of full parameters gathered ahead of their use.
    """

    bucket_bytes: int
    prefetch: int
    in_flight_bytes: int
    ahead_bytes: int


def choose(policy: Policy, usual: Sizes) -> Sizes:
    """The policy's sizes, and the usual ones where it leaves them open."""
    in_flight = policy.in_flight_bytes
    return Sizes(
        usual.bucket_bytes if policy.bucket_bytes is None else policy.bucket_bytes,
        usual.prefetch if policy.prefetch is None else policy.prefetch,
        usual.in_flight_bytes if in_flight is None else in_flight,
        usual.ahead_bytes if in_flight is None else in_flight,
    )


def on_cpu(largest_unit: int) -> Sizes:
    """In flight: two of the largest units, 4 to 32 MiB; one byte less for gathers, so that one of the largest units is
    there while another computes, not two."""
    in_flight = min(max(2 * largest_unit, 4 * MiB), 32 * MiB)
    return Sizes(bucket_bytes=SMALL, prefetch=2, in_flight_bytes=in_flight, ahead_bytes=in_flight - 1)


def on_gpu(largest_block: int, largest_param: int, left_bytes: int) -> Sizes:
    """A bucket holds the largest unit. In flight: the largest bucket beside the largest unit and small buckets, so that
    each has the compute of a unit to hide behind, if that is at most a share of the memory.

    Args:
        largest_block: bytes of the largest unit but the root.
        largest_param: bytes of the largest parameter, which is a bucket by itself.
        left_bytes: what the state leaves of the device's memory.
    """
    bucket = max(SMALL, largest_block)
    in_flight = min(largest_block + max(bucket, largest_param) + SMALL, max(left_bytes, 0) // SHARE)
    return Sizes(bucket, prefetch=1, in_flight_bytes=in_flight, ahead_bytes=in_flight)
