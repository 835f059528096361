"""Torch raises the messages that docs/errors.md lists, and the page's remedies work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness.models import fresh

import thunder

PAGE = (Path(__file__).parents[2] / "docs/errors.md").read_text()
OF_TORCH = re.findall(r"\*\*`([^`]+)`\*\* \(torch\)", PAGE)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.tokens(x))


@pytest.mark.usefixtures("group")
def test_torch_raises_the_listed_messages_and_the_remedies_work() -> None:
    plain = fresh(Embedded)
    full = {name: torch.ones_like(value) for name, value in plain.state_dict().items()}
    model = thunder.jit(plain, transforms=[tz.ZeroTransform(stage=3)])
    normed = fresh(nn.Sequential, nn.Linear(4, 4), nn.BatchNorm1d(4))
    half, overrides = tz.MixedPrecision(torch.bfloat16), {"1": tz.MixedPrecision()}
    in_4_bits = tz.compile(fresh(nn.Linear, 64, 64).requires_grad_(False), stage=3, frozen_format=tz.NF4())
    messages = []
    calls: tuple[Callable[[], object], ...] = (
        lambda: plain.out(torch.ones(2, 4)),
        lambda: model(torch.full((1, 3), 8)),
        lambda: plain.load_state_dict(full),
        lambda: tz.compile(normed, stage=3, mixed_precision=half)(torch.ones(2, 4)),
        lambda: in_4_bits.get_parameter("weight").requires_grad_(True),
    )
    for call in calls:
        with pytest.raises((RuntimeError, IndexError)) as caught:
            call()
        messages.append(str(caught.value) + "".join(getattr(caught.value, "__notes__", ())))
    assert [text for text in OF_TORCH if not any(holds(message, text) for message in messages)] == []
    assert "tokens.weight" in messages[1]
    assert "'1.weight'" in messages[3]
    mended = fresh(nn.Sequential, nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert (
        tz.compile(mended, stage=3, mixed_precision=replace(half, overrides=overrides))(torch.ones(2, 4))
        .isfinite()
        .all()
    )

    model.load_state_dict(full)
    assert model.get_parameter("out.weight").full_tensor().eq(1).all()
    with tz.full_parameters(model) as module:
        assert module.out(torch.ones(2, 4)).eq(5).all()


def holds(message: str, listed: str) -> bool:
    return re.search(".*".join(map(re.escape, listed.split("…"))), message, re.DOTALL) is not None
