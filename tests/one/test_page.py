"""The report: its figures are those of estimate and memory, and its lines, bars, collectives and tensors agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.commands import output_of, refusal_of
from tests.harness.errors import fails
from tests.harness.tiers import slow
from tests.harness.traced import Chain, ResidualBlock, mean_square, traced
from thunder_zero.plan.amounts import duration, size
from thunder_zero.schedule.ops import Gather, Launch, ends
from thunder_zero.tools import Device, Link
from thunder_zero.tools.forecast.rehearsal import Rehearsal
from thunder_zero.tools.table.table import Table
from thunder_zero.tools.time.estimate import by_times
from thunder_zero.tools.views.page.data import Data, data_of
from thunder_zero.tools.views.page.report import page_of

DEVICE = Device("slow", {"float32": 1e9}, 1e10, 1 << 30, intra_node=Link(1e8, 1e-6), inter_node=Link(5e7, 1e-6))
UNITS, WIDTH = 3, 16


def build_model() -> Chain:
    return Chain(*(ResidualBlock(WIDTH) for _ in range(UNITS)))


class TwoOutputs(nn.Module):
    """Return a mean and the output of a layer that does not contribute to it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.used.forward(x)
        return y.square().mean(), self.unused.forward(y)


TRAINING: dict[str, Any] = {"loss": mean_square, "optimizer": torch.optim.AdamW}


def trace_model(stage: int | tz.Policy = 3, **options: Any) -> tz.tools.Traces:
    return traced(build_model, (8, WIDTH), stage, **options)


def make_table(stage: int = 3, *, with_training: bool = True, **options: Any) -> Table:
    return tz.tools.step_table(trace_model(stage, **options), device=DEVICE, **(TRAINING if with_training else {}))


def time_of(table: Table) -> tz.tools.Estimate:
    assert table.time is not None
    return table.time


def rows_of(columns: Data) -> list[Data]:
    """Return the rows of a table with a list for each column."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


each_stage = pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])


@each_stage
def test_figures_are_those_of_estimate_and_memory_and_counted_bytes(stage: int) -> None:
    page = page_of(trace_model(stage), DEVICE, **TRAINING)
    time = tz.tools.estimate(trace_model(stage), DEVICE, **TRAINING)
    memory = tz.tools.memory(trace_model(stage), **TRAINING)
    timeline, figures = trace_model(stage).timeline, page["programs"][0]["figures"]
    times = [figures[f"{name}_seconds"] for name in ("step", "compute", "exposed")]
    assert [*times, figures["mfu"]] == [time.seconds, time.compute_seconds, time.exposed_seconds, time.mfu]
    peaks = [figures[f"{name}_bytes"] for name in ("peak", "at_rest", "optimizer_step")]
    assert peaks == [memory.peak, memory.at_rest, memory.optimizer_step]
    assert figures["sent_bytes"] == sum(timeline.traffic(op).sent for op in timeline.ops)
    assert figures["gathers"] == sum(isinstance(op, Gather) for op in timeline.ops)
    assert sum(row.flops for row in make_table(stage).all_rows) == time.flops
    shares = sum(int(share) for share in re.findall(r"(\d+)%", page["programs"][0]["bound"]))
    assert shares == pytest.approx(100, abs=2)
    assert "\\u003c" not in json.dumps(page)
    assert [tile["name"] for tile in page["top"]][:2] == ["Time of a step", "Peak memory"]


def test_one_rehearsal_serves_time_and_memory() -> None:
    """The loss runs twice per program: once to find the outputs that it uses. The optimizer is built once."""
    losses, optimizers = mock.Mock(side_effect=mean_square), mock.Mock(side_effect=torch.optim.AdamW)
    with mock.patch("thunder_zero.tools.forecast.recorder.Rehearsal", wraps=Rehearsal) as rehearsal:
        page_of(trace_model(3), DEVICE, beside=trace_model(2), loss=losses, optimizer=optimizers)
    assert [mocked.call_count for mocked in (rehearsal, losses, optimizers)] == [2, 4, 2]  # for two programs


def test_time_and_memory_leave_out_what_the_loss_does_not_use() -> None:
    """Layers that lead only to outputs that the loss does not use are left out, as ``for_loss`` does."""
    training: dict[str, Any] = {"loss": lambda outputs: outputs[0], "optimizer": torch.optim.AdamW}
    whole = traced(TwoOutputs, (8, WIDTH))
    pages = page_of(whole, DEVICE, **training), page_of(tz.tools.for_loss(whole, training["loss"]), DEVICE, **training)
    figures, of_pruned, of_whole = (page["programs"][0]["figures"] for page in (*pages, page_of(whole, DEVICE)))
    assert figures == of_pruned
    assert figures["step_seconds"] == tz.tools.estimate(whole, DEVICE, **training).seconds
    assert figures["sent_bytes"] < of_whole["sent_bytes"]


@each_stage
def test_each_operation_is_on_its_line_of_the_trace(stage: int) -> None:
    table = make_table(stage)
    for index, op in enumerate(table.traces.timeline.ops):
        row = table.of(index)
        assert row.position == table.traces.lines[index][0]
        assert (row.kind, set(row.params) >= set(op.params)) == (op.kind if op.params or row.kind else "", True)
        assert row.phase == ("backward" if op.backward else "forward")
    phases = list(dict.fromkeys(row.phase for row in table.all_rows))
    digests = ["digests"] if stage == 1 else []
    assert phases == [*digests, "forward", "loss", "backward", "optimizer step"]
    assert {table.all_rows[line].phase for line, _ in table.spans} == {*phases}  # each has its time
    spans = [(row.start, row.end) for row in table.all_rows]
    assert all(before[1] <= after[1] and after[0] <= after[1] for before, after in pairwise(spans))


def total_length(bars: Iterable[Data]) -> float:
    return sum(bar["end"] - bar["start"] for bar in bars)


@each_stage
def test_bars_last_as_long_as_forecast_and_do_not_overlap(stage: int) -> None:
    table = make_table(stage)
    time, data = time_of(table), data_of("forecast", table)
    all_bars = rows_of(data["bars"])
    by_lane = {lane: [bar for bar in all_bars if bar["lane"] == at] for at, lane in enumerate(data["lanes"])}
    assert sum(map(len, by_lane.values())) == len(all_bars)
    computes = [bar for bar in by_lane["compute"] if not bar["waits"]]
    assert total_length(computes) == pytest.approx(time.compute_seconds)
    assert total_length(bar for bar in all_bars if bar["waits"]) == pytest.approx(time.exposed_seconds)
    wire_seconds = sum(total_length(bars) for lane, bars in by_lane.items() if lane != "compute")
    assert wire_seconds == pytest.approx(sum(time.wire_seconds.values()))
    for bars in by_lane.values():
        assert all(before["end"] <= after["start"] for before, after in pairwise(bars))
    assert max(bar["end"] for bar in all_bars) == pytest.approx(time.seconds)
    assert data["lanes"] == ["compute", *(["gathers"] if stage else []), "reductions"]
    for unit, first, last in data["runs"]:
        assert data["units"][unit] in {row.unit for row in table.all_rows[first : last + 1] if row.end > row.start}


def test_a_peak_that_does_not_fit_is_marked() -> None:
    for nbytes, note in ((1 << 30, "of 1.00 GiB on slow, "), (1 << 10, "does not fit: slow has 1.00 KiB, ")):
        page = page_of(trace_model(), replace(DEVICE, memory_bytes=nbytes), **TRAINING)
        assert page["top"][1]["note"].startswith(note)
        assert page["programs"][0]["memory"]["capacity"] == nbytes


def test_each_wire_of_hybrid_sharding_has_its_own_lanes() -> None:
    lanes = data_of("forecast", make_table(3, replicas=2))["lanes"]
    assert lanes == ["compute", "gathers, shard", "reductions, shard", "reductions, replicate"]


@each_stage
def test_the_memory_curve_is_the_forecast_of_each_line(stage: int) -> None:
    table = make_table(stage)
    assert table.memory is not None
    memory, lines = data_of("forecast", table)["memory"], table.all_rows
    levels = [[memory["reserve"]] * len(lines), *memory["levels"]]
    assert levels[-1][0] == lines[0].alive
    tensors, peak = rows_of(memory["tensors"]), memory["peak"]
    nbytes = sorted((storage.nbytes for storage in table.memory.storages), reverse=True)
    assert [row["size"] for row in tensors] == [*map(size, nbytes)]
    for index, kinds in enumerate(table.memory.alive):
        alive = zip(memory["kinds"], (above[index] - below[index] for below, above in pairwise(levels)), strict=True)
        expected = table.memory.by_kind if index == peak["line"] else kinds
        assert {kind: nbytes for kind, nbytes in alive if nbytes} == dict(expected)
        live = [one for one in table.memory.storages if one.line <= index and (one.freed is None or one.freed > index)]
        assert sum(storage.nbytes for storage in live) == lines[index].alive
        shown = table.memory.at_peak if index == peak["line"] else live
        assert [nbytes[one] for one in memory["tops"][memory["top"][index]]] == sorted(
            (one.nbytes for one in shown), reverse=True
        )[:8]
    assert sum(peak["by_kind"].values()) == peak["bytes"] == table.memory.peak
    assert sum(storage.nbytes for storage in table.memory.at_peak) == table.memory.peak
    assert peak["sizes"] == [*map(size, peak["by_kind"].values())]
    assert lines[peak["line"]].code.splitlines()[0] == table.memory.peak_line.code.splitlines()[0]


@each_stage
def test_collectives_and_parameters_are_described_as_in_the_trace_and_in_explain(stage: int) -> None:
    table = make_table(stage, with_training=False)
    data = data_of("forecast", table)
    paths = [param.path for param in table.traces.plan.params]
    explained = [(path, str(tz.explain(table.traces, path, device=DEVICE))) for path in paths]
    assert [(param["path"], param["explained"]) for param in data["parameters"]] == explained
    launches = [op for op in table.traces.timeline.ops if isinstance(op, Launch)]
    assert len(data["collectives"]) == len(launches)
    for item in data["collectives"]:
        launch, wait = (table.all_rows[item[name]] for name in ("launch", "wait"))
        op = table.traces.timeline.ops[launch.ran]
        assert (launch.kind, wait.kind, launch.params) == (item["kind"], "wait", op.params)
        assert item["sent_bytes"] == launch.sent
        assert item["words"][:2] == [size(launch.sent), duration(item["wire_seconds"])]
        assert (launch.end or 0.0) <= (wait.start or 0.0)
        assert (item["why_exposed"] == "") == (item["exposed_seconds"] == 0) == (item["hidden"] == 100)
    exposed = [item for item in data["collectives"] if item["exposed_seconds"]]
    assert sum(item["exposed_seconds"] for item in exposed) == pytest.approx(time_of(table).exposed_seconds)
    assert any("on the wire; " in item["why_exposed"] for item in exposed)


def test_the_file_loads_nothing_else_and_is_small(tmp_path: Path) -> None:
    tz.tools.report(trace_model(), tmp_path / "report.html", device=DEVICE, **TRAINING, title="a </script> title")
    text = (tmp_path / "report.html").read_text()
    assert re.findall(r"(?:src|href)=\"(?!#|data:,)|https?://", text) == []
    assert "a &lt;/script&gt; title" in text
    (inline,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    page = page_of(trace_model(), DEVICE, **TRAINING, title="a </script> title")
    assert json.loads(inline) == json.loads(json.dumps(page))
    assert len(inline) / len(make_table().all_rows) < 450, "a GPT of 12 blocks has 2,000 lines and must stay below 1 MB"


def test_two_stages_are_compared_as_in_diff() -> None:
    freeing = tz.Policy(3, reshard_after_forward=True)
    page = page_of(trace_model(freeing), DEVICE, beside=trace_model(2))
    assert [program["name"] for program in page["programs"]] == ["ZeRO-3", "ZeRO-2"]
    step, by_unit = page["differences"]
    difference = tz.tools.diff(trace_model(freeing), trace_model(2))
    assert ["gathers", *(str(total["gathers"]) for total in difference.total)] in step["rows"]
    peaks = tuple(table.memory.peak for table in difference.tables if table.memory)
    assert peaks == tuple(program["figures"]["peak_bytes"] for program in page["programs"])
    assert by_unit["heads"] == ["unit", "gathers", "reduces", "sent", "gathered", "recomputed", "its FLOP"]
    units = {row[0]: row[1] for row in by_unit["rows"]}
    gathers = [(str(first["gathers"]), str(second["gathers"])) for first, second in difference.units.values()]
    arrow = "\N{RIGHTWARDS ARROW}"
    assert any(first != second for first, second in gathers)
    assert set(units.values()) == {a if a == b else f"{a} {arrow} {b}" for a, b in gathers}
    repeated = page_of(trace_model(3), DEVICE, beside=trace_model(3))
    assert [program["name"] for program in repeated["programs"]] == ["ZeRO-3", "ZeRO-3, second"]
    other = tz.trace(torch.nn.Linear(4, 4), torch.ones(2, 4), world_size=2)
    fails(lambda: page_of(trace_model(3), DEVICE, beside=other), "ValueError", "the traces are of different modules")
    fails(lambda: page_of(trace_model(3), DEVICE, beside=3), "TypeError", "beside is of type int")  # type: ignore[arg-type]


def make_times(table: Table, slower: float) -> tz.schedule.Times:
    """Return times ``slower`` times the forecast's between waits for gathers. Gathers are as fast as forecast."""
    timeline, costs = time_of(table).timeline, time_of(table).costs
    waits = [index for index, op in enumerate(timeline.ops) if ends(op, Gather)]
    phases: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for index, next_index in pairwise(waits):
        if timeline.ops[index].backward is timeline.ops[next_index].backward:
            seconds = sum(cost.seconds for cost in costs[index:next_index])
            phases[timeline.ops[index].backward][timeline.ops[index].params[0]] = seconds * slower
    gathers = [index for index, op in enumerate(timeline.ops) if isinstance(op, Gather)]
    nbytes = sum(timeline.traffic(timeline.ops[index]).busiest for index in gathers)
    return tz.schedule.Times(*phases, nbytes / sum(costs[index].wire_seconds for index in gathers))


def test_measured_times_are_shown_beside_the_forecast() -> None:
    table = make_table()
    spans, expected = by_times(time_of(table), make_times(table, 1.0)).spans, time_of(table).spans
    assert [(span.op, span.lane) for span in spans] == [(span.op, span.lane) for span in expected]
    assert [span.end for span in spans] == pytest.approx([span.end for span in expected])
    slower = by_times(time_of(table), make_times(table, 2.0))
    assert slower.compute_seconds == pytest.approx(2 * time_of(table).compute_seconds)
    assert slower.exposed_seconds < time_of(table).exposed_seconds
    page = page_of(trace_model(), DEVICE, make_times(table, 2.0), **TRAINING)
    assert [program["name"] for program in page["programs"]] == ["ZeRO-3", "measured times"]
    assert "those of measure_times" in page["programs"][1]["note"]
    assert len(page["differences"]) == 1


MODEL = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.ones(3, 8)
"""


@pytest.mark.slow
def test_the_command_writes_the_file_or_prints_the_data(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    target, out = f"{tmp_path}/model.py:build", tmp_path / "out.html"
    printed = output_of("report", target, "--world-size", "4", "--beside", "2", "--out", out)
    assert printed.startswith(f"{out}  ")
    assert "ZeRO-3, rank 0 of 4, beside ZeRO-2" in re.sub(r"\s+|<[^>]*>", " ", out.read_text()).replace("  ", " ")
    page = json.loads(output_of("report", target, "--stage", 1, "--blocks", 2, "--dtype", "bfloat16", "--json"))
    assert page["title"] == f"{target}, 2 of 3 blocks"
    assert "compute in bfloat16" in page["facts"]
    assert page["programs"][0]["stage"] == "ZeRO-1"
    for option, value, words in (("--blocks", 0, "blocks is 0"), ("--stage", 5, "stage is 5"), ("--dtype", "x", "'x'")):
        assert words in refusal_of("report", target, option, value)


@pytest.mark.slow
def test_the_code_of_the_docs_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/report.md").read_text()
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(block, {"__name__": "page"})
    assert (tmp_path / "report.html").stat().st_size > 10_000
