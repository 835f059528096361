"""The user's own passes, transports and encodings work on ranks as docs/extending.md and its example say."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness.as_one_process import gather_objects
from tests.harness.errors import error_of
from tests.harness.examples import program_of, run_main
from tests.harness.models import Mlp, fresh, full
from tests.harness.ranks import RanksPool
from thunder_zero.plan.traffic import payload_bytes
from thunder_zero.schedule import Gather, Timeline

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()


def run_page(rank: int, world_size: int) -> None:
    """Check the gradients of models with a pass or a transport, and how many bytes were gathered."""
    x = torch.linspace(-1, 1, 14).view(2, 7) + rank
    usual = tz.compile(fresh(Mlp), stage=3)
    usual(x).sum().backward()
    names: dict[str, Any] = {}
    for section in ("A pass", "A transport"):
        names |= {"module": fresh(Mlp), "x": x}
        exec(program_of(PAGE, section), names)
        for param, expected in zip(names["model"].parameters(), usual.parameters(), strict=True):
            assert param.grad is not None
            assert expected.grad is not None
            assert torch.equal(full(param.grad), full(expected.grad))
    timeline = tz.traces_of(names["model"]).timeline
    sent = [param for op in timeline.ops if isinstance(op, Gather) for param in timeline.params_of(op)]
    assert names["Counting"].gathered == sum(4 * prod(timeline.plan.shard_shape(param)) for param in sent)


def run_encoding_of_page(rank: int, world_size: int) -> None:
    """Check that each rank's rows arrive rounded, in the bytes of the plan."""
    names: dict[str, Any] = {"module": fresh(Mlp), "x": torch.linspace(-1, 1, 14).view(2, 7) + rank}
    exec(program_of(PAGE, "An encoding"), names)
    model, form = names["model"], names["Float8"](64)
    plain = fresh(Mlp)
    with torch.no_grad():
        for layer in plain.layers:
            weight = layer.weight.clone()
            parts = weight.tensor_split(world_size)
            layer.weight.copy_(torch.cat([form.decode(form.encode(part), torch.empty_like(part)) for part in parts]))
            assert bool(((layer.weight - weight).abs() <= weight.abs() / 16).all())
            assert not torch.equal(layer.weight, weight)
        torch.testing.assert_close(model(names["x"]), plain(names["x"]))
    plan = tz.traces_of(model).timeline.plan
    assert payload_bytes(plan, plan.by_name["layers.0.weight"]) == form.nbytes(parts[0].numel())
    assert "as float8/64: rounded to nearest, off by at most a sixteenth" in " ".join(
        str(tz.explain(model, "layers.0.weight")).split()
    )


def fail_in_a_pass(rank: int, world_size: int) -> None:
    """Check that all ranks raise, and that the next model trains."""

    def fail(timeline: Timeline) -> Timeline:
        if rank:
            raise ValueError("this rank's own fault")
        return timeline

    def swap(timeline: Timeline, earlier: int = 0) -> Timeline:
        """Swap two gathers on rank 1: the first has ended before the second starts."""
        first, second = [index for index, op in enumerate(timeline.ops) if isinstance(op, Gather)][earlier:][:2]
        ops = list(timeline.ops)
        ops[first], ops[second] = ops[second], ops[first]
        return timeline.with_ops(ops) if rank else timeline

    different = ("are both in forward number 1 of", "(launch 2: all_gather layers.1.weight", "on rank 0, all_gather")
    for a_pass, words in (
        (fail, ("this rank's own fault",)),
        (swap, ("a compilation that failed (ScheduleError",)),
        (partial(swap, earlier=1), different),
    ):
        model = tz.compile(fresh(Mlp), stage=3, passes=(a_pass,), prefetch=3)
        errors = gather_objects(error_of(lambda model=model: model(torch.ones(2, 7))))  # type: ignore[misc]
        assert all(word in text for text in errors for word in words), errors
    tz.compile(nn.Linear(2, 2), stage=3)(torch.ones(1, 2)).sum().backward()


def test_the_users_passes_and_transports(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, run_page)


@pytest.mark.slow
def test_the_users_encodings_and_passes_that_fail(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, run_encoding_of_page)
    ranks_pool.run(2, fail_in_a_pass)


@pytest.mark.slow
def test_the_example_prints_what_the_page_shows(ranks_pool: RanksPool) -> None:
    printed = run_main(ranks_pool, "own_pass")
    assert printed in PAGE
    assert printed.count("\n") == 2
