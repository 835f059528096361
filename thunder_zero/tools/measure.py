"""``measure_times``: measures a running model for ``Policy.times``."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from statistics import median

from thunder_zero.comm import agree
from thunder_zero.frontends.zero_module import traces_of, zero_module
from thunder_zero.plan.policy import Times, is_count
from thunder_zero.schedule.timeline import Kind, Timeline
from thunder_zero.sharded.sharded_model import tagged
from thunder_zero.sharded.state import State
from thunder_zero.sharded.waits import computed, mean_over_ranks

from thunder.core.module import ThunderModule


@tagged("measure_times")
def measure_times(model: ThunderModule, step: Callable[[], object], steps: int = 3) -> Times:
    """Measure how long a model computes between gathers, and how fast its gathers are.

    A collective: all ranks call it, and all get the same times, the mean over ranks of medians, to three digits. The
    model trains as usual in ``step``; then every bucket is gathered ``steps`` times by itself.

    >>> times = tz.tools.measure_times(model, step)
    >>> faster = thunder.jit(module, transforms=[tz.ZeroTransform(times=times)])

    Args:
        model: a model with ZeroTransform, which has run.
        step: runs one forward and one backward of ``model``, and everything else in a step.
        steps: number of runs.

    Raises:
        TypeError: not a model with ZeroTransform; ``step`` is not a function.
        ValueError: ``steps`` is out of range.
        RuntimeError: the model was not called yet, or ``step`` does not run forward and backward of it once.
    """
    state = zero_module(model).state
    with agree.all_or_none(state.group, "its arguments"):
        if not callable(step):
            raise TypeError(f"step is {step!r}; give a function that runs one forward and backward of the model")
        if not is_count(steps) or steps == 0:
            raise ValueError(f"steps is {steps!r}; give how many steps to measure, 1 or more")
        if not any(zero_module(model).graphs()):
            raise RuntimeError("nothing to measure: the model was not called yet; run a step before measure_times")
    runs = []
    for _ in range(steps):
        with state.clock.running() as waits:
            step()
        runs.append(waits)
    timeline = traces_of(model).timeline
    expected = [
        (op.params[0], timeline.ends(op, Kind.GATHER), op.backward) for op in timeline.ops if op.kind is Kind.WAIT
    ]
    with agree.all_or_none(state.group, "its step"):
        seconds = [computed(waits, expected) for waits in runs]
    phases = [{path: median(run[phase][path] for run in seconds) for path in seconds[0][phase]} for phase in (0, 1)]
    values = [*phases[0].values(), *phases[1].values(), _bytes_per_second(state, timeline, steps)]
    means = iter([float(f"{mean:.3g}") for mean in mean_over_ranks(values, state.group)])
    forward, backward = ({path: next(means) for path in phase} for phase in phases)
    return Times(forward, backward, next(means))


def _bytes_per_second(state: State, timeline: Timeline, rounds: int) -> float:
    """Bytes that a rank sends and receives in a second while buckets are gathered one by one; infinite if none are."""
    buckets = {op.params: timeline.wire_bytes(op) for op in timeline.ops if op.kind is Kind.GATHER}
    nbytes = sum(buckets.values())
    if not nbytes:
        return inf
    return nbytes / median(sum(map(state.seconds_alone, buckets)) for _ in range(rounds))
