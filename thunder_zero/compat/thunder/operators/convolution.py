"""needed while: Thunder writes a convolution's gradients as padded convolutions.

Thunder's autodiff writes gradients as convolutions of other sizes, with padded copies of input and gradient. For a
transposed convolution, autodiff also runs forward again. Here each gradient is one line, which calls torch's
``convolution_backward`` as eager mode does::

    y = torch.convolution(x, w, b, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    gx = convolution_input_gradient(g, x, w, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    (gw, gb) = convolution_weight_gradient(g, x, (8, 4, 3, 3), True, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)

Thunder drops an unused gradient: ``gx`` if the input is data, and ``gw`` and ``gb`` if the parameters are frozen. The
line of ``gw`` reads the shape of the weight only, so ZeRO-3 gathers no weight for it.
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
    ltorch._torch_to_thunder_function_map[function]
    for function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)
Options = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]
Numbers = int | Sequence[int]


class ConvolutionExecutor(NeverFuses, OperatorExecutor):
    """Claims the gradients of all convolutions, also transposed ones, on every device. Forward is unchanged.

    It leaves three kinds to later executors: dynamic sizes, complex numbers, and transposed convolutions without a
    batch dimension.
    """

    def __init__(self) -> None:
        super().__init__("thunder_zero_convolution")
        register = self.register_operator
        self.input_gradient = register("convolution_input_gradient", meta=_input_meta, fn=_input_gradient)
        self.weight_gradient = register("convolution_weight_gradient", meta=_weight_meta, fn=_weight_gradient)
        self._claim(prims.convolution, convolution_arguments)
        for symbol in TRANSPOSED:
            self._claim(symbol, transposed_arguments)

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
        images, weight, bias, options = arguments(*args, **kwargs)
        prims.put_grad(images, self.input_gradient(grad, images, weight, *options))
        grads = self.weight_gradient(grad, images, tuple(weight.shape), bias is not None, *options)
        if bias is None:
            prims.put_grad(weight, grads)
        else:
            prims.put_grad(weight, grads[0])
            prims.put_grad(bias, grads[1])
        return output


# Arguments in the order of torch.convolution


def convolution_arguments(
    images: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    transposed: bool,
    output_padding: Numbers,
    groups: int,
) -> tuple[TensorProxy, TensorProxy, TensorProxy | None, Options]:
    """Return the input, the weight, the bias and the options of ``prims.convolution``."""
    per_dim = (_for_each(numbers, weight.ndim - 2) for numbers in (stride, padding, dilation))
    return images, weight, bias, (*per_dim, bool(transposed), _for_each(output_padding, weight.ndim - 2), groups)  # type: ignore[return-value]


def transposed_arguments(
    input: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> tuple[TensorProxy, TensorProxy, TensorProxy | None, Options]:
    """Return the input, the weight, the bias and the options of a transposed convolution, such as conv_transpose2d."""
    return convolution_arguments(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _for_each(numbers: Numbers, dims: int) -> tuple[int, ...]:
    """Return one number for each spatial dimension."""
    listed = tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)
    return listed * dims if len(listed) == 1 else listed


def _is_claimed(arguments: Any, *args: Any, **kwargs: Any) -> bool:
    images, weight, _, (*per_dim, _, output_padding, groups) = arguments(*args, **kwargs)
    sizes = (number for numbers in (*per_dim, output_padding) for number in numbers)
    return (
        not any(isinstance(number, Proxy) for number in (*images.shape, *weight.shape, *sizes, groups))
        and images.ndim == weight.ndim
        and dtypes.is_float_dtype(images.dtype)
    )


# Shapes and dtypes for tracing


def _input_meta(grad: TensorProxy, images: TensorProxy, *others: Any) -> TensorProxy:
    return TensorProxy(like=images)


def _weight_meta(
    grad: TensorProxy, images: TensorProxy, weight_shape: tuple[int, ...], has_bias: bool, *options: Any
) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
    weight_grad = TensorProxy(like=grad, shape=weight_shape)
    return (weight_grad, TensorProxy(like=grad, shape=(grad.shape[1],))) if has_bias else weight_grad


# Functions that the lines call


def _input_gradient(grad: Tensor, images: Tensor, weight: Tensor, *options: Any) -> Tensor:
    result: Tensor = aten.convolution_backward(grad, images, weight, None, *options, (True, False, False))[0]
    return result


def _weight_gradient(
    grad: Tensor, images: Tensor, weight_shape: tuple[int, ...], has_bias: bool, *options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    weight = _empty_weight(grad, images, weight_shape)
    bias_shape = (grad.shape[1],) if has_bias else None
    mask = (False, True, has_bias)
    _, weight_grad, bias_grad = aten.convolution_backward(grad, images, weight, bias_shape, *options, mask)
    return (weight_grad, bias_grad) if has_bias else weight_grad


def _empty_weight(grad: Tensor, images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a weight whose shape and memory format let torch choose the kernel that eager mode uses.

    The kernels differ if only the weight is in channels-last format, and a line after the convolution changes the
    format. Then the gradient differs in some bits from the gradient of eager mode.
    """
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = orders.get(grad.ndim)
    is_last = last is not None and any(
        tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous() for tensor in (grad, images)
    )
    order = last if is_last and last is not None else torch.contiguous_format
    return torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=order)


convolution_ex = ConvolutionExecutor()
