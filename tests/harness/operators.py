"""Lines of traces that run torch's own operators: attention, convolutions, activations and norms."""

from __future__ import annotations

from collections.abc import Iterator

from thunder_zero.trace.operators.choose import operators

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

OURS = operators(())
FLASH, FLASH_BACKWARD, MASK_BACKWARD = (f"cpu_flash_attention{end}" for end in ("", "_backward", "_mask_backward"))
OF_INPUT, OF_WEIGHT = "convolution_input_gradient", "convolution_weight_gradient"


def our_lines(*traces: TraceCtx | None) -> Iterator[BoundSymbol]:
    for trace in traces:
        yield from (line for line in trace.bound_symbols if line.sym.executor in OURS) if trace else ()


def names_of_lines(*traces: TraceCtx | None) -> list[str]:
    return [line.sym.name for line in our_lines(*traces)]
