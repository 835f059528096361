"""Families of Hugging Face's models under dynamo: graphs, gathers and operators; and what docs/zoo.md claims."""

from __future__ import annotations

import importlib.util
from unittest import mock

import pytest

from examples.bench import zoo_table
from examples.bench.families import BY_NAME
from examples.bench.zoo_steps import train
from examples.bench.zoo_table import Failed
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow

from thunder.core import interpreter

SEVERAL_GRAPHS = ("Mixtral", "Whisper")


def trained(rank: int, world_size: int, name: str, stage: int, gathers: int, registered: list[str]) -> None:
    with mock.patch.object(interpreter, "_run_frame", wraps=interpreter._run_frame) as run:
        found = train(BY_NAME[name], "tz.compile", stage, rank, world_size)
    assert run.call_count == 0, "no Python is interpreted"
    assert found["error"] <= zoo_table.MOST_ERROR, found
    assert (found["graphs"], found["scheduled"], found["launched"]) == (1, gathers, gathers), found
    assert found["registered"] == registered, found


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("name", "stage", "gathers", "registered"),
    [*slow(("Llama", 3, 21, [])), *deep(("T5", 2, 26, ["Tensor.new_zeros", "torch.min"]))],
)
def test_one_graph_with_every_gather_in_its_schedule(
    ranks_pool: RanksPool, name: str, stage: int, gathers: int, registered: list[str]
) -> None:
    ranks_pool.run(2, trained, name, stage, gathers, registered, timeout=250.0)


def test_the_page_claims_what_was_measured() -> None:
    """All families train right under dynamo, every gather scheduled; all but two in one graph."""
    rows = zoo_table.read_rows()
    page = zoo_table.PAGE.read_text()
    assert [row.family for row in rows] == list(BY_NAME)
    assert zoo_table.with_tables(page, rows) == page
    for row in rows:
        for name in zoo_table.FRONT_ENDS:
            cell, case = row.cells[name], (row.family, name)
            if isinstance(cell, Failed):
                assert name == "thunder.jit", case
                assert row.alone is not None, (case, "Thunder alone compiles it")
                continue
            assert cell.is_right, case
            assert 0 < cell.launched <= cell.scheduled, case  # ZeRO-1 gathers once what two graphs read
            assert (cell.graphs == 1) is (name == "thunder.jit" or row.family not in SEVERAL_GRAPHS), case
