"""Finds the device that an argument names: one of ``DEVICES``, or a file."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path

from thunder_zero.tools.devices.device import DEVICES, Device
from thunder_zero.tools.devices.device_file import load_device

CHOICES = f"one of {', '.join(DEVICES)}, the path of a file that calibrate wrote, or a thunder_zero.tools.Device"


def device_of(device: Device | str | PathLike[str]) -> Device:
    """The device.

    Args:
        device: a :class:`~thunder_zero.tools.Device`; a key of ``tz.tools.DEVICES``, such as ``"h100"`` or ``"H100"``;
            or the path of a file that :func:`thunder_zero.tools.save_device` or ``thunder-zero calibrate`` wrote.

    Raises:
        ValueError: there is no device and no file of that name; the file is damaged.
        OSError: the file cannot be read.
        TypeError: it is neither a device nor a string.
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str | PathLike):
        raise TypeError(f"device is of type {type(device).__name__}; give {CHOICES}")
    name = fspath(device)
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if not Path(name).is_file():
        raise ValueError(f"there is no device {name!r}; give {CHOICES}")
    return load_device(name)
