"""Families of Hugging Face's models train as in eager PyTorch; and what docs/zoo.md claims."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from examples.bench import zoo_table
from examples.bench.families import BY_NAME
from examples.bench.zoo_steps import eager, train
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

STAGES = zoo_table.STAGES
FAST = {"Llama": (3,), "BERT": (2,), "Mixtral": (3,), "Whisper": (2,)}  # one text, one masked, experts, two halves
GRAPHS = {  # of those that are not one graph; docs/zoo.md says why
    "wav2vec2": 9,
    "Mixtral": 2,
    "Qwen3-MoE": 2,
    "gpt-oss": 2,
    "DeepSeek-V3": 2,
    "Qwen2-VL": 29,
    "DETR": 20,
    "Segformer": 2,
}
TEXT = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "Phi-3", "GPT-2", "GPT-NeoX", "Mamba-2", "LitGPT")
EXPERTS = ("Mixtral", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3")
PICTURES = ("ViT", "CLIP", "SigLIP", "ResNet", "Segformer", "Qwen2-VL", "DETR")
OTHERS = ("BERT", "T5", "Whisper", "wav2vec2")


def trained(rank: int, world_size: int, stages: dict[str, Sequence[int]]) -> None:
    """All families of one launch."""
    for name, of in stages.items():
        right = eager(BY_NAME[name], rank, world_size)
        for stage in of:
            found, where = train(BY_NAME[name], stage, rank, right), f"{name}, stage {stage}"
            assert found["error"] <= zoo_table.MOST_ERROR, (where, found)
            assert found["graphs"] == GRAPHS.get(name, 1), (where, found)
            assert found["launched"] == found["scheduled"] > 0, (where, found)
            torch.compiler.reset()


def left(*names: str) -> dict[str, tuple[int, ...]]:
    """The stages that no fast case has."""
    return {name: tuple(stage for stage in STAGES if stage not in FAST.get(name, ())) for name in names}


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("stages", [FAST, *slow(left(*TEXT), left(*EXPERTS), left(*PICTURES), left(*OTHERS))])
def test_families_train_as_eager_does_with_every_gather_in_its_schedule(
    ranks_pool: RanksPool, stages: dict[str, Sequence[int]]
) -> None:
    """Each rank's batch, seed and buffers are its own; gradients are the mean of what eager gives for them."""
    if "LitGPT" in stages:
        pytest.importorskip("litgpt")
    ranks_pool.run(2, trained, stages, timeout=550.0)


def test_every_family_is_tested() -> None:
    assert sorted((*TEXT, *EXPERTS, *PICTURES, *OTHERS)) == sorted(BY_NAME)


def test_the_page_claims_what_was_measured() -> None:
    """All families train right in both stages, every gather scheduled."""
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
