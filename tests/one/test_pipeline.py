"""The functions of traces/pipeline.py keep no state between calls, and their proved traces are what runs."""

from __future__ import annotations

from contextlib import nullcontext
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch

import thunder_zero as tz
from tests.harness.models import LENGTH, VOCABULARY, GptShape
from thunder_zero.capture.programs import thunder_context
from thunder_zero.traces import pipeline
from thunder_zero.traces.lift import lift_phases
from thunder_zero.traces.pipeline import Program, Scheduled
from thunder_zero.traces.symbols import JointTrace

from thunder.core.trace import TraceCtx

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
pytestmark = pytest.mark.usefixtures("group")


def joint_traces() -> dict[str, JointTrace]:
    """Return the joint traces of one model: of a step, of a step under no_sync, and of inference."""
    model = tz.compile(GptShape(), stage=3)
    joints = {}
    for name, context in {"step": nullcontext, "no_sync": model.no_sync, "no_grad": torch.no_grad}.items():
        with mock.patch.object(pipeline, "schedule_trace", wraps=pipeline.schedule_trace) as scheduled, context():
            output = model(TOKENS)
            if output.requires_grad:
                output.sum().backward()
        ((joints[name],), _) = scheduled.call_args
    return joints


def lines_of(trace: TraceCtx | None) -> list[str]:
    text = "" if trace is None else trace.python()
    return [line for line in text.splitlines() if not line.startswith("#")]  # comments say how long a step took


def describe(program: Program) -> dict[str, Any]:
    """Return all that two equal programs have in common."""
    scheduled = program.scheduled
    return {
        "forward": lines_of(program.forward),
        "backward": lines_of(program.backward),
        "timelines": (program.timeline, scheduled.lifted),
        "facts": (scheduled.facts, scheduled.trained),
    }


def compile_scheduled(scheduled: Scheduled) -> Program:
    with thunder_context():
        return pipeline.compile_program(scheduled, pipeline.make_phases)


def test_compilations_of_one_model_do_not_affect_each_other() -> None:
    joints = joint_traces()
    before = {name: lines_of(joint.trace) for name, joint in joints.items()}
    one_by_one = {name: describe(compile_scheduled(pipeline.schedule_trace(joint))) for name, joint in joints.items()}
    all_scheduled = {name: pipeline.schedule_trace(joint) for name, joint in joints.items()}
    interleaved = {name: describe(compile_scheduled(scheduled)) for name, scheduled in all_scheduled.items()}
    assert interleaved == one_by_one
    assert {name: lines_of(joint.trace) for name, joint in joints.items()} == before, "a step changed its input"
    kinds = [words["facts"][0].synced for words in one_by_one.values()], len(set(map(str, one_by_one.values())))
    assert kinds == ([True, False, True], 3)


def test_the_traces_that_run_were_proved() -> None:
    model = tz.compile(GptShape(), stage=3)
    with mock.patch.object(pipeline, "prove", wraps=pipeline.prove) as prove:
        model(TOKENS).sum().backward()
        traces = tz.traces_of(model)
        with torch.no_grad():
            model(TOKENS)
    (_, *proved), (_, *inference) = (call.args for call in prove.call_args_list)
    for trace, proved_trace in zip((traces.forward, traces.backward), proved, strict=True):
        assert trace is not None
        assert [line for line in trace.bound_symbols if line.sym.name != "zero_enter"] == proved_trace.bound_symbols
    assert [trace is not None for trace in inference] == [True, False]


def test_tools_lift_a_program_once() -> None:
    model = tz.compile(GptShape(), stage=3)
    model(TOKENS).sum().backward()
    with mock.patch("thunder_zero.traces.pipeline.lift_phases", wraps=lift_phases) as lifts:
        traces = tz.traces_of(model)
        assert tz.traces_of(model).timeline is traces.timeline
        tz.print_trace(model, file=StringIO())
        tz.tools.memory(tz.traces_of(model))
        tz.explain(model, traces.plan.params[0].path)
        assert lifts.call_count == 1
        with model.no_sync():
            model(TOKENS).sum().backward()
        assert tz.traces_of(model).timeline is not traces.timeline, "another program has another timeline"
        assert tz.traces_of(model, synced=True).timeline is traces.timeline
