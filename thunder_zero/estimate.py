"""``tz.estimate``: forecasts the time of a step from its traces and the description of a device."""

from __future__ import annotations

from thunder_zero.compiled import Traces
from thunder_zero.cost.device import Device
from thunder_zero.cost.step_time import Estimate, step_time


def estimate(traces: Traces, device: Device) -> Estimate:
    """The time of a step's forward and backward, before anything runs.

    Each line takes as long as its FLOPs at the device's peak or its traffic with memory, whichever is longer; a ring
    collective takes its latency at each step and its bytes at the link's speed. So it is a lower bound of what
    kernels and networks reach. The loss, the optimizer and the host's own time are not in it.

    Args:
        traces: of :func:`thunder_zero.trace` or :func:`thunder_zero.traces_of`.
        device: a :class:`~thunder_zero.Device`, such as ``tz.DEVICES["h100"]``.

    Returns:
        Seconds of the step, of its compute and of exposed communication, the critical path, MFU, and when each
        operation runs.

    Raises:
        TypeError: not traces, or not a device.
        ValueError: the device has no FLOP/s for a dtype that the step computes in, or no link to other nodes where
            ranks of several nodes communicate.
    """
    if not isinstance(traces, Traces):
        raise TypeError(f"estimate takes Traces, got {type(traces).__name__}; pass what trace or traces_of returns")
    if not isinstance(device, Device):
        raise TypeError(f"estimate takes a Device, got {type(device).__name__}; pass one, such as DEVICES['h100']")
    return step_time(traces.timeline, device, traces.lifted)
