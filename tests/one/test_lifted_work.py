"""Lifting finds the class of work of each operation, and the memory behind each view."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz
from thunder_zero.schedule.ops import Compute, Exchange, Op, Work


class Mixed(nn.Module):
    """A model with a line of each class of work."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.softmax(self.linear(self.embed(tokens)), dim=-1)
        x = F.dropout(self.conv(x.transpose(1, 2)), 0.5)
        first, second = x.transpose(1, 2).split(4, dim=-1)
        return torch.tanh(first) * second.unsqueeze(0)[0]


TOKENS = torch.zeros(2, 7, dtype=torch.int64)


@pytest.fixture(scope="module")
def traces() -> tz.tools.Traces:
    return tz.trace(Mixed(), TOKENS, policy=tz.ZERO3, world_size=2)


def calls(traces: tz.tools.Traces, name: str, *, backward: bool = False) -> list[Op]:
    """Return the operations of a phase whose lines call a symbol."""
    trace = traces.backward if backward else traces.forward
    assert trace is not None
    pairs = zip(traces.timeline.ops, traces.lines, strict=True)
    placed = ((op, trace.bound_symbols[positions[0]]) for op, positions in pairs if op.backward is backward)
    return [op for op, line in placed if line.sym.name == name]


def works(ops: Iterable[Op]) -> set[Work | Exchange]:
    return {op.work for op in ops if isinstance(op, Compute)}


def test_each_line_has_its_class_of_work(traces: tz.tools.Traces) -> None:
    forward = {
        "addmm": Work.MATMUL,
        "convolution": Work.CONVOLUTION,
        "_softmax": Work.REDUCTION,
        "embedding": Work.INDEX,
        "native_dropout": Work.RANDOM,
        "tanh": Work.POINTWISE,
        "transpose": Work.VIEW,
    }
    backward = {"mm": Work.MATMUL, "sum": Work.REDUCTION}
    for in_backward, expected in ((False, forward), (True, backward)):
        result = {name: works(calls(traces, name, backward=in_backward)) for name in expected}
        assert result == {name: {work} for name, work in expected.items()}
    assert Work.OTHER not in works(traces.timeline.ops), "no line is unknown"


def test_a_fused_region_has_the_work_of_its_heaviest_part() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    traces = tz.trace(module, torch.zeros(2, 8), world_size=2, fuse="inductor")
    assert works(calls(traces, "inductor_0")) == {Work.MATMUL}


def test_a_view_by_an_operator_of_torch_names_the_value_whose_memory_it_views() -> None:
    class Turns(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).unflatten(1, (2, 4)).transpose(1, 2).clone().flatten(0, 1)

    traces = tz.trace(Turns(8, 8), torch.zeros(3, 8), world_size=2)
    values, names = traces.timeline.values, ("addmm", "reshape", "transpose", "clone", "_unsafe_view")
    outputs = {name: calls(traces, name)[-1].writes[0] for name in ("t", *names)}
    (wait,) = calls(traces, "zero_wait_coalesced")
    assert [values[outputs[name]].base for name in names] == [
        "",
        outputs["addmm"],
        outputs["addmm"],
        "",
        outputs["clone"],
    ]
    assert values[outputs["t"]].base == wait.writes[0]
