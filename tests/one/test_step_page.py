"""docs/how-a-step-works.md: its picture and its table are those of the traces of each stage."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_of_a_step_is_what_the_traces_do() -> None:
    step = run_path(str(DOCS / "step.py"))
    stages = [step["steps"](stage) for stage in range(4)]
    assert step["table"](stages) in (DOCS / "how-a-step-works.md").read_text(), "run python docs/step.py"
    assert step["data"](stages) == (DOCS / "step-data.js").read_text(), "run python docs/step.py"
    gathered_at_most = [max(len([w for w in at["weights"] if w != "shard"]) for at in steps) for steps in stages]
    assert gathered_at_most == [3, 3, 3, 2]
    assert [steps[-1]["sent"] for steps in stages] == [4.5, 4.5, 4.5, 6.75]
