"""A stage-0 step of ``tz.compile`` on one rank equals eager PyTorch's bit for bit: torch's operators, in its order."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import thunder_zero as tz
from examples.gpt import GPT, GPTConfig
from examples.llama import Llama, LlamaConfig
from tests.harness.models import VOCABULARY, GptShape, fresh
from tests.harness.tiers import slow

pytestmark = pytest.mark.usefixtures("group")
Make = Callable[[], nn.Module]
STEPS = 3


def loss_of(output: Any, tokens: Tensor) -> Tensor:
    """Return the loss of a step: the model's own, if it has one."""
    loss = getattr(output, "loss", None)
    return cross_entropy(output.flatten(0, 1), tokens.flatten()) if loss is None else loss


MODELS: dict[str, tuple[Make, int]] = {  # and the size of their vocabulary
    "the tests' GPT": (GptShape, VOCABULARY),
    "the GPT": (lambda: GPT(GPTConfig(2, 16, 2, 32)), 256),
    "the Llama": (lambda: Llama(LlamaConfig(vocab_size=32, tie_word_embeddings=True)), 32),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("the tests' GPT", "SGD"), ("the GPT", "AdamW")),
        *slow(("the tests' GPT", "AdamW"), ("the GPT", "SGD"), ("the Llama", "SGD"), ("the Llama", "AdamW")),
    ],
)
def test_a_step_equals_eagers_bit_for_bit(name: str, optimizer: str) -> None:
    make, words = MODELS[name]
    plain = fresh(make)
    sides = [tz.compile(deepcopy(plain), stage=0), plain]
    steppers = [OPTIMIZERS[optimizer](side.parameters()) for side in sides]
    for step in range(STEPS):
        tokens = torch.randint(words, (2, 16), generator=torch.Generator().manual_seed(step))
        losses = []
        for side in sides:
            inputs = [tokens] * (1 + isinstance(plain, Llama))
            losses.append(loss_of(side(*inputs), tokens))
            losses[-1].backward()
        assert losses[0].equal(losses[1]), f"loss of step {step}"
        for (path, param), expected in zip(sides[0].named_parameters(), sides[1].parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None), path
            assert expected.grad is None or param.grad.equal(expected.grad), f"gradient of {path} in step {step}"
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        for (path, param), expected in zip(sides[0].named_parameters(), sides[1].parameters(), strict=True):
            assert param.equal(expected), f"{path} after step {step}"
