"""needed while: Thunder does not sum the gradient of a broadcast 0-dim tensor on the CPU.

It takes one for a number. Forward gets the line that says so, before autodiff, whose gradient sums::

    t1 = ltorch.sum(t0)                              t1 = ltorch.sum(t0)
    t2 = ltorch.true_divide(t0, t1)         ->       t2 = ltorch.expand(t1, (3, 4))
                                                     t3 = ltorch.true_divide(t0, t2)

All of them are, parameters too: the parts of a gradient that meet must have one shape.
"""

from __future__ import annotations

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

_NAMES = (
    "add addcdiv addcmul clamp div lerp masked_fill maximum minimum mul pow sub true_divide where "
    "add_ addcdiv_ addcmul_ clamp_ div_ lerp_ masked_fill_ mul_ pow_ sub_ true_divide_"
)
ELEMENTWISE = frozenset(_NAMES.split())


def broadcast_scalars(computation: TraceCtx) -> TraceCtx:
    """The trace in which 0-dim operands of elementwise operations have the shape of what is computed.

    Where any of them has another dtype than the result, as under mixed precision, all stay as they are: with more
    dimensions it would decide the result's, and the parts of a gradient that meet must have one shape.

    Args:
        computation: before autodiff, with parameters synchronised, which have their dtypes then.
    """
    scalars = [_scalars(line) for line in computation.bound_symbols]
    lines = list(zip(computation.bound_symbols, scalars, strict=True))
    if any(_dtype(proxy) is not _dtype(line.output) for line, found in lines for proxy in found):
        return computation
    new = from_trace(computation)
    with tracectx(new):
        for line, found in lines:
            swap = {variableify(proxy): ltorch.expand(proxy, line.output.shape) for proxy in found}
            new.bound_symbols.append(line.from_bsym_swap_proxies(swap, skip_output=True) if swap else line)
    new.set_provenance(TraceProvenance("Broadcast scalars (thunder_zero)"))
    return new


def _scalars(line: BoundSymbol) -> list[TensorProxy]:
    """Its 0-dim operands on the CPU that may have a gradient, if it broadcasts them."""
    made = line.output
    is_elementwise = line.sym.name in ELEMENTWISE and isinstance(made, TensorProxy)
    if not is_elementwise or not made.ndim or not dtypes.is_inexact_dtype(made.dtype):
        return []
    tensors = [proxy for proxy in line.flat_proxy_args if isinstance(proxy, TensorProxy) and not proxy.ndim]
    return [
        proxy for proxy in tensors if dtypes.is_inexact_dtype(proxy.dtype) and proxy.device.devicetype is DeviceType.CPU
    ]


def _dtype(proxy: TensorProxy) -> dtypes.dtype:
    return dtypes.to_strong_dtype(proxy.dtype)
