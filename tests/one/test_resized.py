"""A resized dynamic program has the figures of a program that was traced for those sizes."""

from __future__ import annotations

from functools import cache
from io import StringIO
from typing import Any

import pytest
import torch
import torch._dynamo

import thunder_zero as tz
from examples.llama import Llama, LlamaConfig
from tests.harness.errors import refused
from thunder_zero.schedule.ops import Compute

SIZES = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24)
OTHER_SHAPE = (3, 40)


@cache
def trace_llama(shape: tuple[int, int], policy: Any, *, dynamic: bool) -> tz.tools.Traces:
    torch._dynamo.reset()  # dynamo remembers shapes
    with torch.device("meta"):
        model = Llama(SIZES)
    tokens, labels = torch.zeros(2, *shape, dtype=torch.long)
    return tz.trace(model, tokens, labels=labels, policy=policy, world_size=4, dynamic=dynamic)


def products(traces: tz.tools.Traces) -> list[int]:
    return [op.flops for op in traces.timeline.ops if isinstance(op, Compute) and op.flops]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [tz.ZERO3, tz.Policy(stage=2, recompute="none")], ids=["stage 3", "stage 2"])
def test_a_resized_program_equals_one_traced_for_the_other_shapes(policy: tz.Policy) -> None:
    symbolic, expected = trace_llama((2, 8), policy, dynamic=True), trace_llama(OTHER_SHAPE, policy, dynamic=False)
    shapes = {"input_ids": OTHER_SHAPE}  # the labels follow
    before = tz.tools.memory(symbolic).peak
    assert tz.tools.memory(symbolic, shapes=shapes).peak == tz.tools.memory(expected).peak > before
    resized = tz.tools.resized(symbolic, shapes)
    assert tz.tools.estimate(resized, "h100").seconds == pytest.approx(
        tz.tools.estimate(expected, "h100").seconds, rel=1e-3
    )
    assert products(resized) == products(expected)
    assert tz.tools.memory(symbolic).peak == before, "the given traces stay"


@pytest.mark.parametrize(
    ("dynamic", "shapes", "words"),
    [
        (False, {"input_ids": OTHER_SHAPE}, ("input_ids (3, 40)", "is for (2, 8)", "dynamic=True")),
        (True, {"tokens": OTHER_SHAPE}, ("has tokens (3, 40)", "the program's inputs are input_ids (s")),
        (True, {"input_ids": (3,)}, ("has input_ids (3)", "the program's inputs are")),
        (True, {"input_ids": OTHER_SHAPE, "labels": (3, 41)}, ("labels (3, 41)", "one size each")),
        (True, {"input_ids": (0, 40)}, ("does not run", "input_ids (0, 40)")),
    ],
)
def test_shapes_that_a_program_cannot_have_are_refused(
    dynamic: bool, shapes: dict[str, tuple[int, ...]], words: tuple[str, ...]
) -> None:
    with refused(ValueError, *words):
        tz.tools.resized(trace_llama((2, 8), tz.ZERO3, dynamic=dynamic), shapes)


def test_the_program_for_a_loss_has_no_gradients_of_other_outputs() -> None:
    """The logits, returned beside the loss, get no gradient."""
    traces = trace_llama((2, 8), tz.ZERO3, dynamic=False)
    pruned = tz.tools.for_loss(traces, lambda output: output.loss)
    backwards = [item.backward for item in (traces, pruned) if item.backward]
    assert [sum(tangent is not None for tangent in trace.args[1]) for trace in backwards] == [2, 1]
    forecast = tz.tools.memory(traces, loss=lambda output: output.loss)
    tz.print_trace(pruned, "backward", memory=forecast, file=StringIO())  # the forecast matches these lines
