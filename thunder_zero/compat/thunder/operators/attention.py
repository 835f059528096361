"""needed while: Thunder decomposes attention on the CPU.

Thunder's executors for attention need CUDA. On other devices, Thunder's autodiff decomposes
``scaled_dot_product_attention``, and saves three or four tensors of shape (batch, heads, query length, key length).
Here forward and backward are one line each: torch's flash attention for CPUs::

    (y, l) = cpu_flash_attention(q, k, v, None, True, None)                      # l: logsumexp of each row of scores
    (gq, gk, gv) = cpu_flash_attention_backward(g, q, k, v, y, l, None, True, None)

Backward reads the inputs, the output and ``l``. The lines run on the meta device as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from thunder_zero.compat.thunder.operators import ClaimingExecutor, Gradients

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.devices import DeviceType
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy

aten = torch.ops.aten
LOGSUMEXP_DTYPES = {
    torch.float32: dtypes.float32,
    torch.float64: dtypes.float64,
    torch.bfloat16: dtypes.float32,
    torch.float16: dtypes.float32,
}
DEVICES = (DeviceType.CPU, DeviceType.META)


class AttentionExecutor(ClaimingExecutor):
    """Claims ``scaled_dot_product_attention`` where eager torch takes its flash attention for CPUs.

    It leaves other calls to later executors: calls on CUDA, with dropout, or with inputs of other shapes and dtypes. It
    claims nothing after ``torch.backends.cuda.enable_flash_sdp(False)``, which also turns off flash attention on CPUs.
    """

    def __init__(self) -> None:
        super().__init__("thunder_zero_attention")
        tags = (prims.OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,)
        register = self.register_operator
        self.forward = register("cpu_flash_attention", meta=_forward_meta, fn=_forward, tags=tags)
        self.backward = register("cpu_flash_attention_backward", meta=_backward_meta, fn=_backward)
        self.mask_backward = register("cpu_flash_attention_mask_backward", meta=_mask_meta, fn=_mask_backward)
        self.claim(ltorch.scaled_dot_product_attention, is_flash, self._run)

    def _run(
        self,
        query: TensorProxy,
        key: TensorProxy,
        value: TensorProxy,
        attn_mask: TensorProxy | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[TensorProxy, Gradients]:
        output, logsumexp = self.forward(query, key, value, attn_mask, is_causal, scale)
        saved = query, key, value, output, logsumexp, attn_mask

        def gradients(grad: TensorProxy) -> Iterator[tuple[TensorProxy, TensorProxy]]:
            """Yield (input, gradient) tuples, also for a mask, since only autodiff knows whether the mask is learned.

            Thunder drops the line of an unused gradient.
            """
            yield from zip((query, key, value), self.backward(grad, *saved, is_causal, scale), strict=True)
            if attn_mask is not None and not dtypes.is_boolean_dtype(attn_mask.dtype):
                yield attn_mask, self.mask_backward(grad, *saved, scale)

        return output, gradients


def is_flash(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> bool:
    """Return whether eager torch takes flash attention for CPUs, as far as a trace shows.

    The conditions are those of torch's ``use_flash_attention_cpp``, with two exceptions. Strides are not checked, since
    a trace does not know them: the lines copy tensors where necessary. Learned masks are allowed, for which torch
    decomposes attention.
    """
    numbers = (dropout_p, is_causal, scale, *query.shape, *key.shape, *value.shape)
    if any(isinstance(number, Proxy) for number in numbers):  # the value may differ from call to call
        return False
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and dropout_p == 0
        and query.device.devicetype in DEVICES
        and all(tensor.device == query.device for tensor in tensors)
        and to_torch_dtype(query.dtype) in LOGSUMEXP_DTYPES
        and to_torch_dtype(key.dtype) == to_torch_dtype(value.dtype) == to_torch_dtype(query.dtype)
        and len(query.shape) == 4  # (batch, heads, length, width)
        and 0 not in (*query.shape[1:], *key.shape[1:])  # the batch may be empty, so that all ranks run equal lines
        and tuple(key.shape) == tuple(value.shape)
        and (*query.shape[:2], query.shape[3]) == (*key.shape[:2], *key.shape[3:])
        and (attn_mask is None or _fits(attn_mask, query, key))
    )


def _fits(mask: TensorProxy, query: TensorProxy, key: TensorProxy) -> bool:
    """Return whether a mask broadcasts to the scores, and has a dtype that torch's flash attention supports."""
    full = (*query.shape[:3], key.shape[2])
    return (
        to_torch_dtype(mask.dtype) in (torch.bool, torch.float32, to_torch_dtype(query.dtype))
        and len(mask.shape) in (2, 4)
        and all(length in (1, size) for length, size in zip(mask.shape, full[-len(mask.shape) :], strict=True))
    )


# Shapes and dtypes for tracing


def _forward_meta(query: TensorProxy, *others: Any) -> tuple[TensorProxy, TensorProxy]:
    dtype = LOGSUMEXP_DTYPES[to_torch_dtype(query.dtype)]
    logsumexp = TensorProxy(like=query, shape=tuple(query.shape[:3]), dtype=dtype, requires_grad=False)
    return TensorProxy(like=query), logsumexp


def _backward_meta(
    grad: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, *others: Any
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)


def _mask_meta(
    grad: TensorProxy,
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    output: TensorProxy,
    logsumexp: TensorProxy,
    mask: TensorProxy,
    scale: float | None,
) -> TensorProxy:
    return TensorProxy(like=mask)


# Functions that the lines call


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    inputs = map(_readable, (query, key, value))
    outputs: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        *inputs, 0.0, is_causal, attn_mask=_added(mask, query.dtype), scale=scale
    )
    return outputs


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = map(_readable, (query, key, value))
    grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *inputs, output, logsumexp, 0.0, is_causal, attn_mask=_added(mask, query.dtype), scale=scale
    )
    return grads


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor with contiguous rows, which torch's kernels assume."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as a term to add to the scores."""
    # Forward and backward both compute the term, since a boolean mask is smaller to save.
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return _readable(mask)


def _mask_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor,
    scale: float | None,
) -> Tensor:
    """Compute the scores and their gradient again, and sum the gradient to the shape of the mask."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dtype = logsumexp.dtype
    grad, query, key, value, output = (tensor.to(dtype) for tensor in (grad, query, key, value, output))
    weights = (query @ key.transpose(-2, -1)).mul_(scale).add_(mask).sub_(logsumexp.unsqueeze(-1)).exp_()
    toward = (grad @ value.transpose(-2, -1)).sub_((grad * output).sum(-1, keepdim=True))
    return weights.mul_(toward).sum_to_size(mask.shape).to(mask.dtype)


attention_ex = AttentionExecutor()
