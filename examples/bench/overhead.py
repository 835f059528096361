"""What the transform costs on one rank: time to compile, and host time of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

from torch import nn

import thunder_zero as tz  # before thunder
from examples.bench.contestants import trains
from examples.bench.model import Size, make_batch, make_model
from thunder_zero.trace.schedule import Mend, Schedule
from thunder_zero.trace.transform import ZeroTransform

import thunder

COMPILES = 3
HOST_STEPS = 100
OURS: tuple[tuple[type, str], ...] = (  # everything of ours that Thunder calls while it compiles
    (ZeroTransform, "transform_module"),
    (ZeroTransform, "transform_traces_pre_prologue"),
    (ZeroTransform, "transform_trace_post_optimization"),
    (Schedule, "fusion_pass"),
    (Mend, "fusion_pass"),
)
VARIANTS: dict[str, Callable[[], list[Any]]] = {"plain": list, "zero3": lambda: [tz.ZeroTransform(stage=3)]}


@contextmanager
def clocked(spent: dict[str, float]) -> Iterator[None]:
    """Add up, in ``spent``, the seconds that each function of OURS takes."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for owner, name in OURS:
            stack.enter_context(patch.object(owner, name, timed(f"{owner.__name__}.{name}", getattr(owner, name))))
        yield


def compile_times(size: Size) -> dict[str, Any]:
    """Seconds from ``thunder.jit`` to the end of the first step, in turn without and with ZeRO-3; and our share."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    ours: list[dict[str, float]] = []
    for _ in range(COMPILES):
        for name, transforms in VARIANTS.items():
            module = make_model(size)
            spent: dict[str, float] = {}
            with clocked(spent):
                start = time.perf_counter()
                take_step(thunder.jit(module, transforms=transforms()), size)
                seconds[name].append(time.perf_counter() - start)
            if spent:
                ours.append(spent)
    return {"seconds": seconds, "ours": ours}


def take_step(model: nn.Module, size: Size) -> None:
    trains(model)[1](*make_batch(size, 0))


def host_times(size: Size) -> dict[str, Any]:
    """Seconds of a step, in turn without and with ZeRO-3, of the model and of one so narrow that the host is all."""
    narrow = replace(size, width=size.heads, vocabulary=16, tokens=2, sequences=1)
    return {name: step_times(of, steps) for name, of, steps in (("full", size, 20), ("narrow", narrow, HOST_STEPS))}


def step_times(size: Size, count: int) -> dict[str, list[float]]:
    steps = {name: trains(thunder.jit(make_model(size), transforms=make()))[1] for name, make in VARIANTS.items()}
    batch = make_batch(size, 0)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(count + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*batch)
            if number >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(seconds: dict[str, list[float]]) -> float:
    """How much longer it takes with the transform than without, as a fraction.

    >>> median_ratio({"plain": [1.0, 2.0, 3.0], "zero3": [2.0, 2.2, 9.0]})
    0.1
    """
    plain, zero = (median(seconds[name]) for name in VARIANTS)
    return round(zero / plain - 1, 4)


def summary(overhead: dict[str, Any]) -> list[str]:
    """Two sentences with the numbers of ``compile_times`` and ``host_times``."""
    seconds = overhead["compile"]["seconds"]
    ours = median(sum(spent.values()) for spent in overhead["compile"]["ours"])
    plain, zero = median(seconds["plain"]), median(seconds["zero3"])
    sentences = [
        f"First step with compilation: {plain:.2f} s without the transform, {zero:.2f} s with ZeRO-3 "
        f"({median_ratio(seconds):+.1%}); inside our functions {ours:.2f} s ({ours / plain:.1%} of Thunder's)."
    ]
    for name, steps in overhead["host"].items():
        plain, zero = median(steps["plain"]), median(steps["zero3"])
        sentences.append(
            f"A step at W = 1, {name} model: {plain * 1e3:.2f} ms without the transform, {zero * 1e3:.2f} ms "
            f"with ZeRO-3 ({median_ratio(steps):+.1%})."
        )
    return sentences
