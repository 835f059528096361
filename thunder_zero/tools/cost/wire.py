"""Divides a launch into rings: who takes part, what the busiest rank sends, and in how many steps.

Without hybrid sharding all ranks are one group. With it, a reduce-scatter inside a copy of the model is followed by an
all-reduce across the copies, of the rows that a rank owns; the copies' ranks are ``world_size`` apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline


class Lane(StrEnum):
    """What runs one thing after another."""

    COMPUTE = "compute"
    INSIDE = "inside"  # the wire of a copy of the model
    ACROSS = "across"  # the wire between copies


class Sends(StrEnum):
    """What a ring does."""

    GATHER = "gather"
    SCATTER = "scatter"
    ALL_REDUCE = "all_reduce"


@dataclass(frozen=True, slots=True)
class Ring:
    """A part of a launch.

    Attributes:
        lane: the wire that it runs on.
        ranks: how many take part.
        stride: how far apart they are.
        nbytes: what the busiest rank sends, and receives.
        steps: how often it sends to its neighbour.
        sends: what it does.
        tensors: how many travel.
    """

    lane: Lane
    ranks: int
    stride: int
    nbytes: int
    steps: int
    sends: Sends = Sends.GATHER
    tensors: int = 1


def rings(op: Op, timeline: Timeline) -> tuple[Ring, ...]:
    """The rings of a launch, one after the other; none if nothing travels. Together they send its ``wire_bytes``."""
    return tuple(ring for ring in _rings(op, timeline) if ring.nbytes) if op.kind in LAUNCHES else ()


def _rings(op: Op, timeline: Timeline) -> Iterator[Ring]:
    plan = timeline.plan
    world, copies = plan.world_size, plan.replicas
    params = timeline.params_of(op)
    whole = sum(plan.reduce_bytes(param) for param in params if not param.sharded)
    sends = [timeline.busiest_sends(op, param) for param in params if param.sharded]
    inside, across = (sum(part) for part in zip(*sends, strict=True)) if sends else (0, 0)
    of_whole = Lane.ACROSS if copies > 1 else Lane.INSIDE
    moves = Sends.GATHER if op.kind is Kind.GATHER else Sends.SCATTER
    yield Ring(of_whole, plan.ranks, 1, whole, 2 * (plan.ranks - 1), Sends.ALL_REDUCE, len(params) - len(sends))
    yield Ring(Lane.INSIDE, world, 1, inside, world - 1, moves, len(sends))
    yield Ring(Lane.ACROSS, copies, world, across, 2 * (copies - 1), Sends.ALL_REDUCE, len(sends))
