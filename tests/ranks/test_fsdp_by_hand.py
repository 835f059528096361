"""examples/fsdp_by_hand.py runs, each step prints its result, and its comparisons can fail."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import thunder_zero as tz
from tests.harness.examples import example_module, leave_group, printed_by
from tests.harness.ranks import RanksPool
from thunder_zero.schedule import passes

tutorial = example_module("fsdp_by_hand")


def sections_of(printed: str) -> dict[str, str]:
    """Return the printed sections by heading."""
    parts = re.split(r"^(\d+\..*)\n-+\n", printed, flags=re.MULTILINE)[1:]
    assert max(len(line) for body in parts[1::2] for line in body.splitlines()) <= 100
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    return sections_of(printed_by(tutorial.main, []))


def find(sections: dict[str, str], start: str) -> str:
    (body,) = (body for heading, body in sections.items() if heading.startswith(start))
    return body


def test_every_step_is_shown(sections: dict[str, str]) -> None:
    assert {int(heading.partition(".")[0]) for heading in sections} == set(range(1, 13))
    shown = [heading.partition(":")[0] for heading in sections if heading.startswith("7.")]
    assert shown == [f"7. Pass {step.__name__}" for step in passes.PASSES]
    for step in passes.PASSES:
        changes = find(sections, f"7. Pass {step.__name__}:")
        idle = step.__name__ == "keep_last_units" and tutorial.POLICY.reshard_after_forward
        shows = changes.startswith("changes nothing here") if idle else re.search(r"^\+", changes, re.MULTILINE)
        hint = "set a policy in POLICY of examples/fsdp_by_hand.py under which this pass changes something"
        assert shows, f"{step.__name__}: {hint}"
    assert "(5, 4) -> (3, 4)  rows 0:3 on rank 0, 3:5 on rank 1" in find(sections, "2.")
    for start, call, times in (
        ("1.", "zero_", 0),
        ("3.", "= zero_synchronize(", 4),
        ("8.", "+free ", 3),  # two of them free two parameters each
        ("9. The forward", "= zero_all_gather_coalesced(", 2),  # one for each layer
        ("9. The backward", "= zero_all_gather(", 1),  # down.weight, for the gradient of its input
        ("9. The backward", "= zero_reduce_scatter_coalesced(", 2),
        ("12.", "172 without it, 172 with it", 1),  # peak of gathered bytes: (5 * 4 + 5 + 3 * 5 + 3) * 4
    ):
        assert find(sections, start).count(call) == times, (start, call)
    assert find(sections, "11. It runs") == "shapes [(2, 5), (6, 5), (6, 4)]\n\n"  # the first is a shard
    assert find(sections, "11. The numbers").startswith("the output equals the plain module's, and each gradient")


# On two ranks


def run_rank(rank: int, world_size: int, *args: Any) -> str:
    leave_group()
    return printed_by(example_module("fsdp_by_hand_ranks").on_rank, rank, *args)


@pytest.mark.slow
def test_two_ranks_hold_send_and_compute_their_rows(ranks_pool: RanksPool, sections: dict[str, str]) -> None:
    """Check steps 13 to 16: rows by rank, rank 0's trace of step 5, lines of rank 1 that differ, and saved values."""
    printed: list[str] = []

    def spawn(_: object, args: tuple[Any, ...], nprocs: int) -> None:
        printed.extend(ranks_pool.run(nprocs, run_rank, *args))

    with mock.patch.object(torch.multiprocessing, "spawn", spawn), mock.patch.object(tutorial, "one_process"):
        printed_by(tutorial.main, ["--ranks", "2"])
    assert printed[1] == "", "rank 0 prints for all"
    on_ranks = sections_of(printed[0])
    rows = re.findall(r"^  (\S.*?)  +\(.*\) +(.*)$", find(on_ranks, "13."), re.MULTILINE)
    up, down = (["rows 0:3", "rows 3:5 and 1 of zeros"], ["rows 0:2", "rows 2:3 and 1 of zeros"])
    held = {"the batch": ["rows 0:6", "rows 6:12"], "up.weight": up, "up.bias": up}
    held |= {"down.weight": down, "down.bias": down}
    assert rows == [(name, rows_by_rank[rank]) for rank in (0, 1) for name, rows_by_rank in held.items()]
    (first, second) = (find(on_ranks, f"14. The lowered trace of rank {rank}") for rank in (0, 1))
    shown = first.partition("\n\n")[2]
    assert re.sub(r"  # (sends|keeps) .*", "", shown) == find(sections, "5.")
    launches = [line for line in shown.splitlines() if "# sends" in line or "# keeps" in line]
    assert ["zero_all_gather(" in line for line in launches] == [True] * 4 + [False] * 4
    shift = dict((up, down))
    assert second.splitlines()[2:-1] == [re.sub("rows .*", lambda match: shift[match[0]], line) for line in launches]
    for step, launched, saved in (
        ("15.", "4 gathers, 4 reductions", "(3, 5), (6, 5)"),
        ("16.", "3 gathers, 2 reductions", "(2, 5)"),
    ):
        _, *ranks = re.split(r"^rank \d", find(on_ranks, step), flags=re.MULTILINE)
        assert len(ranks) == 2
        for text in ranks:
            assert f"launches {launched}\n" in text
            assert f"forward saves shapes [{saved}, (6, 5), (6, 4)]\n" in text
            (errors,) = re.findall(r"output off by (\S+), gradients by (\S+)$", text, re.MULTILINE)
            assert max(map(float, errors)) < 1e-6


# Comparisons


def test_the_comparisons_find_missing_lines_and_wrong_numbers() -> None:
    module, x = tutorial.TwoLayers(), torch.randn(6, 4)
    traces = tz.trace(module, x, policy=tutorial.POLICY, world_size=2)
    plan, timeline = traces.plan, traces.timeline
    tutorial.compare(timeline, timeline)
    moving = [op for op in timeline.ops if op.params]
    assert len(moving) == 13
    for missing in moving:
        with pytest.raises(AssertionError, match=re.escape(", ".join(missing.params))):
            tutorial.compare(timeline.with_ops(op for op in timeline.ops if op is not missing), timeline)
    late = replace(tutorial.POLICY, prefetch=0)
    with pytest.raises(AssertionError, match=r"\+forward +free +up.bias, up.weight"):
        tutorial.compare(timeline, tz.trace(module, x, policy=late, world_size=2).timeline)
    wrong = {param.path: torch.zeros(plan.shard_shape(param)) for param in plan.params}
    with pytest.raises(AssertionError, match="not close"):
        tutorial.check_numbers(module, x, plan, module(x), wrong)
