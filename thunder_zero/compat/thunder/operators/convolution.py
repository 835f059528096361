"""needed while: Thunder writes a convolution's gradients as padded convolutions.

Its autodiff writes them as convolutions of other sizes, with padded copies of the input and
of the gradient, and those of a transposed one by running its forward again. Here each is one line, which calls torch's
``convolution_backward``, as eager does::

    y = torch.convolution(x, w, b, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    gx = convolution_input_gradient(g, x, w, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    (gw, gb) = convolution_weight_gradient(g, x, (8, 4, 3, 3), True, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)

Thunder drops the line that nobody needs: the first where images come in, the second where weight and bias are frozen.
The second reads the weight's shape alone, so that ZeRO-3 need not gather a weight for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_zero.compat.never_fuses import NeverFuses

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.executors.torchex import ex as torch_ex
from thunder.extend import OperatorExecutor

aten = torch.ops.aten
TRANSPOSED = tuple(
    ltorch._torch_to_thunder_function_map[each] for each in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)
How = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]
Numbers = int | Sequence[int]


class ConvolutionExecutor(NeverFuses, OperatorExecutor):
    """Claims the gradients of convolutions, transposed or not, on every device; forward runs as it does without.

    Sizes that may differ from call to call, complex numbers, and transposed convolutions without a batch dimension stay
    with the executors after it.
    """

    def __init__(self) -> None:
        super().__init__("thunder_zero_convolution")
        register = self.register_operator
        self.input_gradient = register("convolution_input_gradient", meta=_input_meta, fn=_input_gradient)
        self.weight_gradient = register("convolution_weight_gradient", meta=_weight_meta, fn=_weight_gradient)
        self._claim(prims.convolution, of_convolution)
        for symbol in TRANSPOSED:
            self._claim(symbol, of_transposed)

    def _claim(self, symbol: Symbol, arguments: Any) -> None:
        forward = torch_ex.implmap[symbol.id]
        self.register_implementation(
            symbol,
            forward.symbol,
            checker=partial(_is_claimed, arguments),
            execution_transform=forward.execution_transform,
            grad_transform=partial(self._grad, symbol, arguments),
        )

    def _grad(self, symbol: Symbol, arguments: Any, *args: Any, **kwargs: Any) -> TensorProxy:
        output: TensorProxy = symbol(*args, **kwargs)
        grad = prims.get_grad(output)
        given, weight, bias, how = arguments(*args, **kwargs)
        prims.put_grad(given, self.input_gradient(grad, given, weight, *how))
        found = self.weight_gradient(grad, given, tuple(weight.shape), bias is not None, *how)
        if bias is None:
            prims.put_grad(weight, found)
        else:
            prims.put_grad(weight, found[0])
            prims.put_grad(bias, found[1])
        return output


# Arguments, as torch.convolution has them.


def of_convolution(
    given: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    transposed: bool,
    output_padding: Numbers,
    groups: int,
) -> tuple[TensorProxy, TensorProxy, TensorProxy | None, How]:
    """Input, weight, bias and the rest, of ``prims.convolution``."""
    each = (_for_each(numbers, weight.ndim - 2) for numbers in (stride, padding, dilation))
    return given, weight, bias, (*each, bool(transposed), _for_each(output_padding, weight.ndim - 2), groups)  # type: ignore[return-value]


def of_transposed(
    input: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> tuple[TensorProxy, TensorProxy, TensorProxy | None, How]:
    """The same of ``torch.nn.functional.conv_transpose2d`` and its like."""
    return of_convolution(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _for_each(numbers: Numbers, dims: int) -> tuple[int, ...]:
    """One number for each spatial dimension."""
    given = tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)
    return given * dims if len(given) == 1 else given


def _is_claimed(arguments: Any, *args: Any, **kwargs: Any) -> bool:
    given, weight, _, (*each, _, output_padding, groups) = arguments(*args, **kwargs)
    numbers = [*given.shape, *weight.shape, *(number for some in (*each, output_padding) for number in some), groups]
    return (
        not any(isinstance(number, Proxy) for number in numbers)
        and given.ndim == weight.ndim
        and dtypes.is_float_dtype(given.dtype)
    )


# Shapes and dtypes, for tracing.


def _input_meta(grad: TensorProxy, given: TensorProxy, *others: Any) -> TensorProxy:
    return TensorProxy(like=given)


def _weight_meta(
    grad: TensorProxy, given: TensorProxy, weight_shape: tuple[int, ...], has_bias: bool, *how: Any
) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
    of_weight = TensorProxy(like=grad, shape=weight_shape)
    return (of_weight, TensorProxy(like=grad, shape=(grad.shape[1],))) if has_bias else of_weight


# What the lines call.


def _input_gradient(grad: Tensor, given: Tensor, weight: Tensor, *how: Any) -> Tensor:
    found: Tensor = aten.convolution_backward(grad, given, weight, None, *how, (True, False, False))[0]
    return found


def _weight_gradient(
    grad: Tensor, given: Tensor, weight_shape: tuple[int, ...], has_bias: bool, *how: Any
) -> Tensor | tuple[Tensor, Tensor]:
    weight = _empty_like_what_made(grad, given, weight_shape)
    bias_shape = (grad.shape[1],) if has_bias else None
    mask = (False, True, has_bias)
    _, of_weight, of_bias = aten.convolution_backward(grad, given, weight, bias_shape, *how, mask)
    return (of_weight, of_bias) if has_bias else of_weight


def _empty_like_what_made(grad: Tensor, given: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A weight of which torch reads the shape and the order of dimensions, from which it chooses its kernel. Only where
    something after the convolution changes the order does a resident parameter with channels last, of an input without,
    have a gradient with other bits than eager's."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = orders.get(grad.ndim)
    is_last = last is not None and any(
        one.is_contiguous(memory_format=last) and not one.is_contiguous() for one in (grad, given)
    )
    order = last if is_last and last is not None else torch.contiguous_format
    return torch.empty(shape, dtype=given.dtype, device=given.device, memory_format=order)


convolution_ex = ConvolutionExecutor()
