"""Names launches, waits and units by paths of parameters, for profiles and forecasts."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_zero.schedule.timeline import Kind


def launch_label(kind: Kind, paths: Sequence[str]) -> str:
    """``gather blocks.3.norm.weight, 5 more``, or ``reduce ...``."""
    more = f", {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{kind} {paths[0]}{more}"


def wait_label(kind: Kind, paths: Sequence[str]) -> str:
    """``wait for gather blocks.3.norm.weight, 5 more``; ``kind`` is that of the launch."""
    return f"wait for {launch_label(kind, paths)}"


def unit_label(unit: str) -> str:
    """``unit blocks.3``."""
    return f"unit {unit}" if unit else "root unit"
