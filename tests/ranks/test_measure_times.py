"""``measure_times`` and ``calibrate`` give all ranks equal times: of each bucket that runs, of each curve.

No test reads a clock or compares times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thunder_zero as tz
from tests.harness.as_one_process import gather_objects
from tests.harness.commands import output_of, refusal_of
from tests.harness.errors import error_of, fails
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.schedule.ops import Gather
from thunder_zero.sharded.waits import Clock, Moment, Waited
from thunder_zero.tools import measure_times
from thunder_zero.tools.measure import computed

# Each parameter is a bucket, and none is kept unsharded, which makes more gathers.
POLICY = replace(tz.ZERO3, bucket_bytes=0, reshard_after_forward=True)
X = torch.ones(3, 7)


def make_step(model: Any, losses: list[Tensor] | None = None) -> Callable[[], None]:
    """Return a function that takes a step on a new batch, and appends its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(3, 7, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        if losses is not None:
            losses.append(loss.detach())

    return step


def check_times(times: tz.schedule.Times, model: Any) -> None:
    """Check that ranks have equal times, rounded to three digits, of each bucket that runs."""
    of_ranks = gather_objects(repr(times))
    assert set(of_ranks) == {repr(times)}, of_ranks
    traces = tz.traces_of(model)
    gathers = [op for op in traces.timeline.ops if isinstance(op, Gather)]
    for seconds, is_backward in ((times.forward, False), (times.backward, True)):
        paths = [op.params[0] for op in gathers if op.backward is is_backward]
        assert list(seconds) == sorted(paths[:-1]), "the last bucket of a phase needs no time"
        assert all(value > 0 for value in seconds.values()), seconds
    stage = traces.plan.policy.stage
    assert bool(gathers) == (stage > 0)
    assert all(value == float(f"{value:.3g}") for value in (*times.forward.values(), times.bytes_per_second)), times
    travels = dist.get_world_size() > 1 and stage > 0
    assert isfinite(times.bytes_per_second) if travels else times.bytes_per_second == inf, times


def measure(rank: int, world_size: int, policy: tz.Policy) -> None:
    model = sharded(fresh(Mlp), policy)
    step = make_step(model)
    step()
    check_times(measure_times(model, step, steps=2), model)


@pytest.mark.parametrize(
    ("world_size", "policy"),
    [(1, POLICY), *slow((3, tz.DDP)), *deep((2, tz.ZERO2), (3, tz.ZERO3))],
)
def test_all_ranks_get_the_same_times_of_the_buckets_that_run(
    ranks_pool: RanksPool, world_size: int, policy: tz.Policy
) -> None:
    ranks_pool.run(world_size, measure, policy)


def train_with_times(rank: int, world_size: int) -> None:
    """Train while measured, then with the measured times, then with times that start all gathers at once."""
    times, results = None, []
    for mode in ("measured", "times", "slow"):
        policy = replace(POLICY, times=tz.schedule.Times({}, {}, 1.0) if mode == "slow" else times)
        losses: list[Tensor] = []
        model = sharded(fresh(Mlp), policy)
        step = make_step(model, losses)
        step()
        if mode == "measured":
            times = measure_times(model, step, steps=3)
            check_times(times, model)
        else:
            for _ in range(3):
                step()
        assert tz.traces_of(model).plan.policy == policy
        assert len(losses) == 4
        results.append((losses, dict(tz.full_state_dict(model))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_a_model_trains_with_times_as_without(ranks_pool: RanksPool) -> None:
    """Compare bit for bit. Measuring trains, too."""
    ranks_pool.run(2, train_with_times)


def call_wrongly(rank: int, world_size: int) -> None:
    """Check refusals on every rank, also of rank 1's mistakes, and that models can be measured afterwards."""
    model: Any = sharded(fresh(Mlp), POLICY)
    zero1: Any = sharded(fresh(Mlp), tz.ZERO1)  # backward gathers nothing; nor does forward if rows are fresh
    step, step_of_zero1 = make_step(model), make_step(zero1)
    not_called = "RuntimeError", "was not called yet", "run a step before measure_times"
    fails(lambda: measure_times(model, step), *not_called)
    step()
    step_of_zero1()
    check_times(measure_times(zero1, step_of_zero1), zero1)
    zero1(X)

    def twice() -> None:
        step()
        step()

    calls: list[tuple[Any, Any, Any, tuple[str, ...]]] = [
        (Mlp(), step, 1, ("TypeError", "expected a sharded model", "got Mlp")),
        (model, None, 1, ("TypeError", "step is None", "give a function")),
        (model, step, 0, ("ValueError", "steps is 0", "1 or more")),
        (model, step, 1.5, ("ValueError", "steps is 1.5", "1 or more")),
        (model, twice, 1, ("RuntimeError", "should not run, but it ended the gather of layers.0.weight", "each once")),
        (model, lambda: model(X), 1, ("RuntimeError", "should end the gather of layers.2.weight, but it did not run")),
        (model, lambda: None, 1, ("RuntimeError", "wait 0 should end the gather of layers.0.weight", "did not run")),
        (model, lambda: int("x"), 1, ("ValueError", "invalid literal")),
        (zero1, lambda: zero1(X), 1, ("RuntimeError", "should end the reduction of", "but it did not run")),
        # Rank 1 runs nothing, rank 0 a forward that needs no other rank; rank 1 asks for 0 steps.
        (zero1, (lambda: None) if rank else (lambda: zero1(X)), 1, ("step() did not run one forward", "did not run")),
        (zero1, lambda: zero1(X), 1 - rank, ("Error", "steps is 0") if rank else ("rank 1 refused its arguments",)),
    ]
    for owner, run, steps, words in calls:
        fails(lambda: measure_times(owner, run, steps=steps), *words)  # noqa: B023
    assert error_of(lambda: measure_times(model, step)) == "nothing"


def test_every_rank_refuses_a_wrong_call(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, call_wrongly)


# Compute between waits


def moment(seconds: float) -> Moment:
    return Moment(seconds, None)


def make_waits(*spans: tuple[str, float, float]) -> list[Waited]:
    """Return waits of paths, calls and returns; a path in brackets ends a reduction."""
    return [Waited(path.strip("()"), "(" not in path, moment(start), moment(end)) for path, start, end in spans]


def make_expected(forward: str, backward: str) -> list[tuple[str, bool, bool]]:
    """Return the expected waits of a step, in the notation of ``make_waits``."""
    phases = enumerate((forward, backward))
    return [(path.strip("()"), "(" not in path, bool(phase)) for phase, paths in phases for path in paths.split()]


def test_compute_is_what_lies_between_waits() -> None:
    """Expect the shortest time of several buckets that begin with one path."""
    waits_of_step = make_waits(
        ("a", 1, 3), ("b", 4, 4.5), ("c", 8, 9), ("c", 20, 21), ("(c)", 23, 30), ("(b)", 31, 40), ("b", 44, 45)
    )
    assert computed(waits_of_step, make_expected("a b c", "c (c) (b) b")) == ({"a": 1, "b": 3.5}, {"c": 2 + 1 + 4})
    waits_of_step = make_waits(("a", 0, 1), ("b", 3, 4), ("a", 5, 6), ("c", 11, 12))
    assert computed(waits_of_step, make_expected("a b a c", "")) == ({"a": 2, "b": 1}, {})


class Ready:
    def wait(self) -> tuple[Tensor, ...]:
        return (torch.ones(1),)


def test_a_clock_notes_what_is_launched_while_it_runs() -> None:
    clock, ready = Clock(torch.device("cpu")), Ready()
    assert clock.watch(ready, "a", gather=True) is ready
    with clock.running() as waited:
        handle = clock.watch(ready, "b", gather=False)
        assert handle.wait() == (torch.ones(1),)
    assert clock.watch(ready, "c", gather=True) is ready
    ((path, gather, called, returned),) = [(wait.path, wait.gather, wait.called, wait.returned) for wait in waited]
    assert (path, gather) == ("b", False)
    assert called.until(returned) >= 0


# Calibration

TINY = 0.01  # seconds, so that each curve takes the least number of rounds


def assert_measured(device: tz.tools.Device) -> None:
    curves = [curve for name, curve in device.curves.items() if not name.endswith(("taken", "tensor"))]
    assert curves
    assert all(seconds > 0 for curve in curves for _, seconds in curve)


def calibrate(rank: int, world_size: int) -> tz.tools.Device:
    """Return the measured device; check that all ranks refuse what rank 1 refuses."""
    error = error_of(lambda: tz.tools.calibrate(-1.0 if rank else 1.0))
    assert "seconds is -1.0; give how long to measure, a number above 0" in error, error
    assert rank == 1 or "rank 1 refused to calibrate, so every rank stops: " in error, error
    return tz.tools.calibrate(TINY, dtypes=[torch.float32])


@pytest.mark.slow
def test_ranks_calibrate_together(ranks_pool: RanksPool, tmp_path: Path) -> None:
    first, second = ranks_pool.run(2, calibrate)
    assert first == second
    tz.tools.save_device(first, tmp_path / "device.json")
    device = tz.tools.load_device(tmp_path / "device.json")
    assert device == first
    assert_measured(device)
    kinds = {name.removesuffix(" wire") for name in device.curves if name.endswith("wire")}
    assert (device.devices_per_node, kinds) == (2, {"gather", "scatter", "all_reduce"})
    model = torch.nn.Linear(4, 4).to("meta")
    traces = tz.trace(model, torch.empty(3, 4, device="meta"), policy=3, world_size=2)
    assert tz.tools.estimate(traces, device).seconds > 0


@pytest.mark.slow
def test_the_command_writes_a_file(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    path, none = tmp_path / "device.json", tmp_path / "none"
    printed = output_of("calibrate", path, "--seconds", TINY)
    device = tz.tools.load_device(path)
    assert f"{path}: {device.name}, one process, each float32 " in printed
    assert device.devices_per_node == 1
    assert not any("gather" in name for name in device.curves)
    assert_measured(device)
    assert f"there is no folder {none}" in refusal_of("calibrate", none / "device.json")
    assert "seconds is 0.0; give how long to measure" in refusal_of("calibrate", path, "--seconds", 0)
