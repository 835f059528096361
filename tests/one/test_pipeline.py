"""The functions of traces/pipeline.py keep no state between calls, and what runs is written from proved operations."""

from __future__ import annotations

from contextlib import nullcontext
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch

import thunder_zero as tz
from tests.harness.models import LENGTH, VOCABULARY, GptShape
from tests.harness.read_traces import plain, require_written
from thunder_zero.schedule import verify
from thunder_zero.traces import pipeline
from thunder_zero.traces.compiled import Scheduled, Traces
from thunder_zero.traces.lift import lift
from thunder_zero.traces.symbols import JointTrace

from thunder.core.trace import TraceCtx

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
pytestmark = pytest.mark.usefixtures("group")


def joint_traces() -> dict[str, JointTrace]:
    """Return the joint traces of one model: of a step, of a step under no_sync, and of inference."""
    model = tz.compile(GptShape(), stage=3)
    joints = {}
    for name, context in {"step": nullcontext, "no_sync": model.no_sync, "no_grad": torch.no_grad}.items():
        with mock.patch.object(pipeline, "schedule", wraps=pipeline.schedule) as scheduled, context():
            output = model(TOKENS)
            if output.requires_grad:
                output.sum().backward()
        ((joints[name],), _) = scheduled.call_args
    return joints


def lines_of(trace: TraceCtx | None) -> list[str]:
    text = "" if trace is None else trace.python()
    return [line for line in text.splitlines() if not line.startswith("#")]  # comments say how long a step took


def describe(program: Traces) -> dict[str, Any]:
    """Return all that two equal programs have in common."""
    return {
        "forward": lines_of(program.forward),
        "backward": lines_of(program.backward),
        "operations": [plain(timeline.ops) for timeline in (program.timeline, program.scheduled.lifted)],
        "lines": program.lines,
        "facts": program.facts,
    }


def compile_scheduled(scheduled: Scheduled) -> Traces:
    with pipeline.thunder_context():
        return pipeline.write_program(scheduled, fuses=False)


def test_compilations_of_one_model_do_not_affect_each_other() -> None:
    joints = joint_traces()
    before = {name: lines_of(joint.trace) for name, joint in joints.items()}
    one_by_one = {name: describe(compile_scheduled(pipeline.schedule(joint))) for name, joint in joints.items()}
    all_scheduled = {name: pipeline.schedule(joint) for name, joint in joints.items()}
    interleaved = {name: describe(compile_scheduled(scheduled)) for name, scheduled in all_scheduled.items()}
    assert interleaved == one_by_one
    assert {name: lines_of(joint.trace) for name, joint in joints.items()} == before, "a step changed its input"
    kinds = [words["facts"].synced for words in one_by_one.values()], len(set(map(str, one_by_one.values())))
    assert kinds == ([True, False, True], 3)


def test_the_traces_that_run_were_written_from_the_proved_operations() -> None:
    model = tz.compile(GptShape(), stage=3)
    with mock.patch.object(verify, "check", wraps=verify.check) as check:
        model(TOKENS).sum().backward()
        traces = tz.traces_of(model)
        with torch.no_grad():
            model(TOKENS)
    training, inference = (call.args[0] for call in check.call_args_list)
    assert training is traces.timeline
    require_written(traces)
    assert not any(op.backward for op in inference.ops)
    assert inference is tz.traces_of(model).timeline
    require_written(tz.traces_of(model))


def test_a_program_is_lifted_once() -> None:
    with mock.patch.object(pipeline, "lift", wraps=lift) as lifts:
        model = tz.compile(GptShape(), stage=3)
        model(TOKENS).sum().backward()
        traces = tz.traces_of(model)
        assert tz.traces_of(model).timeline is traces.timeline
        tz.print_trace(model, file=StringIO())
        tz.tools.memory(tz.traces_of(model))
        tz.explain(model, traces.plan.params[0].path)
        assert lifts.call_count == 1
        with model.no_sync():
            model(TOKENS).sum().backward()
        assert tz.traces_of(model).timeline is not traces.timeline, "another program has another timeline"
        assert lifts.call_count == 2
