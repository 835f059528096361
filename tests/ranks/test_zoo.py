"""Families of Hugging Face's models under dynamo: graphs, gathers and operators; changing shapes; docs/zoo.md."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import thunder_zero as tz
from examples.bench import zoo_table
from examples.bench.families import BY_NAME, DECODER, hugging_face
from examples.bench.zoo_steps import train
from examples.bench.zoo_table import Failed
from tests.harness.errors import raised
from tests.harness.ranks import RanksPool
from thunder_zero.dynamo import module as dynamo_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
SEVERAL_GRAPHS = ("Mixtral", "Whisper")


def trained(rank: int, world_size: int, name: str, stage: int) -> dict[str, Any]:
    return train(BY_NAME[name], "tz.compile", stage, rank, world_size)


@needs_transformers
@pytest.mark.parametrize(
    ("name", "stage", "gathers", "registered"),
    [("Llama", 3, 21, []), ("T5", 2, 26, ["Tensor.new_zeros", "torch.min"])],
)
def test_one_graph_with_every_gather_in_its_schedule(
    ranks_pool: RanksPool, name: str, stage: int, gathers: int, registered: list[str]
) -> None:
    for found in ranks_pool.run(2, trained, name, stage, timeout=250.0):
        assert found["error"] <= zoo_table.MOST_ERROR
        assert (found["graphs"], found["scheduled"], found["launched"]) == (1, gathers, gathers)
        assert found["registered"] == registered


def many_experts(rank: int, world_size: int, alike: bool) -> list[str]:
    """Steps in which the ranks' words go to other experts; if ``alike``, after one in which they do not."""
    make = hugging_face("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=16)
    torch.manual_seed(0)
    model = tz.compile(make(), stage=3)
    steps = [torch.tensor([[7, 7]])] * alike + [torch.tensor([[5, 9]] if rank else [[7, 7]])]
    return [raised(partial(learn, model, step)) for step in steps]


def learn(model: tz.ZeroModule, tokens: Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


@needs_transformers
def test_ranks_whose_words_go_to_other_experts_are_refused(ranks_pool: RanksPool) -> None:
    for (found,) in ranks_pool.run(2, many_experts, False, timeout=250.0):
        assert "the ranks would run different collectives: line 0 of forward of graph" in found
        assert found.endswith("; give every rank inputs that take the same path through the module")
    for first, found in ranks_pool.run(2, many_experts, True, timeout=250.0):
        assert first == "nothing"
        assert "the ranks do different things: rank 0 and rank 1 are both in forward of graph" in found
        assert "; correct the script" in found


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor, scale: float) -> Tensor:
        return self.out(self.embedding(tokens)) * scale


def step_of(model: tz.ZeroModule, length: int, scale: float = 2.0) -> None:
    model(torch.ones(2, length, dtype=torch.long), scale).sum().backward()


def lengths(rank: int, world_size: int, most: int) -> dict[str, Any]:
    """A new length in each step, until the model refuses one."""
    torch._dynamo.reset()
    model = tz.compile(Words(), stage=3)
    warned, error = [], "nothing"
    with mock.patch.object(dynamo_module, "MOST_PROGRAMS", most):
        for length in range(1, most + 2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                error = raised(partial(step_of, model, length))
            warned += [(length, str(each.message)) for each in caught if "compiled" in str(each.message)]
    known = raised(partial(step_of, model, 1))
    return {"warned": warned, "error": error, "known": known}


def test_many_lengths_are_warned_of_and_then_refused(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, lengths, 9):
        assert found["warned"] == [
            (
                8,
                "Words was compiled 8 times: input L['tokens'] had 8 shapes, the last of them (2, 6), (2, 7), (2, 8), "
                "and each costs a compilation; pad it to a few lengths, or sort batches by length",
            )
        ]
        assert found["error"] == (
            "RuntimeError: Words was compiled 9 times for one function, and dynamo would run it without a graph now, "
            "on this rank alone, where nothing gathers parameters; input L['tokens'] had 9 shapes, the last of them "
            "(2, 7), (2, 8), (2, 9), and each costs a compilation; pad it to a few lengths, or sort batches by length"
        )
        assert found["known"] == "nothing"


def scales(rank: int, world_size: int) -> str:
    """Another number in each step."""
    torch._dynamo.reset()
    model = tz.compile(Words(), stage=3)
    with mock.patch.object(dynamo_module, "MOST_PROGRAMS", 2):
        errors = [raised(partial(step_of, model, 1, scale)) for scale in (1.0, 2.0, 3.0)]
    return errors[-1]


def test_what_changes_beside_shapes(ranks_pool: RanksPool) -> None:
    for error in ranks_pool.run(2, scales):
        assert error == (
            "RuntimeError: Words was compiled 2 times for one function, and dynamo would run it without a graph now, "
            "on this rank alone, where nothing gathers parameters; keep what changes from call to call constant "
            "(TORCH_LOGS=recompiles names it)"
        )


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).float().softmax(-1).cumsum(-1) * torch.logit(x.sigmoid())


def registered(rank: int, world_size: int) -> tuple[str, ...]:
    model = tz.compile(Methods(), stage=3)
    model(torch.randn(2, 3)).sum().backward()
    return tz.traces_of(model).registered


def test_only_operators_that_thunder_does_not_know_are_registered(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(1, registered) == [("torch.logit",)]


def test_the_page_has_what_was_measured() -> None:
    rows = zoo_table.read_rows()
    page = zoo_table.PAGE.read_text()
    assert [row.family for row in rows] == list(BY_NAME)
    assert zoo_table.with_tables(page, rows) == page


@pytest.mark.parametrize("row", zoo_table.read_rows(), ids=lambda row: row.family)
def test_what_the_page_claims(row: zoo_table.Row) -> None:
    """All families train right under dynamo, every gather scheduled; all but two in one graph."""
    for name in zoo_table.FRONT_ENDS:
        cell = row.cells[name]
        if isinstance(cell, Failed):
            assert name == "thunder.jit"
            assert row.alone is not None, "Thunder alone compiles it"
            continue
        assert cell.is_right
        assert 0 < cell.launched <= cell.scheduled  # ZeRO-1 gathers once what two graphs read
        assert (cell.graphs == 1) is (name == "thunder.jit" or row.family not in SEVERAL_GRAPHS)
