"""Activation checkpointing: the recomputed forward gathers nothing more than backward does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.models import (
    LENGTH,
    WIDTH,
    Block,
    count_sends,
    error,
    fresh,
    from_parameters_alone,
    parameter_inputs,
    saved,
    sharded,
)
from tests.harness.ranks import RanksPool
from tests.harness.tiers import only
from thunder_zero.schedule.timeline import Kind, gathered_bytes

import thunder.torch as ltorch

STAGES, BLOCKS, STEPS = (0, 1, 2, 3), 2, 3


class Net(nn.Module):
    """Two transformer blocks, each of them checkpointed."""

    def __init__(self, is_checked: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.is_checked = is_checked

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checked else block(x)
        return x


def policies() -> dict[str, tz.Policy]:
    found = {f"stage {stage}": tz.Policy(stage=stage) for stage in STAGES}
    found["stage 3, nothing kept"] = replace(tz.ZERO3, gather_last_units_once=False)
    return only(("stage 1", "stage 3", "stage 3, nothing kept"), found)


def batch(rank: int) -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(rank))


def collectives(traces: tz.Traces) -> Counter[tuple[str, bool]]:
    return Counter((op.kind, op.backward) for op in traces.timeline.ops if op.kind in (Kind.GATHER, Kind.REDUCE))


def gathered_again(traces: tz.Traces) -> set[str]:
    return {path for op in traces.backward_timeline.ops if op.kind is Kind.GATHER for path in op.params}


def activations(traces: tz.Traces) -> set[str]:
    """What forward saves and data has gone into."""
    parameters = parameter_inputs(traces)
    return saved(traces.forward) - parameters - from_parameters_alone(traces.forward, parameters)


@pytest.mark.parametrize("name", policies())
def test_collectives_are_those_without_checkpointing(name: str) -> None:
    policy = policies()[name]
    x = torch.zeros(2, LENGTH, WIDTH)
    plain, checked = (tz.trace(fresh(Net, is_checked), x, policy=policy, world_size=2) for is_checked in (False, True))
    assert collectives(checked) == collectives(plain)
    more = gathered_again(checked) - gathered_again(plain)
    assert all(path.endswith("bias") or path.startswith("blocks.0") for path in more), "what only forward reads"
    assert bool(more) == (name == "stage 3, nothing kept")
    assert len(activations(checked)) <= BLOCKS < len(activations(plain)) / 2, "they are computed again"
    assert max(gathered_bytes(checked.timeline)) <= max(gathered_bytes(plain.timeline))
    assert gathered_bytes(checked.timeline)[-1] == 0
    if name == "stage 3, nothing kept":
        parameters = parameter_inputs(checked)
        assert saved(checked.forward) & from_parameters_alone(checked.forward, parameters) == set()
        assert gathered_bytes(checked.forward_timeline)[-1] == 0


def two_layers(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    for _ in range(2):
        x = ltorch.tanh(ltorch.linear(x, weight, bias))
    return x


class Own(nn.Module):
    """Thunder's own checkpoint, of functions of tensors."""

    def __init__(self, is_checked: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.is_checked = is_checked

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            args: Any = (x, layer.weight, layer.bias)
            x = ltorch.checkpoint(two_layers, *args) if self.is_checked else two_layers(*args)
        return x


@pytest.mark.parametrize("name", policies())
def test_thunders_own_does_the_same(name: str) -> None:
    x = torch.zeros(2, WIDTH)
    plain, checked = (
        tz.trace(fresh(Own, is_checked), x, policy=policies()[name], world_size=2) for is_checked in (False, True)
    )
    assert collectives(checked) == collectives(plain)
    assert len(activations(checked)) < len(activations(plain))
    assert max(gathered_bytes(checked.timeline)) <= max(gathered_bytes(plain.timeline))


def train(model: Any, xs: list[Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x in xs:
            (model(x).square().mean() / len(xs)).backward()
        optimizer.step()


def run(rank: int, world_size: int) -> list[tuple[str, int, int, dict[str, Tensor]]]:
    results = []
    for name, policy in policies().items():
        model = sharded(fresh(Net, True), policy)
        train(model, [batch(rank)])
        weights = tz.full_state_dict(model)
        model(batch(rank)).sum().backward()  # refreshes ZeRO-1's rows
        with count_sends() as sent:
            model(batch(rank)).square().mean().backward()
        ops = tz.traces_of(model).timeline.ops
        counted = [op for op in ops if policy.stage != 1 or op.backward]
        results.append((name, sum(sent), sum(map(tz.traces_of(model).timeline.bytes_sent, counted)), weights))
    return results


def test_training_equals_one_process(ranks_pool: RanksPool) -> None:
    right = fresh(Net, False)
    train(right, [batch(0), batch(1)])
    for results in ranks_pool.run(2, run):
        for name, sent, foreseen, weights in results:
            assert sent == foreseen, name
            for path, weight in right.state_dict().items():
                assert error(weights[path], weight) < 1e-5, (name, path)
