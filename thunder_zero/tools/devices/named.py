"""Finds the device that an argument names: one of ``DEVICES``, or a file."""

from __future__ import annotations

from thunder_zero.tools.devices.device import DEVICES, Device
from thunder_zero.tools.devices.device_file import load_device


def device_of(device: Device | str) -> Device:
    """The device.

    Args:
        device: a :class:`~thunder_zero.tools.Device`; a key of ``tz.tools.DEVICES``, such as ``"h100"``; or the path of
            a file that :func:`thunder_zero.tools.save_device` or ``thunder-zero calibrate`` wrote, ending in ``.json``.

    Raises:
        ValueError: there is no device of that name; the file is damaged.
        OSError: the file cannot be read.
        TypeError: it is neither a device nor a string.
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device is of type {type(device).__name__}; give {KNOWN}")
    if device.endswith(".json"):
        return load_device(device)
    if device not in DEVICES:
        raise ValueError(f"there is no device {device!r}; give {KNOWN}")
    return DEVICES[device]


KNOWN = f"one of {', '.join(DEVICES)}, the path of a calibrated one (.json), or a thunder_zero.tools.Device"
