"""needed while: Thunder fails on its one operator for ``multi_head_attention_forward``."""

from __future__ import annotations

from types import FunctionType

from torch.nn.functional import multi_head_attention_forward

IN_PYTHON = FunctionType(  # another function of the same code, which Thunder traces
    multi_head_attention_forward.__code__,
    multi_head_attention_forward.__globals__,
    "attention",
    multi_head_attention_forward.__defaults__,
)
IN_PYTHON.__module__ = __name__
