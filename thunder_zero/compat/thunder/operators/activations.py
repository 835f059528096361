"""needed while: Thunder decomposes GELU, SiLU, softmax and layer norm.

Thunder's autodiff writes pointwise lines and reductions for a fuser. Without a fuser each line reads and writes memory,
and backward reads many of the results. Here each phase calls one operator of eager torch::

    y = gelu(x, 'none')                                     gx = gelu_backward(gy, x, 'none')
    y = silu(x)                                             gx = silu_backward(gy, x)
    y = softmax(x, -1)                                      gx = softmax_backward(gy, y, -1)
    (y, m, r) = native_layer_norm(x, (8,), w, b, 1e-05)     (gx, gw, gb) = layer_norm_backward(gy, x, (8,), m, r, ...)

Here ``m`` is the mean of each row, and ``r`` the reciprocal of its standard deviation. Backward of a layer norm does
not read the bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thunder_zero.compat.thunder.operators import ClaimingExecutor, Gradients

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten
HALF = (dtypes.bfloat16, dtypes.float16)


class ActivationExecutor(ClaimingExecutor):
    """Claims GELU, SiLU, softmax and layer norm."""

    def __init__(self) -> None:
        super().__init__("thunder_zero_activations")
        register = self.register_operator
        self.gelu = register("gelu", meta=_like, fn=_gelu)
        self.gelu_backward = register("gelu_backward", meta=_like, fn=_gelu_backward)
        self.silu = register("silu", meta=_like, fn=F.silu)
        self.silu_backward = register("silu_backward", meta=_like, fn=aten.silu_backward)
        self.softmax = register("softmax", meta=_like, fn=torch.softmax)
        self.softmax_backward = register("softmax_backward", meta=_like, fn=_softmax_backward)
        self.norm = register("native_layer_norm", meta=_norm_meta, fn=_norm)
        self.norm_backward = register("layer_norm_backward", meta=_norm_backward_meta, fn=_norm_backward)
        self.claim(ltorch.gelu, _is_gelu, self._run_gelu)
        self.claim(ltorch.silu, _is_silu, self._run_silu)
        self.claim(ltorch._softmax, _is_softmax, self._run_softmax)
        self.claim(ltorch.layer_norm, _is_norm, self._run_norm)

    def _run_gelu(self, a: TensorProxy, /, *, approximate: str = "none") -> tuple[TensorProxy, Gradients]:
        return self.gelu(a, approximate), lambda grad: [(a, self.gelu_backward(grad, a, approximate))]

    def _run_silu(self, a: TensorProxy, /, inplace: bool = False) -> tuple[TensorProxy, Gradients]:
        return self.silu(a), lambda grad: [(a, self.silu_backward(grad, a))]

    def _run_softmax(
        self, a: TensorProxy, /, dim: int, *, dtype: dtypes.dtype | None = None
    ) -> tuple[TensorProxy, Gradients]:
        y = self.softmax(a, dim)
        return y, lambda grad: [(a, self.softmax_backward(grad, y, dim))]

    def _run_norm(
        self,
        a: TensorProxy,
        /,
        normalized_shape: Sequence[int],
        weight: TensorProxy | None = None,
        bias: TensorProxy | None = None,
        eps: float = 1e-5,
    ) -> tuple[TensorProxy, Gradients]:
        shape = tuple(normalized_shape)
        y, mean, rstd = self.norm(a, shape, weight, bias, eps)

        def gradients(grad: TensorProxy) -> Iterable[tuple[TensorProxy, TensorProxy]]:
            inputs = a, weight, bias
            needed = tuple(tensor is not None for tensor in inputs)
            grads = self.norm_backward(grad, a, shape, mean, rstd, weight, needed)
            return zip((tensor for tensor in inputs if tensor is not None), grads, strict=True)

        return y, gradients


# Checks whether a line is claimed


def _is_gelu(a: TensorProxy, /, *, approximate: str = "none") -> bool:
    return _is_float(a) and approximate in ("none", "tanh")


def _is_silu(a: TensorProxy, /, inplace: bool = False) -> bool:
    return _is_float(a) and not inplace


def _is_softmax(a: TensorProxy, /, dim: int, *, dtype: dtypes.dtype | None = None) -> bool:
    return _is_float(a) and a.ndim > 0 and (dtype is None or ltorch.to_dtype(dtype) == a.dtype)


def _is_norm(
    a: TensorProxy,
    /,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> bool:
    if weight is None:
        return _is_float(a) and bias is None
    return _is_float(a) and all(other is None or other.dtype == a.dtype for other in (weight, bias))


def _is_float(a: TensorProxy) -> bool:
    return isinstance(a, TensorProxy) and dtypes.is_float_dtype(a.dtype)


# Shapes and dtypes for tracing


def _like(a: TensorProxy, *others: Any) -> TensorProxy:
    return TensorProxy(like=a)


def _norm_meta(a: TensorProxy, shape: tuple[int, ...], *others: Any) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    rows = (*a.shape[: a.ndim - len(shape)], *(1 for _ in shape))
    on_cuda = a.device.devicetype is DeviceType.CUDA
    dtype = dtypes.float32 if on_cuda and a.dtype in HALF else a.dtype
    mean, rstd = (TensorProxy(like=a, shape=rows, dtype=dtype, requires_grad=False) for _ in range(2))
    return TensorProxy(like=a), mean, rstd


def _norm_backward_meta(
    grad: TensorProxy,
    a: TensorProxy,
    shape: tuple[int, ...],
    mean: TensorProxy,
    rstd: TensorProxy,
    weight: TensorProxy | None,
    needed: tuple[bool, bool, bool],
) -> tuple[TensorProxy, ...]:
    shapes = tuple(a.shape), shape, shape
    return tuple(TensorProxy(like=a, shape=shape) for shape, is_needed in zip(shapes, needed, strict=True) if is_needed)


# Functions that the lines call


def _gelu(a: Tensor, approximate: str) -> Tensor:
    return F.gelu(a, approximate=approximate)


def _gelu_backward(grad: Tensor, a: Tensor, approximate: str) -> Tensor:
    result: Tensor = aten.gelu_backward(grad, a, approximate=approximate)
    return result


def _softmax_backward(grad: Tensor, y: Tensor, dim: int) -> Tensor:
    result: Tensor = aten._softmax_backward_data(grad, y, dim, y.dtype)
    return result


def _norm(
    a: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = aten.native_layer_norm(a, shape, weight, bias, eps)
    return results


def _norm_backward(
    grad: Tensor,
    a: Tensor,
    shape: tuple[int, ...],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor, ...]:
    like_bias = weight if needed[2] else None  # torch reads only the shape and dtype
    grads = aten.native_layer_norm_backward(grad, a, shape, mean, rstd, weight, like_bias, needed)
    return tuple(value for value in grads if value is not None)


activations_ex = ActivationExecutor()
