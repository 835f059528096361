"""``print_trace`` prints lines that are Python, with their bytes and memory, in every stage, and refuses bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.tiers import slow
from tests.harness.traced import Chain, ResidualBlock, mean_square, traced
from thunder_zero.plan.amounts import size
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.tools.table.table import step_table, table_of
from thunder_zero.tools.views.print_rows import format_timeline
from thunder_zero.tools.views.print_trace import json_of, rows_of, shown_rows

import thunder

LAUNCH = re.compile(r"^.{40} (gather|reduce) +(\S.*?)  ?+ *([\d.]+ \w+) +([\d.]+ \w+) +([\d.]+ \w+)$")
FREED = re.compile(r"^del .{36} free +(\S+)(?:, \S+)? +([\d.]+ \w+) +[\d.]+ \w+$", re.MULTILINE)
ALIVE = re.compile(r"^.{82} +[\d.]+ \w+ +[\d.]+ \w+$")
PHASES = ("forward", "backward")
WIDTH, SHAPE = 8, (2, 4)


def gpt_model() -> nn.Module:
    """Build an embedding, two units, and a head."""
    blocks = Chain(ResidualBlock(WIDTH), ResidualBlock(WIDTH))
    return Chain(nn.Embedding(30, WIDTH), blocks, nn.Linear(WIDTH, 30, bias=False))


def small_model() -> nn.Module:
    """Build a module that is quick to trace."""
    return Chain(nn.Embedding(30, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 30, bias=False))


def tied_model() -> nn.Module:
    module = small_model()
    module[2].weight = module[0].weight
    return module


def policy_of(stage: int) -> tz.Policy:
    """Return a policy of which ZeRO-3 frees all after forward: by default it would keep all of these small models."""
    return tz.Policy(stage=stage, reshard_after_forward=True)


def trace_model(stage: int, build: Any = gpt_model, shape: tuple[int, ...] = SHAPE, **options: Any) -> tz.tools.Traces:
    return traced(build, shape, policy_of(stage), **({"world_size": 4, "dtype": torch.int64} | options))


def print_lines(shown: object, phase: str = "both", **options: Any) -> list[str]:
    file = StringIO()
    tz.print_trace(shown, phase, file, **options)
    assert "\x1b" not in file.getvalue()
    *head, blank = (lines := file.getvalue().splitlines())[:4]
    assert max(len(line) for line in lines if not line.startswith("# left out: ")) <= 100
    assert ([line[:2] for line in head], blank) == (["# "] * 3, "")
    for kind in ("gather", "wait", "compute", "free", "reduce", "sent", "gathered", "alive"):
        assert kind in " ".join(head)
    return lines[4:]


def numbers_in(total: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", total)]


def totals_of(timeline: tz.schedule.Timeline) -> list[int]:
    """Return the numbers of collectives, gathers and reductions, the bytes sent, and the peak of gathered bytes."""
    counts = [sum(op.kind == kind for op in timeline.ops) for kind in ("gather", "reduce")]
    return [sum(counts), *counts, sum(timeline.traffic(op).sent for op in timeline.ops), max(gathered_bytes(timeline))]


@pytest.mark.parametrize("stage", [1, 3, *slow(0, 2)])
def test_collectives_show_parameters_and_bytes_and_the_last_line_shows_totals(stage: int) -> None:
    lines = print_lines(trace_model(stage))
    _, gathers, reductions, _, peak = totals = numbers_in(lines[-1])
    assert totals == totals_of(trace_model(stage).timeline)
    assert (reductions > 0, gathers > 0, peak > 0) == (True, stage > 0, stage > 1)
    launches = [LAUNCH.match(line) for line in lines if re.search(r"= zero_(all|reduce)_", line)]
    assert None not in launches
    assert len(launches) == gathers + reductions
    names = {match[2].split(":")[0].split(",")[0].removeprefix("grad ") for match in launches if match}
    units = {"1.0", "1.1"}
    assert units <= names <= units | {"0.weight", "2.weight"} | {f"{unit}.down.weight" for unit in units}


def test_an_outer_step_has_a_line_for_each_fragment() -> None:
    traces, outer = trace_model(2), tz.Outer(sync_every=32, fragments=2, delay=1, wire=tz.Int8(block=64))
    plain = print_lines(traces)
    with_outer = replace(traces, outer=outer)
    file = StringIO()
    tz.print_trace(with_outer, file=file)
    lines = file.getvalue().splitlines()
    assert any("site: an exchange with other sites" in line for line in lines[:4])
    assert lines[-1] == plain[-1]  # the totals of a step have no exchange
    start = next(index for index, line in enumerate(lines) if line.startswith("# outer step, ZeRO-2"))
    assert lines[start + 1] == "# fragment 0 of 2, the root, 1.1: every 32 steps, applied 1 step later"
    vectors = outer.vectors_of(traces.plan)
    assert lines[start + 2].startswith("# a change is off by at most a whole step, 0.8% of the largest in its block")
    code, meaning = lines[start + 3].split(" site ")
    assert (code.strip(), meaning.split()[:4]) == ("outer.step()", ["0.weight,", "5", "more", "as"])
    assert size(outer.sent(vectors[0], 2)) in meaning
    assert step_table(with_outer).sent == step_table(traces).sent
    rows = json_of(with_outer, only="communication")["lines"]
    sent = [row["sent"] for row in rows if row.get("over") == "site"]
    assert sent == [outer.sent(each, 2) for each in vectors]
    assert len(json_of(with_outer, "backward")["lines"]) == len(json_of(traces, "backward")["lines"])


@pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
def test_both_programs_of_a_model_are_shown_with_bytes_and_memory(stage: int, group: ProcessGroup) -> None:
    """A model shows its program and that of ``no_sync``. A trace of four ranks shows the bytes sent."""
    under_no_sync = trace_model(stage, small_model, synced=False)
    *_, totals, deferred = print_lines(under_no_sync)
    assert numbers_in(totals) == totals_of(under_no_sync.timeline)
    assert numbers_in(totals)[2] == 0
    held = sum(param.full_bytes for param in under_no_sync.plan.params)
    assert deferred == f"{held:,} B of full gradients are held for a later backward"
    model: Any = thunder.jit(small_model(), transforms=[tz.ZeroTransform(policy_of(stage))])
    for call in (partial(tz.traces_of, model, synced=False), partial(tz.print_trace, model)):
        fails(call, "the model was not called yet")
    tokens = torch.zeros(SHAPE, dtype=torch.int64)
    model(tokens).sum().backward()
    one_rank = print_lines(trace_model(stage, small_model, world_size=1))
    assert numbers_in(print_lines(model)[-1]) == numbers_in(one_rank[-1])
    assert "0 B sent by this rank" in one_rank[-1]
    assert {match[3] for line in one_rank if (match := LAUNCH.match(line))} == {"0 B"}
    fails(partial(tz.traces_of, model, synced=False), "not called inside no_sync yet; call it there once")
    with model.no_sync():
        model(tokens).sum().backward()
    shown = {synced: print_lines(tz.traces_of(model, synced=synced)) for synced in (True, False)}
    assert shown[False] == print_lines(model)
    for synced, lines in shown.items():
        titles = [line for line in lines if line.startswith(("# forward", "# backward"))]
        assert ["under no_sync" in title for title in titles] == [not synced] * 2
        assert ("held for a later backward" in lines[-1]) is not synced


def test_every_line_of_the_trace_is_printed_as_python() -> None:
    traces = trace_model(3)
    for phase, trace in (("forward", traces.forward), ("backward", traces.backward)):
        text = "\n".join(print_lines(traces, phase, every_line=True))
        assert trace is not None
        calls = [bsym for bsym in trace.bound_symbols if bsym.sym.name not in ("unpack_trivial", "python_return")]
        for name in {proxy.name for bsym in calls for proxy in bsym.flat_proxy_outs if len(bsym.flat_proxy_outs) == 1}:
            assert re.search(rf"^\W*{name}\W* = ", text, re.MULTILINE), name
        dels = sum(bsym.sym.name == "python_del" for bsym in calls)
        assert sum(line.startswith("del ") for line in text.splitlines()) == dels
    assert "# embedding" not in text
    forward, backward, both = (print_lines(traces, phase) for phase in (*PHASES, "both"))
    assert both == print_lines(traces)
    assert len(both) < len(print_lines(traces, every_line=True))
    assert both[:-1] == forward[:-1] + backward[:-1]
    in_forward, in_backward, in_both = (numbers_in(lines[-1])[:4] for lines in (forward, backward, both))
    assert in_both == [sum(parts) for parts in zip(in_forward, in_backward, strict=True)]
    files = set(re.findall(r"^# (\w+\.py):\d+  \S", "\n".join(forward), re.MULTILINE))
    assert "traced.py" in files  # files of the models, none of Thunder
    assert files.isdisjoint({"module.py", "symbol.py", "proxies.py"})
    gradients = re.findall(r"^# gradient of (\w+\.py):\d+  \S", "\n".join(backward), re.MULTILINE)
    assert set(gradients) == {"traced.py"}


class Checkpointed(nn.Module):
    """A module of checkpointed blocks, which dynamo captures as graphs with equal names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        best: Tensor = x.topk(2)[0]
        return best


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        made: Tensor = x + self.down(torch.tanh(hidden))
        return made


class Gated(nn.Module):
    """A module that names both parts of a split value, and a view that one line reads."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        heads = self.out(torch.sigmoid(gate) * value).view(2, 4, 2, 4)
        return torch.tanh(heads * self.scale)


def codes_of(traces: tz.tools.Traces) -> dict[str, list[str]]:
    return {phase: [row.code for row in shown_rows(table_of(traces), phase)] for phase in PHASES}


def test_names_are_the_users_variables_and_paths() -> None:
    traces = traced(Checkpointed, (2, 4, WIDTH), policy_of(3), world_size=4)
    lines = {
        "forward": (
            "(blocks_0_norm, blocks_0_norm_1, blocks_0_norm_2) = "
            "aten.native_layer_norm(x, [8], blocks_0_norm_weight, blocks_0_norm_bias, 1e-05)",
            "hidden = aten.addmm(blocks_0_up_bias, blocks_0_norm.reshape([8, 8]), blocks_0_up_weight.t())",
            "hidden_1 = aten.addmm(blocks_1_up_bias, blocks_1_norm.reshape([8, 8]), blocks_1_up_weight.t())",
            "made_1 = aten.add(made, blocks_1_down.reshape([2, 4, 8]))",
            "(best, topk_1) = aten.topk(made_1, 2)",
        ),
        "backward": (
            "hidden_1_again = "
            "aten.addmm(blocks_1_up_bias_again, blocks_1_norm_again_view, blocks_1_up_weight_again.t())",
            "blocks_1_down_weight_grad = aten.mm(view_8.t(), tanh_1_again.reshape([8, 16]))",
            "blocks_1_down_bias_grad = aten.sum(view_8, [0], True).reshape([8])",
            "del blocks_1_down_weight_again",
        ),
    }
    codes = codes_of(traces)
    assert [line for phase in PHASES for line in lines[phase] if line not in codes[phase]] == []
    text = "\n".join([*codes["forward"], *codes["backward"]])
    assert [word for word in ("getitem", "C0", "clear_mutable", ".t().t()", "torch.ops") if word in text] == []
    assert not any("…" in line for line in print_lines(traces) if not line.startswith("#"))


def test_views_are_printed_inside_the_lines_that_read_them() -> None:
    """ZeRO-2 keeps parameters for backward; forward saves views of them."""
    forward, backward = codes_of(traced(Gated, (2, 4, WIDTH), policy_of(2), world_size=4)).values()
    lines = (
        "both = aten.addmm(both_bias, x.reshape([8, 8]), both_weight.t())",
        "(gate, value) = both.reshape([2, 4, 16]).split(8, -1)",
        "heads = aten.addmm(out_bias, mul.reshape([8, 8]), out_weight.t())",
        "mul_1 = aten.mul(heads.reshape([2, 4, 2, 4]), scale)",
    )
    assert [line for line in lines if line not in forward] == []
    assert forward[-1] == "return (tanh,), (tanh, scale, out_weight, both, x)"
    assert "view_8 = aten.mm(view_6, out_weight).reshape([2, 4, 8])" in backward  # transposed twice


def test_zero3_frees_parameters_in_each_phase_and_zero2_in_backward() -> None:
    def frees_of(stage: int, phase: str) -> list[tuple[str, str]]:
        return FREED.findall("\n".join(print_lines(trace_model(stage), phase)))

    assert frees_of(3, "forward")[-1] == ("2.weight", "0 B")
    assert frees_of(3, "backward")[-1][1] == "0 B"
    assert "2.weight" not in dict(frees_of(2, "forward"))
    assert frees_of(2, "forward")[-1][1] != "0 B"
    assert frees_of(2, "backward")[-1][1] == "0 B"
    assert "2.weight" in dict(frees_of(2, "backward"))
    assert frees_of(1, "forward") == []
    lines = print_lines(drop_backward(trace_model(3)))
    assert lines[-3:-1] == ["# no backward: nothing here needs a gradient", ""]
    assert lines[-1] == print_lines(trace_model(3), "forward")[-1]


@pytest.mark.parametrize("stage", [3, *slow(1, 2)])
def test_a_unit_can_be_printed_alone(stage: int) -> None:
    lines, whole = print_lines(trace_model(stage), unit="1.0"), print_lines(trace_model(stage))
    # a gather, and a reduction in backward; in ZeRO-3 a second gather
    collectives = [line for line in lines if re.search(r"(gather|reduce) +1\.0[:.]", line)]
    assert len(collectives) == (3 if stage == 3 else 2)
    assert len(lines) < len(whole)
    assert set(lines[:-1]) <= {*whole, *(line for line in lines if line.startswith("# ... "))}


def test_folded_lines_are_counted_and_tied_weights_are_one_parameter() -> None:
    def lines_of(lines: list[str], kinds: str) -> list[str]:
        return [line for line in lines if re.match(rf"^.{{40}} ({kinds}) ", line)]

    whole, folded = print_lines(trace_model(3), "forward"), print_lines(trace_model(3), "forward", only="parameters")
    assert folded[-1] == whole[-1]
    assert len(folded) < len(whole)
    assert lines_of(folded, "gather|wait|free|reduce") == lines_of(whole, "gather|wait|free|reduce")
    whole, sent = print_lines(trace_model(3)), print_lines(trace_model(3), only="communication")
    assert lines_of(sent, "gather|wait|reduce") == lines_of(whole, "gather|wait|reduce")
    assert [any(" free " in line for line in lines) for lines in (whole, sent)] == [True, False]
    text = "\n".join(print_lines(trace_model(3, tied_model)))
    assert "0.weight" in text
    assert "2.weight" not in text


def test_a_timeline_is_printed_with_the_numbers_of_errors() -> None:
    timeline, file = trace_model(3, small_model).timeline, StringIO()
    tz.print_trace(timeline, file=file)
    assert file.getvalue() == f"{format_timeline(timeline, numbered=True)}\n"
    fails(partial(tz.print_trace, timeline, unit="0"), "ValueError", "a timeline is printed whole")


def drop_backward(traces: tz.tools.Traces) -> tz.tools.Traces:
    forward = traces.forward_timeline
    return replace(traces, backward=None, timeline=forward, lines=traces.lines[: len(forward.ops)])


@pytest.mark.slow
def test_a_forecast_is_printed_beside_the_lines() -> None:
    """The forecast includes the optimizer's state and what the loss holds."""
    traces, forecast = trace_model(3), partial(tz.tools.memory, loss=mean_square, reserve=5000)
    memory, adam = (forecast(traces, optimizer=optimizer) for optimizer in (torch.optim.SGD, torch.optim.AdamW))
    plain, with_memory = print_lines(traces), print_lines(traces, memory=adam)
    assert len(with_memory) == len(plain) + 1
    in_step = size(adam.optimizer_step or 0)
    assert with_memory[-2] == f"# at rest {size(adam.at_rest)}, in the optimizer's step {in_step}"
    assert with_memory[-1] == plain[-1]
    product = re.compile(r"aten\.(add)?mm\.default\(")
    totals = [line.alive for line in adam.lines if product.search(line.code)]
    assert len(totals) == 5 + 2 * 5, "two products of each block, one of the head; each has two gradients"
    table = table_of(traces, adam)
    every, some = ([row for phase in PHASES for row in rows(table, phase)] for rows in (rows_of, shown_rows))
    assert [line.alive for line in every if product.search(line.code)] == totals
    assert [line[92:].strip() for line in with_memory if ALIVE.search(line)] == [size(line.alive or 0) for line in some]
    assert [some[-1].alive, max(line.highest or 0 for line in some if line.is_peak)] == [every[-1].alive, adam.peak]
    assert marks_in(with_memory) == [f"# the peak of the step: {size(adam.peak)} alive in the line above"]
    assert marks_in(plain) == [f"# the peak of the step: {size(tz.tools.memory(traces).peak)} alive in the line above"]
    assert adam.peak - memory.peak == adam.at_rest - memory.at_rest > 0
    # A peak in the loss is marked between the phases.
    traces = trace_model(0, small_model)
    in_loss = tz.tools.memory(traces, loss=lambda y: y.repeat(9, 9, 9).square().mean())
    lines = print_lines(traces, memory=in_loss)
    assert in_loss.peak_line.phase == "loss"
    assert marks_in(lines) == [f"# the peak of the step: {size(in_loss.peak)} alive in the loss"]
    assert lines[lines.index(marks_in(lines)[0]) + 2].startswith("# backward")
    assert marks_in(print_lines(traces, "backward", memory=in_loss)) == []
    assert lines[-2] == "# left out: the optimizer's state and step: give optimizer="


def marks_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("# the peak of the step: ")]


def test_bad_input_is_refused() -> None:
    traces = trace_model(3, small_model)
    forecasts_of_others: list[tuple[tz.tools.Traces, str]] = [
        (trace_model(3, small_model, world_size=1), "of ZeRO-3, rank 0 of 1, the traces are of ZeRO-3, rank 0 of 4"),
        (trace_model(3, tied_model), "of ZeRO-3, rank 0 of 4, the traces are of the same rank with another module"),
        (trace_model(3, small_model, (2, 5)), "is a forecast of other traces, with 'forward line "),
        (drop_backward(traces), "with 'nothing' in place of 'backward line "),
    ]
    gives = "give what thunder_zero.tools.memory returns"
    rows: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        *(({"memory": tz.tools.memory(other)}, ("ValueError", words, gives)) for other, words in forecasts_of_others),
        ({"memory": 5}, ("TypeError", "memory is of type int", gives)),
        ({"phase": "forwards"}, ("ValueError", "phase is 'forwards'", "choose 'forward', 'backward' or 'both'")),
        ({"rank": 1}, ("ValueError", "rank is 1", "the rank that prints, 0 to 0")),
        ({"shown": gpt_model()}, ("TypeError", "expected a sharded model")),
    ]
    for options, words in rows:
        fails(partial(print_lines, **{"shown": traces, **options}), *words)


def test_only_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for columns, width in (("100", 100), ("300", 140)):
        monkeypatch.setenv("COLUMNS", columns)
        file = Terminal()
        tz.print_trace(trace_model(3), "forward", file=file)
        assert "\x1b[" in file.getvalue()
        plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines()
        assert max(map(len, plain[:-1])) == width
