"""``print_trace`` on Thunder's traces: a GPT-like module in every stage, and what bad input gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.tiers import slow
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero.plan.amounts import size
from thunder_zero.schedule import Kind
from thunder_zero.schedule.lifetimes import gathered_bytes

import thunder

SHOWS = re.compile(r"^.{40} (gather|reduce) +(\S.*?)  ?+ *([\d.]+ \w+) +([\d.]+ \w+) +([\d.]+ \w+)$")
FREE = re.compile(r"^del .{36} free +(\S+)(?:, \S+)? +([\d.]+ \w+) +[\d.]+ \w+$")
WIDTH, SHAPE = 8, (2, 4)


def gpt() -> nn.Module:
    """An embedding, two units, and a head."""
    blocks = Chain(ResidualBlock(WIDTH), ResidualBlock(WIDTH))
    return Chain(nn.Embedding(30, WIDTH), blocks, nn.Linear(WIDTH, 30, bias=False))


def small() -> nn.Module:
    """Quick to trace."""
    return Chain(nn.Embedding(30, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 30, bias=False))


def tied() -> nn.Module:
    module = small()
    module[2].weight = module[0].weight
    return module


def policy(stage: int) -> tz.Policy:
    """Otherwise ZeRO-3 would gather as little of it again as ZeRO-2."""
    return tz.Policy(stage=stage, reshard_after_forward=True)


def traces(
    stage: int, make: Callable[[], nn.Module] = gpt, shape: tuple[int, ...] = SHAPE, *, world_size: int = 4, **how: Any
) -> tz.tools.Traces:
    return traced(make, shape, policy(stage), world_size=world_size, dtype=torch.int64, **how)


def printed(shown: object, phase: str = "both", **options: Any) -> list[str]:
    file = StringIO()
    tz.print_trace(shown, phase, file, **options)
    text = file.getvalue()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("# left out: ")) <= 100
    how, lines = text.splitlines()[:4], text.splitlines()[4:]
    assert [line[:2] for line in how] == ["# "] * 3 + [""]
    for kind in ("gather", "wait", "compute", "free", "reduce", "sent", "gathered", "alive"):
        assert kind in " ".join(how)
    return lines


def numbers(total: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", total)]


def sums(timeline: tz.schedule.Timeline) -> list[int]:
    """Collectives, gathers and reductions of them, bytes sent, and the peak of what is gathered."""
    counts = [sum(op.kind is kind for op in timeline.ops) for kind in (Kind.GATHER, Kind.REDUCE)]
    return [sum(counts), *counts, sum(map(timeline.bytes_sent, timeline.ops)), max(gathered_bytes(timeline))]


@pytest.mark.parametrize("stage", [1, 3, *slow(0, 2)])
def test_every_collective_shows_its_parameters_and_bytes_and_the_last_line_their_sums(stage: int) -> None:
    lines = printed(traces(stage))
    _, gathers, reductions, _, peak = found = numbers(lines[-1])
    assert found == sums(traces(stage).timeline)
    assert (reductions > 0, gathers > 0, peak > 0) == (True, stage > 0, stage > 1)
    launches = [SHOWS.match(line) for line in lines if re.search(r"= zero_(all|reduce)_", line)]
    assert None not in launches
    assert len(launches) == gathers + reductions
    names = {match[2].split(":")[0].split(",")[0].removeprefix("grad ") for match in launches if match}
    units = {"1.0", "1.1"}
    assert units <= names <= units | {"0.weight", "2.weight"} | {f"{unit}.down.weight" for unit in units}


@pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
def test_both_programs_of_a_model_are_shown_with_bytes_and_memory(stage: int, group: ProcessGroup) -> None:
    """One model, called both ways; W = 1 here, so the bytes that are sent are those of a trace for four ranks."""
    inside = traces(stage, small, synced=False)
    *_, summed, deferred = printed(inside)
    assert numbers(summed) == sums(inside.timeline)
    assert numbers(summed)[2] == 0
    held = sum(param.full_bytes for param in inside.plan.params)
    assert deferred == f"{held:,} B of full gradients are held for a later backward"
    model: Any = thunder.jit(small(), transforms=[tz.ZeroTransform(policy(stage))])
    for call in (lambda: tz.traces_of(model, synced=False), lambda: tz.print_trace(model)):
        assert "the model was not called yet" in raised(call)
    tokens = torch.zeros(SHAPE, dtype=torch.int64)
    model(tokens).sum().backward()
    alone = printed(traces(stage, small, world_size=1))
    assert numbers(printed(model)[-1]) == numbers(alone[-1])
    assert "0 B sent by this rank" in alone[-1]
    assert {match[3] for line in alone if (match := SHOWS.match(line))} == {"0 B"}
    assert "not called inside no_sync yet; call it there once" in raised(lambda: tz.traces_of(model, synced=False))
    with model.no_sync():
        model(tokens).sum().backward()
    shown = {synced: printed(tz.traces_of(model, synced=synced)) for synced in (True, False)}
    assert shown[False] == printed(model)
    for synced, lines in shown.items():
        titles = [line for line in lines if line.startswith(("# forward", "# backward"))]
        assert ["under no_sync" in title for title in titles] == [not synced] * 2
        assert ("held for a later backward" in lines[-1]) is not synced


def test_every_line_of_the_trace_is_there_and_is_python() -> None:
    shown = traces(3)
    for phase, trace in (("forward", shown.forward), ("backward", shown.backward)):
        text = "\n".join(printed(shown, phase, every_line=True))
        assert trace is not None
        calls = [bsym for bsym in trace.bound_symbols if bsym.sym.name not in ("unpack_trivial", "python_return")]
        for name in {proxy.name for bsym in calls for proxy in bsym.flat_proxy_outs if len(bsym.flat_proxy_outs) == 1}:
            assert re.search(rf"^\W*{name}\W* = ", text, re.MULTILINE), name
        dels = sum(bsym.sym.name == "python_del" for bsym in calls)
        assert sum(line.startswith("del ") for line in text.splitlines()) == dels
    assert "# embedding" not in text
    forward, backward, both = (printed(shown, phase) for phase in ("forward", "backward", "both"))
    assert both == printed(shown)
    assert len(both) < len(printed(shown, every_line=True))
    assert both[:-1] == forward[:-1] + backward[:-1]
    of_forward, of_backward, of_both = (numbers(lines[-1])[:4] for lines in (forward, backward, both))
    assert of_both == [sum(parts) for parts in zip(of_forward, of_backward, strict=True)]
    origin = re.compile(r"^# (\w+\.py):\d+  \S")
    files = {match[1] for line in forward if (match := origin.match(line))}
    assert "traced.py" in files  # the models', and none of Thunder's own
    assert files.isdisjoint({"module.py", "symbol.py", "proxies.py"})
    assert not any(map(origin.match, backward))


def test_zero3_frees_all_in_each_phase_and_zero2_in_backward_if_there_is_one() -> None:
    def freed(stage: int, phase: str) -> list[tuple[str, str]]:
        return [(match[1], match[2]) for line in printed(traces(stage), phase) if (match := FREE.match(line))]

    assert freed(3, "forward")[-1] == ("2.weight", "0 B")
    assert freed(3, "backward")[-1][1] == "0 B"
    assert "2.weight" not in dict(freed(2, "forward"))
    assert freed(2, "forward")[-1][1] != "0 B"
    assert freed(2, "backward")[-1][1] == "0 B"
    assert "2.weight" in dict(freed(2, "backward"))
    assert freed(1, "forward") == []
    lines = printed(without_backward(traces(3)))
    assert lines[-3:-1] == ["# no backward: nothing here needs a gradient", ""]
    assert lines[-1] == printed(traces(3), "forward")[-1]


@pytest.mark.parametrize("stage", [3, *slow(1, 2)])
def test_one_unit(stage: int) -> None:
    lines, whole = printed(traces(stage), unit="1.0"), printed(traces(stage))
    # its gather and its reduction in backward; with ZeRO-3 a second gather
    own = [line for line in lines if re.search(r"(gather|reduce) +1\.0[:.]", line)]
    assert len(own) == (3 if stage == 3 else 2)
    assert len(lines) < len(whole)
    assert set(lines[:-1]) <= {*whole, *(line for line in lines if line.startswith("# ... "))}


def test_folded_lines_are_counted_and_tied_weights_are_one_parameter() -> None:
    whole, folded = printed(traces(3), "forward"), printed(traces(3), "forward", fold=True)
    assert folded[-1] == whole[-1]
    assert len(folded) <= len(whole) * 3 / 4
    named = re.compile(r"^.{40} (gather|wait|free|reduce) ")
    assert [line for line in folded if named.match(line)] == [line for line in whole if named.match(line)]
    text = "\n".join(printed(traces(3, tied)))
    assert "0.weight" in text
    assert "2.weight" not in text


def without_backward(shown: tz.tools.Traces) -> tz.tools.Traces:
    return tz.tools.Traces(shown.forward, None, shown.forward_timeline, shown.plan)


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.slow
def test_a_forecast_that_is_given_is_shown() -> None:
    """With the optimizer's state, 8 bytes a number of the shards, and with what the loss holds."""
    shown = traces(3)
    memory, adam = (
        tz.tools.memory(shown, loss=mean_square, optimizer=optimizer, reserve=5000)
        for optimizer in (torch.optim.SGD, torch.optim.AdamW)
    )
    alone, given = printed(shown), printed(shown, memory=adam)
    assert len(given) == len(alone) + 1
    assert given[-2] == f"# at rest {size(adam.at_rest)}, in the optimizer's step {size(adam.optimizer_step or 0)}"
    assert given[-1] == alone[-1]
    totals = [size(line.total) for line in adam.lines if re.search(r"aten\.(add)?mm\.default\(", line.code)]
    assert len(totals) == 5 + 2 * 5, "two products of each block, one of the head; each has two gradients"
    assert [line[-8:].strip() for line in given if re.search(r" = aten\.(add)?mm\(", line)] == totals
    assert marks(given) == [f"# the peak of the step: {size(adam.peak)} alive in the line above"]
    assert marks(alone) == [f"# the peak of the step: {size(tz.tools.memory(shown).peak)} alive in the line above"]
    assert adam.peak - memory.peak == adam.at_rest - memory.at_rest > 0
    # A peak in the loss is marked between the phases.
    shown = traces(0, small)
    in_loss = tz.tools.memory(shown, loss=lambda y: y.repeat(9, 9, 9).square().mean())
    lines = printed(shown, memory=in_loss)
    assert in_loss.peak_line.phase == "loss"
    assert marks(lines) == [f"# the peak of the step: {size(in_loss.peak)} alive in the loss"]
    assert lines[lines.index(marks(lines)[0]) + 2].startswith("# backward")
    assert marks(printed(shown, "backward", memory=in_loss)) == []
    assert lines[-2] == "# left out: the optimizer's state and step: give optimizer="


def marks(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("# the peak of the step: ")]


def test_it_refuses() -> None:
    shown = traces(3, small)
    of_others: list[tuple[tz.tools.Traces, tuple[str, ...]]] = [
        (traces(3, small, world_size=1), ("of ZeRO-3, rank 0 of 1, the traces are of ZeRO-3, rank 0 of 4;",)),
        (traces(3, tied), ("of ZeRO-3, rank 0 of 4, the traces are of the same rank with another module",)),
        (traces(3, small, (2, 5)), ("memory is a forecast of other traces, where line ", " of backward is '")),
        (without_backward(shown), (" of backward is 'missing', not '", "; give what thunder_zero.tools.memory ret")),
    ]
    rows: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        *(({"memory": tz.tools.memory(other)}, ("ValueError", *words)) for other, words in of_others),
        ({"memory": 5}, ("TypeError", "memory is of type int", "give what thunder_zero.tools.memory returns")),
        ({"phase": "forwards"}, ("ValueError", "phase is 'forwards'", "choose 'forward', 'backward' or 'both'")),
        ({"unit": "h.0"}, ("ValueError", "unit is 'h.0'", "the units of this module are ''")),
        ({"rank": 1}, ("ValueError", "rank is 1", "the rank that prints, 0 to 0")),
        ({"shown": gpt()}, ("TypeError", "expected a module jitted with ZeroTransform")),
    ]
    for options, words in rows:
        text = raised(partial(printed, **{"shown": shown, **options}))
        assert [word for word in words if word not in text] == [], text


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
