"""Trains a small GPT for twenty steps and records the results."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.models import LENGTH, VOCABULARY

STEPS = 20
ROWS = 12  # of the global batch; 1, 2, 3 and 4 divide it
OPTIMIZERS = ("sgd", "adamw")
Record = dict[str, Any]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, the same in every process: each (ROWS, LENGTH)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return tokens[0], tokens[1]


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW with an eps above the noise of a zero gradient."""
    if name == "sgd":
        return torch.optim.SGD(parameters, 0.02, momentum=0.9)
    return torch.optim.AdamW(parameters, 5e-3, eps=1e-3)


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> Record:
    """Losses of all steps, logits and gradients of the last one, and the parameters after it."""
    losses = []
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    for step in range(STEPS):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        logits = model(tokens[rows])
        loss = F.cross_entropy(logits.flatten(0, 1), targets[rows].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    named = dict(model.named_parameters())
    return {
        "losses": torch.stack(losses),
        "logits": logits.detach(),
        "grads": {name: param.grad for name, param in named.items()},
        "weights": {name: param.detach().clone() for name, param in named.items()},
    }


def assert_same_bits(ranks: list[Record], others: list[Record]) -> None:
    """Assert that loss, logits, gradients and weights of two runs are equal, rank by rank."""
    for record, other in zip(ranks, others, strict=True):
        assert torch.equal(record["losses"], other["losses"])
        assert torch.equal(record["logits"], other["logits"])
        for kind in ("grads", "weights"):
            for name, value in record[kind].items():
                assert value is None is other[kind][name] or torch.equal(value, other[kind][name]), (kind, name)
