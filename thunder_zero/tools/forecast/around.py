"""Adds the operations of the loss and of the optimizer to a timeline::

    digests (ZeRO-1) | forward | loss and its gradient | backward | optimizer step

Each torch operator that runs between the phases becomes an operation, with the bytes read and written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_zero.schedule.timeline import Timeline
from thunder_zero.sharded.digests import digests_of
from thunder_zero.tools.forecast.figures import Memory
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.for_loss import Loss, for_loss
from thunder_zero.tools.forecast.lines import empty_like
from thunder_zero.tools.forecast.memory import backend_of, memory_of
from thunder_zero.tools.forecast.operators import Operators
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.watch import Layout
from thunder_zero.traces.compiled import Traces


def memory_and_timeline(
    traces: Traces, *, loss: Loss | None = None, optimizer: MakeOptimizer | None = None
) -> tuple[Memory, Timeline]:
    """Return the results of :func:`thunder_zero.tools.memory` and :func:`whole_step`, from one recorder."""
    recorder = Recorder(traces, backend_of(traces), loss, optimizer)
    return memory_of(Fold(recorder, traces.timeline).run()), _with_operators(recorder)


def whole_step(traces: Traces, loss: Loss | None, optimizer: MakeOptimizer | None) -> Timeline:
    """Return the timeline of a step, including the loss and the optimizer's step."""
    if traces.backward is None or (loss is None and optimizer is None):
        return traces.timeline
    traces = for_loss(traces, loss) if loss else traces
    recorder = Recorder(traces, backend_of(traces), loss, optimizer)
    recorder.loss(_outputs_of(traces))
    if recorder.rehearsal.optimizer is not None and traces.facts.synced:
        recorder.optimizer_step()
    return _with_operators(recorder)


def loss_traffic(traces: Traces, loss: Loss) -> int:
    """Return the bytes that the operators of the loss and its gradient read and write in eager torch."""
    recorder = Recorder(traces, "gloo", loss)
    recorder.loss(_outputs_of(traces))
    return sum(value.nbytes for value in recorder.in_loss.values.values())


def _with_operators(recorder: Recorder) -> Timeline:
    """Return the timeline of a step, including the operators around its phases, if it has a loss or an optimizer."""
    timeline, in_loss, in_step = recorder.traces.timeline, recorder.in_loss, recorder.in_step
    if recorder.traces.backward is None or not (recorder.of_loss or recorder.steps):
        return timeline
    # ZeRO-1 begins with digests of this rank's rows, which show the ranks which parameters to refresh.
    digests, rows = Operators("digests"), [param.rows for param in recorder.rehearsal.resident]
    if rows and recorder.plan.mesh.shard.size > 1:
        with digests:
            torch.cat(digests_of(rows))
    ops, border = timeline.ops, timeline.backward_start
    all_ops = (*digests.ops, *ops[:border], *in_loss.ops, *ops[border:-1], *in_step.ops, ops[-1])
    return timeline.with_ops(all_ops, digests.values | in_loss.values | in_step.values)


def _outputs_of(traces: Traces) -> dict[str, Any]:
    """Return contiguous layouts of forward's outputs, keyed by name."""
    proxies = traces.forward.bound_symbols[-1].flat_proxy_args
    values = {proxy.name: empty_like(proxy) for proxy in proxies}
    return {name: Layout.of(value) if isinstance(value, Tensor) else value for name, value in values.items()}
