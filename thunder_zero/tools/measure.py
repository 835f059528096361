"""``measure_times``: measures a running model for ``Policy.times``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from math import inf
from statistics import median

from thunder_zero.capture.zero_module import captured_forward, traces_of, zero_module
from thunder_zero.comm import agree
from thunder_zero.comm.collective_tags import CollectiveTag
from thunder_zero.comm.small_collectives import all_gather_object, barrier
from thunder_zero.plan.policy import Times, is_count
from thunder_zero.schedule.ops import Gather, Wait, ends
from thunder_zero.sharded.sharded_model import tagged
from thunder_zero.sharded.state import State
from thunder_zero.sharded.waits import Waited

from thunder.core.module import ThunderModule

Seconds = dict[str, float]


@tagged("measure_times")
def measure_times(model: ThunderModule, step: Callable[[], object], steps: int = 3) -> Times:
    """Measure a model's compute between gathers, and the speed of its gathers.

    ``step`` runs a training step, with one forward and one backward of ``model``, which was called before. All ranks
    call this function, and get equal times: medians over steps, averaged over ranks, with three digits. The model
    trains as usual in ``step``. Then every bucket is gathered ``steps`` times without compute.

    >>> times = tz.tools.measure_times(model, step)
    >>> faster = thunder.jit(module, transforms=[tz.ZeroTransform(times=times)])
    """
    state = zero_module(model).state
    with agree.all_or_none(state.group, "its arguments"):
        if not callable(step):
            raise TypeError(f"step is {step!r}; give a function that runs one forward and backward of the model")
        if not is_count(steps) or steps == 0:
            raise ValueError(f"steps is {steps!r}; give how many steps to measure, 1 or more")
        if not any(captured_forward(model).ran):
            raise RuntimeError("nothing to measure: the model was not called yet; run a step before measure_times")
    runs = []
    for _ in range(steps):
        with state.clock.running() as waits:
            step()
        runs.append(waits)
    timeline = traces_of(model).timeline
    expected = [(op.params[0], ends(op, Gather), op.backward) for op in timeline.ops if isinstance(op, Wait)]
    with agree.all_or_none(state.group, "its step"):
        seconds = [computed(waits, expected) for waits in runs]
    phases = [{path: median(run[phase][path] for run in seconds) for path in seconds[0][phase]} for phase in (0, 1)]
    buckets = {op.params: timeline.traffic(op).busiest for op in timeline.ops if isinstance(op, Gather)}
    nbytes, speed = sum(buckets.values()), inf  # bytes per second on the wire in separate gathers
    if nbytes:
        speed = nbytes / median(sum(_seconds_alone(state, paths) for paths in buckets) for _ in range(steps))
    values = [*phases[0].values(), *phases[1].values(), speed]
    columns = zip(*all_gather_object(values, state.group), strict=True)  # rank order makes all means equal
    means = iter([float(f"{sum(column) / len(column):.3g}") for column in columns])
    forward, backward = ({path: next(means) for path in phase} for phase in phases)
    return Times(forward, backward, next(means))


def _seconds_alone(state: State, paths: Sequence[str]) -> float:
    """Return the seconds that a gather of these sharded parameters takes without overlap (a collective)."""
    params = [state.params[path] for path in paths]
    barrier(state.group)
    state.transport.enter(CollectiveTag(f"measure_times of {state.name}", repr(paths)))
    start = state.clock.now()
    state.wire.gather_now([param.rows for param in params], [param.planned for param in params])
    state.copies.wait()
    return start.until(state.clock.now())


def computed(waits: Sequence[Waited], expected: Sequence[tuple[str, bool, bool]]) -> tuple[Seconds, Seconds]:
    """Return the seconds of compute between the waits of successive gathers, in forward and in backward.

    A gather gets the seconds between its wait and the next gather's wait, without waits for reductions. The last gather
    of a phase gets no seconds. If several buckets of a phase begin with one path, the path gets the shortest time.

    ``expected`` has a (first path of the bucket, True for a gather, True in backward) tuple for each wait.
    """
    ran = [f"the {'gather' if wait.gather else 'reduction'} of {wait.path}" for wait in waits]
    planned = [f"the {'gather' if gather else 'reduction'} of {path}" for path, gather, _ in expected]
    for number, (actual, wanted) in enumerate(zip_longest(ran, planned)):
        if actual != wanted:
            should = "should not run" if wanted is None else f"should end {wanted}"
            event = "it did not run" if actual is None else f"it ended {actual}"
            raise RuntimeError(
                f"step() did not run one forward and one backward of the model: wait {number} {should}, but {event}; "
                f"give a step that runs each once"
            )
    gathers = [(index, backward) for index, (_, gather, backward) in enumerate(expected) if gather]
    seconds: tuple[Seconds, Seconds] = {}, {}
    for (wait, phase), (following, next_phase) in pairwise(gathers):
        if phase is next_phase:
            spans = (before.returned.until(after.called) for before, after in pairwise(waits[wait : following + 1]))
            path = waits[wait].path
            seconds[phase][path] = min(sum(spans), seconds[phase].get(path, inf))
    return seconds
