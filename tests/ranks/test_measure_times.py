"""``measure_times``: all ranks get the same times, one for each bucket that runs, and training uses them. No test
reads a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.runtime.clock import Clock, Moment, Waited, computed
from thunder_zero.schedule.timeline import Kind

# Each parameter is a bucket, and none is gathered once: more gathers, and other orders.
POLICY = replace(tz.ZERO3, bucket_bytes=0, gather_last_units_once=False)


def trainer(model: Any, rank: int, losses: list[Tensor] | None = None) -> Callable[[], None]:
    """One step of training, each time on another batch."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(3, 7, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        if losses is not None:
            losses.append(loss.detach())

    return step


def gathers(traces: tz.Traces) -> tuple[list[str], list[str]]:
    """First path of each bucket that forward gathers, and of each that backward gathers."""
    ops = [op for op in traces.timeline.ops if op.kind is Kind.GATHER]
    return [op.params[0] for op in ops if not op.backward], [op.params[0] for op in ops if op.backward]


def measured(rank: int, world_size: int, policies: tuple[tz.Policy, ...]) -> list[Any]:
    """For each policy: the times, and the first paths of the buckets that are gathered."""
    results = []
    for policy in policies:
        model = sharded(fresh(Mlp), policy)
        step = trainer(model, rank)
        step()
        results.append((tz.measure_times(model, step, steps=2), gathers(tz.traces_of(model))))
    return results


@pytest.mark.parametrize("world_size", of_tier([1, 3], [1, 2, 3]))
def test_all_ranks_get_the_same_times_of_the_buckets_that_run(ranks_pool: RanksPool, world_size: int) -> None:
    policies = of_tier((POLICY, tz.ZERO1, tz.DDP), (POLICY, tz.ZERO3, tz.ZERO2, tz.ZERO1, tz.DDP))
    ranks = ranks_pool.run(world_size, measured, policies)
    assert all(repr(results) == repr(ranks[0]) for results in ranks)
    for policy, (times, (forward, backward)) in zip(policies, ranks[0], strict=True):
        assert list(times.forward) == sorted(forward[:-1]), "the last one of a half needs none"
        assert list(times.backward) == sorted(backward[:-1])
        assert (forward, backward) != ([], []) or policy.stage == 0
        assert all(seconds > 0 for seconds in (*times.forward.values(), *times.backward.values()))
        assert all(value == float(f"{value:.3g}") for value in (*times.forward.values(), times.bytes_per_second))
        travels = world_size > 1 and policy.stage > 0
        assert isfinite(times.bytes_per_second) if travels else times.bytes_per_second == inf


def trained(rank: int, world_size: int) -> list[Any]:
    """Losses and weights: with prefetch; while measured; with the times; with times that start all gathers at once."""
    results = []
    times = None
    for how in ("prefetch", "measured", "times", "slow"):
        policy = replace(POLICY, times=tz.Times({}, {}, 1.0) if how == "slow" else times)
        losses: list[Tensor] = []
        model = sharded(fresh(Mlp), policy)
        step = trainer(model, rank, losses)
        step()
        if how == "measured":
            times = tz.measure_times(model, step, steps=3)
        else:
            for _ in range(3):
                step()
        assert tz.traces_of(model).plan.policy == policy
        results.append((losses, tz.full_state_dict(model)))
    return results


def test_a_model_trains_with_times_as_without(ranks_pool: RanksPool) -> None:
    """To the bit: the same collectives at other moments. Measuring trains too."""
    for results in ranks_pool.run(2, trained):
        losses, weights = results[0]
        assert len(losses) == 4
        for other_losses, other_weights in results[1:]:
            assert torch.equal(torch.stack(other_losses), torch.stack(losses))
            assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())


def bad_calls(rank: int, world_size: int) -> dict[str, str]:
    """The error of each misuse; after all of them, the model trains and can be measured."""
    model: Any = sharded(fresh(Mlp), POLICY)
    step = trainer(model, rank)
    kept: Any = sharded(fresh(Mlp), tz.ZERO2)  # backward gathers nothing
    trainer(kept, rank)()
    told = {"not called": raised(lambda: tz.measure_times(model, step))}
    step()

    def twice() -> None:
        step()
        step()

    def forward_only() -> None:
        model(torch.ones(3, 7))

    told |= {
        "no model": raised(lambda: tz.measure_times(Mlp(), step)),
        "no function": raised(lambda: tz.measure_times(model, None)),  # type: ignore[arg-type]
        "no steps": raised(lambda: tz.measure_times(model, step, steps=0)),
        "part of a step": raised(lambda: tz.measure_times(model, step, steps=1.5)),  # type: ignore[arg-type]
        "twice": raised(lambda: tz.measure_times(model, twice)),
        "forward only": raised(lambda: tz.measure_times(model, forward_only)),
        "nothing": raised(lambda: tz.measure_times(model, lambda: None)),
        "all kept": raised(lambda: tz.measure_times(kept, lambda: kept(torch.ones(3, 7)))),
        "failed": raised(lambda: tz.measure_times(model, lambda: int("x"))),
    }
    told["after all"] = raised(lambda: tz.measure_times(model, step))
    return told


def words_of_bad_calls() -> dict[str, list[str]]:
    return {
        "not called": ["RuntimeError", "was not called yet", "run a step before measure_times"],
        "no model": ["TypeError", "jitted with ZeroTransform", "got Mlp"],
        "no function": ["TypeError", "step is None", "give a function"],
        "no steps": ["ValueError", "steps is 0", "1 or more"],
        "part of a step": ["ValueError", "steps is 1.5", "1 or more"],
        "twice": ["RuntimeError", "should not run, but it ended the gather of layers.0.weight", "runs each once"],
        "forward only": [
            "RuntimeError",
            "should end the gather of layers.2.weight, but it did not run",
            "runs each once",
        ],
        "nothing": ["RuntimeError", "wait 0 should end the gather of layers.0.weight, but it did not run"],
        "failed": ["ValueError", "invalid literal"],
        "all kept": ["RuntimeError", "should end the reduction of", "but it did not run"],
        "after all": ["nothing"],
    }


@pytest.fixture(scope="module")
def told(ranks_pool: RanksPool) -> dict[str, str]:
    first, second = ranks_pool.run(2, bad_calls)
    assert first == second
    assert first.keys() == words_of_bad_calls().keys()
    return dict(first)


@pytest.mark.parametrize("case", words_of_bad_calls())
def test_every_rank_refuses_a_wrong_call(told: dict[str, str], case: str) -> None:
    assert [word for word in words_of_bad_calls()[case] if word not in told[case]] == [], told[case]


def differing(rank: int, world_size: int) -> list[str]:
    """Rank 1 runs nothing as its step, rank 0 a forward of ZeRO-1 whose rows are fresh, which needs no other rank; then
    rank 1 asks for 0 steps."""
    model: Any = sharded(fresh(Mlp), tz.ZERO1)
    x = torch.ones(3, 7)
    trainer(model, rank)()
    model(x)
    return [
        raised(lambda: tz.measure_times(model, (lambda: None) if rank else (lambda: model(x)))),
        raised(lambda: tz.measure_times(model, lambda: model(x), steps=0 if rank else 1)),
    ]


def test_every_rank_refuses_if_one_cannot_measure(ranks_pool: RanksPool) -> None:
    of_ranks = ranks_pool.run(2, differing)
    for told in of_ranks:
        assert [sentence for sentence in told if not sentence.startswith(("RuntimeError", "ValueError"))] == []
        assert "step() did not run one forward" in told[0]
        assert "but it did not run" in told[0]
        assert "steps is 0" in told[1]
    assert "rank 1 refused its arguments" in of_ranks[0][1]


# Compute between waits


def moment(seconds: float) -> Moment:
    return Moment(seconds, None)


def waits(*spans: tuple[str, float, float]) -> list[Waited]:
    """Waits by path, called and returned; a path in brackets ends a reduction."""
    return [Waited(path.strip("()"), "(" not in path, moment(start), moment(end)) for path, start, end in spans]


def expected(forward: str, backward: str) -> list[tuple[str, bool, bool]]:
    """The waits of a step, as ``waits`` names them."""
    halves = enumerate((forward, backward))
    return [(path.strip("()"), "(" not in path, bool(half)) for half, paths in halves for path in paths.split()]


def test_seconds_between_waits_and_not_in_them() -> None:
    seen = waits(
        ("a", 1, 3), ("b", 4, 4.5), ("c", 8, 9), ("c", 20, 21), ("(c)", 23, 30), ("(b)", 31, 40), ("b", 44, 45)
    )
    assert computed(seen, expected("a b c", "c (c) (b) b")) == ({"a": 1, "b": 3.5}, {"c": 2 + 1 + 4})


def test_of_several_buckets_that_begin_alike_the_shortest_counts() -> None:
    seen = waits(("a", 0, 1), ("b", 3, 4), ("a", 5, 6), ("c", 11, 12))
    assert computed(seen, expected("a b a c", "")) == ({"a": 2, "b": 1}, {})


class Ready:
    def wait(self) -> tuple[Tensor, ...]:
        return (torch.ones(1),)


def test_a_clock_notes_what_is_launched_while_it_runs() -> None:
    clock, ready = Clock(torch.device("cpu")), Ready()
    assert clock.watched(ready, "a", gather=True) is ready
    with clock.running() as seen:
        handle = clock.watched(ready, "b", gather=False)
        assert handle.wait() == (torch.ones(1),)
    assert clock.watched(ready, "c", gather=True) is ready
    ((path, gather, called, returned),) = [(wait.path, wait.gather, wait.called, wait.returned) for wait in seen]
    assert (path, gather) == ("b", False)
    assert called.until(returned) >= 0
