"""The report: its figures are those of estimate and memory, and its lines, bars, collectives and tensors agree."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.tiers import slow
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero.schedule.names import launch_label, wait_label
from thunder_zero.schedule.timeline import LAUNCHES, Kind
from thunder_zero.tools import Device, Link, cli
from thunder_zero.tools.ask.print_trace import code_of
from thunder_zero.tools.forecast.rehearsal import Rehearsal
from thunder_zero.tools.page.collectives import Bar
from thunder_zero.tools.page.data import data_of
from thunder_zero.tools.page.measured import by_profile, by_times
from thunder_zero.tools.page.program import PageProgram
from thunder_zero.tools.page.report import page_of

DEVICE = Device("slow", {"float32": 1e9}, 1e10, 1 << 30, intra_node=Link(1e8, 1e-6), inter_node=Link(5e7, 1e-6))
UNITS, WIDTH = 3, 16


def model() -> Chain:
    return Chain(*(ResidualBlock(WIDTH) for _ in range(UNITS)))


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


class TwoOutputs(nn.Module):
    """Returns a mean beside what another layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.used.forward(x)
        return y.square().mean(), self.unused.forward(y)


def first_output(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0]


AROUND: dict[str, Any] = {"loss": mean_square, "optimizer": torch.optim.AdamW}


def traces(stage: int | tz.Policy = 3, **options: Any) -> tz.tools.Traces:
    return traced(model, (8, WIDTH), stage, **options)


def program(stage: int = 3, *, around: bool = True, **options: Any) -> PageProgram:
    of, given = traces(stage, **options), AROUND if around else {}
    time = tz.tools.estimate(of, DEVICE, **given)
    return PageProgram("forecast", of, time, tz.tools.memory(of, **given))


STAGES = [3, *slow(0, 1, 2)]


@pytest.mark.parametrize("stage", STAGES)
def test_figures_are_those_of_estimate_and_memory_and_counted_bytes(stage: int) -> None:
    shown = page_of(traces(stage), DEVICE, **AROUND)
    time = tz.tools.estimate(traces(stage), DEVICE, **AROUND)
    memory = tz.tools.memory(traces(stage), **AROUND)
    timeline, figures = traces(stage).timeline, shown["programs"][0]["figures"]
    assert figures["step_seconds"] == time.seconds
    assert figures["compute_seconds"] == time.compute_seconds
    assert figures["exposed_seconds"] == time.exposed_seconds
    assert figures["mfu"] == time.mfu
    held = memory.peak, memory.at_rest, memory.optimizer_step
    assert (figures["peak_bytes"], figures["at_rest_bytes"], figures["optimizer_step_bytes"]) == held
    assert figures["sent_bytes"] == sum(map(timeline.bytes_sent, timeline.ops))
    assert figures["gathers"] == sum(op.kind is Kind.GATHER for op in timeline.ops)
    shares = sum(int(share) for share in re.findall(r"(\d+)%", shown["programs"][0]["bound"]))
    assert shares == pytest.approx(100, abs=2)
    assert "\\u003c" not in json.dumps(shown)
    assert [tile["name"] for tile in shown["top"]][:2] == ["Time of a step", "Peak memory"]


def test_one_rehearsal_serves_time_and_memory() -> None:
    """The loss runs once more, which tells which outputs it uses; the optimizer is made once."""
    losses, optimizers = mock.Mock(side_effect=mean_square), mock.Mock(side_effect=torch.optim.AdamW)
    with mock.patch("thunder_zero.tools.forecast.memory.Rehearsal", wraps=Rehearsal) as rehearsal:
        page_of(traces(3), DEVICE, beside=traces(2), loss=losses, optimizer=optimizers)
    assert [each.call_count for each in (rehearsal, losses, optimizers)] == [2, 4, 2]  # of two programs


def test_time_and_memory_are_of_the_program_that_trains_with_the_loss() -> None:
    """A loss that does not use an output leaves out what leads to it, as ``for_loss`` does."""
    whole = traced(TwoOutputs, (8, WIDTH))
    pruned = tz.tools.for_loss(whole, first_output)
    around: dict[str, Any] = {"loss": first_output, "optimizer": torch.optim.AdamW}
    figures = [page_of(each, DEVICE, **around)["programs"][0]["figures"] for each in (whole, pruned)]
    assert figures[0] == figures[1]
    assert figures[0]["step_seconds"] == tz.tools.estimate(whole, DEVICE, **around).seconds
    assert figures[0]["sent_bytes"] < page_of(whole, DEVICE)["programs"][0]["figures"]["sent_bytes"]


@pytest.mark.parametrize("stage", STAGES)
def test_each_operation_is_on_the_line_that_the_trace_has_for_it(stage: int) -> None:
    one = program(stage)
    for at, op in enumerate(one.traces.timeline.ops):
        line = one.lines[one.line_of[at]]
        assert " ".join(line.code.partition("  #")[0].split()).startswith(code_of(op, one.traces)[:40])
        assert line.phase == ("backward" if op.backward else "forward")
    phases = list(dict.fromkeys(line.phase for line in one.lines))
    digests = ["digests"] if stage == 1 else []
    assert phases == [*digests, "forward", "loss", "backward", "optimizer step"]
    starts = [(line.start, line.end) for line in one.lines]
    assert all(before[1] <= after[1] and after[0] <= after[1] for before, after in pairwise(starts))


def length(bars: Iterable[Bar]) -> float:
    return sum(bar.end - bar.start for bar in bars)


@pytest.mark.parametrize("stage", STAGES)
def test_bars_take_the_time_of_the_forecast_and_none_is_over_another(stage: int) -> None:
    one = program(stage)
    by_lane = {lane: [bar for bar in one.bars if bar.lane == lane] for lane in one.lanes}
    assert sum(map(len, by_lane.values())) == len(one.bars)
    assert length(bar for bar in by_lane["compute"] if not bar.waits) == pytest.approx(one.estimate.compute_seconds)
    assert length(bar for bar in one.bars if bar.waits) == pytest.approx(one.estimate.exposed_seconds)
    wires = sum(length(bars) for lane, bars in by_lane.items() if lane != "compute")
    assert wires == pytest.approx(sum(one.estimate.wire_seconds.values()))
    for bars in by_lane.values():
        assert all(before.end <= after.start for before, after in pairwise(bars))
    assert max(bar.end for bar in one.bars) == pytest.approx(one.estimate.seconds)
    kinds = {bar.lane.split()[0] for bar in one.bars} - {"compute"}
    assert kinds == ({"reduce"} if stage == 0 else {"gather", "reduce"})
    for unit, first, last in one.units:
        assert {one.lines[at].unit for at in range(first, last + 1) if one.lines[at].end > one.lines[at].start} >= {
            unit
        }


def test_a_peak_that_does_not_fit_is_marked() -> None:
    roomy, small = (page_of(traces(), replace(DEVICE, memory_bytes=room), **AROUND) for room in (1 << 30, 1 << 10))
    assert roomy["top"][1]["note"].startswith("of 1.00 GiB on slow, ")
    assert small["top"][1]["note"].startswith("does not fit: slow has 1.00 KiB, ")
    assert [shown["programs"][0]["memory"]["capacity"] for shown in (roomy, small)] == [1 << 30, 1 << 10]


def test_with_copies_each_wire_has_lanes_of_its_own() -> None:
    one = program(3, replicas=2)
    assert one.lanes == ("compute", "gather shard", "reduce shard", "reduce replicate")


@pytest.mark.parametrize("stage", STAGES)
def test_the_curve_of_memory_is_the_forecast_line_by_line(stage: int) -> None:
    one = program(stage)
    assert one.memory is not None
    shown = data_of(one)["memory"]
    places = [at for at, line in enumerate(one.lines) if line.memory != (one.lines[at - 1].memory if at else None)]
    assert len(places) == len(one.memory.lines)
    alive: Counter[str] = Counter()
    changes = list(shown["changes"])
    tensors = [dict(zip(shown["tensors"], row, strict=True)) for row in zip(*shown["tensors"].values(), strict=True)]
    for place, line in zip(places, one.memory.lines, strict=True):
        while changes and changes[0][0] <= place:
            _, kind, step = changes.pop(0)
            alive[shown["kinds"][kind]] += step
        assert +alive == {str(kind): nbytes for kind, nbytes in line.alive.items()}
        there = [each for each in tensors if each["made"] <= place and (each["freed"] is None or each["freed"] > place)]
        assert sum(each["bytes"] for each in there) == line.total
    peak = shown["peak"]
    assert sum(peak["by_kind"].values()) == peak["bytes"] == one.memory.peak
    assert sum(tensors[at]["bytes"] for at in peak["tensors"]) == one.memory.peak
    assert one.lines[peak["line"]].code.splitlines()[0] == one.memory.peak_line.code.splitlines()[0]


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_and_parameters_say_what_explain_says(stage: int) -> None:
    one = program(stage, around=False)
    shown = data_of(one)
    paths = [param.path for param in one.traces.plan.params]
    assert [each["path"] for each in shown["parameters"]] == paths
    for each in shown["parameters"]:
        assert each["explained"] == str(tz.explain(one.traces, each["path"], device=DEVICE))
    launches = [op for op in one.traces.timeline.ops if op.kind in LAUNCHES]
    assert [each.params for each in one.collectives] == [op.params for op in launches]
    for each in one.collectives:
        launch, wait = one.lines[each.launch], one.lines[each.wait]
        assert launch.row is not None
        assert wait.row is not None
        assert (launch.row.kind, wait.row.kind, launch.row.params) == (each.kind, Kind.WAIT, each.params)
        assert each.sent_bytes == launch.row.sent
        assert each.waited >= each.launched
        assert (each.why_exposed == "") == (each.exposed_seconds == 0) == (each.hidden_share == 1)
    assert sum(each.exposed_seconds for each in one.collectives) == pytest.approx(one.estimate.exposed_seconds)
    exposed = [each for each in one.collectives if each.exposed_seconds]
    assert any("on the wire; " in each.why_exposed for each in exposed)


def test_the_file_needs_nothing_else_and_is_small(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    tz.tools.report(traces(), path, device=DEVICE, **AROUND, title="a </script> title")
    text = path.read_text()
    assert re.findall(r"(?:src|href)=\"(?!#|data:,)", text) == []
    assert re.findall(r"https?://", text) == []
    assert "a &lt;/script&gt; title" in text
    (inline,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    assert json.loads(inline) == json.loads(json.dumps(page_of(traces(), DEVICE, **AROUND, title="a </script> title")))
    a_line = len(inline) / len(program().lines)
    assert a_line < 2e6 / 5_000, "a GPT of 12 blocks has 2,000 lines and must stay below 2 MB"


def test_two_stages_are_compared_as_diff_does() -> None:
    freeing = tz.Policy(3, reshard_after_forward=True)
    shown = page_of(traces(freeing), DEVICE, beside=traces(2))
    assert [one["name"] for one in shown["programs"]] == ["ZeRO-3", "ZeRO-2"]
    step, by_unit = shown["differences"]
    change = tz.tools.diff(traces(freeing), traces(2))
    figures = {row[0]: row[1:] for row in step["rows"]}
    assert figures["gathers"] == [str(one.gathers) for one in change.total]
    assert change.peaks == tuple(one["figures"]["peak_bytes"] for one in shown["programs"])
    assert by_unit["heads"] == ["unit", "gathers", "reduces", "sent", "gathered", "recomputed", "its FLOP"]
    units = {row[0]: row[1] for row in by_unit["rows"]}
    gathers = [(str(first.gathers), str(second.gathers)) for first, second in change.units.values()]
    arrow = "\N{RIGHTWARDS ARROW}"
    assert any(first != second for first, second in gathers)
    assert set(units.values()) == {a if a == b else f"{a} {arrow} {b}" for a, b in gathers}
    again = page_of(traces(3), DEVICE, beside=traces(3))
    assert [one["name"] for one in again["programs"]] == ["ZeRO-3", "ZeRO-3, second"]
    other = tz.trace(torch.nn.Linear(4, 4), torch.ones(2, 4), world_size=2)
    fails(lambda: page_of(traces(3), DEVICE, beside=other), "ValueError", "the traces are of different modules")
    fails(lambda: page_of(traces(3), DEVICE, beside=3), "TypeError", "beside is of type int")  # type: ignore[arg-type]


def measured_times(of: PageProgram, slower: float) -> tz.schedule.Times:
    """As long as the forecast computes between the waits of gathers, times a factor; gathers as fast as forecast."""
    timeline, costs = of.estimate.timeline, of.estimate.costs
    waits = [at for at, op in enumerate(timeline.ops) if timeline.ends(op, Kind.GATHER)]
    phases: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for at, after in pairwise(waits):
        if timeline.ops[at].backward is timeline.ops[after].backward:
            seconds = sum(cost.seconds for cost in costs[at:after])
            phases[timeline.ops[at].backward][timeline.ops[at].params[0]] = seconds * slower
    gathers = [at for at, op in enumerate(timeline.ops) if op.kind is Kind.GATHER]
    nbytes = sum(timeline.wire_bytes(timeline.ops[at]) for at in gathers)
    return tz.schedule.Times(*phases, nbytes / sum(wire[1] for at in gathers if (wire := costs[at].wire)))


def test_measured_times_are_beside_the_forecast() -> None:
    one = program()
    same, usual = by_times(one.estimate, measured_times(one, 1.0)).spans, one.estimate.spans
    assert [(span.op, span.lane) for span in same] == [(span.op, span.lane) for span in usual]
    assert [span.end for span in same] == pytest.approx([span.end for span in usual])
    slower = PageProgram("measured", one.traces, by_times(one.estimate, measured_times(one, 2.0)), None)
    assert slower.estimate.compute_seconds == pytest.approx(2 * one.estimate.compute_seconds)
    assert slower.estimate.exposed_seconds < one.estimate.exposed_seconds
    shown = page_of(traces(), DEVICE, measured_times(one, 2.0), **AROUND)
    assert [each["name"] for each in shown["programs"]] == ["ZeRO-3", "measured times"]
    assert "those of measure_times" in shown["programs"][1]["note"]
    assert len(shown["differences"]) == 1


def events(of: PageProgram, steps: int, gap: float) -> list[dict[str, Any]]:
    """A profile of the forecast's waits and launches, each for ``gap`` seconds after what is computed before it."""
    timeline, now, found = of.estimate.timeline, 5.0, []
    for _ in range(steps):
        for op, cost in zip(timeline.ops, of.estimate.costs, strict=True):
            now += cost.seconds
            if op.kind in LAUNCHES or op.kind is Kind.WAIT:
                launch = timeline.launches[op.reads[0]] if op.kind is Kind.WAIT else op
                words = (wait_label if op.kind is Kind.WAIT else launch_label)(launch.kind, launch.params)
                found.append({"name": words, "ph": "X", "ts": now * 1e6, "dur": gap * 1e6, "cat": "user_annotation"})
                now += gap
    return found


def test_a_profile_puts_launches_and_waits_where_they_ran(tmp_path: Path) -> None:
    one = program(around=False)
    profile = [{"name": "other", "ph": "X", "ts": 1.0}, *events(one, 2, 0.001)]
    shown = PageProgram("profile", one.traces, by_profile(one.estimate, profile), None)
    marked = sum(op.kind in LAUNCHES or op.kind is Kind.WAIT for op in one.traces.timeline.ops)
    assert shown.estimate.seconds == pytest.approx(one.estimate.compute_seconds + 0.001 * marked)
    waits = sum(op.kind is Kind.WAIT for op in one.traces.timeline.ops)
    assert shown.estimate.exposed_seconds == pytest.approx(0.001 * waits)
    assert all(each.wire_seconds > 0 for each in shown.collectives)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": profile}))
    found = page_of(traces(), DEVICE, path)["programs"][1]
    assert (found["name"], found["figures"]["step_seconds"]) == ("profile", shown.estimate.seconds)
    path.write_text(json.dumps({"traceEvents": profile[:4]}))
    fails(lambda: page_of(traces(), DEVICE, path), "ValueError", "the profile has no whole step of this program")


MODEL = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.ones(3, 8)
"""


@pytest.mark.slow
def test_the_command_writes_the_file_or_prints_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    place, out = f"{tmp_path}/model.py:build", str(tmp_path / "out.html")
    assert cli.main(["report", place, "--world-size", "4", "--beside", "2", "--out", out]) == 0
    assert capsys.readouterr().out.startswith(f"{out}  ")
    assert "ZeRO-3, rank 0 of 4, beside ZeRO-2" in re.sub(r"\s+|<[^>]*>", " ", Path(out).read_text()).replace("  ", " ")
    assert cli.main(["report", place, "--stage", "1", "--blocks", "2", "--dtype", "bfloat16", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["title"] == f"{place}, 2 of 3 blocks"
    assert "compute in bfloat16" in shown["facts"]
    assert shown["programs"][0]["stage"] == "ZeRO-1"
    for wrong, words in (
        (("--blocks", "0"), "blocks is 0"),
        (("--stage", "5"), "stage is 5"),
        (("--dtype", "x"), "'x'"),
    ):
        assert cli.main(["report", place, *wrong]) == 1
        assert words in capsys.readouterr().err


def test_notebooks_show_a_small_form() -> None:
    one = program()
    assert one.memory is not None
    forms: Sequence[Callable[[], str]] = (one.traces._repr_html_, one.memory._repr_html_, one.estimate._repr_html_)
    for form, words in zip(forms, ("gathered at most", "peak", "exposed communication"), strict=True):
        html = form()
        assert words in html
        assert html.count("<svg") == 1
        assert len(html) < 60_000
    assert "waits" in one.estimate._repr_html_()


@pytest.mark.slow
def test_the_page_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs/report.md"
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), {"__name__": "page"})
    assert (tmp_path / "report.html").stat().st_size > 10_000
