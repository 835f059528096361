"""Lengths and numbers that change become symbols of few programs, or the program that ran longest ago is dropped."""

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
from tests.harness.ranks import LONG, RanksPool
from thunder_zero.capture import forward
from thunder_zero.capture.zero_module import captured_forward

LENGTHS_BY_RANK = [(8, 8), (12, 9), (16, 8), (31, 30), (9, 8), (5, 40)]  # for each step, the length of each rank
LENGTHS_OF_RANK_1 = [(8, 8), (8, 12), (8, 16), (8, 9)]  # rank 0 has a single length, and a static program
SMALL = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1)


def rows_of(lengths: Sequence[int], step: int) -> list[Tensor]:
    """Return two sequences for each rank."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(SMALL.vocab_size, (2, length), generator=generator) for length in lengths]


def train_on_lengths(side: Side, steps: Sequence[Sequence[int]]) -> Steps:
    """Train on batches of other lengths in each step; yield the mean loss over ranks."""
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, lengths in enumerate(steps):
        tokens = rows_of(lengths, step)
        losses = [model(batch, batch).loss for batch in ([tokens[side.rank]] if side.is_sharded else tokens)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        yield side.mean(torch.stack(losses).mean())
        optimizer.zero_grad()


def list_launches(model: Any) -> list[list[tuple[str, ...]]]:
    """Return the parameters of each collective of each compiled program, in order."""
    programs = [next(iter(captured.programs.values())) for captured in captured_forward(model).kept.values()]
    compiled = [entry.traces() for program in programs for entry in program.by_mode.values()]
    return [[op.params for op in traces.timeline.launches.values()] for traces in compiled]


def train_on_ranks(rank: int, world_size: int, stage: int, steps: Sequence[Sequence[int]]) -> None:
    plain = fresh(Llama, SMALL)
    model: Any = tz.compile(deepcopy(plain), stage=stage)
    trains_as_one_process([(model, plain)], partial(train_on_lengths, steps=steps))
    symbolic = len({lengths_of_ranks[rank] for lengths_of_ranks in steps}) > 1
    assert len(captured_forward(model).kept) == 1 + symbolic
    everywhere = [program for programs in gather_objects(list_launches(model)) for program in programs]
    assert all(program == everywhere[0] for program in everywhere), "programs have unlike collectives"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 2])
def test_ranks_of_other_lengths_run_few_programs(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, train_on_ranks, stage, LENGTHS_BY_RANK)


@pytest.mark.slow
def test_one_rank_runs_a_static_program_and_the_other_a_symbolic_one(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, train_on_ranks, 3, LENGTHS_OF_RANK_1)


def train_experts(rank: int, world_size: int) -> None:
    """Train experts that are an operator, whose numbers of tokens are symbols; refuse experts in a loop."""
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
        for step, lengths in enumerate(LENGTHS_BY_RANK[:4]):
            tokens = rows_of(lengths, step)
            batches = [tokens[side.rank]] if side.is_sharded else tokens
            loss = torch.stack([network(input_ids=rows, labels=rows).loss for rows in batches]).mean()
            loss.backward()
            yield side.mean(loss)
            network.zero_grad()

    trains_as_one_process([(model, plain)], steps)
    assert len(captured_forward(model).kept) <= 4


@pytest.mark.slow
def test_experts_get_any_number_of_tokens(ranks_pool: RanksPool) -> None:
    pytest.importorskip("transformers")
    ranks_pool.run(2, train_experts, timeout=LONG)


class Scaled(nn.Module):
    """A module that computes with a float and an int, as with a temperature and a number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float, times: int) -> Tensor:
        y: Tensor = self.a(x) * scale + x.sum() / (1.0 + scale)
        return F.pad(y, (0, times)) * times


def train_on_numbers(side: Side) -> Steps:
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


def change_numbers(rank: int, world_size: int) -> None:
    plain = fresh(Scaled)
    model: Any = tz.compile(deepcopy(plain), stage=3)
    trains_as_one_process([(model, plain)], train_on_numbers)
    assert len(captured_forward(model).kept) == 2


def test_numbers_that_change_become_symbols(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, change_numbers)


class Chunked(torch.autograd.Function):
    """Products of chunks of rows, written into slices of a buffer, as in TRL's loss. The second output is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunk: int) -> tuple[Tensor, None]:
        ctx.save_for_backward(x, weight)
        ctx.chunk = chunk
        buffer, sums = x.new_empty(min(chunk, len(x)), 2 * len(weight)), x.new_zeros(len(x))
        for start in range(0, len(x), chunk):
            stop = min(start + chunk, len(x))
            torch.mm(x[start:stop], weight.t(), out=buffer[: stop - start, : len(weight)])
            sums[start:stop] += buffer[: stop - start, : len(weight)].square().sum(-1)
        return sums, None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad if grad.is_contiguous() else grad.contiguous()
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), ctx.chunk):
            rows = x[start : start + ctx.chunk]
            parts = 2 * grad[start : start + ctx.chunk, None] * (rows @ weight.t())
            grad_x[start : start + ctx.chunk] = parts @ weight
            grad_weight += parts.t() @ rows
        return grad_x, grad_weight, None


class Looping(nn.Module):
    """A module that cuts rows into chunks: in forward, and in an autograd function that gets a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.chunk = nn.Linear(4, 4), 8

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.a(x[start : start + self.chunk]).tanh() for start in range(0, len(x), self.chunk)]
        sums: tuple[Tensor, None] = Chunked.apply(torch.cat(parts), self.a.weight, self.chunk)  # type: ignore[no-untyped-call]
        return sums[0].mean()


def loop_over_chunks(rank: int, world_size: int) -> None:
    """Train on lengths of one chunk, and of two chunks. Each number of chunks takes a program."""
    plain = fresh(Looping)
    model: Any = tz.compile(deepcopy(plain), stage=3)

    def steps(side: Side) -> Steps:
        (network,) = side.models
        for length in (5, 6, 7, 3, 11, 13, 14, 4):
            rows = torch.arange(4.0 * length).view(length, 4).cos()
            loss = network(rows)
            loss.backward()
            yield side.mean(loss)
            network.zero_grad()

    trains_as_one_process([(model, plain)], steps)
    assert len(captured_forward(model).kept) == 3, "one for the first length, and one for each number of chunks"


@pytest.mark.slow
def test_a_loop_over_chunks_has_a_program_for_each_number_of_chunks(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, loop_over_chunks)


class Named(nn.Module):
    """A module that computes differently for each name, so that no symbol can join programs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = self.a(x) * len(name)
        return y


def count_programs(rank: int, world_size: int) -> None:
    """Count the programs that three lengths take, by ``dynamic`` and ``mark_dynamic``."""
    cases = [(None, False, 2), (True, False, 1), (False, False, 3), (None, True, 1)]  # dynamic, marks, programs
    for dynamic, marks, count in cases:
        torch._dynamo.reset()
        plain = fresh(Named)
        model: Any = tz.compile(deepcopy(plain), stage=3, dynamic=dynamic)
        for length in (3, 4, 5):
            x = torch.ones(2, length, 4)  # torch keeps the mark on the tensor
            if marks:
                torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(model(x, "a"), plain(x, "a"))
        assert len(captured_forward(model).kept) == count, (dynamic, count)
        with torch.no_grad():
            torch.testing.assert_close(model(x, "a"), plain(x, "a"))
        assert model._forward_fn.program_count == count + 1, "a program for forward alone, of the same graph"


def test_dynamic_and_mark_dynamic_save_programs(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, count_programs)


def drop_oldest(rank: int, world_size: int) -> None:
    """Check that the program that ran longest ago is dropped, and that training goes on."""
    plain = fresh(Named)
    model: Any = tz.compile(deepcopy(plain), stage=3)

    def step(name: str) -> None:
        x = torch.ones(2 + len(name), 4)
        loss = model(x, name).square().sum()
        expected = plain(x, name).square().sum()
        grads = torch.autograd.grad(expected, list(plain.parameters()))
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(model.get_parameter("a.bias").grad.full_tensor(), grads[1])
        model.zero_grad()

    with mock.patch.object(forward, "MOST", 3), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("a", "bb", "ccc", "a"):
            step(name)
        captured_graphs = captured_forward(model).kept.values()
        references = {len(graph.programs): ref(next(iter(graph.programs.values()))) for graph in captured_graphs}
        oldest = ref(next(iter(captured_forward(model).kept.values())))  # of "bb"
        assert not [warning for warning in caught if "dropped" in str(warning.message)], references
        for name in ("dddd", "eeeee", "a", "ccc", "bb"):
            step(name)
    gc.collect()
    assert oldest() is None, "a dropped program is freed"
    (sentence,) = [str(warning.message) for warning in caught if "dropped" in str(warning.message)]
    for words in ("Named has 3 programs", "ran longest ago", "because", "name", "tools.programs(model)"):
        assert words in sentence, sentence
    assert len(captured_forward(model).kept) <= 5, "those of symbolic lengths up to the limit, and the first one's"
    assert dist.get_world_size() == world_size


def test_programs_that_no_symbol_can_join_are_dropped(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, drop_oldest)
