"""What Thunder's users see of a sharded module: its traces, counts, other transforms, refused options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.models import fresh
from tests.harness.tiers import slow

import thunder
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import Transform
from thunder.dev_utils.debug_transform import DebugTransform
from thunder.dev_utils.nvtx_profile_transform import NvtxProfileTransform
from thunder.executors.torch_compile import torch_compile_ex
from thunder.extend import OperatorExecutor
from thunder.recipes.base import BaseRecipe
from thunder.transforms.cudagraph import CUDAGraphTransform

X = torch.linspace(-1, 1, 12).view(3, 4)
pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """Two outputs, so that a loss may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(hidden), hidden


def jit(*transforms: Transform, **options: Any) -> Any:
    arguments = options.pop("arguments", {"stage": 3})
    return thunder.jit(fresh(Net), transforms=[*transforms, tz.ZeroTransform(**arguments)], **options)


def text_of(trace: TraceCtx) -> str:
    return "\n".join("".join(line.python(indent=0)) for line in trace.bound_symbols)


def test_last_traces_show_each_transform_in_order() -> None:
    model = jit()
    model(X)[0].sum().backward()
    plain, synchronised, reduced, lowered, forward = thunder.last_traces(model)
    assert [arg.name for arg in plain.args][:2] == ["first_weight", "first_bias"]
    assert [tuple(arg.shape) for arg in plain.args][:2] == [(8, 4), (8,)], "full parameters"
    texts = [text_of(trace) for trace in (plain, synchronised, reduced, lowered, forward)]
    words = ("zero_", "zero_synchronize(", "zero_reduce(", "zero_all_gather(", "zero_enter(")
    assert [[word in text for word in words] for text in texts] == [
        [False, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [True, False, False, True, False],
        [True, False, False, False, True],
    ]
    assert texts[1].count("zero_synchronize(") == len(list(model.parameters())) == texts[2].count("zero_reduce(")
    (backward,) = thunder.last_backward_traces(model)
    assert "zero_reduce_scatter" in text_of(backward)
    assert [*thunder.last_prologue_traces(model)] == []
    assert backward is tz.traces_of(model).backward
    assert forward is tz.traces_of(model).forward


def test_counts_are_thunders() -> None:
    model = jit()
    for _ in range(3):
        model(X)
    with torch.no_grad():
        model(X)
    assert (thunder.cache_misses(model), thunder.cache_hits(model), thunder.compile_stats(model).calls) == (2, 2, 4)


# Other transforms


class Notes(Transform):
    """Notes what it gets, and adds a comment to it."""

    def __init__(self) -> None:
        self.traces: list[TraceCtx] = []

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        self.traces.append(trace)
        return trace


@pytest.mark.parametrize("fuse", [None, *slow("inductor")])
def test_another_transform_gets_each_forward_and_backward(fuse: Any) -> None:
    notes = Notes()
    model, plain = jit(notes, arguments={"stage": 3, "fuse": fuse}), fresh(Net)
    for loss in (lambda outputs: outputs[0].sum(), lambda outputs: sum(map(torch.sum, outputs))):
        for network in (model, plain):
            network.zero_grad()
            loss(network(X)).backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    names = [trace.siginfo().name for trace in notes.traces]
    assert names == ["computation", "backward_fn", "backward_fn"], "a backward for each set of outputs"
    assert thunder.last_traces(model)[-1] is notes.traces[0]
    assert thunder.last_backward_traces(model)[-1] is notes.traces[-1]
    assert any(line.sym.is_fusion for line in notes.traces[0].bound_symbols) is (fuse is not None)


OURS = ("zero_all_gather_coalesced", "zero_wait_coalesced", "zero_reduce_scatter_coalesced")


def test_thunders_debug_and_profiling_transforms_see_each_line() -> None:
    names: list[str] = []

    def note(line: Any, *args: Any, **kwargs: Any) -> str:
        names.append(line.sym.name)
        return ""

    labels: list[str] = []
    with (
        mock.patch.object(torch.cuda.nvtx, "range_push", labels.append),
        mock.patch.object(torch.cuda.nvtx, "range_pop", side_effect=partial(labels.append, "")),
    ):
        model, plain = jit(DebugTransform(pre_callback=note), NvtxProfileTransform()), fresh(Net)
        for network in (model, plain):
            network(X)[0].sum().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    assert {*OURS, "addmm"} <= {*names}
    assert all(any(name in label for label in labels) for name in OURS)
    assert labels.count("") == len(labels) // 2


def without(lines: list[Any], name: str) -> list[Any]:
    return [line for line in lines if line.sym.name != name]


def swapped(lines: list[Any]) -> list[Any]:
    first, second = (next(i for i, line in enumerate(lines) if line.sym.name == name) for name in PAIR)
    lines[first], lines[second] = lines[second], lines[first]
    return lines


PAIR = "zero_all_gather_coalesced", "zero_wait_coalesced"
BROKEN: dict[str, Callable[[list[Any]], list[Any]]] = {
    "enter": lambda lines: without(lines, "zero_enter"),
    "del": lambda lines: without(lines, "python_del"),
    "order": swapped,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_transform_that_changes_our_lines_is_refused(fault: str) -> None:
    class Breaks(Transform):
        def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
            new = from_trace(trace)
            new.bound_symbols = BROKEN[fault](list(trace.bound_symbols))
            return new

    with refused(tz.schedule.ScheduleError, "Breaks changed, moved or dropped a line", "in place and in order"):
        jit(Breaks())(X)


def test_a_transform_may_keep_activations_longer() -> None:
    class Keeps(Transform):
        def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
            new = from_trace(trace)
            for line in trace.bound_symbols:
                if line.sym.name == "python_del":
                    args = [arg for arg in line.args if arg.name.endswith(("weight", "bias", "weight_t"))]
                    kept.update({arg.name for arg in line.args} - {arg.name for arg in args} if args else ())
                    line = line.from_bsym(args=args)
                new.bound_symbols += [line] if line.args or line.sym.name != "python_del" else []
            return new

    kept = set[str]()
    jit(Keeps())(X)[0].sum().backward()
    assert "tanh_backward" in kept, "it is in one line with a gathered weight"


class Early(Transform):
    def transform_module(self, model: Any) -> None:
        """Do nothing."""


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "an early hook": (lambda: jit(Early()), ("Early", "transform_module", "transform_trace_post_optimization")),
    "CUDA graphs": (lambda: jit(CUDAGraphTransform()), ("CUDAGraphTransform", "leave it out")),
    "an executor": (lambda: jit(executors=[OperatorExecutor("mine")]), ("the executor 'mine'", "fuse='inductor'")),
    "cache": (lambda: jit(cache="same input"), ("cache=", "leave it out")),
    "sharp_edges": (lambda: jit(sharp_edges="error"), ("sharp_edges=", "leave it out")),
    "autograd": (lambda: jit(disable_torch_autograd=True), ("disable_torch_autograd=", "leave it out")),
    "debug": (
        lambda: jit(debug_options=thunder.DebugOptions(check_traces=True)),
        ("debug_options=", "leave it out"),
    ),
    "an option": (lambda: jit(nv_store_fusion_inputs=True), ("nv_store_fusion_inputs=", "leave it out")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_of_thunders_interpreter_are_refused(name: str) -> None:
    call, words = REFUSED[name]
    with refused(RuntimeError, *words):
        call()


@pytest.mark.slow
def test_thunders_own_recipe_works_and_its_fuser_is_ours() -> None:
    model = thunder.compile(fresh(Net), plugins=[tz.Zero(stage=3)], recipe=BaseRecipe(fuser="torch.compile"))
    model(X)[0].sum().backward()
    assert any(line.sym.is_fusion for line in tz.traces_of(model).forward.bound_symbols)
    model = jit(executors=[torch_compile_ex])
    model(X)
    assert any(line.sym.is_fusion for line in tz.traces_of(model).forward.bound_symbols)
