"""Parts of examples/bench are right: bytes, bounds, data files, options, and its commands that need no peers.

The pages show the tables: a test compares them with the tables rendered from their data files.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thunder_zero as tz  # before thunder
from examples.bench import forecast_table, gpu, memory_table, report, run
from examples.bench.contestants import contestants
from examples.bench.held import alive, held_bytes
from examples.bench.memory_curves import points_of, save, step_of
from examples.bench.memory_table import Workspace
from examples.bench.model import Size, floor_bytes, make_batch, make_model, model_bytes, spared_bytes
from examples.bench.overhead import added, summary
from examples.bench.page import marks
from examples.bench.plot import save_plot
from examples.bench.report import ALONE, Memory, Result, Row
from examples.bench.step_memory import BACKWARD, FORWARD, LOSS, OPTIMIZER, Measured
from examples.bench.workspaces import MOST, alike, largest
from examples.tensor_memory import Added
from tests.harness.examples import ROOT, example_module, output_of, start

DATA = ROOT / "docs/bench.json"
TINY = Size(blocks=2, width=8, heads=2, vocabulary=32, sequences=1, tokens=4)
ROWS = (
    Row("eager", ALONE, None, (0.5, 0.4, 0.6), (0.0,)),
    Row("thunder", ALONE, None, (0.45, 0.44, 9.0), (0.0,)),
    Row("zero3", "thunder_zero 3", 3, (1.6, 1.5, 1.7), (150.0, 150.0, 151.0)),
    Row("zero3+tc", "thunder_zero 3", 3, (1.4, 1.55, 1.5), (150.0,)),
    Row("ddp", "torch DDP", 0, (2.0,), (100.0,)),
)
#  W = 2, so u = 50 bytes: stages 0-2 send 100, stage 3 sends 150 - 20 / 2 = 140. The wire carries 100 bytes in 1 s.
RESULT = Result("1gbit", 2, full=100, spared=20, wire_bytes=100.0, wire_seconds=(0.9, 1.0, 1.1), rows=ROWS)


# The model, its bytes, and the bound


def test_the_model_has_the_bytes_of_arithmetic() -> None:
    model = make_model(TINY)
    blocks = 2 * (12 * 8 * 8 + 13 * 8)  # four matrices of 12 d², biases of 9 d, two norms of 4 d
    outside = 2 * 32 * 8 + 4 * 8 + 2 * 8  # embedding and head, positions, the last norm
    assert model_bytes(model) == 4 * (blocks + outside)
    biases = 2 * (9 + 2) * 8 + 8
    assert spared_bytes(model) == 4 * (biases + 32 * 8 + 4 * 8)
    for stage, world_size, least in ((0, 2, 100.0), (2, 4, 150.0), (3, 2, 140.0), (3, 4, 210.0), (3, 1, 0.0)):
        assert floor_bytes(stage, world_size, full=100, spared=20) == least, (stage, world_size)


def test_ranks_train_the_same_model_on_different_batches() -> None:
    first, second = make_model(TINY), make_model(TINY)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    tokens, targets = make_batch(TINY, 0)
    assert tokens.shape == targets.shape == (1, 4)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, make_batch(TINY, 1)[0])


def test_the_bound_is_the_longer_of_compute_and_wire() -> None:
    assert RESULT.compute_seconds == 0.45  # the median of the faster contestant, not its mean or its fastest turn
    assert RESULT.bytes_per_second == 100.0
    assert [RESULT.bound(stage) for stage in (None, 0, 3)] == [0.45, 1.0, 1.4]
    fast = replace(RESULT, wire_seconds=(0.1,))
    assert [fast.bound(stage) for stage in (0, 3)] == [0.45, 0.45]


def test_held_bytes_count_shared_memory_once() -> None:
    before = alive()
    model = torch.nn.Linear(10, 100, bias=False)
    view = model.weight.detach()[5:]
    assert held_bytes(before, model) == 4 * 10 * 100
    assert held_bytes(alive(), model) == 0
    del view


# Tables and data files


def test_a_saved_run_is_read_and_rendered(tmp_path: Path) -> None:
    memory = {"zero3": Memory(1 << 20, 2 << 20)}
    expected = ("zero3", "1.600", "1.500 - 1.700", "1.400", "1.14", "0.0", "1.500", "3")
    assert report.cells(RESULT, ROWS[2], Memory(rest=0, peak=3 << 20)) == expected
    run.save(run.Found([RESULT], {2: memory}), {"date": "today"}, tmp_path)
    read = report.read_report(tmp_path / "bench.json")
    result = (read.about, read.results, read.memory, read.overhead)
    assert result == ({"date": "today"}, (RESULT,), {2: memory}, ())
    assert all(f"\n| {row.name} |" in report.render(read) for row in ROWS)
    save_plot([RESULT, replace(RESULT, network="loopback", world_size=4)], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    best = {group: row.name for group, row in report.best_by_group(ROWS).items()}
    assert best == {ALONE: "thunder", "thunder_zero 3": "zero3+tc", "torch DDP": "ddp"}


def test_pages_have_the_figures_of_their_data_files() -> None:
    # The package promises forecasts within 15 %, ranked as measured, for W = 2 on 0.25 and 1 Gbit/s.
    assert report.render(report.read_report(DATA)).count("**W = 2, ") > 0
    page = memory_table.PAGE.read_text()
    assert memory_table.with_tables(page, memory_table.read_data()) == page, (
        "run python -m examples.bench.memory --page"
    )
    page, rows = forecast_table.PAGE.read_text(), forecast_table.read_rows()
    assert forecast_table.with_tables(page, rows) == page, "run python -m examples.bench.forecast --page"
    for network in ("250mbit", "1gbit"):
        here = [row for row in rows if row.where == (2, network)]
        assert [row.stage for row in here] == [0, 1, 2, 3]
        assert all(abs(row.off) <= 0.15 for row in here), here
        assert not forecast_table.misranked(here)


def test_a_contestant_with_different_losses_is_refused() -> None:
    assert report.different_losses({}) == []
    assert report.different_losses({"a": [2.0, 1.0], "b": [2.0005, 1.0], "c": [2.0, 1.1], "d": [2.0]}) == ["c", "d"]
    built = [contestants()[name] for name in ("eager", "ddp", "zero3")]
    losses = {"eager": [[9.0], [8.0]], "ddp": [[2.0], [3.0]], "zero3": [[2.0], [3.0]]}
    run.refuse_different(built, losses)  # a contestant that computes alone trains differently
    with pytest.raises(RuntimeError, match=r"on rank 1 the losses of \['zero3'\] differ from those of ddp"):
        run.refuse_different(built, losses | {"zero3": [[2.0], [3.5]]})


def test_the_seconds_that_the_transform_adds_are_summed_up() -> None:
    seconds = {"plain": [10.0, 10.0, 50.0], "zero3": [10.4, 10.5, 10.6]}
    assert added(seconds) == 0.05
    assert added(seconds, sum) == -0.55
    seconds = {"plain": [9.0, 10.0, 11.0], "zero3": [10.4, 10.5, 10.6]}
    compiling = {"seconds": seconds, "cpu": {"plain": [10.0], "zero3": [10.3]}}
    compile_time, host_time = summary({"compile": compiling, "host": {"full": seconds}})
    assert all(figure in compile_time for figure in ("10.00 s", "10.50 s", "+5.0%", "+3.0%"))
    assert "+5.0%" in host_time


def test_rows_of_memory_are_written_and_replaced(tmp_path: Path) -> None:
    sizes = {"at_rest": (2 << 20, 2 << 20), "peak": (100 << 20, 99 << 20), "optimizer_step": (0, 0)}
    row = memory_table.Row("GPT, stage 3", "torch 2", **sizes, peer=3 << 20)
    data = memory_table.Data((row,), (Workspace("gelu", "[2, 3]", 1 << 20, 1 << 19),), "torch 2", "peak 3")
    page, path, text = tmp_path / "memory.md", tmp_path / "memory.json", memory_table.PAGE.read_text()
    page.write_text(text)
    memory_table.write(data, path, page)
    assert memory_table.read_data(path) == data
    assert memory_table.read_data(tmp_path / "missing.json") == memory_table.Data()
    assert page.read_text() == memory_table.with_tables(text, data)
    with pytest.raises(ValueError, match="no place for workspaces"):
        memory_table.with_tables(text.replace("workspaces", "others"), data)
    fused, newer = replace(row, case="GPT, stage 3, fused"), replace(row, versions="torch 3", peak=(100, 103))
    gone = replace(row, case="a case of before")
    order = ("GPT, stage 1", fused.case, row.case)
    assert memory_table.merged((gone, row, fused), (newer,), order) == (fused, newer)
    assert memory_table.versions_of((fused, newer, fused)) == "torch 2; torch 3."
    off = replace(row, optimizer_step=(1000, 998))
    assert memory_table.besides((row, off)).endswith("at most 0.200% off.")
    less = (Workspace("gelu", "[1]", 0, 1), *data.workspaces, Workspace("mm", "[5]", 0, 2 << 20))
    assert re.findall(
        r"\| (\w+) \| (\[\d.*?\]) ", memory_table.places(replace(data, workspaces=less))["workspaces"]
    ) == [
        ("mm", "[5]"),
        ("gelu", "[2x3]"),
    ]


def test_rows_of_forecasts_are_written_ranked_and_replaced(tmp_path: Path) -> None:
    page, path = tmp_path / "page.md", tmp_path / "forecast.json"
    page.write_text("old\n".join(marks(*forecast_table.SECTION)))
    first = forecast_table.Row("1gbit", 2, 0, (2.0, 1.0, 3.0), 2.2, 1.5, 0.7, 1.0, "torch 2")
    tied = replace(first, stage=1, measured=(2.05,), seconds=2.1)  # faster by forecast, equally fast by measurement
    slower = replace(first, stage=3, measured=(3.5,), seconds=2.15)
    forecast_table.write((first, tied, slower), path, page)
    assert forecast_table.read_rows(path) == (first, tied, slower)
    assert forecast_table.read_rows(tmp_path / "none.json") == ()
    assert forecast_table.misranked((first, tied, slower)) == [(0, 3)]
    assert forecast_table.misranked((first, replace(slower, measured=(2.9,)))) == []  # one step of stage 0 took 3 s
    text = page.read_text()
    assert "+10.0%" in text
    assert "-38.6%) | stage 3 before stage 0 |" in text
    assert "old" not in text
    elsewhere, slow = replace(first, network="loopback"), replace(first, network="250mbit")
    assert forecast_table.merged((first, tied, elsewhere, slow), (slower,)) == (slow, slower, elsewhere)


def test_the_largest_workspaces_of_each_operator() -> None:
    workspaces = [Workspace("convolution", str(number), 0, number) for number in range(MOST + 2)]
    kept = largest([Workspace("linear", "", 0, 1), *workspaces])
    assert [workspace.hidden for workspace in kept] == [*range(MOST + 1, 1, -1), 1]
    assert list(alike(["[2]", "[2]", "[3]"])) == ["2 x [2]", "[3]"]


@pytest.mark.slow
def test_the_curves_have_the_measured_points(tmp_path: Path) -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(64, 64)
    steps = {}
    for stage in range(4):
        traces = tz.trace(layer, torch.empty(8, 64), policy=tz.Policy(stage), world_size=2)
        memory = tz.tools.memory(traces, loss=lambda y: y.square().mean(), optimizer=torch.optim.AdamW)
        parts = {FORWARD: Added(10, 20), LOSS: Added(20, 20), BACKWARD: Added(30, 5000), OPTIMIZER: Added(40, 50)}
        steps[stage] = (memory, Measured(memory.at_rest, 2048, parts))
        peak = [line.highest for line in memory.lines].index(memory.peak)
        step, result = step_of(memory), points_of(step_of(memory), steps[stage][1])
        assert [round(y * memory_table.MiB) - memory.at_rest for _, y in result] == [2048, 2058, 7048, 2078, 50]
        assert step.edges[peak] < result[2][0] < step.edges[peak + 1]
        assert (result[1][0], result[3][0]) == (step.borders[LOSS], step.borders[OPTIMIZER])
    save(steps, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="passes"/>
<testcase classname="tests.gpu.a" name="fails"><failure message="assert 1 == 2&#10;more">...</failure></testcase>
<testcase classname="tests.gpu.a" name="waits"><skipped message="needs a CUDA device"/></testcase>
</testsuite></testsuites>"""


def test_the_report_of_a_gpu_names_each_test_that_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT)
    *_, heading, _, failed, skipped = gpu.tests_section(tmp_path / "tests.xml")
    assert "1 of 3 passed" in heading
    assert failed.endswith("`tests.gpu.a::fails` assert 1 == 2")
    assert skipped.endswith("`tests.gpu.a::waits` needs a CUDA device")
    none = gpu.Contestant(lambda tokens: None, 0, [gpu.Measured(0.001, 0.001, None, None)])
    some = gpu.Contestant(lambda tokens: None, 0, [gpu.Measured(0.002, 0.004, 7, 5 << 20)] * 3)
    rows = gpu.table({"zero3": some, "fsdp2": none})[2:]
    assert rows == ["| zero3 | 2.00 | 4.00 | 7 | 5 |", "| fsdp2 | 1.00 | 1.00 | - | - |"]


# Commands


def test_options_have_defaults_by_machine_and_wrong_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"250mbit": 250e6, "2.5gbit": 2.5e9, "loopback": float("inf")}
    assert {text: report.rate_of(text) for text in rates} == rates
    for text in ("", "gbit", "1", "1gb", "-1gbit", "0gbit", "fast"):
        with pytest.raises(ValueError, match="give a rate such as '250mbit'"):
            report.rate_of(text)
    monkeypatch.setattr(run, "can_limit", lambda: True)
    quick = run.parse_options(contestants(), ["--quick", "--rounds", "3"])
    assert (quick.networks, quick.world_sizes, quick.rounds) == (["loopback", "1gbit"], [2], 3)
    assert set(quick.contestants) <= set(contestants())
    monkeypatch.setattr(run, "can_limit", lambda: False)
    defaults = run.parse_options(contestants(), [])
    assert (defaults.networks, defaults.world_sizes, defaults.rounds) == (["loopback"], [2, 4], 5)
    assert set(defaults.contestants) == set(contestants())
    for option, value, words in (
        ("--networks", "1gbit", "cannot limit ['1gbit']"),
        ("--rounds", "0", "--rounds is 0; give at least 1"),
        ("--world-sizes", "1", "--world-sizes is [1]; give at least 2"),
        ("--contestants", "zero9", "'zero9'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run.parse_options(contestants(), [option, value])
        assert words in capsys.readouterr().err
    monkeypatch.syspath_prepend(ROOT / "examples/bench")
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("transport").main(["--world-sizes", "1"])
    assert "give world sizes and rounds of 2 or more" in capsys.readouterr().err


def test_the_bench_of_formats_has_speeds_and_feedback_that_keeps_only_the_last_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formats = example_module("bench.formats")
    monkeypatch.setattr(formats, "SPEED_ELEMENTS", 1000)
    rows = re.findall(r"^\| ([a-z, ]+) \| [\d.]+ \| [\d.]+ \|$", formats.speed(), re.MULTILINE)
    assert rows == ["write, to nearest", "write, at random", "read", "read and add"]

    x, count = torch.linspace(-1, 1, 1000), 20

    def off(feedback: bool) -> float:
        total = torch.zeros(1000)
        with formats.gradients_to_nearest(feedback=feedback):
            for number in range(count):
                tz.Int8().decode(tz.Int8().encode(x, key=f"0 weight {number} 0 0"), total, add=True)
        return (total - count * x).abs().max().item()

    step = 1 / 127
    assert off(feedback=False) > 0.4 * count * step, "the same error each time"
    assert off(feedback=True) <= 0.51 * step, "only the last error"
    with pytest.raises(RuntimeError, match="no gradient was written"), formats.gradients_to_nearest(feedback=True):
        pass


@pytest.mark.slow
def test_the_bench_of_transports_prints_the_rows_of_the_performance_page() -> None:
    options = ("--rounds", 2, "--world-sizes", 2)
    printed = output_of(start(sys.executable, "-W", "ignore", "examples/bench/transport.py", *options))
    rows = re.findall(r"^\| 2 \| (\w+) (?:\| [\d.]+ \([\d.]+-[\d.]+\) ){3}\|$", printed, re.MULTILINE)
    assert rows == ["all_gather", "reduce_scatter", "all_reduce"] * 2, "for one tensor, and for the 12 of a GPT block"
    assert len(re.findall(r"^\| 2 \| 16 x \d+ KiB ", printed, re.MULTILINE)) == 6, "separate and packed"


@pytest.mark.slow
def test_the_bench_of_a_gpu_runs_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert capsys.readouterr().err == "torch finds no CUDA device here; rehearse with --device cpu --tiny\n"
    tiny = ["--device", "cpu", "--tiny", "--rounds", "1", "--contestants", "zero2", "zero3", "fsdp2"]
    written = tmp_path / "runs/report.md"
    assert gpu.main([*tiny, "--report", str(written)]) == 0
    lines = written.read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")][2:] == ["| zero2", "| zero3", "| fsdp2"]
