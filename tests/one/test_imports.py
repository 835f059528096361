"""``import thunder_zero`` and the command line load only what they need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = r"""
import contextlib, importlib.util, io, json, sys
import thunder_zero

def loaded(*names):
    return sorted(name for name in sys.modules if name.startswith(names))

steps = {"import": loaded("thunder", "rich")}
from thunder_zero.tools import cli
import thunder_zero.spmd.check, thunder_zero.spmd.picture, thunder_zero.tools.from_file
steps["start of checks"] = loaded("torch.")  # ranks are processes of their own
for command in ("inspect", "consolidate", "shard", "trace", "report", "check", "plan", "sites", "calibrate"):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
steps["help"] = loaded("thunder.", "rich")
tools = loaded("thunder_zero.tools.")
importlib.util.find_spec("thunder")  # whoever asks whether Thunder is there does not spoil its import
assert {*thunder_zero.__all__} < {*dir(thunder_zero)} and "trace" not in dir(thunder_zero.tools)
core = [name for name in thunder_zero.__all__ if name not in ("tools", "trace", "print_trace", "explain")]
assert all(getattr(thunder_zero, name) is not None for name in core)
steps["core"] = sorted({*loaded("thunder_zero.tools.")} - {*tools})
import thunder
steps["finders"] = [kind for kind in map(type, sys.meta_path) if kind.__module__.startswith("thunder_zero")]
from thunder.plugins import get_plugin
steps["plugin"] = type(get_plugin("zero3")()).__name__
import torch
thunder_zero.trace(torch.nn.Linear(2, 2), torch.ones(1, 2), world_size=2)
steps["inductor"] = loaded("torch._inductor.compile_fx")
for name in ("memory", "Timeline", "nonsense"):
    try:
        getattr(thunder_zero, name)
    except AttributeError as error:
        steps[name] = str(error).partition(";")[2]
print(json.dumps(steps))
"""


@pytest.mark.slow
def test_help_loads_no_thunder_and_training_no_tools() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    steps = json.loads(done.stdout)
    assert steps.pop("import") == [
        "thunder_zero",
        "thunder_zero.compat",
        "thunder_zero.compat.imports",
        "thunder_zero.lazy",
    ]
    moved = {"memory": " it is thunder_zero.tools.memory", "Timeline": " it is thunder_zero.schedule.Timeline"}
    none: dict[str, list[str]] = {name: [] for name in ("start of checks", "help", "core", "finders", "inductor")}
    assert steps == {**none, "plugin": "Zero", **moved, "nonsense": ""}
