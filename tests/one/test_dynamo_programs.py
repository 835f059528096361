"""``tz.compile`` turns dynamo's graphs into lines of torch's operators, from one joint graph for all programs."""

from __future__ import annotations

import gc
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from io import StringIO
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gumbel_softmax
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.eager import assert_same_as_eager
from tests.harness.errors import error_of
from tests.harness.models import Halves, fresh, full
from tests.harness.tiers import slow
from thunder_zero.capture import compilations
from thunder_zero.capture.zero_module import captured_forward
from thunder_zero.compat import aot
from thunder_zero.schedule.ops import Gather
from thunder_zero.sharded.initial_values import progress
from thunder_zero.traces.operators import read_for_shape

import thunder
from thunder.core import interpreter

X = torch.arange(8.0).view(2, 4).sin()
pytestmark = pytest.mark.usefixtures("group")


class Observed(nn.Module):
    """Records process-wide settings in Python code between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[tuple[int, bool]] = []

    @torch.compiler.disable
    def note(self) -> None:
        self.seen.append((torch._dynamo.config.recompile_limit, gc.isenabled()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.note()
        z: Tensor = self.b(y)
        return z.tanh()


def test_process_wide_settings_change_only_while_a_graph_compiles() -> None:
    plain = Observed()
    model, settings = tz.compile(plain), (torch._dynamo.config.recompile_limit, True)
    with mock.patch.object(gc, "disable", wraps=gc.disable) as stopped:
        model(X).sum().backward()
        compiling = stopped.call_count
        for _ in range(3):
            model(X).sum().backward()
    assert plain.seen == [settings] * 4
    assert compiling >= 4, "two functions, two programs, and a backward for each"
    assert stopped.call_count == compiling, "nothing compiles again"


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
        left, expected = (y / (1 + scale)).chunk(2, dim=-1)
        return left * torch.tensor([1.0, 2.0]), expected.float().neg(), 3


def calls_of(model: Any) -> list[Counter[str]]:
    """Count the lines of forward and of backward by name."""
    traces = tz.traces_of(model)
    assert traces.backward is not None
    return [Counter(line.sym.name for line in phase.bound_symbols) for phase in (traces.forward, traces.backward)]


def test_a_graph_becomes_lines_of_torchs_operators() -> None:
    module = fresh(Mixed)
    with mock.patch.object(interpreter, "_run_frame", wraps=interpreter._run_frame) as run:
        model = tz.compile(deepcopy(module), 3)
        left, right, number = model(X)
    assert run.call_count == 0
    expected = module(X)
    assert (number, torch.equal(left, expected[0]), torch.equal(right, expected[1])) == (3, True, True)
    for outputs in ((left, right), expected):
        (outputs[0].sum() + outputs[1].square().sum()).backward()
    for param, expected_param in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected_param.grad)
    forward, backward = calls_of(model)
    assert (forward["tanh"], backward["tanh"], backward["tanh_backward"]) == (1, 1, 1), "the checkpoint is recomputed"
    assert not [name for name in (*forward, *backward) if name in ("linear", "ltorch", "native_dropout")]


class Viewed(nn.Module):
    """Reads views of views: of a parameter, of values, and of an input that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ self.a.weight.t().t() + self.a(x).view(-1).view(4, 2).view(2, 4)
        return x.t().t(), y.tanh().t().t(), y.view(8).view(2, 2, 2)


def test_lines_read_the_base_of_a_chain_of_views() -> None:
    module = fresh(Viewed)
    model = tz.compile(deepcopy(module), 3)
    result, expected = model(X), module(X)
    assert [torch.equal(value, expected_value) for value, expected_value in zip(result, expected, strict=True)] == [
        True
    ] * 3
    assert (result[0] is X, result[0]._is_view(), result[0].data_ptr()) == (False, True, X.data_ptr())
    for outputs in (result, expected):
        (outputs[1].sum() + outputs[2].square().sum()).backward()
    for value, expected_value in zip(model.parameters(), module.parameters(), strict=True):
        assert torch.equal(value.grad.full_tensor(), expected_value.grad)
    forward, backward = calls_of(model)
    assert (forward["t"], forward["reshape"]) == (1 + 4, 1), "outputs keep their two views"
    assert (backward["t"], backward["reshape"]) == (2, 2)


def test_lines_have_the_users_source() -> None:
    model = tz.compile(fresh(Mixed), 3)
    model(X)
    text = str(tz.traces_of(model).forward)
    assert "left * torch.tensor([1.0, 2.0])" in text
    assert "eval_with_key" not in text


def test_a_forecast_of_a_model_that_ran_passes_forwards_output_to_the_loss() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"loss": [super().forward(x).square()], "rows": len(x)}

    x = torch.ones(2, 4)
    model = tz.compile(Named(4, 3), 3)
    model(x)["loss"][0].sum().backward()
    result = tz.tools.memory(model, loss=lambda output: output["loss"][0].sum() * output["rows"])
    traces = tz.trace(Named(4, 3), x, policy=3, world_size=1)
    assert result.peak == tz.tools.memory(traces, loss=lambda output: output["loss"][0].sum() * output["rows"]).peak


class Layer(nn.Module):
    """A linear layer and a function."""

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


def test_one_joint_graph_serves_all_programs() -> None:

    class Asks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training in (True, False), "dynamo guards what forward reads"
            y: Tensor = self[1](self[0](x))
            return y

    model = tz.compile(fresh(lambda: Asks(nn.Linear(4, 4), nn.Tanh())), 3)
    with mock.patch.object(aot, "export", wraps=aot.export) as exports:
        with model.no_sync():
            model(X).sum().backward()
        model(X).sum().backward()
        for mode in MODES.values():
            with mode():
                model(X)
        model.eval()
        model(X).sum().backward()
    assert exports.call_count == 1
    assert len(captured_forward(model).kept) == 4  # in three grad modes, and for evaluation
    assert model._forward_fn.program_count == 3  # inference mode runs what no_grad does
    assert len(tz.traces_of(model).backward.bound_symbols)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), *slow(lambda: Halves(4))], ids=["one graph", "two graphs"])
def test_outputs_computed_without_gradients_require_none(make: Callable[[], nn.Module], mode: str) -> None:
    module = fresh(make)
    for trains_first in (False, True):
        model = tz.compile(deepcopy(module), 3)
        if trains_first:
            model(X).sum().backward()
        with MODES[mode]():
            result = model(X)
        assert (result.requires_grad, result.grad_fn, result.is_inference()) == (False, None, mode == "inference_mode")
        torch.testing.assert_close(result, module(X).detach())
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


ASKING: list[Any] = [asks_by_another_name, *slow(asks_a_tensor, asks_outside, turns_on)]


@pytest.mark.slow
@pytest.mark.parametrize("then", ASKING, ids=lambda then: then.__name__)
def test_code_that_depends_on_the_grad_mode_is_captured_in_each_mode(then: Callable[[Tensor], Tensor]) -> None:
    module = Layer(then)
    for modes in (("no_grad", "grad", "no_grad"), ("grad", "no_grad")):
        model = tz.compile(deepcopy(module), 3)
        for mode in modes:
            with torch.no_grad() if mode == "no_grad" else nullcontext():
                result, expected = model(X), module(X)
            torch.testing.assert_close(result, expected)
            assert result.requires_grad == expected.requires_grad, mode


def test_forward_may_turn_gradients_on() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            without = self.layer(x)
            with torch.enable_grad():
                return without, self.layer(without)

    module = fresh(Forces)
    model = tz.compile(deepcopy(module), 3)
    with torch.no_grad():
        result, expected = model(X), module(X)
    assert [out.requires_grad for out in result] == [out.requires_grad for out in expected] == [False, True]
    result[1].sum().backward()
    expected[1].sum().backward()
    for param, expected_param in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected_param.grad)


def test_a_checkpointed_batch_norm_trains() -> None:

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.layers, x, use_reentrant=False)
            return y

    model = assert_same_as_eager(fresh(Net), X)
    assert model.layers[1].num_batches_tracked == 1


def test_writes_that_autograd_forbids_run_without_gradients() -> None:

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


SHARING: list[Callable[[Tensor], Sequence[Tensor]]] = [  # shapes and strides are the same
    lambda both: (both[:2], both[1:3]),
    lambda both: (both[1:3], both[:2]),
    lambda both: both.split(2),
    lambda both: (both[:2], both[2:].clone()),
]


def keep(outputs: list[Tensor], model: Any, inputs: Sequence[Tensor]) -> None:
    outputs.append(model(*inputs))


@pytest.mark.parametrize("views", SHARING)
def test_inputs_that_share_memory_see_what_forward_writes(views: Callable[[Tensor], Sequence[Tensor]]) -> None:

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            z: Tensor = self.layer(x)
            return z + y

    module = fresh(Writes)
    for first in SHARING:
        model = tz.compile(deepcopy(module), 3)
        model(*first(torch.ones(4, 4)))
        base, expected_base = (torch.arange(16.0).view(4, 4).sin() for _ in range(2))
        outputs: list[Tensor] = []
        text = error_of(partial(keep, outputs, model, views(base)))
        if outputs:
            torch.testing.assert_close(outputs[0], module(*views(expected_base)))
        else:
            assert "share memory in another way than in the call" in text
            assert first is not views
        assert torch.equal(base, expected_base)


def test_names_of_parameters_hide_no_names_of_the_programs() -> None:
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


def test_inputs_made_in_inference_mode_are_accepted() -> None:
    module = fresh(lambda: nn.Linear(4, 4))
    model = tz.compile(deepcopy(module), 3)
    model(X).sum().backward()
    with torch.inference_mode():
        torch.testing.assert_close(model(X + 1), module(X + 1))


# Programs that Thunder's own differentiation computed wrongly or refused


def doubles_half(y: Tensor) -> Tensor:
    y[:, :2].mul_(2)
    return y


def puts(y: Tensor) -> Tensor:
    return torch.zeros(2, 4).index_put((torch.tensor([0, 1]),), y)


def stacks(y: Tensor) -> Tensor:
    return torch.hstack([y, y.tanh()])


@pytest.mark.parametrize("then", [doubles_half, *slow(puts, stacks)], ids=lambda then: then.__name__)
def test_gradients_go_through_writes_and_lists(then: Callable[[Tensor], Tensor]) -> None:
    assert_same_as_eager(fresh(Layer, then), X)


def test_torchs_attention_trains_as_in_eager_mode() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return attended

    assert_same_as_eager(fresh(Attends), X.view(1, 2, 4))


def drops_in_a_checkpoint(y: Tensor) -> Tensor:
    return checkpoint(lambda z: dropout(z, 0.5) * z.exp(), y, use_reentrant=False)


def drops_much_in_a_checkpoint(y: Tensor) -> Tensor:
    """Draw a mask of more bytes than the generator's state, so that the state is saved instead."""
    return checkpoint(lambda z: dropout(z.repeat(400, 1), 0.5).exp(), y, use_reentrant=False)


RANDOM: list[Any] = [drops_in_a_checkpoint, *slow(drops_much_in_a_checkpoint, gumbel_softmax)]


@pytest.mark.parametrize("then", RANDOM, ids=lambda then: then.__name__)
def test_backward_has_the_random_numbers_of_forward(then: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    for rows in (2, 3):  # at the second length dynamo makes a symbol
        model = assert_same_as_eager(fresh(Layer, then), X[:1].repeat(rows, 1))
        states = "run_with_rng_state" in str(tz.traces_of(model).backward)
        assert states == (then is drops_much_in_a_checkpoint)
    assert "s" in str(tz.tools.programs(model)[0]["inputs"])


@pytest.mark.parametrize("weighted", [*slow(False), True])
def test_smoothed_losses_leave_ignored_targets_out(weighted: bool) -> None:
    target, weight = torch.tensor([1, -100]), torch.arange(1.0, 5.0) if weighted else None
    assert_same_as_eager(fresh(Layer, lambda y: cross_entropy(y, target, weight, label_smoothing=0.1)), X)


def test_reentrant_checkpoints_train_as_in_eager_mode() -> None:
    assert_same_as_eager(fresh(Layer, lambda y: checkpoint(torch.tanh, y, use_reentrant=True)), X)


def test_mixed_precision_casts_at_the_borders() -> None:
    precision = tz.MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    module = fresh(Layer, torch.tanh)
    model = tz.compile(deepcopy(module), 3, mixed_precision=precision)
    out = model(X)
    assert out.dtype is torch.float32
    assert "bf16[2, 4]" in str(tz.traces_of(model).forward)
    expected = deepcopy(module).bfloat16()(X.bfloat16()).float()
    torch.testing.assert_close(out, expected)


# Messages of compilations


class Embeds(nn.Module):
    """An embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.table(tokens)  # the user's line
        return self.layer(y)


def test_an_error_of_a_program_names_the_users_line_and_the_parameter() -> None:
    model: Any = tz.compile(fresh(Embeds), 3)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(IndexError) as caught:
        model(torch.tensor([1, 9]))
    (note,) = caught.value.__notes__
    code, source, parameter = note.splitlines()
    assert re.match(r"in y = torch\.ops\.aten\.embedding\.default\(", code)
    assert re.match(r"from /.*\.py:\d+: ", source)
    assert parameter.startswith("which reads 'table.weight'")
    assert "# the user's line" in note


def test_errors_of_the_user_pass() -> None:
    class Raises(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise NotImplementedError("not yet")

    with pytest.raises(NotImplementedError, match=r"^not yet$"):
        thunder.jit(Raises(4, 4), transforms=[tz.ZeroTransform(stage=3)])(X)


def test_changing_lengths_raise_a_warning() -> None:
    model: Any = tz.compile(fresh(lambda: nn.Linear(4, 4)), 3, dynamic=False)
    with model.no_sync():  # another program, for the same shape
        model(X)
    for rows in range(2, compilations.WARN_AFTER + 1):
        model(X[:1].expand(rows, 4))
    with pytest.warns(
        UserWarning, match=rf"Linear was compiled for {compilations.WARN_AFTER} shapes: input .*(input|0)"
    ):
        model(X[:1].expand(10, 4))


def test_a_length_that_becomes_a_symbol_raises_no_warning() -> None:
    """Train, accumulate and evaluate on changing lengths: many programs, of which a symbol serves all lengths."""
    model: Any = tz.compile(fresh(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))), 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(1, 11):
            with torch.set_grad_enabled(rows % 3 != 0), model.no_sync() if rows % 3 == 1 else nullcontext():
                model.train(rows % 3 != 0)(torch.ones(rows, 4))
    assert model._forward_fn.program_count >= 4
    assert not [warning for warning in caught if "was compiled for" in str(warning.message)]


PARTS = ((1, 64), (2, 80), (3, 112), (4, 120))  # tensors loaded, and their bytes


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_each_slow_compilation_is_reported_on_standard_error_unless_progress_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = fresh(lambda: nn.Linear(4, 4))
    compiled = r"compiled forward and backward of Linear for \({0}, 4\): [\d.]+ s\n"
    line = {Terminal: rf"compiling Linear for \({{0}}, 4\) \.\.\.\r{compiled}", StringIO: compiled}
    for stream_type, pattern in line.items():
        stream = stream_type()
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(compilations, "SECONDS", 100.0)
        tz.compile(deepcopy(module), 3)(X)
        monkeypatch.setattr(compilations, "SECONDS", 0.0)
        tz.compile(deepcopy(module), 3, progress=False)(X)
        assert stream.getvalue() == ""
        model = tz.compile(deepcopy(module), 3, mixed_precision=tz.MixedPrecision(output_dtype=torch.float32))
        model(X)
        text = stream.getvalue()
        assert re.fullmatch(pattern.format(len(X)), text)
        model(X)
        assert stream.getvalue() == text
        model(X[:1])
        assert re.fullmatch(pattern.format(len(X)) + pattern.format(1), stream.getvalue())


def test_a_long_load_is_reported_on_standard_error_unless_progress_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    totals = "4 tensors, 120 B, 0 s"
    counts = [f"loading Sequential: {count} of 4 tensors, {size} B of 120 B, 0 s" for count, size in PARTS]
    lines = [*counts, f"loaded Sequential: {totals}"]
    for stream_type, seconds, expected in (
        (StringIO, 0.0, "\n".join([*lines, ""])),
        (Terminal, 0.0, "\x1b[K\r".join(lines) + "\x1b[K\n"),
        (Terminal, 100.0, ""),
    ):
        stream = stream_type()
        monkeypatch.setattr("sys.stderr", stream)
        for name in ("SECONDS", "EVERY", "EVERY_ON_TERMINAL"):
            monkeypatch.setattr(progress, name, seconds)
        weights = deepcopy(module).to_empty(device="cpu").state_dict()
        tz.compile(deepcopy(module), 3, progress=False)
        assert stream.getvalue() == ""
        tz.compile(deepcopy(module), 3, weights=weights)
        assert stream.getvalue() == expected


class Masking(nn.Module):
    """Writes a vector, a number and rows through masks, as SpecAugment does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mask = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        h = self.a(x)
        h[rows] = self.mask
        h[h > 2] = 0
        return h


def test_writes_through_masks_need_no_graph_break() -> None:
    model = assert_same_as_eager(fresh(Masking), X, torch.tensor([True, False]))
    assert len(captured_forward(model).ran) == 1
    assert model.mask.grad.full_tensor().any()


class AsksForNames(nn.Module):
    """A module that asks for the name of a parameter's class, as peft's DoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return h if type(self.a.weight).__module__.startswith("torch.nn") else h * 2


class Loops(nn.Module):
    """A loop that ends graphs: each layer, of other shapes than the last, is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x if x.max().item() < 1e9 else x / 2)
        return x


def test_sizes_of_parameters_are_no_symbols() -> None:
    torch._dynamo.reset()  # dynamo remembers shapes
    model = tz.compile(fresh(Loops), stage=3)
    model(torch.ones(2, 4))
    sizes = [dict(tz.traces_of(model, graph=number).facts.input_shapes) for number in range(2)]
    assert sizes == [{"args_0": (2, 4)}, {"args_0": (2, 6)}]


def test_names_of_classes_need_no_graph_break() -> None:
    assert len(captured_forward(assert_same_as_eager(fresh(AsksForNames), X)).ran) == 1


class Convolves(nn.Module):
    """The input of the first convolution needs no gradient, so backward reads only the shape of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.last = nn.Conv1d(4, 4, 3), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.second(self.norm(self.first(x)).sin()))
        return y


def test_backward_gathers_no_parameter_for_its_shape() -> None:
    plain = fresh(Convolves)
    model = tz.compile(deepcopy(plain), tz.Policy(stage=3, reshard_after_forward=True))
    x = X.view(1, 2, 4).repeat(2, 2, 1)
    for network in (model, plain):
        network(x).sin().sum().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(full(param.grad), expected.grad)
    ops = tz.traces_of(model).timeline.ops
    gathered = {path for op in ops if op.backward and isinstance(op, Gather) for path in op.params}
    assert gathered == {"norm.weight", "second.weight", "last.weight"}


@pytest.mark.parametrize("name", ["convolution", "layer norm", "group norm"])
def test_the_values_of_arguments_read_for_their_shape_do_not_matter(name: str) -> None:
    x = torch.randn(2, 4, 6)
    weight, bias = torch.randn(4, 4, 3), torch.randn(6)
    mean, rstd = torch.randn(2, 4, 1), torch.rand(2, 4, 1)
    aten = torch.ops.aten
    conv = (x, x, weight, [4], [1], [1], [1], False, [0], 1)
    norm = (x, x, [6], mean, rstd, bias, bias * 2)
    groups = (x, x, mean[:, :2, 0], rstd[:, :2, 0], torch.randn(4), 2, 4, 6, 2)
    calls: dict[str, list[tuple[Any, Any]]] = {
        "convolution": [(aten.convolution_backward.default, (*conv, [False, True, True]))],
        "layer norm": [(aten.native_layer_norm_backward.default, (*norm, [asks, True, True])) for asks in (0, 1)],
        "group norm": [(aten.native_group_norm_backward.default, (*groups, [False, True, True]))],
    }
    for target, args in calls[name]:
        read = read_for_shape(target, args)
        assert len(read) > 0
        poisoned = [
            torch.full_like(arg, torch.nan) if any(arg is arg_read for arg_read in read) else arg for arg in args
        ]
        for result, expected in zip(target(*poisoned), target(*args), strict=True):
            assert expected is None or result.equal(expected)


class Drawing(nn.Module):
    """Draws with NumPy in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.tensor(np.random.rand(4), dtype=torch.float32)


def test_numpy_draws_the_numbers_of_eager_mode() -> None:
    module = fresh(Drawing)
    model = tz.compile(deepcopy(module), 3)
    outs = []
    for network in (model, module):
        np.random.seed(3)
        outs.append(torch.stack([network(X), network(X)]))
    torch.testing.assert_close(*outs)
    assert not torch.equal(outs[0][0], outs[0][1])


class Hooking(nn.Module):
    """Hooks a submodule in its first forward, as transformers does to collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.hooked = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.a.register_forward_hook(lambda module, args, out: out * 2)
            self.hooked = True
        return self.a(x)


def test_hooks_of_submodules_are_called_once_they_are_registered() -> None:
    module = fresh(Hooking)
    model = tz.compile(deepcopy(module), 3)
    for _ in range(2):
        torch.testing.assert_close(model(X), module(X))
    for network in (model.plain, module):
        network.a.register_forward_hook(lambda module, args, out: out + 1)
    torch.testing.assert_close(model(X), module(X))
