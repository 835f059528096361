"""Lifting finds the class of work of each operation, and the memory behind each view."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz
from thunder_zero.schedule.timeline import Kind, Op, Work


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
    phase = traces.backward_timeline if backward else traces.forward_timeline
    assert trace is not None
    return [op for op in phase.ops if trace.bound_symbols[op.source[0]].sym.name == name]


def test_each_line_has_its_class_of_work(traces: tz.tools.Traces) -> None:
    forward = {
        "addmm": Work.MATMUL,
        "convolution": Work.CONVOLUTION,
        "_softmax": Work.REDUCTION,
        "embedding": Work.INDEX,
        "native_dropout": Work.RANDOM,
        "tanh": Work.POINTWISE,
        "transpose": Work.VIEW,
        "python_return": Work.NONE,
        "zero_all_gather_coalesced": Work.NONE,
    }
    backward = {"mm": Work.MATMUL, "sum": Work.REDUCTION}
    for in_backward, expected in ((False, forward), (True, backward)):
        result = {name: {op.work for op in calls(traces, name, backward=in_backward)} for name in expected}
        assert result == {name: {work} for name, work in expected.items()}
    assert {op.writes for op in traces.timeline.ops if op.work is Work.OTHER} == set(), "no line is unknown"
    assert {op.work for op in traces.timeline.ops if op.kind is not Kind.COMPUTE} == {Work.NONE}


def test_a_fused_region_has_the_work_of_its_heaviest_part() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    traces = tz.trace(module, torch.zeros(2, 8), world_size=2, fuse="inductor")
    regions = [op for op in traces.forward_timeline.ops if traces.forward.bound_symbols[op.source[0]].sym.is_fusion]
    assert [op.work for op in regions] == [Work.MATMUL]


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
