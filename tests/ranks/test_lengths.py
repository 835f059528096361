"""Lengths and numbers that change from call to call: what torch makes symbols of, and what is kept where it cannot."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz
from examples.bench.families import DECODER, EXPERTS, hugging_face
from examples.llama import Llama, LlamaConfig
from tests.harness.as_one_process import Side, Steps, gather_objects, trains_as_one_process
from tests.harness.errors import error_of
from tests.harness.models import fresh
from tests.harness.ranks import RanksPool
from thunder_zero.frontends.dynamo import graphs

OWN_LENGTHS = [(8, 8), (12, 9), (16, 8), (31, 30), (9, 8), (5, 40)]  # of each rank, in each step
ONE_RANKS = [(8, 8), (8, 12), (8, 16), (8, 9)]  # rank 0 has one length all the time, whose program is static
SMALL = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2)


def rows_of(lengths: Sequence[int], step: int) -> list[Tensor]:
    """Two sequences for each rank."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(SMALL.vocab_size, (2, length), generator=generator) for length in lengths]


def lengths(side: Side, steps: Sequence[Sequence[int]]) -> Steps:
    """Train on batches of other lengths in each step; the loss is the mean over ranks."""
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, each in enumerate(steps):
        tokens = rows_of(each, step)
        losses = [model(own, own).loss for own in ([tokens[side.rank]] if side.is_sharded else tokens)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        yield side.mean(torch.stack(losses).mean())
        optimizer.zero_grad()


def launches(model: Any) -> list[list[tuple[str, ...]]]:
    """Return the parameters of each collective of each compiled program, in order."""
    programs = [next(iter(captured.programs.values())) for captured in model._graphs.captured.values()]
    compiled = [entry.traces() for of_graph in programs for entry in of_graph.entries.values()]
    return [[op.params for op in traces.timeline.launches.values()] for traces in compiled]


def trains(rank: int, world_size: int, stage: int, steps: Sequence[Sequence[int]]) -> None:
    torch._dynamo.reset()
    plain = fresh(Llama, SMALL)
    model: Any = tz.compile(deepcopy(plain), stage=stage)
    trains_as_one_process([(model, plain)], partial(lengths, steps=steps))
    symbolic = len({lengths_of_ranks[rank] for lengths_of_ranks in steps}) > 1
    assert len(model._graphs.captured) == 1 + symbolic
    everywhere = [program for programs in gather_objects(launches(model)) for program in programs]
    assert all(program == everywhere[0] for program in everywhere), "a rank may run one program, and its peer another"


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_have_lengths_of_their_own_and_few_programs(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, trains, stage, OWN_LENGTHS)


def test_one_rank_runs_a_static_program_and_the_other_a_symbolic_one(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, trains, 3, ONE_RANKS)


def experts(rank: int, world_size: int) -> None:
    """How many tokens an expert gets is a number of the program where experts are one operator; in a loop it would be a
    graph for each."""
    make = hugging_face("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4, **EXPERTS)
    looping = fresh(make)
    looping.set_experts_implementation("eager")
    text = error_of(lambda: tz.compile(looping, stage=3)(*rows_of([8], 0) * 2))
    assert "MixtralExperts reads parameter 'model.layers.0.mlp.experts" in text, text
    assert "set_experts_implementation('grouped_mm')" in text, text
    torch._dynamo.reset()
    plain = fresh(make)
    plain.set_experts_implementation("grouped_mm")
    model: Any = tz.compile(deepcopy(plain), stage=3)

    def steps(side: Side) -> Steps:
        (network,) = side.models
        for step, of_ranks in enumerate(OWN_LENGTHS[:4]):
            tokens = rows_of(of_ranks, step)
            batches = [tokens[side.rank]] if side.is_sharded else tokens
            loss = torch.stack([network(input_ids=rows, labels=rows).loss for rows in batches]).mean()
            loss.backward()
            yield side.mean(loss)
            network.zero_grad()

    trains_as_one_process([(model, plain)], steps)
    assert len(model._graphs.captured) <= 4


@pytest.mark.slow
def test_experts_get_any_number_of_tokens(ranks_pool: RanksPool) -> None:
    pytest.importorskip("transformers")
    ranks_pool.run(2, experts, timeout=180)


class Scaled(nn.Module):
    """A float and an int that change, as a temperature and a number of steps do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float, times: int) -> Tensor:
        y: Tensor = self.a(x) * scale + x.sum() / (1.0 + scale)
        return F.pad(y, (0, times)) * times


def numbers(side: Side) -> Steps:
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(8):
        rows = torch.arange(16.0).view(4, 4).cos()
        loss = model(side.rows(rows), 1.0 / (step + 1), step + 2).square().mean()
        if not side.is_sharded:  # the mean over ranks, of which each sees its own rows' sum
            parts = [model(part, 1.0 / (step + 1), step + 2).square().mean() for part in rows.chunk(2)]
            loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        yield side.mean(loss)
        optimizer.zero_grad()


def numbers_change(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    plain = fresh(Scaled)
    model: Any = tz.compile(deepcopy(plain), stage=3)
    trains_as_one_process([(model, plain)], numbers)
    assert len(model._graphs.captured) == 2


def test_numbers_that_change_become_symbols(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, numbers_change)


class Named(nn.Module):
    """Does another thing for each name, so that no symbol helps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = self.a(x) * len(name)
        return y


def is_dynamic(rank: int, world_size: int) -> None:
    """What ``dynamic`` and ``mark_dynamic`` say: how many programs three lengths take."""
    cases = [(None, False, 2), (True, False, 1), (False, False, 3), (None, True, 1)]  # dynamic, marks, programs
    for dynamic, marks, count in cases:
        torch._dynamo.reset()
        plain = fresh(Named)
        model: Any = tz.compile(deepcopy(plain), stage=3, dynamic=dynamic)
        for length in (3, 4, 5):
            x = torch.ones(2, length, 4)  # torch marks tensors themselves
            if marks:
                torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(model(x, "a"), plain(x, "a"))
        assert len(model._graphs.captured) == count, (dynamic, count)
        with torch.no_grad():
            torch.testing.assert_close(model(x, "a"), plain(x, "a"))
        assert model._count_programs() == count + 1, "a program for forward alone, of the same graph"


def test_what_is_said_to_be_dynamic(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, is_dynamic)


def drops(rank: int, world_size: int) -> None:
    """The program that ran longest ago is dropped, and training goes on."""
    torch._dynamo.reset()
    plain = fresh(Named)
    model: Any = tz.compile(deepcopy(plain), stage=3)
    x = torch.ones(2, 4)

    def step(name: str) -> None:
        loss = model(x, name).square().sum()
        right = plain(x, name).square().sum()
        grads = torch.autograd.grad(right, list(plain.parameters()))
        loss.backward()
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(model.get_parameter("a.bias").grad.full_tensor(), grads[1])
        model.zero_grad()

    with mock.patch.object(graphs, "MOST", 3), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name in ("a", "bb", "ccc", "a"):
            step(name)
        graphs_kept = model._graphs.captured.values()
        kept = {len(graph.programs): ref(next(iter(graph.programs.values()))) for graph in graphs_kept}
        oldest = ref(next(iter(model._graphs.captured.values())))  # of "bb"
        assert not [warning for warning in seen if "dropped" in str(warning.message)], kept
        for name in ("dddd", "eeeee", "a", "ccc", "bb"):
            step(name)
    gc.collect()
    assert oldest() is None, "its memory went with it"
    (sentence,) = [str(warning.message) for warning in seen if "dropped" in str(warning.message)]
    for words in ("Named has 3 programs", "ran longest ago", "because", "name", "tools.programs(model)"):
        assert words in sentence, sentence
    assert len(model._graphs.captured) <= 4
    assert dist.get_world_size() == world_size


def test_programs_that_no_symbol_can_join_are_dropped(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, drops)
