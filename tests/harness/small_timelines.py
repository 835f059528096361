"""Builds small timelines, and the lines of text that a test compares."""

from __future__ import annotations

from collections import Counter

from tests.harness.timelines import (
    Use,
    lifted,
    make_param,
)
from thunder_zero.plan import Plan
from thunder_zero.policy import Policy
from thunder_zero.schedule.timeline import Kind, Op, Timeline

ALONE = Policy(stage=3, bucket_bytes=0, in_flight_bytes=0, gather_last_units_once=False)


def model(policy: Policy, *uses: Use | str, training: bool = True, **fields: dict[str, object]) -> Timeline:
    """A timeline of 4-byte parameters named ``unit.name``; ``fields`` has the special ones, by ``unit_name``."""
    all_uses = [use if isinstance(use, Use) else Use(use) for use in uses]
    paths = dict.fromkeys(path for use in all_uses for path in (use.path, *use.steps) if "." in path)
    params = []
    for path in paths:
        special: dict[str, object] = {"shape": (1,), **fields.get(path.replace(".", "_"), {})}
        params.append(make_param(path, unit=path.split(".")[0], policy=policy, **special))  # type: ignore[arg-type]
    return lifted(Plan(policy, 2, 0, tuple(params)), all_uses, training=training)


def lines(timeline: Timeline, *kinds: Kind, backward: bool | None = None) -> list[str]:
    """One line for each operation: its kind and parameters, or the values that it writes and reads."""

    def line(op: Op) -> str:
        computed = f"{' '.join(op.writes) or 'return'} <- {' '.join(op.reads)}"
        return f"{op.kind} {' '.join(op.params)}" if op.params else computed

    wanted = kinds or tuple(Kind)
    return [line(op) for op in timeline.ops if op.kind in wanted and backward in (None, op.backward)]


def gathered(timeline: Timeline, *, backward: bool) -> Counter[str]:
    gathers = (op for op in timeline.ops if op.kind is Kind.GATHER and op.backward == backward)
    return Counter(path for op in gathers for path in op.params)
