"""Families of Hugging Face's models train as in eager PyTorch, and docs/zoo.md says what was measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from examples.bench import zoo_table
from examples.bench.families import BY_NAME
from examples.bench.zoo_steps import eager, train
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow

STAGES = zoo_table.STAGES
# A causal and a masked language model, experts, an encoder with a decoder; CI trains each in the other stage as well
TWICE = {"Llama": (3,), "BERT": (2,), "Mixtral": (3,), "Whisper": (2,)}
GRAPHS = {  # of families that are not one graph; docs/zoo.md says why
    "wav2vec2": 9,
    "Mixtral": 2,
    "Qwen3-MoE": 2,
    "gpt-oss": 2,
    "DeepSeek-V3": 2,
    "Qwen2-VL": 29,
    "DETR": 20,
    "Segformer": 2,
    "LSTM, packed": 3,
}
TEXT = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "Phi-3", "GPT-2", "GPT-NeoX", "Mamba-2", "LitGPT")
EXPERTS = ("Mixtral", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3")
PICTURES = ("ViT", "CLIP", "SigLIP", "ResNet", "Segformer", "Qwen2-VL", "DETR")
OTHERS = ("BERT", "T5", "Whisper", "wav2vec2", "Llama, DoRA of peft", "LSTM, packed")
GROUPS = (TEXT, EXPERTS, PICTURES, OTHERS)  # a launch each


@pytest.fixture(scope="module")
def ranks_pool() -> Iterator[RanksPool]:
    """Start a pool for these tests only, because dynamo and the libraries stay in memory, 0.4 GiB a rank."""
    with RanksPool() as pool:
        yield pool


def train_families(rank: int, world_size: int, stages: dict[str, Sequence[int]]) -> None:
    """Train all families of a launch and compare them with eager PyTorch."""
    for name, family_stages in stages.items():
        expected = eager(BY_NAME[name], rank, world_size)
        for stage in family_stages:
            result, label = train(BY_NAME[name], stage, rank, expected), f"{name}, stage {stage}"
            assert result["error"] <= zoo_table.MOST_ERROR, (label, result)
            assert result["graphs"] == GRAPHS.get(name, 1), (label, result)
            assert result["launched"] == result["scheduled"] > 0, (label, result)
            torch.compiler.reset()


def first_stages(names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the stage in which CI trains each family: not one of ``TWICE``, and alternating."""
    alternating = {name: (STAGES[index % len(STAGES)],) for index, name in enumerate(BY_NAME)}
    return {name: tuple({*STAGES} - {*TWICE[name]}) if name in TWICE else alternating[name] for name in names}


def other_stages(names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the stages that no case in CI has."""
    tested = first_stages(names)
    rest = {name: tuple({*STAGES} - {*tested[name], *TWICE.get(name, ())}) for name in names}
    return {name: stages for name, stages in rest.items() if stages}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("stages", [*slow(TWICE, *map(first_stages, GROUPS)), *deep(*map(other_stages, GROUPS))])
def test_families_train_as_eager_does_with_every_gather_in_its_schedule(
    ranks_pool: RanksPool, stages: dict[str, Sequence[int]]
) -> None:
    """Each rank has its own batch, seed and buffers; gradients are the mean of eager's on all ranks."""
    if "LitGPT" in stages:
        pytest.importorskip("litgpt")
    if "Llama, DoRA of peft" in stages:
        pytest.importorskip("peft")
    ranks_pool.run(2, train_families, stages, timeout=550.0)


def test_every_family_is_tested() -> None:
    """CI trains each family in at least one stage; the deep cases cover the rest."""
    cases: list[Mapping[str, Sequence[int]]] = [TWICE, *map(first_stages, GROUPS), *map(other_stages, GROUPS)]
    assert {name for case in cases[:5] for name in case} == set(BY_NAME)
    assert sorted((name, stage) for case in cases for name, stages in case.items() for stage in stages) == sorted(
        (name, stage) for name in BY_NAME for stage in STAGES
    )


def test_the_page_says_what_was_measured() -> None:
    """All families train correctly in both stages, and every gather is scheduled."""
    rows = zoo_table.read_rows()
    page = zoo_table.PAGE.read_text()
    assert [row.family for row in rows] == list(BY_NAME)
    assert zoo_table.with_tables(page, rows) == page
    for row in rows:
        for stage in STAGES:
            cell, case = row.cells[stage], (row.family, stage)
            assert isinstance(cell, zoo_table.Found), case
            assert cell.is_right, case
            assert cell.launched == cell.scheduled > 0, case
            assert cell.graphs == GRAPHS.get(row.family, 1), case
