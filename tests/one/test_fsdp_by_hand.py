"""examples/fsdp_by_hand.py runs, each step prints its result, and its comparisons can fail."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thunder_zero as tz
from examples import fsdp_by_hand as tutorial
from thunder_zero.schedule import passes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/fsdp_by_hand.py"
LONGEST_STEP = 15  # lines


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The script's output, by heading."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, SCRIPT], cwd=ROOT, env=env, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr
    parts = re.split(r"^(\d+\..*)\n-+\n", run.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def section(sections: dict[str, str], start: str) -> str:
    (body,) = (body for heading, body in sections.items() if heading.startswith(start))
    return body


def test_every_step_is_shown(sections: dict[str, str]) -> None:
    assert [heading.partition(":")[0] for heading in sections if heading.startswith("7.")] == [
        f"7. Pass {step.__name__}" for step in passes.PASSES
    ]
    numbers = {int(heading.partition(".")[0]) for heading in sections}
    assert numbers == set(range(1, 13))
    assert max(len(line) for body in sections.values() for line in body.splitlines()) <= 100


def test_the_shards_are_shown(sections: dict[str, str]) -> None:
    plan = section(sections, "2.")
    assert "(5, 4) -> (3, 4)  rows 0:3 on rank 0, 3:5 on rank 1" in plan
    assert "(3, 5) -> (2, 5)  rows 0:2 on rank 0, 2:3 on rank 1" in plan
    assert "unit down  (3,)   -> (2,)" in plan
    assert section(sections, "1.").count("zero_") == 0
    assert section(sections, "3.").count("= zero_synchronize(") == 4
    assert '# t_up_weight: "cpu f32[3, 4]"' in section(sections, "3.")


def test_every_pass_changes_something(sections: dict[str, str]) -> None:
    for step in passes.PASSES:
        changes = section(sections, f"7. Pass {step.__name__}:")
        idle = step.__name__ == "gather_last_units_once" and not tutorial.POLICY.gather_last_units_once
        assert changes.startswith("changes nothing here") if idle else re.search(r"^\+", changes, re.MULTILINE), step
    assert "+gather   ft" in section(sections, "7. Pass regather:")
    assert section(sections, "7. Pass free:").count("+free ") == 5


def test_the_traces_communicate_as_zero3_does(sections: dict[str, str]) -> None:
    forward, backward = section(sections, "9. The forward"), section(sections, "9. The backward")
    assert forward.count("= zero_all_gather_coalesced(") == 2  # one a layer
    assert backward.count("= zero_all_gather(") == 1  # down.weight, for the gradient of its input
    assert backward.count("= zero_reduce_scatter_coalesced(") == 2
    assert section(sections, "11. It runs") == "shapes [(2, 5), (6, 5), (6, 4)]\n\n"  # the first is a shard
    assert section(sections, "11. The numbers").startswith("the output equals the plain module's, and each gradient")


def test_the_effect_of_gather_last_units_once_is_shown(sections: dict[str, str]) -> None:
    assert section(sections, "12.").splitlines() == [
        "-forward   free    down.weight",
        "-backward  gather  down.weight",
        "-backward  wait    down.weight",
        "peak of gathered bytes: 172 without it, 172 with it",  # (5 * 4 + 5 + 3 * 5 + 3) * 4
    ]


@pytest.fixture(scope="module")
def timeline() -> tz.Timeline:
    return tz.trace(tutorial.TwoLayers(), torch.randn(6, 4), policy=tutorial.POLICY, world_size=2).timeline


def test_the_comparison_finds_each_missing_line(timeline: tz.Timeline) -> None:
    tutorial.compare(timeline, timeline)
    moving = [op for op in timeline.ops if op.params]
    assert len(moving) == 15
    for gone in moving:
        with pytest.raises(AssertionError, match=re.escape(", ".join(gone.params))):
            tutorial.compare(timeline.with_ops(op for op in timeline.ops if op is not gone), timeline)


def test_the_comparison_finds_another_schedule(timeline: tz.Timeline) -> None:
    late = replace(tutorial.POLICY, prefetch=0)
    other = tz.trace(tutorial.TwoLayers(), torch.randn(6, 4), policy=late, world_size=2).timeline
    with pytest.raises(AssertionError, match=r"\+forward +gather  down.weight, down.bias"):
        tutorial.compare(timeline, other)


def test_the_numbers_are_compared() -> None:
    module, x = tutorial.TwoLayers(), torch.randn(6, 4)
    plan = tz.make_plan(module, tutorial.POLICY, 2, 0)
    wrong = {param.path: torch.zeros(plan.shard_shape(param)) for param in plan.params}
    with pytest.raises(AssertionError, match="not close"):
        tutorial.check_numbers(module, x, plan, module(x), wrong)


def test_steps_are_short() -> None:
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name != "main":
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < LONGEST_STEP, node.name
