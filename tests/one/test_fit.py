"""``tz.fit``: the policy that it returns fits by the exact forecast, and what does not fit is refused with numbers."""

from __future__ import annotations

from functools import cache
from io import StringIO

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised_as

from thunder.executors.torch_compile import torch_compile_ex

pytestmark = pytest.mark.slow

WIDTH, ROWS, BLOCKS = 64, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x))
        return logits


def net() -> Net:
    with torch.device("meta"):
        return Net()


X = torch.empty(ROWS, WIDTH)


def forecast(policy: tz.Policy) -> tz.Memory:
    return tz.memory(tz.trace(net(), X, policy=policy, world_size=2), optimizer=torch.optim.SGD)


@cache
def fitted(memory_bytes: int) -> tuple[tz.Policy, str]:
    out = StringIO()
    policy = tz.fit(net(), (X,), memory_bytes=memory_bytes, world_size=2, optimizer=sgd, file=out)
    return policy, out.getvalue()


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)  # type: ignore[arg-type]


def test_it_fits_and_costs_less_with_more_memory() -> None:
    plenty, text = fitted(1 << 30)
    assert plenty.keep_units == tuple(f"blocks.{number}" for number in range(BLOCKS))  # no gather again
    assert plenty.recompute_units == ()
    assert "<- chosen" in text
    most = forecast(plenty).peak
    small = int(0.85 * most)
    tight, _ = fitted(small)
    assert forecast(tight).peak <= small
    assert tight != plenty
    assert fitted(int(1.02 * most))[0] == plenty


def test_what_fits_is_not_refused() -> None:
    """Small buckets need smaller buffers of transports, which the estimate leaves out: a compilation corrects it."""
    budget = int(1.05 * forecast(tz.Policy(bucket_bytes=0, in_flight_bytes=0)).peak)
    policy, _ = fitted(budget)
    assert forecast(policy).peak <= budget


def test_it_fits_the_program_of_other_executors() -> None:
    out = StringIO()
    policy = tz.fit(net(), X, memory_bytes=1 << 30, world_size=2, executors=[torch_compile_ex], file=out)
    assert policy.keep_units == tuple(f"blocks.{number}" for number in range(BLOCKS))


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    kind, text = raised_as(lambda: tz.fit(net(), (X,), memory_bytes=1000, world_size=2, optimizer=sgd))
    assert kind == "DoesNotFit"
    assert text.startswith("no policy fits into 0.98 KiB: the least that was found takes ")
    for word in ("more, with units", " of ", "twice the ranks", "cpu_offload"):
        assert word in text


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="memory_bytes is 0; give a number of bytes"):
        tz.fit(net(), (X,), memory_bytes=0, world_size=2)
    with pytest.raises(ValueError, match="world_size is None, and there is no process group"):
        tz.fit(net(), (X,), memory_bytes=1 << 30)
    with pytest.raises(
        ValueError, match=r"keep_units names 'blocks.9', which is no unit of Net; its units are 'blocks.0'"
    ):
        tz.trace(net(), X, policy=tz.Policy(keep_units=("blocks.9",)))


def test_inputs_by_name() -> None:
    policy = tz.fit(net(), {"x": X}, memory_bytes=1 << 30, world_size=2, policy=2, file=StringIO())
    assert (policy.stage, policy.keep_units, policy.recompute_units) == (2, (), ())
