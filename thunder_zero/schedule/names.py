"""Names launches, waits and units: for profiles and for forecasts."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_zero.plan.mesh import OF_MEANS, SHARD, TENSOR
from thunder_zero.schedule.ops import Compute, Exchange, Launch, Op, Wait, Work
from thunder_zero.schedule.timeline import Timeline


def launch_label(kind: str, paths: Sequence[str], axis: str = SHARD) -> str:
    """Return the label of a launch, such as ``gather blocks.3.norm.weight, 5 more`` or ``reduce w over replicate``."""
    more = f", {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{kind} {paths[0]}{more}{f' over {axis}' * (axis in OF_MEANS)}"


def wait_label(kind: str, paths: Sequence[str], axis: str = SHARD) -> str:
    """Return the label of a wait, such as ``wait for gather w, 5 more``. ``kind`` is the kind of the awaited launch."""
    return f"wait for {launch_label(kind, paths, axis)}"


def label_of(op: Op, timeline: Timeline) -> str:
    """Return the label of a launch or a wait, such as ``all_reduce over tensor`` for torch's tensor parallelism."""
    match op:
        case Wait(launch=launch):
            return wait_label(launch.kind, launch.params, launch.over)
        case Compute(work=Work.AWAIT):
            return f"wait for {label_of(timeline.collectives[op.reads[0]], timeline)}"
        case Compute(work=Exchange(moves=moves)):
            return f"{moves} over {TENSOR}"
    assert isinstance(op, Launch), f"a {op.kind} is not a collective"
    return launch_label(op.kind, op.params, op.over)


def unit_label(unit: str) -> str:
    """Return the label of a unit: ``unit blocks.3``, or ``root unit``."""
    return f"unit {unit}" if unit else "root unit"
