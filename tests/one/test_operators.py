"""On the CPU, attention, convolutions, activations and norms are one line of each trace, with eager torch's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import thunder_zero as tz  # noqa: F401  # before thunder
from tests.harness.models import relative_error
from tests.harness.operators import (
    FLASH,
    FLASH_BACKWARD,
    MASK_BACKWARD,
    OF_INPUT,
    OF_WEIGHT,
    OURS,
    names_of_lines,
    our_lines,
)
from tests.harness.tiers import slow
from thunder_zero.compat.thunder.operators.attention import is_flash

import thunder
from thunder.core.devices import Device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.trace import TraceCtx, tracectx

GELU, SILU, SOFTMAX = (["gelu", "gelu_backward"], ["silu", "silu_backward"], ["softmax", "softmax_backward"])
NORM = ["native_layer_norm", "layer_norm_backward"]
DRAW = torch.Generator().manual_seed(0)
BFLOAT16, FLOAT16, DOUBLE = torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True)
class Case:
    """A call, its arguments, and the lines that it becomes in both phases."""

    call: Callable[..., Tensor]
    args: Sequence[Tensor]
    lines: Sequence[str]


def run_both_ways(call: Callable[..., Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of the arguments that require one."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in args]
    output = call(*leaves)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    grad = torch.empty_like(output).copy_(grad)  # with the output's strides
    return [output, *torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], grad)]


def jit(call: Callable[..., Tensor]) -> Any:
    return thunder.jit(call, executors=[*OURS, *thunder.get_default_executors()])


def traces_of(model: Any) -> tuple[TraceCtx, TraceCtx]:
    return thunder.last_traces(model)[-1], thunder.last_backward_traces(model)[-1]


def draw(*shape: int, dtype: torch.dtype = torch.float32, learned: bool = True) -> Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype).requires_grad_(learned)


# Attention.

BATCH, HEADS, QUERIES, WIDTH = 2, 3, 9, 8


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def attention(mask: Tensor | None = None, dtype: torch.dtype = torch.float32, keys: int = 13, **options: Any) -> Case:
    """Build a case of tensors whose memory is (batch, length, heads, width), as in a GPT."""
    args = [draw(BATCH, length, HEADS, WIDTH, dtype=dtype).transpose(1, 2) for length in (QUERIES, keys, keys)]
    lines = [FLASH, FLASH_BACKWARD] + [MASK_BACKWARD] * (mask is not None and mask.requires_grad)
    return Case(partial(attend, **options), args if mask is None else [*args, mask], lines)


def draw_mask(*shape: int) -> Tensor:
    return draw(*shape, learned=False)


def draw_bool_mask(*shape: int) -> Tensor:
    return draw_mask(*shape) > -0.5


def hide_all_keys(mask: Tensor, nothing: float) -> Tensor:
    """Hide all keys from one query, in place, and return the mask."""
    mask[4] = nothing
    return mask


ATTENTION = {
    "causal": attention(keys=QUERIES, is_causal=True),
    "bool mask": attention(draw_bool_mask(QUERIES, 13)),
    "float64, causal, fewer keys": attention(None, DOUBLE, 5, is_causal=True),
    "bfloat16, causal, more keys": attention(None, BFLOAT16, is_causal=True),
    "bool mask in bfloat16, a row sees nothing": attention(hide_all_keys(draw_bool_mask(QUERIES, 13), False), BFLOAT16),
    "float mask of all dimensions": attention(draw_mask(BATCH, HEADS, QUERIES, 13)),
    "float mask of one column": attention(draw_mask(QUERIES, 1)),
    "float32 mask in float64": attention(draw_mask(1, 1, QUERIES, 13), DOUBLE),
    "transposed mask, scale": attention(draw_mask(13, QUERIES).t(), scale=0.3),
}

# Convolutions.

IMAGE, WEIGHT = (2, 4, 9, 9), (6, 4, 3, 3)


def convolution(
    call: Callable[..., Tensor] = F.conv2d,
    image: tuple[int, ...] = IMAGE,
    weight: tuple[int, ...] = WEIGHT,
    *,
    dtype: torch.dtype = torch.float32,
    channels: int = 6,
    frozen: str = "",
    last: str = "",
    lines: Sequence[str] = (OF_INPUT, OF_WEIGHT),
    **options: Any,
) -> Case:
    """Build a case. ``frozen`` and ``last`` say which of x, w and b require no gradient and have channels last.

    ``channels`` is the length of the bias; 0 for none.
    """
    shapes = {"x": image, "w": weight} | ({"b": (channels,)} if channels else {})
    args = {name: draw(*shape, dtype=dtype, learned=name not in frozen) for name, shape in shapes.items()}
    args |= {name: args[name].contiguous(memory_format=torch.channels_last) for name in last}
    return Case(partial(call, **options), list(args.values()), lines)


# Only needed gradients are computed; the bias's comes with the weight's.
CONVOLUTIONS = {
    "a stride for each, no bias": convolution(stride=(1, 2), padding=(0, 1), channels=0),
    "float64, padding, no gradient of the bias": convolution(padding=1, dtype=DOUBLE, frozen="b"),
    "float16, dilation, groups": convolution(weight=(6, 2, 3, 3), dilation=2, groups=2, dtype=FLOAT16),
    "each channel alone": convolution(weight=(4, 1, 3, 3), groups=4, channels=4),
    "1x1, no batch": convolution(image=IMAGE[1:], weight=(6, 4, 1, 1)),
    "an empty batch": convolution(image=(0, *IMAGE[1:])),
    "1d, no gradient of the input": convolution(F.conv1d, (2, 4, 9), (6, 4, 3), frozen="x", lines=[OF_WEIGHT]),
    "3d": convolution(F.conv3d, (2, 4, 5, 5, 5), (6, 4, 3, 3, 3)),
    "channels last, no gradient of the weight": convolution(last="xw", frozen="w"),
    "an image with channels last, its gradient alone": convolution(last="x", frozen="wb", lines=[OF_INPUT]),
    "a weight with channels last, its gradient alone": convolution(
        image=(8, 64, 32, 32), weight=(64, 64, 3, 3), last="w", frozen="xb", channels=64, lines=[OF_WEIGHT]
    ),
    "transposed, all options": convolution(
        partial(F.conv_transpose2d, output_padding=1, groups=2, dilation=(2, 2)),
        weight=(4, 3, 3, 3),
        stride=(2, 3),
        padding=1,
    ),
    "transposed, 1d, bfloat16": convolution(F.conv_transpose1d, (2, 4, 9), (4, 6, 3), stride=2, dtype=BFLOAT16),
    "transposed, no batch, stays with Thunder": convolution(F.conv_transpose2d, IMAGE[1:], (4, 6, 3, 3), lines=[]),
}

# Activations and norms.


def rowwise(
    call: Callable[..., Tensor], lines: Sequence[str], dtype: torch.dtype = torch.float32, *others: Tensor
) -> Case:
    return Case(call, [draw(2, 3, WIDTH, dtype=dtype), *others], lines)


def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias)


ACTIVATIONS = {
    "gelu": rowwise(F.gelu, GELU, BFLOAT16),
    "gelu, tanh": rowwise(lambda x: F.gelu(x, approximate="tanh"), GELU),
    "silu": rowwise(F.silu, SILU, BFLOAT16),
    "softmax": rowwise(lambda x: F.softmax(x, -1), SOFTMAX, BFLOAT16),
    "softmax, its own dtype": rowwise(lambda x: torch.softmax(x, 1, dtype=x.dtype), SOFTMAX, DOUBLE),
    "norm of another view": rowwise(lambda x: norm(x.transpose(0, 1)), NORM, DOUBLE),
    "norm, two dimensions": rowwise(lambda x: F.layer_norm(x, (3, WIDTH), eps=0.1), NORM, BFLOAT16),
    "norm with a weight": rowwise(norm, NORM, BFLOAT16, draw(WIDTH, dtype=BFLOAT16)),
    "norm with weight and bias": rowwise(norm, NORM, torch.float32, draw(WIDTH), draw(WIDTH)),
}
CASES = {**ATTENTION, **CONVOLUTIONS, **ACTIVATIONS}
FAST = ("causal", "bool mask", "norm with weight and bias")


@pytest.mark.parametrize("name", [*FAST, *slow(*(name for name in CASES if name not in FAST))])
def test_outputs_and_gradients_have_eagers_bits_and_strides(name: str) -> None:
    case = CASES[name]
    model = jit(case.call)
    for actual, expected in zip(run_both_ways(model, case.args), run_both_ways(case.call, case.args), strict=True):
        assert torch.equal(actual, expected)
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
    assert names_of_lines(*traces_of(model)) == list(case.lines)
    assert_lines_describe_results(model)


def assert_lines_describe_results(model: Any) -> None:
    """Compare shapes and dtypes in the trace, and of a run on the meta device, with those of a run on the CPU."""
    for line in our_lines(*traces_of(model)):
        call = line._call_ctx[line.sym.name]
        runs = [call(*(to_tensor(arg, device) for arg in line.args)) for device in ("cpu", "meta")]
        on_cpu, on_meta = map(tree_iter, runs)
        for output, result, meta in zip(line.flat_outs, on_cpu, on_meta, strict=True):
            if "layer_norm" not in line.sym.name:  # on the meta device its means have another dtype
                assert (meta.shape, meta.dtype) == (result.shape, result.dtype)
            assert (tuple(output.shape), to_torch_dtype(output.dtype)) == (tuple(result.shape), result.dtype)
            assert meta.stride() == result.stride() or "attention" not in line.sym.name


def to_tensor(arg: Any, device: str) -> Any:
    """Return zeros like a proxy, and anything else unchanged."""
    if not isinstance(arg, TensorProxy):
        return arg
    return torch.zeros(tuple(arg.shape), dtype=to_torch_dtype(arg.dtype), device=device)


DECOMPOSED = {
    "silu in place": rowwise(lambda x: F.silu(x * 1, inplace=True), []),
    "softmax in another dtype": rowwise(lambda x: F.softmax(x, -1, dtype=FLOAT16), [], BFLOAT16),
    "norm with a bias alone": rowwise(lambda x, bias: norm(x, None, bias), [], torch.float32, draw(WIDTH)),
    "attention where flash is disabled": replace(attention(), lines=SOFTMAX),
}


@pytest.mark.slow
def test_other_calls_are_decomposed_by_thunder() -> None:
    for name, case in DECOMPOSED.items():
        model = jit(case.call)
        with sdpa_kernel(SDPBackend.MATH):
            actual, expected = run_both_ways(model, case.args), run_both_ways(case.call, case.args)
        assert names_of_lines(*traces_of(model)) == case.lines, name
        assert [(y.dtype, y.shape) for y in actual] == [(y.dtype, y.shape) for y in expected], name


# Attention that eager torch decomposes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((QUERIES, 13), torch.float32), ((BATCH, HEADS, QUERIES, 13), BFLOAT16), ((BATCH, 1, 1, 13), FLOAT16)],
)
def test_a_learned_mask_gets_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Eager torch decomposes this call; ours is as close to float64 as eager."""
    mask = hide_all_keys(draw_mask(*shape), float("-inf")) if shape == (QUERIES, 13) else draw_mask(*shape)
    case = attention(mask.to(dtype).requires_grad_(), dtype)
    model = jit(case.call)
    exact = run_both_ways(case.call, [tensor.double() for tensor in case.args])
    for actual, expected in zip(run_both_ways(model, case.args), exact, strict=True):
        assert relative_error(actual.detach().double(), expected.detach()) < (1e-2 if dtype.itemsize == 2 else 1e-6)
    assert names_of_lines(*traces_of(model)) == case.lines
    assert_lines_describe_results(model)


def attend_with_a_learned_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend with a mask of which Thunder learns only in autodiff that it needs a gradient."""
    return attend(query, key, value, torch.zeros(QUERIES, 13) + 2 * mask.expand(BATCH, 1, -1, -1))


# torch's kernel reads these wrongly
NOT_CONTIGUOUS = [draw(BATCH, HEADS, WIDTH, QUERIES).transpose(2, 3) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "args"),
    [(attend_with_a_learned_mask, [*attention().args, draw(1, 1, QUERIES, 13)]), (attend, NOT_CONTIGUOUS)],
    ids=["a mask that depends on a parameter", "rows that are not contiguous"],
)
def test_attention_is_right_where_eager_decomposes(call: Callable[..., Tensor], args: Sequence[Tensor]) -> None:
    model = jit(call)
    for actual, expected in zip(run_both_ways(model, args), run_both_ways(call, args), strict=True):
        assert relative_error(actual.detach(), expected.detach()) < 1e-6
    assert names_of_lines(*traces_of(model))[:2] == [FLASH, FLASH_BACKWARD]


@pytest.mark.slow
def test_an_empty_batch_runs_the_same_program() -> None:
    """All ranks must run the same program: if the mask is a parameter, backward gathers it."""
    mask = draw(1, HEADS, QUERIES, QUERIES)
    model = jit(attend)
    output, *grads, mask_grad = run_both_ways(model, [*[draw(0, HEADS, QUERIES, WIDTH)] * 3, mask])
    assert {tuple(tensor.shape) for tensor in (output, *grads)} == {(0, HEADS, QUERIES, WIDTH)}
    assert torch.equal(mask_grad, torch.zeros_like(mask))
    assert names_of_lines(*traces_of(model)) == [FLASH, FLASH_BACKWARD, MASK_BACKWARD]


FULL = (BATCH, HEADS, QUERIES, WIDTH)
REFUSED_BY_TORCH = {
    "dropout": ((FULL, FULL, FULL), None, 0.1),
    "three dimensions": ((FULL[1:], FULL[1:], FULL[1:]), None, 0.0),
    "heads are broadcast": ((FULL, (BATCH, 1, QUERIES, WIDTH), (BATCH, 1, QUERIES, WIDTH)), None, 0.0),
    "wider queries": ((FULL, FULL, (BATCH, HEADS, QUERIES, 6)), None, 0.0),
    "mask of three dimensions": ((FULL, FULL, FULL), (HEADS, QUERIES, QUERIES), 0.0),
}
TAKEN_SINCE_2_14 = ("three dimensions", "heads are broadcast")  # by torch's kernel; our line does not claim them


def make_proxy(*shape: int, device: str = "cpu") -> TensorProxy:
    return TensorProxy(shape=shape, device=Device(device), dtype=thunder.float32, requires_grad=False)


@pytest.mark.filterwarnings("ignore:.*")  # torch warns why
def test_attention_that_torchs_kernel_refuses_is_not_claimed() -> None:
    """Attention on CUDA, and attention without keys, are not claimed either."""
    for name, (shapes, mask, dropout_p) in REFUSED_BY_TORCH.items():
        with tracectx(TraceCtx()):
            query, key, value = (make_proxy(*shape) for shape in shapes)
            assert not is_flash(query, key, value, None if mask is None else make_proxy(*mask), dropout_p), name
        if name in TAKEN_SINCE_2_14 and not torch.__version__.startswith("2.13"):
            continue
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(q, k, v, None if mask is None else torch.zeros(mask), dropout_p)
    for device, keys, claimed in (("cpu", 5, True), ("meta", 5, True), ("cuda:0", 5, False), ("cpu", 0, False)):
        with tracectx(TraceCtx()):
            query, key = make_proxy(*FULL, device=device), make_proxy(BATCH, HEADS, keys, WIDTH, device=device)
            assert is_flash(query, key, key) is claimed, (device, keys)
