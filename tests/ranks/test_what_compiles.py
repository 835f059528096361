"""Under ``tz.compile``, what dynamo and PyTorch's joint graph trace trains as in eager mode, in stages 2 and 3.

A row is a module, its inputs, and, if unusual, how it is called and differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.eager import assert_same_leaves, call, differentiate, loss_of, trains_as_eager
from tests.harness.errors import refused
from tests.harness.models import fresh, full
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import deep, slow
from tests.harness.untraceable import Tiled

TOLERANCE = 2e-5
Make = Callable[[], nn.Module]
ROWS = (3, 4)
SEQUENCES = (2, 3, 4)
PADDED = (3, 4, 4)
BOTH: dict[str, Any] = {"batch_first": True, "bidirectional": True}


class Words(tuple[int, ...]):
    """The shape of an input of integers below 4."""


class NoGradient(tuple[int, ...]):
    """The shape of an input that needs no gradient."""


@dataclass(frozen=True)
class Row:
    """A module that trains as in eager mode."""

    make: Make
    shapes: tuple[tuple[int, ...], ...] = (ROWS,)
    forward: Callable[..., Any] = call
    backward: Callable[[Any, Sequence[Any]], None] = differentiate


def inputs_of(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for shape in shapes:
        if isinstance(shape, Words):
            inputs.append(torch.randint(0, 4, shape, generator=generator))
        else:
            value = torch.randn(shape, generator=generator)
            inputs.append(value if isinstance(shape, NoGradient) else value.requires_grad_())
    return inputs


class Function(nn.Module):
    """A linear layer, a function of its output, and another layer if the result is a tensor of 4 columns."""

    def __init__(self, then: Callable[..., Any], width: int = 4, *, last: bool = False) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(4, width), then
        self.last = nn.Linear(4, 4) if last else None

    def forward(self, x: Tensor, *others: Any) -> Any:
        y = self.then(self.layer(x), *others)
        return y if self.last is None else self.last(y)


def then(function: Callable[..., Any], width: int = 4) -> Make:
    return partial(Function, function, width)


def within(function: Callable[..., Any], width: int = 4) -> Make:
    return partial(Function, function, width, last=True)


# Layers


class Wrapped(nn.Module):
    """A layer between two others."""

    def __init__(self, make: Make, width: int = 4) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(4, 4), make(), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(torch.tanh(self.before(x)))
        return self.after(y[0] if isinstance(y, tuple) else y)


class Packs(nn.Module):
    """A recurrent layer of packed sequences, of other lengths in each call. It runs without and then with states."""

    def __init__(self, make: Make, *, is_sorted: bool = False) -> None:
        super().__init__()
        self.before, self.layer, self.is_sorted = nn.Linear(4, 4), make(), is_sorted

    def forward(self, x: Tensor, words: Tensor) -> Any:
        lengths = words.sort(descending=True).values + 1 if self.is_sorted else words + 1
        packed = pack_padded_sequence(self.before(x), lengths, batch_first=True, enforce_sorted=self.is_sorted)
        _, states = self.layer(packed)
        y, last = self.layer(packed, states)
        return pad_packed_sequence(y, batch_first=True, total_length=4)[0], last


class OtherShapes(nn.Module):
    """Layers of other shapes in a loop whose body is a graph for each layer."""

    def __init__(self, *layers: Make) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for make in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.abs().max().item() > 1e9:
                x = x / 2
            x = torch.tanh(layer(x))
        return x


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended, weights = self.attention(x, x, x)
        return attended, weights


class Complex(nn.Module):
    """Complex parameters, and real ones that become the parts of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.complex64)
        self.filter = nn.Parameter(torch.randn(3, 2))
        self.real, self.imaginary = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(torch.complex(self.real(x), self.imaginary(x)))
        filtered = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=4)
        return z.abs() + z.real * z.conj().imag, filtered


def grouped_query_attention(y: Tensor) -> Tensor:
    query, key, value = y.view(2, 3, 4, 2, 4).permute(3, 0, 2, 1, 4)[0], *y.view(2, 3, 8, 4)[:, :, :4].chunk(2, 2)
    return F.scaled_dot_product_attention(query, key.transpose(1, 2), value.transpose(1, 2), enable_gqa=True)


# Writes


def double_half(y: Tensor) -> Tensor:
    y[:, :2].mul_(2)
    return y * y.exp()


def write_through_views(y: Tensor) -> Tensor:
    view, first = y.view(-1), y[0]
    view[::2] += 1
    first.neg_()
    y.transpose(0, 1)[1].copy_(view[:3] * 2)
    return y.sin()


def put(y: Tensor) -> Tensor:
    return torch.zeros(5, 4).index_put((torch.tensor([0, 3, 3]),), y, accumulate=True)


def fill_new(y: Tensor) -> Tensor:
    result = torch.zeros(5, 4)
    result[1:4] = y
    result[torch.tensor([0, 4])] = y[:2].exp()
    return result


class Counts(nn.Module):
    """A module with buffers that are written in place, replaced, and read before and after a write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.steps: Tensor
        self.mean: Tensor
        self.last: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        y = self.layer(x) * (1 + self.mean)
        self.mean.lerp_(y.detach().mean(0), 0.5)
        self.last = y.detach().clone()
        return y + self.mean / self.steps


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(x.mean())
        x[0] = 0
        y: Tensor = self.layer(x)
        return y


def write_in_the_graph(model: Any, x: Tensor) -> Any:
    """Write to an input that has a history, so its gradient goes through the write."""
    return model(x * 1)


class WritesWithGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x[:, :2].mul_(x.detach().exp()[:, :2])
        return self.layer(x), x.sin()


# Custom functions and operators


class Doubled(torch.autograd.Function):
    """A function whose gradient is three times the correct one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x * 6 * ctx.scale, None


def custom_function(y: Tensor) -> Tensor:
    doubled: Tensor = Doubled.apply(y, 0.5)  # type: ignore[no-untyped-call]
    return doubled


class Parts(torch.autograd.Function):
    """A function with two outputs, whose backward also reads the second output's gradient, zero if it is unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first * second.cos() + second.exp().sum() + (second - first) * 0.5


class CustomFunctionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tiled: Tensor = Tiled.apply(self.layer(x).sin(), self.layer.weight)  # type: ignore[no-untyped-call]
        return tiled


def custom_function_in_a_checkpoint(y: Tensor) -> Tensor:
    return checkpoint(lambda z: custom_function(z.exp()).sin(), y, use_reentrant=False)


@torch.library.custom_op("thunder_zero_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """Return ``x`` cubed: an operator with a backward."""
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: cube(ctx.saved_tensors[0]) * grad,  # not the correct gradient
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("thunder_zero_tests::signs", mutates_args=())
def signs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return signs: an operator without a backward."""
    return x.sign(), x.abs()


signs.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


@torch.library.custom_op("thunder_zero_tests::add_one_", mutates_args={"x"})
def add_one_(x: Tensor) -> None:
    """Add one in place: an operator that writes to its input."""
    x.add_(1)


def operator_without_backward(y: Tensor) -> Tensor:
    sign, size = signs(y.detach())
    return y * sign + size


def operator_that_writes(y: Tensor) -> Tensor:
    z = y.detach().clone()
    add_one_(z)
    return y * z


# Checkpoints and random numbers


def block(y: Tensor, scale: Tensor | float = 1.0, *, shift: Tensor | None = None) -> Tensor:
    z = F.dropout(torch.tanh(y).exp() * scale, 0.4)
    return z if shift is None else z + shift * z


def with_keywords(y: Tensor) -> Tensor:
    return checkpoint(block, y, y.mean(), shift=y[0], use_reentrant=False)


def nested(y: Tensor) -> Tensor:
    return checkpoint(lambda z: checkpoint(block, z.sin(), use_reentrant=False) * z, y, use_reentrant=False)


def reentrant(y: Tensor) -> Tensor:
    return checkpoint(block, y, use_reentrant=True)


class Blocks(nn.Module):
    """Checkpointed blocks in sequence, which share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: block(layer(y) * self.scale), x, use_reentrant=False)
        return x


def drop_path(y: Tensor, rate: float = 0.3) -> Tensor:
    mask = y.new_empty((len(y), 1)).bernoulli_(1 - rate)
    return y.tanh() + y.exp() * mask.div_(1 - rate)


def drop_much(y: Tensor) -> Tensor:
    """Drop out a large tensor: its mask takes more bytes than the generator's state."""
    return checkpoint(lambda z: F.dropout(z.repeat(400, 1), 0.5).exp(), y, use_reentrant=False)


# Precision, losses


def under_autocast(model: Any, *inputs: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*inputs)


class TurnsOff(nn.Module):
    """A module that disables autocast for a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.autocast("cpu", enabled=False):
            y = self.b(y.float()).softmax(-1)
        return self.c(y)


class Autocasts(TurnsOff):
    """A module that enables autocast for a part."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(y)
        return self.c(y.float())


# Outputs


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass
class Output:
    loss: Tensor
    hidden: list[Tensor]
    cache: dict[str, Tensor] | None = None


def structures(y: Tensor) -> Any:
    return Pair(y.sin(), None), [y.cos(), [y.exp(), 3, "text"]], {"a": (y * 2,), "b": None}, None, 1.5


def return_dataclass(y: Tensor) -> Output:
    return Output(y.sum(), [y.sin(), y.cos()], {"key": y * 3})


class Aliases(nn.Module):
    """A module that returns an input, views, one value twice, a detached value and an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: Tensor) -> Any:
        y = self.layer(x)
        half = y[:, :2]
        return x, x.view(-1), given, given.t(), y, y, half, y.t(), y.detach(), y.argmax(-1), x.detach()


class Unused(nn.Module):
    """A module with three outputs, of which the loss reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.never = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y), self.c(y), y.exp()


def use_first(outputs: Any, inputs: Sequence[Any]) -> None:
    loss_of(outputs[0]).backward()


def use_last(outputs: Any, inputs: Sequence[Any]) -> None:
    loss_of(outputs[-1]).backward()


def write_to_the_output(outputs: Any, inputs: Sequence[Any]) -> None:
    outputs.mul_(2)
    loss_of(outputs).backward()


# Kinds of backward


def call_backward_twice(outputs: Any, inputs: Sequence[Any]) -> None:
    loss = loss_of(outputs)
    loss.backward(retain_graph=True)
    loss.backward()


def call_backwards_in_turn(outputs: Any, inputs: Sequence[Any]) -> None:
    loss_of(outputs[0]).backward(retain_graph=True)
    loss_of(outputs[1:]).backward()


def differentiate_inputs(outputs: Any, inputs: Sequence[Any]) -> None:
    (grad,) = torch.autograd.grad(loss_of(outputs), inputs[0])
    inputs[0].grad = grad


# Hooks


class Hooked(nn.Module):
    """A module whose submodules have forward and backward hooks."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.a.register_forward_hook(lambda module, args, output: output.relu() + args[0])
        self.b.register_forward_pre_hook(lambda module, args, kwargs: ((args[0].sin(),), kwargs), with_kwargs=True)
        if backward:
            self.b.register_full_backward_hook(lambda module, grads, outputs: (outputs[0] * 3,))
            self.a.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def hook_values(y: Tensor) -> Tensor:
    z = y.sin()
    z.register_hook(lambda grad: grad * 2)
    return z.exp()


# Python


def branch(y: Tensor) -> Tensor:
    scale = y.square().mean().item()
    return y * scale if scale > -1 else y


def print_values(y: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return y.tanh() if y.square().sum() > -1 else y


class Described(nn.Module):
    """A module that reads facts and views of a parameter in a loop that breaks the graph, so that dynamo skips it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            facts = self.w.is_cuda, self.w.requires_grad, self.w.dtype, self.w.device.type, self.w.ndim, self.w.shape[1]
            if facts == (False, True, torch.float32, "cpu", 2, 4):
                x = (x @ self.w.T + x @ self.w.mT.real * self.w[0] + x * self.w.data).sin()
        return x


def view_in_a_graph(y: Tensor) -> Tensor:
    """Return a view from a graph that computes nothing, between two other graphs."""
    torch._dynamo.graph_break()
    flat = y.view(-1)
    torch._dynamo.graph_break()
    return flat.sin().view(y.shape)


def view_without_gradients(y: Tensor) -> Tensor:
    """Make views without gradients, and then a view of one of them with gradients."""
    torch._dynamo.graph_break()
    with torch.no_grad():
        flat = y.view(-1)
    torch._dynamo.graph_break()
    with torch.no_grad():
        turned = y.t()
    back = turned.t()
    with torch.no_grad():
        written = (y * 3).clamp_(-1)
    kept = y * 4
    with torch.no_grad():
        same = kept.mul_(2)  # the value itself, with its history
    torch._dynamo.graph_break()
    return (flat * 2 + y.view(-1)).view(y.shape) + back.sin() + written + same


def shape_of_rank(y: Tensor) -> Tensor:
    return y[y > 0].sin()


class Tied(nn.Module):
    """A module with a tied weight, a layer used twice, frozen and empty parameters, and one that is read as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.scalar, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(self.a(x))) * self.frozen + self.empty.sum()
        return y * self.scalar + self.a.weight.view(2, 8)[0, :4] + self.a.bias.expand(3, 4)


class Returns(nn.Module):
    """A module that returns views of a parameter, and reads them in another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.row = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        turned, bias = self.weight.t(), self.row.view(1, 4)
        torch._dynamo.graph_break()
        return x @ turned + bias, turned, bias.detach()


class Table(nn.Module):
    """A module that looks up rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.w, self.options = nn.Parameter(torch.randn(4, 4)), options

    def forward(self, words: Tensor) -> Tensor:
        return F.embedding(words, self.w, **self.options)


FAST: dict[str, Row] = {
    "writes through views": Row(within(write_through_views)),
    "own function in a checkpoint": Row(within(custom_function_in_a_checkpoint)),
    "checkpoints with dropout": Row(Blocks),
    "structures": Row(then(structures)),
    "unused outputs": Row(Unused, backward=use_first),
    "buffers": Row(Counts),
    "hooks": Row(partial(Hooked, backward=True)),
    "backward twice": Row(then(torch.tanh), backward=call_backward_twice),
}
SLOW: dict[str, Row] = {
    "LSTM": Row(partial(Wrapped, partial(nn.LSTM, 4, 3, batch_first=True), 3), (SEQUENCES,)),
    "packed GRU": Row(partial(Packs, partial(nn.GRU, 4, 3, batch_first=True)), (PADDED, Words((3,)))),
    "layers of other shapes": Row(
        partial(OtherShapes, partial(nn.Linear, 4, 6), partial(nn.LayerNorm, 6), partial(nn.Linear, 6, 5))
    ),
    "facts of a parameter": Row(Described, ((4, 4),)),
    "spectral_norm": Row(partial(Wrapped, lambda: parametrizations.spectral_norm(nn.Linear(4, 4)))),
    "MultiheadAttention": Row(Attends, (SEQUENCES,)),
    "complex": Row(Complex),
    "own operator": Row(within(cube)),
    "aliases": Row(Aliases, (ROWS, NoGradient(ROWS))),
    "views alone": Row(within(view_in_a_graph)),
    "views without gradients": Row(within(view_without_gradients)),
    "GRU": Row(partial(Wrapped, partial(nn.GRU, 4, 3, 2, batch_first=True, bidirectional=True), 6), (SEQUENCES,)),
    "packed LSTM": Row(partial(Packs, partial(nn.LSTM, 4, 3, 2, **BOTH, proj_size=2)), (PADDED, Words((3,)))),
    "packed LSTM, sorted": Row(
        partial(Packs, partial(nn.LSTM, 4, 3, 2, **BOTH, dropout=0.5), is_sorted=True), (PADDED, Words((3,)))
    ),
    "packed RNN": Row(partial(Packs, partial(nn.RNN, 4, 3, 2, batch_first=True, dropout=0.5)), (PADDED, Words((3,)))),
    "convolutions of other shapes": Row(
        partial(OtherShapes, partial(nn.Conv1d, 2, 4, 3), partial(nn.Conv1d, 4, 6, 2)), ((2, 2, 9),)
    ),
    "old spectral_norm": Row(partial(Wrapped, lambda: spectral_norm(nn.Linear(4, 4)))),
    "weight_norm": Row(partial(Wrapped, lambda: parametrizations.weight_norm(nn.Linear(4, 4)))),
    "old weight_norm": Row(partial(Wrapped, lambda: weight_norm(nn.Linear(4, 4)))),
    "orthogonal": Row(partial(Wrapped, lambda: parametrizations.orthogonal(nn.Linear(4, 4)))),
    "tied": Row(Tied),
    "views of parameters": Row(Returns),
    "doubles half": Row(within(double_half)),
    "index_put": Row(within(put)),
    "fills a fresh tensor": Row(within(fill_new)),
    "hstack of lists": Row(then(lambda y: torch.hstack([torch.vstack([y, y.sin()]), torch.cat([y.exp(), y])]))),
    "writes to an input": Row(WritesInput, (NoGradient(ROWS),)),
    "writes to an input with a history": Row(WritesWithGradients, forward=write_in_the_graph),
    "writes to the output": Row(then(lambda y: y.sin().view(4, 3)), backward=write_to_the_output),
    "own function": Row(within(custom_function)),
    "own function of a parameter, which dynamo does not trace": Row(CustomFunctionLayer),
    "own function, an output unused": Row(within(lambda y: Parts.apply(y)[0])),  # type: ignore[no-untyped-call]
    "own function, an output for the loss unused": Row(then(Parts.apply), backward=use_first),
    "own operator without a backward": Row(within(operator_without_backward)),
    "own operator that writes": Row(within(operator_that_writes)),
    "own operator in a checkpoint": Row(within(lambda y: checkpoint(cube, y.sin(), use_reentrant=False))),
    "checkpoint with keywords": Row(within(with_keywords)),
    "nested checkpoints": Row(within(nested)),
    "reentrant checkpoint": Row(within(reentrant)),
    "much dropout": Row(within(drop_much)),
    "dropout": Row(within(partial(F.dropout, p=0.5))),
    "bernoulli_": Row(within(lambda y: y * torch.empty_like(y).bernoulli_(0.5))),
    "DropPath": Row(within(drop_path)),
    "gumbel_softmax": Row(within(partial(F.gumbel_softmax, hard=True))),
    "rand": Row(within(lambda y: y * torch.rand(4) + torch.randn_like(y) + torch.randint(3, (4,)))),
    "multinomial": Row(within(lambda y: y + torch.multinomial(y.detach().softmax(-1), 4, replacement=True))),
    "attention with dropout": Row(
        within(lambda y: F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=0.5)[:, 0])
    ),
    "autocast around": Row(TurnsOff, forward=under_autocast),
    "autocast inside": Row(Autocasts),
    "cross_entropy, sum": Row(then(partial(F.cross_entropy, reduction="sum")), (ROWS, Words((3,)))),
    "cross_entropy, smoothed": Row(
        then(lambda y, t: F.cross_entropy(y, t, torch.arange(1.0, 5.0), label_smoothing=0.1)), (ROWS, Words((3,)))
    ),
    "pos_weight": Row(
        then(lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid(), pos_weight=torch.arange(1.0, 5.0))),
        (ROWS, NoGradient(ROWS)),
    ),
    "ctc_loss": Row(
        then(
            lambda y, t: F.ctc_loss(
                y.view(6, 2, 5).log_softmax(-1), t + 1, torch.tensor([6, 6]), torch.tensor([2, 2]), reduction="sum"
            ),
            20,
        ),
        (ROWS, Words((2, 2))),
    ),
    "dataclass": Row(then(return_dataclass)),
    "unused outputs, the last": Row(Unused, backward=use_last),
    "outputs one after another": Row(Unused, backward=call_backwards_in_turn),
    "grad of inputs": Row(then(torch.tanh), backward=differentiate_inputs),
    "hooks of forward": Row(partial(Hooked, backward=False)),
    "hooks of values": Row(within(hook_values)),
    "%": Row(within(lambda y: y % 0.7 + torch.remainder(y, y.detach().abs() + 1) + torch.fmod(y, 0.3))),
    "item": Row(within(branch)),
    "a branch in Python": Row(within(print_values)),
    "a mask": Row(then(shape_of_rank)),
    "repeat_interleave": Row(within(lambda y: y.repeat_interleave(2, dim=0) + y.repeat_interleave(2, dim=0).flip(0))),
    "repeat_interleave of counts": Row(within(lambda y: y.repeat_interleave(torch.tensor([1, 2, 0]), dim=0))),
    "linalg_norm": Row(
        then(lambda y: (torch.linalg.norm(y), torch.linalg.norm(y, 2), torch.linalg.vector_norm(y, 3, dim=-1)))
    ),
    "linalg": Row(
        then(lambda y: (torch.linalg.svdvals(y), torch.linalg.inv(y.T @ y + torch.eye(4)), torch.det(y @ y.T)))
    ),
    "gqa": Row(then(grouped_query_attention, 32), (SEQUENCES,)),
    "isfinite": Row(within(lambda y: torch.where(torch.isfinite(y), y, torch.zeros_like(y)).nan_to_num())),
    "interpolate": Row(then(lambda y: F.interpolate(y.view(1, 1, 3, 4), (5, 6), mode="bilinear", align_corners=True))),
    "interpolate, bicubic": Row(then(lambda y: F.interpolate(y.view(1, 1, 3, 4), scale_factor=2.0, mode="bicubic"))),
    "grid_sample": Row(
        then(lambda y: F.grid_sample(y.view(1, 1, 3, 4), y.view(1, 3, 2, 2).tanh(), align_corners=False))
    ),
    "flip": Row(within(lambda y: y.flip(0, 1) + y.roll(1, 0) + torch.rot90(y, 2))),
    "round": Row(within(lambda y: y + (y.round() - y).detach() + y.floor() + torch.round(y, decimals=1))),
    "lerp": Row(within(lambda y: torch.lerp(y, y.sin(), 0.3) + torch.lerp(y, y.exp(), y.sigmoid()))),
    "index_add": Row(within(lambda y: torch.zeros(5, 4).index_add(0, torch.tensor([0, 2, 2]), y, alpha=2))),
    "scatter": Row(
        within(lambda y: torch.zeros(3, 4).scatter_reduce(1, (y > 0).long(), y, "amax") + y.cumsum(0).sort(1).values)
    ),
    "unfold": Row(then(lambda y: (y.unfold(1, 2, 1), F.unfold(y.view(1, 1, 3, 4), 2), y.as_strided((2, 2), (4, 2))))),
    "einsum": Row(then(lambda y: torch.einsum("ij,kj->ik", y, y.sin()) + torch.vmap(torch.dot)(y, y)[:, None])),
    "pools": Row(
        then(lambda y: (F.max_pool1d(y[None], 2), F.adaptive_avg_pool1d(y[None], 3), F.avg_pool1d(y[None], 3, 1, 1)))
    ),
    "conv": Row(partial(Wrapped, lambda: nn.Conv1d(3, 3, 3, padding=1)), (SEQUENCES,)),
    "a tensor of the graph": Row(within(lambda y: y * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4))),
    "no_grad inside": Row(within(lambda y: y * torch.no_grad()(lambda z: z.sigmoid().mul_(2))(y))),
}
ALL = FAST | SLOW


def train(rank: int, world_size: int, name: str, stage: int) -> None:
    row = ALL[name]
    trains_as_eager(
        rank,
        world_size,
        row.make,
        partial(inputs_of, row.shapes),
        stage,
        forward=row.forward,
        backward=row.backward,
        tolerance=TOLERANCE,
    )


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *product(FAST, (3,)),
        *slow(*product(FAST, (2,)), *zip(SLOW, cycle((2, 3)), strict=False)),  # each program once, in either stage
        *deep(*zip(SLOW, cycle((3, 2)), strict=False)),
    ],
)
def test_it_trains_as_in_eager_mode(ranks_pool: RanksPool, name: str, stage: int) -> None:
    ranks_pool.run(2, train, name, stage)


# Refusals


def penalize(outputs: Any, inputs: Sequence[Any]) -> None:
    (grad,) = torch.autograd.grad(loss_of(outputs), inputs[0], create_graph=True)
    grad.square().sum().backward()


REFUSED: list[tuple[Row, str]] = [  # rows, and words of the errors
    (Row(partial(nn.Embedding, 4, 4, max_norm=1.0), (Words((3,)),)), "has max_norm"),
    (Row(partial(nn.Embedding, 4, 4, sparse=True), (Words((3,)),)), "has sparse=True"),
    (Row(partial(Table, max_norm=1.0), (Words((3,)),)), "writes to parameter 'w'"),
    (Row(partial(Table, sparse=True), (Words((3,)),)), "sparse gradient of parameter 'w'"),
    (Row(then(torch.tanh), backward=penalize), "create_graph=True"),
    *(
        (Row(partial(Wrapped, partial(kind, 4, 3, 2, dropout=0.5), 3), (SEQUENCES,)), "recurrent layer has dropout")
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    ),
]


def refuse_rows(rank: int, world_size: int) -> None:
    for row, words in REFUSED:
        with refused(RuntimeError, words):
            trains_as_eager(rank, world_size, row.make, partial(inputs_of, row.shapes), 3, backward=row.backward)


def test_unsupported_rows_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, refuse_rows)


def compare_inference(rank: int, world_size: int) -> None:
    """Compare outputs under no_grad, of graphs that have a backward."""
    for name in ("own function, an output unused", "checkpoints with dropout", "views of parameters"):
        torch._dynamo.reset()
        row = ALL[name]
        plain = fresh(row.make)
        model: Any = tz.compile(deepcopy(plain), stage=3)
        differentiate(model(*inputs_of(row.shapes, 0)), ())
        results = []
        for network in (model, plain):
            torch.manual_seed(1)
            with torch.no_grad():
                results.append(network(*inputs_of(row.shapes, 1 + rank)))
        computed = results[0][0] if isinstance(results[0], tuple) else results[0]
        assert (computed.requires_grad, computed.grad_fn) == (False, None), name
        actual, expected = (tree_map_only(Tensor, torch.detach, result) for result in results)
        assert_same_leaves(actual, expected, name)


@pytest.mark.slow
def test_inference_is_as_in_eager_mode(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, compare_inference)


OTHER_LENGTHS = (
    *("unused outputs", "unused outputs, the last", "outputs one after another", "checkpoints with dropout"),
    *(
        "own function in a checkpoint",
        "own function, an output for the loss unused",
        "structures",
        "item",
        "a mask",
        "packed GRU",
    ),
    *("packed LSTM", "packed LSTM, sorted", "layers of other shapes", "convolutions of other shapes"),
)


def compare_lengths(rank: int, world_size: int) -> None:
    """Compare other lengths with eager mode. The second program is dynamic."""
    for name in OTHER_LENGTHS:
        torch._dynamo.reset()
        row = ALL[name]
        plain: Any = fresh(row.make)
        model: Any = tz.compile(fresh(row.make), stage=3)
        for more in range(3):
            shapes = [type(shape)((shape[0] + more, *shape[1:])) for shape in row.shapes]
            results = []
            for network in (model, plain):
                inputs = inputs_of(shapes, more)
                torch.manual_seed(more)
                outputs = row.forward(network, *inputs)
                row.backward(outputs, inputs)
                grads = [value.grad for value in inputs if isinstance(value, Tensor) and value.is_leaf]
                params = [None if param.grad is None else full(param.grad) for param in network.parameters()]
                results.append((outputs, grads, params))
                network.zero_grad()
            actual, expected = (tree_map_only(Tensor, torch.detach, result) for result in results)
            assert_same_leaves(actual, expected, f"{name}, {more}", TOLERANCE)


@pytest.mark.slow
def test_other_lengths_train_as_in_eager_mode(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, compare_lengths, timeout=LONG)
