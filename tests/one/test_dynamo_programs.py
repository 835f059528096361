"""What tz.compile makes of dynamo's graphs: symbols without interpretation, and one acquisition for all programs."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gumbel_softmax
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.models import Halves, fresh
from thunder_zero.frontends import compilations
from thunder_zero.frontends.dynamo import acquire as direct
from thunder_zero.frontends.dynamo import module as graphs
from thunder_zero.frontends.dynamo import programs

import thunder
from thunder.core import interpreter
from thunder.transforms.autodiff import grad_transform_on_trace

X = torch.arange(8.0).view(2, 4).sin()
pytestmark = pytest.mark.usefixtures("group")


class Mixed(nn.Module):
    """Methods, operators, a checkpoint, a constant, a buffer, a split, and a region without gradients."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(x)) * 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        y = self.a(x) + self.offset
        y = checkpoint(self.inner, y, use_reentrant=False)
        with torch.no_grad():
            scale = y.abs().mean()
        left, right = (y / (1 + scale)).chunk(2, dim=-1)
        return left * torch.tensor([1.0, 2.0]), right.float().neg(), 3


def calls_of(model: Any) -> list[Counter[str]]:
    """How often each phase calls what."""
    traces = tz.traces_of(model)
    assert traces.backward is not None
    return [Counter(line.sym.name for line in phase.bound_symbols) for phase in (traces.forward, traces.backward)]


def test_a_graph_becomes_the_program_that_thunder_would_interpret() -> None:
    """The same calls in both phases, numbers and gradients; and no Python is interpreted."""
    module = fresh(Mixed)
    with mock.patch.object(interpreter, "_run_frame", wraps=interpreter._run_frame) as run:
        model = tz.compile(deepcopy(module), 3)
        left, right, number = model(X)
    assert run.call_count == 0
    with interpreted():
        other = tz.compile(deepcopy(module), 3)
        expected = other(X)
    assert (number, torch.equal(left, expected[0]), torch.equal(right, expected[1])) == (3, True, True)
    for each, outputs in ((model, (left, right)), (other, expected)):
        (outputs[0].sum() + outputs[1].square().sum()).backward()
        assert calls_of(each)[1]["linear"] == 1, "backward computes the checkpoint again"
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())
    assert calls_of(model) == calls_of(other)


def test_a_graph_with_what_has_no_symbol_is_interpreted(caplog: pytest.LogCaptureFixture) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return attended

    module, x = fresh(Attends), X.view(1, 2, 4)
    with caplog.at_level(logging.INFO, graphs.__name__):
        got = tz.compile(deepcopy(module), 3)(x)
    assert "no symbol for multi_head_attention_forward" in caplog.text
    torch.testing.assert_close(got, module(x))


def test_lines_have_the_users_source() -> None:
    model = tz.compile(fresh(Mixed), 3)
    model(X)
    text = str(tz.traces_of(model).forward)
    assert "left * torch.tensor([1.0, 2.0])" in text
    assert "eval_with_key" not in text


class Layer(nn.Module):
    """A linear layer, and what a function makes of it."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return self.then(y)


# Grad modes


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
}


def test_one_acquisition_and_one_differentiation_serve_all_programs() -> None:
    """Reducing, deferring, without gradients, in inference mode; and dynamo captures once."""

    class Asks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training in (True, False), "dynamo guards what forward reads"
            y: Tensor = self[1](self[0](x))
            return y

    model = tz.compile(fresh(lambda: Asks(nn.Linear(4, 4), nn.Tanh())), 3)
    acquired = mock.patch.object(graphs, "acquire", wraps=direct.acquire)
    differentiated = mock.patch.object(programs, "grad_transform_on_trace", wraps=grad_transform_on_trace)
    with acquired as acquires, differentiated as differentiates:
        with model.no_sync():
            model(X).sum().backward()
        model(X).sum().backward()
        for mode in MODES.values():
            with mode():
                model(X)
        model.eval()
        model(X).sum().backward()
    assert (acquires.call_count, differentiates.call_count) == (1, 1)
    assert len(model._graphs.captured) == 2  # for training or not
    assert len(tz.traces_of(model).backward.bound_symbols)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: Halves(4)], ids=["one graph", "two graphs"])
def test_what_is_computed_without_gradients_requires_none(make: Callable[[], nn.Module], mode: str) -> None:
    """Whether training captured the graph before or not."""
    module = fresh(make)
    for trains_first in (False, True):
        model = tz.compile(deepcopy(module), 3)
        if trains_first:
            model(X).sum().backward()
        with MODES[mode]():
            got = model(X)
        assert (got.requires_grad, got.grad_fn, got.is_inference()) == (False, None, mode == "inference_mode")
        torch.testing.assert_close(got, module(X).detach())
        assert torch.is_grad_enabled()
        out = model(X)
        assert out.requires_grad


def asks_by_another_name(y: Tensor) -> Tensor:
    asks = getattr(torch, "is_grad_" + "enabled")
    return y * 2 if asks() else y * 5


def asks_a_tensor(y: Tensor) -> Tensor:
    return y * 2 if getattr(y, "requires_" + "grad") else y * 5


@torch.compiler.disable
def asks_outside(y: Tensor) -> Tensor:
    return y * 2 if torch.is_grad_enabled() else y * 5


def turns_on(y: Tensor) -> Tensor:
    with torch.enable_grad():
        return y.detach().requires_grad_(True).sin()


ASKING: list[Callable[[Tensor], Tensor]] = [asks_by_another_name, asks_a_tensor, asks_outside, turns_on]


@pytest.mark.parametrize("then", ASKING, ids=lambda then: then.__name__)
def test_what_depends_on_the_grad_mode_is_captured_in_each(then: Callable[[Tensor], Tensor]) -> None:
    module = Layer(then)
    for modes in (("no_grad", "grad", "no_grad"), ("grad", "no_grad")):
        model = tz.compile(deepcopy(module), 3)
        for mode in modes:
            with torch.no_grad() if mode == "no_grad" else nullcontext():
                got, expected = model(X), module(X)
            torch.testing.assert_close(got, expected)
            assert got.requires_grad == expected.requires_grad, mode


def test_what_raises_with_gradients_on_runs_without() -> None:
    """Writes to a leaf, and to an output of unbind."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first, _ = self.layer(x.mul_(2)).unbind(0)
            return first.mul_(2)

    module = fresh(Writes)
    model = tz.compile(deepcopy(module), 3)
    with torch.no_grad():
        torch.testing.assert_close(model(X.clone().requires_grad_()), module(X.clone().requires_grad_()))


def test_inputs_that_share_memory_are_apart_or_refused_where_forward_writes() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            z: Tensor = self.layer(x)
            return z + y

    module = fresh(Writes)
    model, both = tz.compile(deepcopy(module), 3), torch.arange(16.0).view(4, 4).sin()
    torch.testing.assert_close(model(*both.clone().split(2)), module(*both.clone().split(2)))
    for x, y in ((both[:2], both[1:3]), (both, both.t())):
        with pytest.raises(RuntimeError, match=r"shapes \(., 4\) and \(., 4\), are views of the same memory"):
            model(x, y)


def test_names_of_parameters_hide_none_of_the_programs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.torch, self.zero_wait = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.register_buffer("Tensor", torch.ones(4))
            self.parts = nn.ModuleDict({"if": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Tensor:
            C0 = self.parts["if"](x * self.torch + self.zero_wait)
            return C0 * self.Tensor

    module = fresh(Named)
    model = tz.compile(deepcopy(module), 3)
    torch.testing.assert_close(model(X), module(X))
    model(X).sum().backward()


def test_tensors_made_in_inference_mode_are_taken() -> None:
    module = fresh(lambda: nn.Linear(4, 4))
    model = tz.compile(deepcopy(module), 3)
    model(X).sum().backward()
    with torch.inference_mode():
        torch.testing.assert_close(model(X + 1), module(X + 1))


# What is mended or refused in Thunder's traces, whether a graph is evaluated or interpreted


@pytest.fixture(params=["evaluated", "interpreted"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """How a graph becomes a trace."""
    with nullcontext() if request.param == "evaluated" else interpreted():
        yield request.param


def interpreted() -> Any:
    return mock.patch.object(graphs, "acquire", side_effect=direct.NoSymbol("a test"))


def test_random_numbers_are_drawn_once_for_both_phases(path: str) -> None:
    model = tz.compile(Layer(lambda y: checkpoint(lambda z: dropout(z, 0.5) * 2, y, use_reentrant=False)), 3)
    out = model(X)
    out.sum().backward()
    kept = (out != 0).float().sum(0)
    torch.testing.assert_close(model.plain.layer.bias.grad.full_tensor(), 4 * kept)
    with pytest.raises(RuntimeError, match="draws its random numbers again"):
        tz.compile(Layer(gumbel_softmax), 3)(X)


@pytest.mark.parametrize("weighted", [False, True])
def test_smoothed_losses_leave_ignored_targets_out(path: str, weighted: bool) -> None:
    target, weight = torch.tensor([1, -100]), torch.arange(1.0, 5.0) if weighted else None
    module = Layer(lambda y: cross_entropy(y, target, weight, label_smoothing=0.1))
    model = tz.compile(deepcopy(module), 3)
    got, expected = model(X), module(X)
    torch.testing.assert_close(got, expected)
    got.backward()
    expected.backward()
    torch.testing.assert_close(model.plain.layer.weight.grad.full_tensor(), module.layer.weight.grad)


def test_gradients_that_thunder_loses_are_refused(path: str) -> None:
    def writes(y: Tensor) -> Tensor:
        y[:, :2].mul_(2)
        return y

    def puts(y: Tensor) -> Tensor:
        return torch.zeros(2, 4).index_put((torch.tensor([0, 1]),), y)

    for lossy in (writes, puts, lambda y: torch.hstack([y, y])):
        with pytest.raises(RuntimeError, match="gradient"):
            tz.compile(Layer(lossy), 3)(X)


def test_mixed_precision_casts_at_the_borders(path: str) -> None:
    precision = tz.MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    module = Layer(torch.tanh)
    model = tz.compile(deepcopy(module), 3, mixed_precision=precision)
    out = model(X)
    assert out.dtype is torch.float32
    assert "bfloat16" in str(tz.traces_of(model).forward)
    expected = deepcopy(module).bfloat16()(X.bfloat16()).float()
    torch.testing.assert_close(out, expected)


def test_reentrant_checkpoints_are_refused_or_right(path: str) -> None:
    """Dynamo captures them as it does the others."""
    module = Layer(lambda y: checkpoint(torch.tanh, y, use_reentrant=True))
    model = tz.compile(deepcopy(module), 3)
    model(X).sum().backward()
    module(X).sum().backward()
    torch.testing.assert_close(model.plain.layer.weight.grad.full_tensor(), module.layer.weight.grad)


# What a compilation says


def test_a_module_that_thunder_cannot_trace_is_led_to_compile() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y * 2 if y.sum() > 0 else y

    module = fresh(Branches)
    with pytest.raises(NotImplementedError, match=r"cannot trace Branches: .*data dependency.*thunder_zero\.compile"):
        thunder.jit(deepcopy(module), transforms=[tz.ZeroTransform(stage=3)])(X)
    torch.testing.assert_close(tz.compile(deepcopy(module), 3)(X), module(X))


class Embeds(nn.Module):
    """Looks tokens up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.table(tokens)  # the user's line
        return self.layer(y)


@pytest.mark.parametrize("way", ["tz.compile", "thunder.jit"])
def test_an_error_of_a_program_names_the_users_line_and_the_parameter(way: str) -> None:
    module = fresh(Embeds)
    transforms = [tz.ZeroTransform(stage=3)]
    model: Any = tz.compile(module, 3) if way == "tz.compile" else thunder.jit(module, transforms=transforms)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(IndexError) as caught:
        model(torch.tensor([1, 9]))
    (note,) = caught.value.__notes__
    code, source, parameter = note.splitlines()
    assert re.match(r"in t\d+ = torch\.nn\.functional\.embedding\(", code)
    assert re.match(r"from /.*\.py:\d+: ", source)
    assert parameter.startswith("which reads 'table.weight'")
    assert "# the user's line" in note or way == "thunder.jit"


def test_errors_of_the_user_pass() -> None:
    class Raises(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise NotImplementedError("not yet")

    with pytest.raises(NotImplementedError, match=r"^not yet$"):
        thunder.jit(Raises(4, 4), transforms=[tz.ZeroTransform(stage=3)])(X)


@pytest.mark.parametrize(
    "make",
    [lambda module: tz.compile(module, 3), lambda module: thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])],
    ids=["tz.compile", "thunder.jit"],
)
def test_lengths_that_change_are_warned_of(make: Callable[[nn.Module], Any]) -> None:
    model = make(fresh(lambda: nn.Linear(4, 4)))
    with model.no_sync():  # another program, for the same shape
        model(X)
    for rows in range(2, compilations.WARN_AFTER + 1):
        model(X[:1].expand(rows, 4))
    with pytest.warns(
        UserWarning, match=rf"Linear was compiled for {compilations.WARN_AFTER} shapes: input .*\b(input|0)"
    ):
        model(X[:1].expand(10, 4))


@pytest.mark.parametrize("way", ["tz.compile", "thunder.jit"])
def test_a_terminal_is_told_what_is_compiled_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Of later programs, too. Nothing of what takes less than a second; and nothing where it is no terminal, or the
    user wants none."""
    jit = lambda module, stage, **options: thunder.jit(module, transforms=[tz.ZeroTransform(stage, **options)])  # noqa: E731
    make: Callable[..., Any] = tz.compile if way == "tz.compile" else jit
    assert compilations.terminal_of(shows=True, rank=0) is None, "pytest's standard error is no terminal"
    module, terminal = fresh(lambda: nn.Linear(4, 4)), StringIO()
    monkeypatch.setattr(compilations, "terminal_of", lambda shows, rank: terminal if shows and not rank else None)
    monkeypatch.setattr("thunder_zero.frontends.zero_module.terminal_of", compilations.terminal_of)
    make(deepcopy(module), 3)(X)
    quick = terminal.getvalue()
    monkeypatch.setattr(compilations, "SECONDS", 0.0)
    make(deepcopy(module), 3, progress=False)(X)
    assert terminal.getvalue() == quick
    model = make(deepcopy(module), 3)
    model(X)
    said = terminal.getvalue().removeprefix(quick)
    line = r"compiling Linear for \({0}, 4\) \.\.\.\rcompiled forward and backward of Linear for \({0}, 4\): .*s\n"
    assert re.fullmatch(line.format(len(X)), said)
    model(X)
    assert terminal.getvalue() == quick + said
    model(X[:1])
    assert re.fullmatch(line.format(len(X)) + line.format(1), terminal.getvalue().removeprefix(quick))
