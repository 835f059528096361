"""Seconds in few characters."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``"1.23 ms"``; at most 8 characters up to a thousand seconds."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return "0 s" if seconds < 5e-10 else f"{seconds * 1e9:.3g} ns"
