"""The same program for inputs of other sizes, beside one that was traced for them."""

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

SIZES = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24)
OTHER = (3, 40)


@cache
def traced(shape: tuple[int, int], policy: Any, *, dynamic: bool) -> tz.tools.Traces:
    torch._dynamo.reset()  # it remembers what it saw
    with torch.device("meta"):
        model = Llama(SIZES)
    tokens, labels = torch.zeros(2, *shape, dtype=torch.long)
    return tz.trace(model, tokens, labels=labels, policy=policy, world_size=4, dynamic=dynamic)


@pytest.mark.parametrize("policy", [tz.ZERO3, tz.Policy(stage=2, recompute="none")], ids=["stage 3", "stage 2"])
def test_a_resized_program_is_that_of_the_other_shapes(policy: tz.Policy) -> None:
    symbolic, right = traced((2, 8), policy, dynamic=True), traced(OTHER, policy, dynamic=False)
    shapes = {"input_ids": OTHER}  # the labels follow
    before = tz.tools.memory(symbolic).peak
    assert tz.tools.memory(symbolic, shapes=shapes).peak == tz.tools.memory(right).peak > before
    resized = tz.tools.resized(symbolic, shapes)
    assert tz.tools.estimate(resized, "h100").seconds == pytest.approx(
        tz.tools.estimate(right, "h100").seconds, rel=1e-3
    )
    assert [op.flops for op in resized.timeline.ops if op.flops] == [op.flops for op in right.timeline.ops if op.flops]
    assert tz.tools.memory(symbolic).peak == before, "the given traces stay"


@pytest.mark.parametrize(
    ("dynamic", "shapes", "words"),
    [
        (False, {"input_ids": OTHER}, ("input_ids (3, 40)", "is for (2, 8)", "dynamic=True")),
        (True, {"tokens": OTHER}, ("has tokens (3, 40)", "the program's inputs are input_ids (s")),
        (True, {"input_ids": (3,)}, ("has input_ids (3)", "the program's inputs are")),
        (True, {"input_ids": OTHER, "labels": (3, 41)}, ("labels (3, 41)", "one size each")),
        (True, {"input_ids": (0, 40)}, ("does not run", "input_ids (0, 40)")),
    ],
)
def test_shapes_that_a_program_cannot_have(
    dynamic: bool, shapes: dict[str, tuple[int, ...]], words: tuple[str, ...]
) -> None:
    with refused(ValueError, *words):
        tz.tools.resized(traced((2, 8), 3, dynamic=dynamic), shapes)


def test_the_program_for_a_loss_is_without_what_leads_to_other_outputs() -> None:
    """The logits are returned beside the loss: nobody makes a gradient of them."""
    traces = traced((2, 8), tz.ZERO3, dynamic=False)
    of_loss = tz.tools.for_loss(traces, lambda output: output.loss)
    tangents = [[tangent is not None for tangent in of.backward.args[1]] for of in (traces, of_loss) if of.backward]
    assert [sum(of) for of in tangents] == [2, 1]
    forecast = tz.tools.memory(traces, loss=lambda output: output.loss)
    tz.print_trace(of_loss, "backward", memory=forecast, file=StringIO())  # it is a forecast of these lines


def test_thunders_front_end_has_no_symbols() -> None:
    with refused(ValueError, "dynamic is True"):
        tz.trace(torch.nn.Linear(2, 2), torch.ones(1, 2), world_size=2, frontend="thunder", dynamic=True)
