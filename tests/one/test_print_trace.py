"""``print_trace`` on Thunder's traces: a GPT-like module in every stage, and what bad input gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness.tiers import of_tier
from thunder_zero.report.trace_printer import size
from thunder_zero.schedule.timeline import gathered_bytes

import thunder

STAGES = pytest.mark.parametrize("stage", of_tier((1, 3), range(4)))
SHOWS = re.compile(r"^.{40} (gather|reduce) +(\S.*?)  ?+ *([\d.]+ \w+) +([\d.]+ \w+) +([\d.]+ \w+)$")


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output_projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.queries_keys_values(x).chunk(3, dim=-1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.output_projection(heads.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.second_norm(x))))
        return y


class GPT(nn.Module):
    def __init__(self, *, tied: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, width)
        self.transformer_blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 30, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.transformer_blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def small() -> nn.Module:
    """Quick to trace."""
    return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 30, bias=False))


@cache
def traces(stage: int, world_size: int = 4, tied: bool = False) -> tz.Traces:
    torch.manual_seed(0)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    policy = tz.Policy(
        stage=stage, gather_last_units_once=False
    )  # else ZeRO-3 would gather as little of it again as ZeRO-2
    return tz.trace(GPT(tied=tied), tokens, policy=policy, world_size=world_size)


def printed(shown: object, half: str = "both", **options: Any) -> list[str]:
    file = StringIO()
    tz.print_trace(shown, half, file, **options)
    text = file.getvalue()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("# left out: ")) <= 100
    return text.splitlines()


def numbers(total: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", total)]


@STAGES
def test_the_last_line_is_the_timeline_s(stage: int) -> None:
    timeline = traces(stage).timeline
    counts = [sum(op.kind is kind for op in timeline.ops) for kind in (tz.Kind.GATHER, tz.Kind.REDUCE)]
    sent, peak = sum(map(timeline.bytes_sent, timeline.ops)), max(gathered_bytes(timeline))
    assert numbers(printed(traces(stage))[-1]) == [sum(counts), *counts, sent, peak]
    assert counts[1] > 0
    assert (counts[0] > 0, peak > 0) == (stage > 0, stage > 1)


@STAGES
def test_both_programs_of_an_accumulation_are_shown_with_bytes_and_memory(stage: int) -> None:
    """One model, called both ways; W = 1 here, so the bytes that are sent are those of a trace for four ranks."""
    tokens, policy = torch.zeros(2, 4, dtype=torch.int64), tz.Policy(stage=stage, gather_last_units_once=False)
    inside = tz.trace(small(), tokens, policy=policy, world_size=4, synced=False)
    counts = [sum(op.kind is kind for op in inside.timeline.ops) for kind in (tz.Kind.GATHER, tz.Kind.REDUCE)]
    sent, peak = sum(map(inside.timeline.bytes_sent, inside.timeline.ops)), max(gathered_bytes(inside.timeline))
    full = sum(param.full_bytes for param in inside.plan.params)
    *_, summed, deferred = printed(inside)
    assert numbers(summed) == [sum(counts), *counts, sent, peak]
    assert counts[1] == 0
    assert deferred == f"{full:,} B of full gradients are held for a later backward"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = thunder.jit(small(), transforms=[tz.ZeroTransform(policy)])
        with pytest.raises(RuntimeError, match="the model was not called yet"):
            tz.traces_of(model, synced=False)
        model(tokens).sum().backward()
        with pytest.raises(RuntimeError, match="not called inside no_sync yet; call it there once"):
            tz.traces_of(model, synced=False)
        with model.no_sync():
            model(tokens).sum().backward()
        shown = {synced: printed(tz.traces_of(model, synced=synced)) for synced in (True, False)}
        assert shown[False] == printed(model)
    finally:
        dist.destroy_process_group()
    for synced, lines in shown.items():
        titles = [line for line in lines if line.startswith(("# forward", "# backward"))]
        assert ["under no_sync" in title for title in titles] == [not synced] * 2
        assert ("held for a later backward" in lines[-1]) is not synced


@STAGES
def test_every_collective_shows_its_parameters_and_bytes(stage: int) -> None:
    lines = printed(traces(stage))
    launches = [line for line in lines if re.search(r"= zero_(all|reduce)_", line)]
    shown = [SHOWS.match(line) for line in launches]
    assert None not in shown
    assert len(shown) == numbers(lines[-1])[0]
    names = {match[2].split(":")[0].split(",")[0].removeprefix("grad ") for match in shown if match}
    assert names <= {"embedding.weight", "head.weight", "transformer_blocks.0", "transformer_blocks.1"}
    assert {"transformer_blocks.0", "transformer_blocks.1"} <= names


def test_every_line_of_the_trace_is_there_and_is_python() -> None:
    shown = traces(3)
    for half, trace in (("forward", shown.forward), ("backward", shown.backward)):
        text = "\n".join(printed(shown, half))
        assert trace is not None
        calls = [bsym for bsym in trace.bound_symbols if bsym.sym.name not in ("unpack_trivial", "python_return")]
        for name in {proxy.name for bsym in calls for proxy in bsym.flat_proxy_outs if len(bsym.flat_proxy_outs) == 1}:
            assert re.search(rf"^\W*{name}\W* = ", text, re.MULTILINE), name
        assert sum(line.startswith("del ") for line in text.splitlines()) == sum(
            bsym.sym.name == "python_del" for bsym in calls
        )
    assert "# embedding" not in text


FREE = re.compile(r"^del .{36} free +(\S+)(?:, \S+)? +([\d.]+ \w+) +[\d.]+ \w+$")


def test_zero3_frees_all_in_each_half_and_zero2_in_backward() -> None:
    def freed(stage: int, half: str) -> list[tuple[str, str]]:
        return [(match[1], match[2]) for line in printed(traces(stage), half) if (match := FREE.match(line))]

    assert freed(3, "forward")[-1] == ("head.weight", "0 B")
    assert freed(3, "backward")[-1][1] == "0 B"
    assert "head.weight" not in dict(freed(2, "forward"))
    assert freed(2, "forward")[-1][1] != "0 B"
    assert freed(2, "backward")[-1][1] == "0 B"
    assert "head.weight" in dict(freed(2, "backward"))
    assert freed(1, "forward") == freed(0, "forward") == []


def test_long_paths_break_at_a_dot() -> None:
    lines = printed(traces(3), "forward", unit="transformer_blocks.1")
    assert {match[1] for line in lines if (match := FREE.match(line))} == {
        "transformer_blocks.1.first_norm.",
        "transformer_blocks.1.attention.",
        "transformer_blocks.1.second_norm.",
        "transformer_blocks.1.up.weight,",
        "transformer_blocks.1.down.weight,",
    }
    assert f"{'':49}queries_keys_values.weight, bias" in lines


def test_both_is_forward_then_backward() -> None:
    forward, backward = printed(traces(3), "forward"), printed(traces(3), "backward")
    assert printed(traces(3), "both")[:-1] == forward[:-1] + backward[:-1]
    assert printed(traces(3)) == printed(traces(3), "both")
    sums = [numbers(lines[-1]) for lines in (forward, backward, printed(traces(3)))]
    assert [sums[2][at] for at in range(4)] == [sums[0][at] + sums[1][at] for at in range(4)]


@pytest.mark.parametrize("stage", of_tier((1, 3), (1, 2, 3)))
def test_one_unit(stage: int) -> None:
    lines = printed(traces(stage), unit="transformer_blocks.0")
    whole = printed(traces(stage))
    # its gather and its reduction in backward; with ZeRO-3 a second gather
    own = [line for line in lines if re.search(r"(gather|reduce) +transformer_blocks\.0:", line)]
    assert len(own) == (3 if stage == 3 else 2)
    assert len(lines) < len(whole)
    assert set(lines[:-1]) <= {*whole, *(line for line in lines if line.startswith("# ... "))}


def test_folded_lines_are_counted() -> None:
    whole, folded = printed(traces(3), "forward"), printed(traces(3), "forward", fold=True)
    assert folded[-1] == whole[-1]
    assert len(folded) < len(whole) * 2 / 3
    named = re.compile(r"^.{40} (gather|wait|free|reduce) ")
    assert [line for line in folded if named.match(line)] == [line for line in whole if named.match(line)]


def test_forward_shows_where_its_lines_come_from() -> None:
    origin = re.compile(r"^# (\w+\.py):\d+  \S")
    files = {match[1] for line in printed(traces(3), "forward") if (match := origin.match(line))}
    assert files == {"test_print_trace.py", "linear.py", "normalization.py", "sparse.py"}  # none of Thunder's own
    assert not any(map(origin.match, printed(traces(3), "backward")))


def test_tied_weights_are_one_parameter() -> None:
    text = "\n".join(printed(traces(3, tied=True)))
    assert "embedding.weight" in text
    assert "head.weight" not in text


def test_one_rank_sends_nothing() -> None:
    lines = printed(traces(3, world_size=1))
    assert "0 B sent by this rank" in lines[-1]
    assert {match[3] for line in lines if (match := SHOWS.match(line))} == {"0 B"}


def test_without_a_backward() -> None:
    shown = traces(3)
    alone = tz.Traces(shown.forward, None, shown.forward_timeline, shown.plan)
    assert printed(alone)[-3:-1] == ["# no backward: nothing here needs a gradient", ""]
    assert printed(alone)[-1] == printed(shown, "forward")[-1]


@pytest.mark.slow
def test_a_forecast_that_is_given_is_shown() -> None:
    """With the optimizer's state, 8 bytes a number of the shards, and with what the loss holds."""
    shown = traces(3)
    memory = tz.memory(shown, loss=lambda y: y.square().mean(), optimizer=torch.optim.SGD, reserve=5000)
    adam = tz.memory(shown, loss=lambda y: y.square().mean(), optimizer=torch.optim.AdamW, reserve=5000)
    alone, given = printed(shown), printed(shown, memory=adam)
    assert len(given) == len(alone) + 1
    assert given[-2] == f"# at rest {size(adam.at_rest)}, in the optimizer's step {size(adam.optimizer_step or 0)}"
    assert given[-1] == alone[-1]
    totals = [size(line.total) for line in adam.lines if line.half == "forward" and "linear" in line.code]
    assert [line[-8:].strip() for line in given if line.startswith("t") and "linear(" in line] == totals
    assert marks(given) == [f"# the peak of the step: {size(adam.peak)} alive in the line above"]
    assert marks(alone) == [f"# the peak of the step: {size(tz.memory(shown).peak)} alive in the line above"]
    assert adam.peak - memory.peak == adam.at_rest - memory.at_rest > 0


@pytest.mark.slow
def test_a_peak_in_the_loss_is_marked_between_the_halves() -> None:
    shown = tz.trace(nn.Linear(8, 8), torch.zeros(64, 8), policy=tz.DDP, world_size=2)
    memory = tz.memory(shown, loss=lambda y: y.repeat(9, 9).square().mean())
    lines = printed(shown, memory=memory)
    assert memory.peak_line.half == "loss"
    assert marks(lines) == [f"# the peak of the step: {size(memory.peak)} alive in the loss"]
    at = lines.index(marks(lines)[0])
    assert lines[at + 2].startswith("# backward")
    assert marks(printed(shown, "backward", memory=memory)) == []
    assert lines[-2] == "# left out: the optimizer's state and step: give optimizer="


@pytest.mark.slow
def test_a_forecast_of_other_traces_is_refused() -> None:
    shown = traces(3)
    with pytest.raises(
        ValueError, match=r"^memory is a forecast of rank 0 of 2 in ZeRO-3, the traces are of rank 0 of 4 in"
    ):
        printed(shown, memory=tz.memory(traces(3, world_size=2)))
    with pytest.raises(
        ValueError, match=r"of rank 0 of 4 in ZeRO-3, the traces are of the same rank with another module"
    ):
        printed(shown, memory=tz.memory(traces(3, tied=True)))
    longer = tz.trace(GPT(), torch.zeros(2, 5, dtype=torch.int64), policy=shown.plan.policy, world_size=4)
    with pytest.raises(
        ValueError, match=r"^memory is a forecast of other traces, where line \d+ of \w+ is '.*', not '.*'; "
    ):
        printed(shown, memory=tz.memory(longer))
    alone = tz.Traces(shown.forward, None, shown.forward_timeline, shown.plan)
    with pytest.raises(
        ValueError, match=r"line \d+ of backward is 'missing', not '.*'; give what thunder_zero.memory ret"
    ):
        printed(shown, memory=tz.memory(alone))
    with pytest.raises(
        TypeError, match=r"^memory is of type int; give what thunder_zero\.memory returns for these traces$"
    ):
        printed(shown, memory=5)


def marks(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("# the peak of the step: ")]


def test_a_half_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="half is 'forwards'; choose 'forward', 'backward' or 'both'"):
        tz.print_trace(traces(3), "forwards")


def test_a_unit_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"unit is 'h\.0'; the units of this module are '', 'transformer_blocks\.0'"):
        tz.print_trace(traces(3), file=StringIO(), unit="h.0")


def test_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for columns, width in (("100", 100), ("300", 140)):
        monkeypatch.setenv("COLUMNS", columns)
        file = Terminal()
        tz.print_trace(traces(3), "forward", file=file)
        assert "\x1b[" in file.getvalue()
        plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines()
        assert max(map(len, plain[:-1])) == width


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_model_shows_what_ran() -> None:
    model = thunder.jit(GPT(), transforms=[tz.ZeroTransform(stage=3, gather_last_units_once=False)])
    with pytest.raises(RuntimeError, match="the model was not called yet"):
        tz.print_trace(model)
    model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    assert numbers(printed(model)[-1]) == numbers(printed(traces(3, world_size=1))[-1])
    with pytest.raises(TypeError, match="expected a module jitted with ZeroTransform"):
        tz.print_trace(GPT())
