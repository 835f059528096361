"""Attention, convolutions, activations and norms on the CPU: one line of a trace each way, with eager torch's bits."""

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
    """A call, tensors for it, and the lines of both phases that it becomes."""

    call: Callable[..., Tensor]
    given: Sequence[Tensor]
    lines: Sequence[str]


def outcome(call: Callable[..., Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the tensors that require one."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
    output = call(*leaves)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    grad = torch.empty_like(output).copy_(grad)  # with the output's strides
    return [output, *torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], grad)]


def jitted(call: Callable[..., Tensor]) -> Any:
    return thunder.jit(call, executors=[*OURS, *thunder.get_default_executors()])


def traces_of(model: Any) -> tuple[TraceCtx, TraceCtx]:
    return thunder.last_traces(model)[-1], thunder.last_backward_traces(model)[-1]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, learned: bool = True) -> Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype).requires_grad_(learned)


# Attention.

BATCH, HEADS, QUERIES, WIDTH = 2, 3, 9, 8


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def attention(mask: Tensor | None = None, dtype: torch.dtype = torch.float32, keys: int = 13, **options: Any) -> Case:
    """Of tensors whose memory is (batch, length, heads, width), as that of a GPT's."""
    given = [drawn(BATCH, length, HEADS, WIDTH, dtype=dtype).transpose(1, 2) for length in (QUERIES, keys, keys)]
    lines = [FLASH, FLASH_BACKWARD] + [MASK_BACKWARD] * (mask is not None and mask.requires_grad)
    return Case(partial(attend, **options), given if mask is None else [*given, mask], lines)


def added(*shape: int) -> Tensor:
    return drawn(*shape, learned=False)


def seen(*shape: int) -> Tensor:
    return added(*shape) > -0.5


def blind(mask: Tensor, nothing: float) -> Tensor:
    """The mask, which now hides all keys from one query."""
    mask[4] = nothing
    return mask


ATTENTION = {
    "causal": attention(keys=QUERIES, is_causal=True),
    "bool mask": attention(seen(QUERIES, 13)),
    "float64, causal, fewer keys": attention(None, DOUBLE, 5, is_causal=True),
    "bfloat16, causal, more keys": attention(None, BFLOAT16, is_causal=True),
    "bool mask in bfloat16, a row sees nothing": attention(blind(seen(QUERIES, 13), False), BFLOAT16),
    "float mask of all dimensions": attention(added(BATCH, HEADS, QUERIES, 13)),
    "float mask of one column": attention(added(QUERIES, 1)),
    "float32 mask in float64": attention(added(1, 1, QUERIES, 13), DOUBLE),
    "transposed mask, scale": attention(added(13, QUERIES).t(), scale=0.3),
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
    """``frozen`` and ``last``: which of input, weight and bias (x, w, b) have no gradient, and channels last in memory;
    ``channels``: of the result, 0 without a bias."""
    shapes = {"x": image, "w": weight} | ({"b": (channels,)} if channels else {})
    given = {name: drawn(*shape, dtype=dtype, learned=name not in frozen) for name, shape in shapes.items()}
    given |= {name: given[name].contiguous(memory_format=torch.channels_last) for name in last}
    return Case(partial(call, **options), list(given.values()), lines)


# Only the gradients that are needed are computed; that of the bias comes with the weight's.
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


def of_rows(
    call: Callable[..., Tensor], lines: Sequence[str], dtype: torch.dtype = torch.float32, *others: Tensor
) -> Case:
    return Case(call, [drawn(2, 3, WIDTH, dtype=dtype), *others], lines)


def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias)


ACTIVATIONS = {
    "gelu": of_rows(F.gelu, GELU, BFLOAT16),
    "gelu, tanh": of_rows(lambda x: F.gelu(x, approximate="tanh"), GELU),
    "silu": of_rows(F.silu, SILU, BFLOAT16),
    "softmax": of_rows(lambda x: F.softmax(x, -1), SOFTMAX, BFLOAT16),
    "softmax, its own dtype": of_rows(lambda x: torch.softmax(x, 1, dtype=x.dtype), SOFTMAX, DOUBLE),
    "norm of another view": of_rows(lambda x: norm(x.transpose(0, 1)), NORM, DOUBLE),
    "norm, two dimensions": of_rows(lambda x: F.layer_norm(x, (3, WIDTH), eps=0.1), NORM, BFLOAT16),
    "norm with a weight": of_rows(norm, NORM, BFLOAT16, drawn(WIDTH, dtype=BFLOAT16)),
    "norm with weight and bias": of_rows(norm, NORM, torch.float32, drawn(WIDTH), drawn(WIDTH)),
}
CASES = {**ATTENTION, **CONVOLUTIONS, **ACTIVATIONS}
FAST = ("causal", "bool mask", "norm with weight and bias")


@pytest.mark.parametrize("name", [*FAST, *slow(*(name for name in CASES if name not in FAST))])
def test_outputs_and_gradients_have_eagers_bits_and_strides(name: str) -> None:
    case = CASES[name]
    model = jitted(case.call)
    for found, right in zip(outcome(model, case.given), outcome(case.call, case.given), strict=True):
        assert torch.equal(found, right)
        assert found.dtype == right.dtype
        assert found.stride() == right.stride()
    assert names_of_lines(*traces_of(model)) == list(case.lines)
    assert_lines_say_the_truth(model)


def assert_lines_say_the_truth(model: Any) -> None:
    """The shapes and dtypes in the trace, and those of a run on the meta device, are those of a run on the CPU."""
    for line in our_lines(*traces_of(model)):
        call = line._call_ctx[line.sym.name]
        on_cpu, on_meta = (tree_iter(call(*(like(arg, device) for arg in line.args))) for device in ("cpu", "meta"))
        for output, real, meta in zip(line.flat_outs, on_cpu, on_meta, strict=True):
            if "layer_norm" not in line.sym.name:  # on meta torch gives its means another dtype
                assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
            assert (tuple(output.shape), to_torch_dtype(output.dtype)) == (tuple(real.shape), real.dtype)
            assert meta.stride() == real.stride() or "attention" not in line.sym.name


def like(arg: Any, device: str) -> Any:
    """A tensor for a proxy; what is no proxy as it is."""
    if not isinstance(arg, TensorProxy):
        return arg
    return torch.zeros(tuple(arg.shape), dtype=to_torch_dtype(arg.dtype), device=device)


DECOMPOSED = {
    "silu in place": of_rows(lambda x: F.silu(x * 1, inplace=True), []),
    "softmax in another dtype": of_rows(lambda x: F.softmax(x, -1, dtype=FLOAT16), [], BFLOAT16),
    "norm with a bias alone": of_rows(lambda x, bias: norm(x, None, bias), [], torch.float32, drawn(WIDTH)),
    "attention where flash is disabled": replace(attention(), lines=SOFTMAX),
}


@pytest.mark.slow
def test_the_rest_is_decomposed_by_thunder() -> None:
    for name, case in DECOMPOSED.items():
        model = jitted(case.call)
        with sdpa_kernel(SDPBackend.MATH):
            found, right = outcome(model, case.given), outcome(case.call, case.given)
        assert names_of_lines(*traces_of(model)) == case.lines, name
        assert [(one.dtype, one.shape) for one in found] == [(one.dtype, one.shape) for one in right], name


# Attention where eager does otherwise.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((QUERIES, 13), torch.float32),
        ((BATCH, HEADS, QUERIES, 13), BFLOAT16),
        ((BATCH, 1, 1, 13), FLOAT16),
    ],
)
def test_a_learned_mask_gets_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Eager decomposes here; ours is as near to float64 as that."""
    mask = blind(added(*shape), float("-inf")) if shape == (QUERIES, 13) else added(*shape)
    case = attention(mask.to(dtype).requires_grad_(), dtype)
    model = jitted(case.call)
    exact = outcome(case.call, [tensor.double() for tensor in case.given])
    for found, right in zip(outcome(model, case.given), exact, strict=True):
        assert relative_error(found.detach().double(), right.detach()) < (1e-2 if dtype.itemsize == 2 else 1e-6)
    assert names_of_lines(*traces_of(model)) == case.lines
    assert_lines_say_the_truth(model)


def from_a_parameter(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Before autodiff Thunder does not know that this mask is learned."""
    return attend(query, key, value, torch.zeros(QUERIES, 13) + 2 * mask.expand(BATCH, 1, -1, -1))


NOT_CONTIGUOUS = [drawn(BATCH, HEADS, WIDTH, QUERIES).transpose(2, 3) for _ in range(3)]  # torch's kernel misreads them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "given"),
    [(from_a_parameter, [*attention().given, drawn(1, 1, QUERIES, 13)]), (attend, NOT_CONTIGUOUS)],
    ids=["a mask that depends on a parameter", "rows that are not contiguous"],
)
def test_attention_is_right_where_eager_decomposes(call: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    model = jitted(call)
    found, right = outcome(model, given), outcome(call, given)
    assert max(relative_error(mine.detach(), its.detach()) for mine, its in zip(found, right, strict=True)) < 1e-6
    assert names_of_lines(*traces_of(model))[:2] == [FLASH, FLASH_BACKWARD]


@pytest.mark.slow
def test_an_empty_batch_runs_the_same_lines() -> None:
    """Ranks with other batches run the same programs: where a mask is a parameter, backward gathers it again."""
    mask = drawn(1, HEADS, QUERIES, QUERIES)
    model = jitted(attend)
    output, *grads, its_grad = outcome(model, [*[drawn(0, HEADS, QUERIES, WIDTH)] * 3, mask])
    assert {tuple(one.shape) for one in (output, *grads)} == {(0, HEADS, QUERIES, WIDTH)}
    assert torch.equal(its_grad, torch.zeros_like(mask))
    assert names_of_lines(*traces_of(model)) == [FLASH, FLASH_BACKWARD, MASK_BACKWARD]


FULL = (BATCH, HEADS, QUERIES, WIDTH)
OTHER = {
    "dropout": ((FULL, FULL, FULL), None, 0.1),
    "three dimensions": ((FULL[1:], FULL[1:], FULL[1:]), None, 0.0),
    "heads are broadcast": ((FULL, (BATCH, 1, QUERIES, WIDTH), (BATCH, 1, QUERIES, WIDTH)), None, 0.0),
    "wider queries": ((FULL, FULL, (BATCH, HEADS, QUERIES, 6)), None, 0.0),
    "mask of three dimensions": ((FULL, FULL, FULL), (HEADS, QUERIES, QUERIES), 0.0),
}


def proxy(*shape: int, device: str = "cpu") -> TensorProxy:
    return TensorProxy(shape=shape, device=Device(device), dtype=thunder.float32, requires_grad=False)


@pytest.mark.filterwarnings("ignore:.*")  # torch says why
def test_attention_that_torchs_kernel_refuses_stays_as_it_is() -> None:
    """So does attention on CUDA, and to nothing."""
    for name, (shapes, mask, dropout_p) in OTHER.items():
        with tracectx(TraceCtx()):
            query, key, value = (proxy(*shape) for shape in shapes)
            assert not is_flash(query, key, value, None if mask is None else proxy(*mask), dropout_p), name
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(q, k, v, None if mask is None else torch.zeros(mask), dropout_p)
    for device, keys, claimed in (("cpu", 5, True), ("meta", 5, True), ("cuda:0", 5, False), ("cpu", 0, False)):
        with tracectx(TraceCtx()):
            query, key = proxy(*FULL, device=device), proxy(BATCH, HEADS, keys, WIDTH, device=device)
            assert is_flash(query, key, key) is claimed, (device, keys)
