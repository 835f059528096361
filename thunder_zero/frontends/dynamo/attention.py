"""Puts the GPU's attention kernels into a graph of CPU tensors.

A plan for GPUs may be computed on a machine without a GPU. There torch would trace the CPU's kernel. For attention with
dropout, it would trace the decomposed formula, whose saved values grow with the square of the sequence length.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
HALF, WIDEST = (torch.float16, torch.bfloat16), 256


def as_on_gpu(graph: fx.GraphModule) -> None:
    """Change a graph so that it calls the operators that torch chooses on a GPU."""
    for node in graph.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
        node.target = attention
    graph.recompile()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention as torch does on a GPU.

    Calls in half precision without a mask use the flash kernel. Other calls use the efficient kernel. Torch chooses
    likewise (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``).
    """
    if attn_mask is None and query.dtype in HALF and query.shape[-1] <= WIDEST:
        output: Tensor = FLASH(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return output
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    output = EFFICIENT(query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale)[0]
    return output
