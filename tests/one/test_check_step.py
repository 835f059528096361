"""``check_step`` says nothing of right steps, and names the cause of wrong ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import thunder_zero as tz
from tests.harness import steps
from tests.harness.tiers import slow
from thunder_zero.tools.cli import main

Step = Callable[[DeviceMesh], nn.Module]
FAST = (steps.megatron, steps.vocabulary_in_slices, steps.fsdp_with_clip_and_accumulation, steps.tensor_parallel)
RIGHT = [case if case[0] in FAST else slow(case)[0] for case in steps.RIGHT]


def named(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("step", "mesh"), RIGHT, ids=named)
def test_nothing_is_said_of_right_steps(step: Step, mesh: dict[str, int]) -> None:
    verdict = tz.tools.check_step(step, mesh)
    assert [fault for fault in verdict.faults if fault.kind != "warning"] == [], str(verdict)
    assert verdict.status == 0
    assert str(verdict).startswith("nothing wrong")
    assert all(factor == 1 for gradient in verdict.gradients for factor in gradient.factors.values())


@pytest.mark.parametrize(("step", "mesh", "cause"), steps.WRONG, ids=named)
def test_the_first_fault_names_the_cause(step: Step, mesh: dict[str, int], cause: str) -> None:
    verdict = tz.tools.check_step(step, mesh)
    assert verdict.status == 1, str(verdict)
    first = verdict.faults[0]
    assert cause in f"{first.text} {' '.join(first.parameters)}", str(verdict)
    assert json.loads(verdict.to_json())["faults"][0]["text"] == first.text


PAGE = (Path(__file__).parents[2] / "docs/check.md").read_text()
SCRIPTS = re.findall(r"<!-- script: ([\w ]+) -->\n```python\n(.*?)```(?:\n\n```\n(.*?)```)?", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(("name", "program", "said"), [SCRIPTS[1], *slow(SCRIPTS[0], *SCRIPTS[2:])], ids=named)
def test_the_page_shows_what_is_said_of_its_scripts(
    name: str, program: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(SCRIPTS) == 4
    script = tmp_path / "train.py"
    script.write_text(program)
    mesh = "dp=7" if name in ("right", "never divided") else "tp=2"
    assert main(["check", f"{script}:step", "--mesh", mesh]) == (1 if said else 0)
    printed = capsys.readouterr().out
    assert printed.startswith("wrong: " if said else "nothing wrong: ")
    assert said in printed


def test_a_step_that_cannot_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("def step(mesh):\n    return mesh.nothing\n")
    assert main(["check", f"{script}:step", "--mesh", "dp=7"]) == 2
    assert "train.py:2" in capsys.readouterr().err
    assert main(["check", f"{script}:step", "--mesh", "dp"]) == 2
    assert "cannot read the mesh 'dp'" in capsys.readouterr().err


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="the mesh has no axis fsdp; it has dp"):
        tz.tools.check_step(steps.ddp, "dp=2", data=["fsdp"])
    with pytest.raises(TypeError, match="define step at the top of a file"):
        tz.tools.check_step(lambda mesh: mesh, "dp=2")
