"""``explain``, ``diff``, ``save_timeline``, profiler labels and ``thunder-zero trace`` say what holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.commands import output_of, run_command
from tests.harness.errors import fails
from thunder_zero.comm.handle import Handle
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Gather, Op, Wait
from thunder_zero.schedule.prefetch import Bound, bounds
from thunder_zero.sharded.waits import Labels, label_launch
from thunder_zero.tools import Device, Link, diff, estimate

import thunder

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/cost-model.md"
WIDTH, ROWS, UNITS = 4, 3, 5
MATRIX = WIDTH * WIDTH * 4  # bytes
DEVICE = Device("one", {"float32": 1.0}, 1e18, 1 << 30, intra_node=Link(0.1))  # a FLOP takes 1 s, a byte 10 s


class Deep(nn.Module):
    """Linear layers, a frozen parameter, an unused parameter and a buffer."""

    def __init__(self, units: int = UNITS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(units))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer.forward(x))
        return x * self.frozen + self.shift


@cache
def traces(stage: int, *, synced: bool = True, rank: int = 0, units: int = UNITS, **fields: Any) -> tz.tools.Traces:
    policy = tz.Policy(stage, **{"reshard_after_forward": True, "recompute": "none", **fields})
    return tz.trace(Deep(units), torch.ones(ROWS, WIDTH), policy=policy, world_size=2, rank=rank, synced=synced)


def weight(layer: int) -> str:
    return f"layers.{layer}.weight"


def in_words(shown: object) -> str:
    text = str(shown)
    assert max(map(len, text.splitlines())) <= 100
    return " ".join(text.split())


def op_at(line: Any, program: tz.tools.Traces) -> Op:
    """Return the operation that a line runs. A line that frees a gathered parameter runs a FREE."""
    places = [(op.backward, positions[0]) for op, positions in zip(program.timeline.ops, program.lines, strict=True)]
    return program.timeline.ops[places.index((line.phase == "backward", line.position))]


def test_explain_names_each_line_of_a_zero3_parameter() -> None:
    program = traces(3, bucket_bytes=0)
    shown = tz.explain(program, weight(2))
    assert f"rows 0 to 1 of 4 on this rank, {MATRIX // 2} B of {MATRIX} B" in in_words(shown)
    assert [gather["gather"].phase for gather in shown.gathers] == ["forward", "backward"]
    for gather, use in zip(shown.gathers, ("aten.t(", "aten.mm("), strict=True):  # backward reads the weight itself
        launch, free = gather["gather"], gather["free"]
        assert op_at(launch, program).params == op_at(gather["wait"], program).params == (weight(2),)
        assert use in gather["first use"].statement
        assert op_at(gather.get("last use", gather["first use"]), program).flops == 2 * ROWS * WIDTH**2
        assert free.code.startswith("del ")
        assert free.phase == launch.phase
    for alive in re.findall(r"64 B of its own; at most (\d+) B of all", in_words(shown)):
        assert 2 * MATRIX <= int(alive) <= max(gathered_bytes(program.timeline))
    assert isinstance(op_at(shown.gradient["wait"], program), Wait)
    assert op_at(shown.gradient["made"], program).writes == op_at(shown.gradient["reduce"], program).reads
    assert (shown.traffic.sent, shown.traffic.received) == (3 * MATRIX // 2, 3 * MATRIX // 2)
    assert shown.exposed_seconds is None
    text = in_words(shown)
    assert text.startswith("layers.2.weight: 4 x 4 float32, in unit layers.2; ZeRO-3, rank 0 of 2 at rest rows 0 to 1")
    assert "after its last use in this phase; it is gathered again" in text
    assert text.endswith("a step gathered twice; this rank sends 96 B and receives 96 B for it")


ALONE = {"bucket_bytes": 0}
ONE_AHEAD = ALONE | {"prefetch": 1, "in_flight_bytes": 2 * MATRIX}
TIMES = tz.schedule.Times({weight(index): 1.0 for index in range(UNITS)}, {}, bytes_per_second=MATRIX / 2)
REASONS: tuple[tuple[int, dict[str, Any], str, str], ...] = (  # stage, policy's fields, parameter, words
    # why a gather starts where it does
    (3, ALONE, weight(2), "right after the wait for layers.0.weight, 2 units ahead (Policy.prefetch)"),
    (3, ALONE | {"prefetch": 1}, weight(2), "after the wait for layers.1.weight, one unit ahead (Policy.prefetch)"),
    (3, ALONE | {"prefetch": 0}, weight(2), "right before its use: Policy.prefetch=0"),
    (3, ALONE | {"in_flight_bytes": 0}, weight(2), "right before its use: Policy.in_flight_bytes=0"),
    (3, ALONE | {"in_flight_bytes": MATRIX}, weight(2), "layers.1.weight: earlier, more than 64 B would be in flight"),
    (3, ALONE | {"prefetch": 9}, weight(2), "layers.0.weight: the first gather of forward has the wire to itself"),
    (3, ALONE | {"times": TIMES}, weight(2), "layers.1.weight: by the measured times (Policy.times) it still ends"),
    (3, ALONE, weight(0), "it starts with forward, so that it ends as soon as it can"),
    # how long the parameter lives
    (0, {}, weight(2), "every rank has all of it: DDP shards nothing"),
    (1, {}, weight(2), "free never: it stays in memory"),
    (3, {"reshard_after_forward": None}, weight(UNITS - 1), "staying does not raise the peak of gathered bytes"),
    (3, {"keep_unsharded": ("layers.1",)}, weight(1), "Policy.keep_unsharded names its unit"),
    (3, {"replicate_below_bytes": MATRIX + 1}, weight(1), "its 64 B are below Policy.replicate_below_bytes=65"),
    (3, {"replicated": ("layers.1",)}, weight(1), "Policy.replicated names it"),
    (2, {"owned": ("layers.*",)}, weight(1), "rank 1 steps it, since Policy.owned names it"),
    # when its gradient travels, and why some have none
    (3, {}, weight(0), "at the end of backward, behind all of its compute"),
    (3, ALONE | {"in_flight_bytes": MATRIX}, weight(4), "before the next gradient is made: with it, more than 64 B"),
    (3, ONE_AHEAD, weight(4), "before gathers start ahead: with them, more than 128 B would be in flight"),
    (3, {"synced": False}, weight(1), "no_sync keeps all of it"),
    (3, {}, "frozen", "it is frozen (requires_grad=False)"),
    (3, {}, "unused", "backward does not reach it"),
    (3, {}, "unused", "gathers none: this program does not read it"),
    (3, {"rank": 1}, "unused", "rows 3 to 4 of 5 on this rank, 12 B of 20 B, with 1 row of padding"),
)


def test_explain_gives_the_reason_for_each_place() -> None:
    for stage, fields, path, words in REASONS:
        find = traces.__wrapped__ if "times" in fields else traces  # times have no hash
        assert words in in_words(tz.explain(find(stage, **fields), path))


def test_nothing_computes_between_the_bound_of_a_gather_and_its_launch() -> None:
    for program in (
        traces(3, **ALONE),
        traces(1, **ALONE, prefetch=1),
        traces(2, **ALONE, in_flight_bytes=2 * MATRIX),
        traces(3, **ALONE, reshard_after_forward=None),
    ):
        ops, result = program.timeline.ops, bounds(program.timeline)
        launches = {op.writes[0]: index for index, op in enumerate(ops) if isinstance(op, Gather)}
        assert result.keys() == launches.keys()
        assert {bound for _, bound in result.values()} - {Bound.PHASE}
        for handle, (after, bound) in result.items():
            between = {op.kind for op in ops[after + 1 : launches[handle]]}
            assert bound is not Bound.EARLIER
            assert not between & {"compute", "wait"}


def test_each_stage_gathers_and_frees_as_it_promises() -> None:
    assert "free" not in tz.explain(traces(1), weight(2)).gathers[0]
    (gather,) = tz.explain(traces(2), weight(2)).gathers
    phases = [gather[name].phase for name in ("first use", "last use", "free")]
    assert phases == ["forward", "backward", "backward"]
    assert len(tz.explain(traces(3, keep_unsharded=("layers.1",)), weight(1)).gathers) == 1
    deferred = tz.explain(traces(3, synced=False), weight(1))
    assert list(deferred.gradient) == ["made", "defer"]
    assert deferred.traffic.sent == MATRIX, "two gathers"


def test_a_program_without_backward_is_explained_without_one() -> None:
    with torch.no_grad():
        program = tz.trace(Deep(2), torch.ones(ROWS, WIDTH), policy=3, world_size=2)
    text = in_words(tz.explain(program, weight(0)))
    assert text.count("there is no backward") == 3
    assert "backward does not" not in text


def test_a_value_computed_from_a_parameter_alone_counts_as_its_use() -> None:
    half = tz.MixedPrecision(torch.bfloat16)
    module, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), torch.ones(3, 4)
    program = tz.trace(module, x, policy=tz.Policy(2, mixed_precision=half, recompute="none"), world_size=2)
    (gather,) = tz.explain(program, "0.weight").gathers
    assert gather["last use"].phase == gather["free"].phase
    assert gather["last use"].position < gather["free"].position


def test_seconds_of_parameters_add_up_to_the_estimate() -> None:
    program = traces(3, bucket_bytes=0)
    shown = [tz.explain(program, path, device=DEVICE) for path in (*map(weight, range(UNITS)), "frozen")]
    exposed = sum(report.exposed_seconds or 0.0 for report in shown)
    assert exposed == pytest.approx(estimate(program, DEVICE).exposed_seconds)
    assert "compute waits" in in_words(shown[0])
    for gather in shown[0].gathers:
        assert gather["gather"].wire_seconds == pytest.approx(10 * MATRIX / 2)


def test_diff_compares_zero2_and_zero3_unit_by_unit() -> None:
    first, second = traces(2), traces(3)
    shown = diff(first, second)
    for index in range(UNITS):
        zero2, zero3 = shown.units[f"layers.{index}"]
        regathers = int(index > 0)  # x needs no gradient
        assert (zero2["gathers"], zero3["gathers"]) == (1, 1 + regathers)
        assert (zero2["reduces"], zero3["reduces"]) == (1, 1)
        assert (zero2["sent"], zero3["sent"]) == (MATRIX, MATRIX + regathers * MATRIX // 2)
        assert (zero2["gathered"], zero3["gathered"]) == (MATRIX, MATRIX)
    for program, total in zip((first, second), shown.total, strict=True):
        assert total["sent"] == sum(program.timeline.traffic(op).sent for op in program.timeline.ops)
        assert total["gathered"] == max(gathered_bytes(program.timeline))
        assert total["gathers"] == sum(isinstance(op, Gather) for op in program.timeline.ops)
        assert (total["recomputed"], total["its FLOP"]) == (0, 0)
    peaks = [table.memory.peak for table in shown.tables if table.memory]
    assert peaks == [tz.tools.memory(program).peak for program in (first, second)]
    assert "layers.1 .. 4, each 1 -> 2 1 64 -> 96 B 64 B 0 0" in in_words(shown)


def test_diff_counts_recomputed_flops_for_their_unit() -> None:
    units = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    module, x = nn.Sequential(*units), torch.ones(ROWS, 8)
    plain = tz.Policy(3, recompute="none", unit_of=lambda module: ("0", "1"))
    policies = plain, replace(plain, recompute="units")
    programs = [tz.trace(module, x, policy=policy, world_size=2) for policy in policies]
    shown, estimates = diff(*programs), [estimate(program, DEVICE) for program in programs]
    assert estimates[0].model_seconds == estimates[1].model_seconds  # recomputation is no work of the model
    more = 2 * ROWS * 8 * 8  # the first product of the first unit
    assert shown.total[1]["its FLOP"] == estimates[1].flops - estimates[0].flops == more
    assert [pair[0]["its FLOP"] for pair in shown.units.values()] == [0, 0]
    assert sum(pair[1]["its FLOP"] for pair in shown.units.values()) == shown.total[1]["its FLOP"]
    fused = diff(*(tz.trace(module, x, policy=policy, world_size=2, fuse="inductor") for policy in policies))
    assert fused.units == shown.units, "operations are counted before fusion"
    assert "; also recompute none -> units" in in_words(shown)


def test_wrong_arguments_are_refused_in_a_sentence() -> None:
    program, zero3 = traces(3), cast(Any, "zero3")
    three, two, rooted = traces(3, units=3), traces(3, units=2), traces(3, units=2, unit_of=lambda module: ())
    unknown = "no parameter 'layer.3.weight'; the nearest names are 'layers.3."
    no_sync = "one of the programs runs under no_sync and the other does not"
    rows: tuple[tuple[Any, str], ...] = (
        (lambda: tz.explain(program, "layer.3.weight"), unknown),
        (lambda: tz.explain(program, "shift"), "'shift' is a buffer, or a parameter that Policy.ignored names"),
        (lambda: tz.explain(program, weight(0), device="h9"), "there is no device 'h9'; give one of a100, h100"),
        (lambda: diff(three, two), "the first has 'layers.2.weight' (4, 4) float32 where the second has no"),
        (lambda: diff(rooted, two), "'layers.0.weight' is of unit '' in the first and of 'layers.0' in"),
        (lambda: diff(program, traces(3, synced=False)), no_sync),
        (lambda: diff(program, zero3), "diff takes Traces, got str"),
    )
    for call, words in rows:
        fails(call, "TypeError" if "got str" in words else "ValueError", words)


def events_of(path: Path, category: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == category]


def test_a_timeline_for_perfetto_has_the_numbers_of_the_estimate(tmp_path: Path) -> None:
    program, path = traces(3, bucket_bytes=0), tmp_path / "trace.json"
    tz.tools.save_timeline(path, program, device=DEVICE)
    forecast = estimate(program, DEVICE)
    slices = events_of(path, "forecast")
    assert max(item["ts"] + item["dur"] for item in slices) == pytest.approx(forecast.seconds * 1e6)
    on_wire = [item for item in slices if item["tid"] == 1]
    assert {item["name"] for item in on_wire} >= {f"{kind} {weight(2)}" for kind in ("gather", "reduce")}
    assert sum(item["args"]["sent_bytes"] for item in on_wire) == forecast.busiest_bytes
    waits = [item for item in slices if item["name"].startswith("wait for ")]
    assert sum(item["dur"] for item in waits) == pytest.approx(forecast.exposed_seconds * 1e6)
    computes = [item for item in slices if item["tid"] == 0 and item not in waits]
    assert sum(item["args"]["flops"] for item in computes) == forecast.flops
    assert weight(2) in {item["name"] for item in computes}
    counts = [event["args"]["bytes"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "C"]
    assert max(counts) == max(gathered_bytes(program.timeline))


@pytest.mark.usefixtures("group")
def test_a_profile_has_labels_and_is_shown_beside_the_forecast(tmp_path: Path) -> None:
    profile, combined = tmp_path / "profile.json", tmp_path / "both.json"
    model: Any = thunder.jit(Deep(2), transforms=[tz.ZeroTransform(3, reshard_after_forward=True)])
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    with torch.profiler.profile() as profiler:
        model(torch.ones(ROWS, WIDTH)).sum().backward()
    profiler.export_chrome_trace(str(profile))
    spans = sorted(events_of(profile, "user_annotation"), key=lambda event: (event["ts"], event["dur"]))
    labels = [event["name"] for event in spans if not event["name"].startswith("Profiler")]
    forward = [
        *(f"gather {weight(0)}", f"wait for gather {weight(0)}"),
        *("unit layers.0", f"gather {weight(1)}", "gather frozen", f"wait for gather {weight(1)}"),
        *("unit layers.1", "wait for gather frozen", "root unit"),
    ]
    assert labels[: len(forward)] == forward
    backward = labels[len(forward) :]
    assert backward[-1] == f"wait for reduce {weight(0)}"
    places = [backward.index(label) for label in (f"reduce {weight(1)}", "unit layers.1", f"reduce {weight(0)}")]
    assert places == sorted(places)
    tz.tools.save_timeline(combined, traces(3, units=2), device=DEVICE, measured=profile)
    forecast, measured = events_of(combined, "forecast"), events_of(combined, "user_annotation")
    first = [min(event["ts"] for event in events if event["name"] == labels[0]) for events in (forecast, measured)]
    assert first[0] == pytest.approx(first[1])
    assert {event["pid"] for event in forecast}.isdisjoint(event["pid"] for event in measured)
    assert len(measured) == len(spans)
    for text, words in (("[1]", "has no list of traceEvents; give what profile.export_chrome"), ("{", "is no JSON")):
        profile.write_text(text)
        fails(lambda: tz.tools.save_timeline(combined, traces(3), device=DEVICE, measured=profile), "ValueError", words)


def test_a_label_ends_with_backward(tmp_path: Path) -> None:
    # A label that ends in the next profile crashes.
    labels, x, profile = Labels(traces(3).plan), torch.ones(2, requires_grad=True), tmp_path / "profile.json"
    with torch.profiler.profile() as profiler:
        y = x * 2
        y.register_hook(lambda _: labels.begin("layers.0"))
        y.sum().backward()
        with torch.profiler.record_function("after"):
            labels.end()
    profiler.export_chrome_trace(str(profile))
    spans = {event["name"]: event for event in events_of(profile, "user_annotation")}
    unit = spans["unit layers.0"]
    assert unit["ts"] + unit["dur"] <= spans["after"]["ts"]


def test_without_a_profiler_nothing_is_labelled() -> None:
    handle = Handle((), (), set())
    assert Labels(traces(3).plan).watch(handle, "gather", (weight(0),)) is handle
    assert label_launch("gather", (weight(0),)) is label_launch("reduce", (weight(1),))


MODEL = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
import beside

@dataclass
class Config:
    width: int = 4

class Broken(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(7)

def build():
    with torch.device("meta"):
        layers = [nn.Linear(Config().width, Config().width, bias=False) for _ in range(beside.UNITS)]
        return nn.Sequential(*layers), torch.ones(3, Config().width)

def wrong(): return build()[0]
def broken(): return int("three")
def broken_forward(): return Broken(4, 4), torch.zeros(2, 4)
def wrong_shape(): return nn.Linear(4, 4), torch.zeros(2, 5)
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "beside.py").write_text("UNITS = 3")
    return tmp_path / "model.py"


def test_the_command_traces_a_file_for_any_world(model_file: Path) -> None:
    trace = partial(output_of, "trace", f"{model_file}:build")
    printed = trace("--world-size", 4, "--rank", 3, "--stage", 2, "--phase", "forward")
    assert "\n# forward, ZeRO-2, rank 3 of 4" in printed
    words, every, some = ("torch.ops.aten", "C0", " aten."), trace("--world-size", 4, "--all"), trace("--world-size", 4)
    assert [word in every for word in words] == [True, True, False]
    assert [word in some for word in words] == [False, False, True]
    lines = json.loads(trace("--world-size", 4, "--json"))["lines"]
    launched = [line for line in lines if line["sent"]]
    assert [line["kind"] for line in launched].count("reduce") == 3
    assert sum(line["sent"] for line in launched if line["phase"] == "forward") == 3 * MATRIX * 3 // 4
    assert {"forward", "backward"} == {line["phase"] for line in lines}
    shown = json.loads(trace("--json", "--unit", "1", "--only", "parameters"))["lines"]
    assert 0 < len(shown) < len(lines)
    assert any("lines_left_out" in line for line in shown)
    for device, ahead in (((), 2), (("--device", "h100"), 1)):  # units gathered ahead: Policy.prefetch
        kinds = [line["kind"] for line in json.loads(trace("--phase", "forward", "--json", *device))["lines"]]
        assert kinds[: kinds.index("compute")].count("gather") == 1 + ahead


REFUSED = (
    ("model.py:nothing", (), "has no function 'nothing'; it has build, wrong, broken"),
    ("model.py:wrong", (), "wrong returns Sequential; return a tuple of the module and its inputs"),
    ("model.py", (), "names no function; give FILE.py:function"),
    ("other.py:build", (), "there is no file"),
    ("model.py:build", ("--rank", "9"), "rank is 9; with world_size=8 it must be 0 to 7"),
    ("model.py:build", ("--stage", "4"), "stage is 4; choose 0 (DDP), 1, 2 or 3"),
    ("model.py:build", ("--unit", "x"), "unit is 'x'; the units of this module are '0', '1', '2'"),
)


def test_a_wrong_place_is_refused_in_a_sentence(model_file: Path) -> None:
    for place, options, sentence in REFUSED:
        code, _, error = run_command("trace", model_file.parent / place, *options)
        assert (code, error.count("\n")) == (1, 1)
        assert sentence in error


@pytest.mark.parametrize("command", [("trace",), ("plan", "--world-size", "8", "--model")], ids=["trace", "plan"])
def test_an_error_of_the_users_code_is_one_sentence_with_its_line(command: tuple[str, ...], model_file: Path) -> None:
    (model_file.parent / "syntax.py").write_text("def build(:\n")
    lines = [line.strip() for line in MODEL.splitlines()]
    for function, line, words in (
        ("broken", 'def broken(): return int("three")', "ValueError: invalid literal for int"),
        ("broken_forward", "return super().forward(x).view(7)", "RuntimeError: shape '[7]' is invalid for input"),
    ):
        code, _, error = run_command(*command, f"{model_file}:{function}")
        assert code == 1
        assert error.splitlines()[-1].startswith(f"thunder-zero: {model_file}:{lines.index(line) + 1}, in "), error
        assert f"`{line}`: {words}" in error
        assert "Traceback" not in error
    _, _, error = run_command(*command, f"{model_file}:wrong_shape")
    assert "linear.py:" in error
    assert "RuntimeError: a and b must have same reduction dim" in error
    assert "syntax.py:1: SyntaxError" in run_command(*command, f"{model_file.parent / 'syntax.py'}:build")[2]


def test_the_page_shows_the_output_of_its_programs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    text = PAGE.read_text()
    for section in (text, text.partition("## Ask a line")[2]):
        program, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)[:2]
        exec(compile(program, str(PAGE), "exec"), names)
        assert capsys.readouterr().out == printed
    assert (tmp_path / "trace.json").exists()
