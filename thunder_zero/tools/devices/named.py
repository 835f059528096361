"""Finds the device that an argument names, by a key of ``DEVICES`` or by a JSON file.

::

    "h100"                                          -> DEVICES["h100"]
    "laptop.json"  {"format": ..., "products": {"matmul": {"float32": [[131072, 2.5e-6], ...]}}, ...}  -> Calibrated
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from thunder_zero.tools.devices.calibrated import Calibrated, CollectiveCurves, Curve
from thunder_zero.tools.devices.device import DEVICES, Device, Link

CHOICES = f"one of {', '.join(DEVICES)}, the path of a file that calibrate wrote, or a thunder_zero.tools.Device"


def device_of(device: Device | str | PathLike[str]) -> Device:
    """Return the device that an argument names.

    The argument is a device, a key of ``tz.tools.DEVICES`` such as ``"h100"`` or ``"H100"``, or the path of a JSON
    file. :func:`thunder_zero.tools.save_device` and ``thunder-zero calibrate`` write such files.

    Raises:
        ValueError: the key or the path is unknown.
        TypeError: the argument has another type.
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


FORMAT = "thunder_zero device 1"


def load_device(path: str | Path) -> Calibrated:
    """Read a device from a file that ``save_device`` or ``thunder-zero calibrate`` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has no device, or is damaged.
    """
    text = Path(path).read_text(errors="replace")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); give a file of thunder-zero calibrate") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        other = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"{path} is no file of this version's thunder-zero calibrate (format {other!r}, not {FORMAT!r}); calibrate "
            f"this machine again"
        )
    try:
        return _from_data(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fault = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged: {fault}; calibrate this machine again") from None


def save_device(device: Calibrated, path: str | Path) -> None:
    """Write a device to a file.

    Raises:
        OSError: the file cannot be written.
    """
    data = to_data(device)
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def to_data(device: Calibrated) -> dict[str, Any]:
    """Convert a device to JSON data. Curves become lists of points."""
    return {"format": FORMAT, **_plain({field.name: getattr(device, field.name) for field in fields(device)})}


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return value.points
    if isinstance(value, CollectiveCurves | Link):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _from_data(data: Mapping[str, Any]) -> Calibrated:
    """Convert JSON data to a device. Damaged data raises KeyError, TypeError, ValueError or AttributeError."""
    products = {
        work: {dtype: _curve(points) for dtype, points in by_dtype.items()}
        for work, by_dtype in data["products"].items()
    }
    traffic = {work: _curve(points) for work, points in data["traffic"].items()}
    for work, curves in (("matmul", products), ("pointwise", traffic)):
        if not curves.get(work):
            raise ValueError(f"it has no curve of {work} work")
    return Calibrated(
        name=str(data["name"]),
        flops_per_second=data["flops_per_second"],
        memory_bytes_per_second=data["memory_bytes_per_second"],
        memory_bytes=data["memory_bytes"],
        intra_node=Link(**data["intra_node"]),
        devices_per_node=data["ranks"],
        products=products,
        traffic=traffic,
        collectives={kind: _collective(times) for kind, times in data["collectives"].items()},
        ranks=data["ranks"],
        about={str(name): str(value) for name, value in data["about"].items()},
    )


def _collective(data: Mapping[str, Any]) -> CollectiveCurves:
    curves = {name: _curve(data[name]) for name in ("launch", "wire", "finish", "taken")}
    return CollectiveCurves(**curves, tensor_seconds=float(data["tensor_seconds"]))


def _curve(points: Any) -> Curve:
    return Curve(tuple((float(size), float(seconds)) for size, seconds in points))
