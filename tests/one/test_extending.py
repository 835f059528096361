"""The programs of docs/extending.md, for a user's own devices and named models, run and print what they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thunder_zero as tz
from tests.harness.examples import program_of

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()


def test_an_estimate_on_a_users_device_follows_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(program_of(PAGE, "A device"), names)
    slow, fast = (tz.tools.estimate(names["traces"], names[device]) for device in ("cluster", "faster"))
    assert capsys.readouterr().out == f"{slow}\n{fast}\n"
    assert slow.compute_seconds == fast.compute_seconds >= slow.flops / 20e12 > 0
    wire = slow.busiest_bytes / (4 * 6e9)  # a ring of 16 ranks leaves each node of 4 by 4 links
    assert slow.wire_seconds["shard"] == pytest.approx(wire, rel=0.1)
    assert slow.wire_seconds["shard"] > fast.wire_seconds["shard"]


def test_a_question_to_the_table_is_answered_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(program_of(PAGE, "A question"), names)
    printed, table = capsys.readouterr().out, names["table"]
    assert f"```text\n{printed}```" in PAGE
    storages = tz.tools.memory(table.traces).storages
    kept = sum(storage.nbytes for storage in storages if storage.kind is tz.tools.Holds.SAVED and storage.line >= 0)
    assert sum(tz.tools.kept_for_backward(table).values()) == kept > 0
    with pytest.raises(ValueError, match="no forecast of memory: cannot forecast the loss"):
        tz.tools.kept_for_backward(tz.tools.step_table(table.traces, loss=lambda y: y.sum() * y.sum().item()))
    assert [row["code"] for row in table.as_dicts()] == [row.code for row in table.all_rows]


@pytest.mark.slow
def test_a_users_named_model_is_planned_and_sliced_by_its_styles() -> None:
    names: dict[str, Any] = {}
    exec(program_of(PAGE, "A named model"), names)
    plan, named = names["plan"], names["named"]
    assert (plan.model, plan.blocks, plan.tokens) == ("tower", 12, 4 * 1024)
    assert plan.parameters == sum(param.numel() for param in named.make(8).parameters())
    assert "module = ...  # yours: tower, of 1024 tokens" in plan.code
    assert plan.rows[0].loss_seconds > 0
    with pytest.raises(ValueError, match="nothing says how to slice tower; give tp_plan="):
        tz.tools.plan_training(named, world_size=8, tp=2)
    with pytest.raises(ValueError, match="tower comes with a loss"):
        tz.tools.plan_training(named, world_size=8, loss=torch.sum)
    with pytest.raises(ValueError, match="tower comes with inputs"):
        tz.tools.plan_training(named, torch.zeros(1), world_size=8)
