"""From a joint trace, we build the same two traces, and functions, as Thunder."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.frontends.dynamo import programs
from thunder_zero.traces import pipeline
from thunder_zero.traces.split import split
from thunder_zero.traces.write import function_of

from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used
from thunder.transforms.autodiff import split_into_forward_and_backward


class Net(nn.Module):
    """A module that returns a value twice and saves numbers, views and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1)
        out = self.second(hidden.expand(3, *hidden.shape).clone(memory_format=torch.contiguous_format))
        return out, hidden.sum(), out


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> TraceCtx:
    traces: list[TraceCtx] = []

    def record(trace: TraceCtx) -> Any:
        traces.append(trace)
        return split(trace)

    monkeypatch.setattr(pipeline, "split", record)
    tz.trace(Net(), torch.ones(4, 8), policy=3, world_size=2)
    return traces[0]


def lines_of(trace: TraceCtx) -> list[str]:
    return [str(line) for line in trace.bound_symbols]


def test_the_split_and_the_frees_equal_thunders(joint: TraceCtx) -> None:
    with programs.thunder_context():
        forward, backward = split_into_forward_and_backward(joint)
    expected = del_last_used(forward), del_last_used(backward, clear_mutable_collections=True)
    for ours, theirs in zip(split(joint), expected, strict=True):
        assert lines_of(ours) == lines_of(theirs)
        assert ours.tags == theirs.tags
        assert [str(arg) for arg in ours.args] == [str(arg) for arg in theirs.args]


def test_a_function_is_written_as_thunder_writes_it(joint: TraceCtx) -> None:
    for trace in split(joint):
        ours, theirs = (text_of(make(trace)) for make in (function_of, TraceCtx.python_callable))
        assert ours == theirs


def text_of(function: Any) -> list[str]:
    """Return the lines of a generated function, without imports, comments and blank lines."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    text = linecache.getlines(function.__code__.co_filename)
    first = next(index for index, line in enumerate(text) if line.startswith("@"))
    return [line.rstrip() for line in text[first:] if line.strip() and not line.strip().startswith("#")]
