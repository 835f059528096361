"""``tz.tools.estimate``: forecasts the time of a step from its traces, on a device."""

from __future__ import annotations

from thunder_zero.compiled import Traces
from thunder_zero.tools.cost.step_time import Estimate, counts_fused, step_time
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.devices.named import device_of
from thunder_zero.tools.forecast.around import whole_step
from thunder_zero.tools.forecast.optimizer import MakeOptimizer
from thunder_zero.tools.forecast.replay import Loss


def estimate(
    traces: Traces,
    device: Device | str,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    fused: bool | None = None,
) -> Estimate:
    """The time of a step's forward and backward, before anything runs.

    Each line takes as long as its FLOPs at the device's peak or its traffic with memory, whichever is longer; a ring
    collective takes its latency at each step and its bytes at the link's speed. So it is a lower bound of what
    kernels and networks reach, without the host's own time. On a calibrated device each takes what was measured.

    Args:
        traces: of :func:`thunder_zero.trace` or :func:`thunder_zero.traces_of`.
        device: a :class:`~thunder_zero.tools.Device`; the name of one in ``tz.tools.DEVICES``, such as ``"h100"``; or
            the path of a file (``.json``) that ``thunder-zero calibrate`` wrote.
        loss: from what forward returns to the loss, where the model does not compute it; without it the loss and its
            gradient are left out.
        optimizer: a class of optimizers, or a function from parameters to an optimizer; without it its step is left
            out. Both are counted operator by operator, as :func:`thunder_zero.tools.memory` does.
        fused: whether pointwise lines that are one by one in the traces are fused on the device, as nvFuser or
            torch.compile does it. None, as in a plan: on a calibrated device if the model's executors fuse, otherwise
            yes.

    Returns:
        Seconds of the step, of its compute and of exposed communication, the critical path, MFU, and when each
        operation runs.

    Raises:
        TypeError: not traces, or not a device; a loss or an optimizer that :func:`thunder_zero.tools.memory` refuses.
        ValueError: the device has no FLOP/s for a dtype that the step computes in, or no link to other nodes where
            ranks of several nodes communicate; it was calibrated with another number of ranks.
        RuntimeError: the loss or the optimizer reads a value.
    """
    if not isinstance(traces, Traces):
        raise TypeError(f"estimate takes Traces, got {type(traces).__name__}; pass what trace or traces_of returns")
    around = traces.backward is not None and (loss is not None or optimizer is not None)
    timeline = whole_step(traces, loss, optimizer) if around else traces.timeline
    on = device_of(device)
    return step_time(timeline, on, fused=counts_fused(traces, on, fused), model=traces.lifted)
