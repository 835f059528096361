"""All ranks trace a module to one timeline, whatever the hash seeds of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thunder_zero as tz
from tests.harness.hash_seeds import Loop

ROOT = Path(__file__).parents[2]


def test_a_forward_lists_its_parameters_in_the_modules_order() -> None:
    # Thunder alone lists them in the order of a set, which depends on the hash seed.
    policy = tz.Policy(stage=3, bucket_bytes=1)
    traces = tz.trace(Loop(), torch.ones(4), policy=policy)
    waits = [op.params[0] for op in traces.forward_timeline.ops if isinstance(op, tz.schedule.Wait)]
    assert waits == ["b.weight", "a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]


@pytest.mark.slow
def test_timelines_do_not_depend_on_the_hash_seed() -> None:
    # These seeds differ for two kinds of faults: values listed, and freed, in the order of a set.
    command = [sys.executable, "-m", "tests.harness.hash_seeds"]
    runs = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("4", "5")
    ]
    first, second = (run.communicate()[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(first) > 100
    assert first == second
