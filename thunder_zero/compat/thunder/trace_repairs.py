"""Repairs lines of traces that Thunder gets wrong.

In: a trace. Out: a trace whose lines compute torch's results, identical on all ranks. The functions run in this order::

    draw_once            the acquired trace, before autodiff           frontends/program_transform.py
    broadcast_scalars    the same trace, with parameters synchronised  frontends/program_transform.py
    sort_aliases         the lowered joint trace, before scheduling    frontends/program_transform.py
    fused_only           the scheduled trace, if a fuser saved too much  frontends/program_transform.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.devices import DeviceType
from thunder.core.proxies import NumberProxy, ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transforms import is_constant_for_vjp
from thunder.extend import FusionExecutor

# needed while: Thunder lists values that are changed in place in the order of a set.


def sort_aliases(trace: TraceCtx) -> TraceCtx:
    """Return a trace whose ``update_aliases`` lines list values in the order in which they were written.

    Thunder inserts these lines around in-place operations, and lists values in the order of a set. The order of a set
    differs between ranks, so ranks would free values at different lines.
    """
    new = from_trace(trace)
    written = {proxy.name: position for position, proxy in enumerate(trace.args)}
    for bsym in trace.bound_symbols:
        if bsym.sym.name == prims.update_aliases.name:
            pairs = sorted(zip(bsym.args[0], bsym.output, strict=True), key=lambda pair: written[pair[0].name])
            old_values, new_values = zip(*pairs, strict=True)
            bsym = bsym.from_bsym(args=(old_values,), output=new_values)
        for proxy in bsym.flat_proxy_outs:
            written.setdefault(proxy.name, len(written))
        new.bound_symbols.append(bsym)
    return new


# needed while: Thunder does not sum the gradient of a broadcast 0-dim tensor on the CPU.
# Thunder treats such a tensor as a number. Forward gets a line that expands the tensor, whose gradient is a sum:
#
#     t1 = ltorch.sum(t0)                              t1 = ltorch.sum(t0)
#     t2 = ltorch.true_divide(t0, t1)         ->       t2 = ltorch.expand(t1, (3, 4))
#                                                      t3 = ltorch.true_divide(t0, t2)
#
# All 0-dim operands are expanded, also parameters, since summands of a gradient must have one shape.

_NAMES = (
    "add addcdiv addcmul clamp div lerp masked_fill maximum minimum mul pow sub true_divide where "
    "add_ addcdiv_ addcmul_ clamp_ div_ lerp_ masked_fill_ mul_ pow_ sub_ true_divide_"
)
ELEMENTWISE = frozenset(_NAMES.split())


def broadcast_scalars(computation: TraceCtx) -> TraceCtx:
    """Return a trace in which 0-dim operands of elementwise operations are expanded to the shape of the result.

    Call this before autodiff, once parameters are synchronised. Return the trace unchanged if an operand and its result
    differ in dtype, as under mixed precision: an expanded operand would decide the result's dtype.
    """
    scalars = [_scalars(line) for line in computation.bound_symbols]
    lines = list(zip(computation.bound_symbols, scalars, strict=True))
    if any(_dtype(proxy) is not _dtype(line.output) for line, operands in lines for proxy in operands):
        return computation
    new = from_trace(computation)
    with tracectx(new):
        for line, operands in lines:
            replacements = {variableify(proxy): ltorch.expand(proxy, line.output.shape) for proxy in operands}
            if replacements:
                line = line.from_bsym_swap_proxies(replacements, skip_output=True)
            new.bound_symbols.append(line)
    new.set_provenance(TraceProvenance("Broadcast scalars (thunder_zero)"))
    return new


def _scalars(line: BoundSymbol) -> list[TensorProxy]:
    """Return the 0-dim operands on the CPU that a line broadcasts, and that may have a gradient."""
    result = line.output
    is_elementwise = line.sym.name in ELEMENTWISE and isinstance(result, TensorProxy)
    if not is_elementwise or not result.ndim or not dtypes.is_inexact_dtype(result.dtype):
        return []
    tensors = [proxy for proxy in line.flat_proxy_args if isinstance(proxy, TensorProxy) and not proxy.ndim]
    return [
        proxy for proxy in tensors if dtypes.is_inexact_dtype(proxy.dtype) and proxy.device.devicetype is DeviceType.CPU
    ]


def _dtype(proxy: TensorProxy) -> dtypes.dtype:
    return dtypes.to_strong_dtype(proxy.dtype)


# needed while: Thunder draws random numbers again where backward recomputes.
# Here backward uses the random numbers that forward drew, or an error is raised. Thunder tags every line of an
# activation checkpoint for recomputation, also a dropout, which would draw another mask. Lines that draw lose the tag,
# so that their results are saved. Thunder tags lines of its own checkpoint only in autodiff, so they are inlined here:
#
#     y = ltorch.checkpoint(f, x, w)         h = ltorch.mul(x, w)           # again in backward
#                                       ->   d = ltorch.dropout(h, 0.5)     # its mask is saved
#                                            y = ltorch.exp(d)


@dataclass(frozen=True, slots=True)
class Switch:
    """An argument of an operator, such as ``p``, that turns the operator's random numbers off if it is 0 or False."""

    position: int
    names: tuple[str, ...]
    default: float

    def is_on(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the argument's value in a call is neither 0 nor False."""
        named = (kwargs[name] for name in self.names if name in kwargs)
        value = args[self.position] if self.position < len(args) else next(named, self.default)
        return bool(value.value if isinstance(value, NumberProxy) else value)


def _switches(probability: int, training: int, *, default: float = 1, trains: bool = True) -> tuple[Switch, Switch]:
    return Switch(probability, ("p", "dropout", "dropout_p"), default), Switch(training, ("training", "train"), trains)


# Thunder registers these operators automatically. Their gradient runs torch's forward once more, and draws again.
DRAWN_AGAIN: dict[str, tuple[Switch, ...]] = {
    **dict.fromkeys(("dropout", "feature_dropout", "native_dropout"), _switches(1, 2)),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), _switches(1, 2)),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _switches(1, 2, trains=False)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _switches(5, 6)),
    "multi_head_attention_forward": _switches(10, 13, default=0),
    **dict.fromkeys(("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"), ()),
    **dict.fromkeys(("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"), ()),
}


Draws = Callable[[str], bool]  # name of an operator -> whether it draws random numbers


def draw_once(computation: TraceCtx, draws: Draws) -> TraceCtx:
    """Return a trace in which backward draws no random number again. Call it before autodiff.

    ``draws`` tells which operators draw, since Thunder does not tag all of them.

    Raises:
        RuntimeError: the gradient of an operator would draw again.
    """
    for bsym in _leaves(computation.bound_symbols):
        _refuse_drawn_again(bsym)
    new = from_trace(computation)
    new.bound_symbols = [line for bsym in computation.bound_symbols for line in _opened(bsym, draws)]
    return new


def _opened(bsym: BoundSymbol, draws: Draws) -> Iterator[BoundSymbol]:
    """Yield a line, without its recomputation tag if it draws. For Thunder's checkpoint, yield the lines inside."""
    if not _is_random(bsym, draws):
        yield bsym
    elif bsym.sym == ltorch.checkpoint:
        inputs = {proxy.name for proxy in bsym.flat_proxy_args}
        for inner in bsym.subsymbols:
            for proxy in inner.flat_proxy_outs:
                if proxy.name not in inputs:
                    proxy.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
            yield from _opened(inner, draws)
        for proxy in bsym.flat_proxy_outs:  # a checkpoint's results are saved, if backward reads them
            proxy.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
            yield prims.shallow_copy.bind(proxy, output=proxy)
    else:
        for proxy in bsym.flat_proxy_outs:
            proxy.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
        yield bsym


def _is_random(bsym: BoundSymbol, draws: Draws) -> bool:
    """Return whether one of a line's primitives draws random numbers."""
    return any(
        draws(leaf.sym.name)
        or prims.OpTags.RANDOM_OP in (leaf.sym.tags or ())
        or (leaf.sym.name in DRAWN_AGAIN and _is_registered_automatically(leaf))
        for leaf in _leaves([bsym])
    )


def _leaves(bsyms: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    for bsym in bsyms:
        if bsym.subsymbols:
            yield from _leaves(bsym.subsymbols)
        else:
            yield bsym


def _refuse_drawn_again(bsym: BoundSymbol) -> None:
    switches = DRAWN_AGAIN.get(bsym.sym.name)
    if switches is None or not _is_registered_automatically(bsym) or is_constant_for_vjp(bsym):
        return
    if all(switch.is_on(bsym.args, bsym.kwargs) for switch in switches):
        raise RuntimeError(
            f"cannot train through {bsym.sym.id}: Thunder draws its random numbers again for backward, so the gradient "
            f"would be that of other ones; draw them with torch.rand, or use torch.nn.functional.dropout (nn.Dropout), "
            f"for an RNN between its layers"
        )


def _is_registered_automatically(bsym: BoundSymbol) -> bool:
    return prims.OpTags.AUTO_REGISTERED in (bsym.sym.tags or ())


# needed while: a fuser's pass weighs tensors by their dtypes alone when it rematerialises.
# So forward may save more bytes than were scheduled. Backward may also read parameters that forward gathered
# (``fusion_repair.py``). ``frontends/program_transform.py`` repairs both.


def fused_only(fuser: FusionExecutor, trace: TraceCtx) -> TraceCtx:
    """Return the trace after a fuser's pass in which Thunder's ``rematerialize`` is a no-op.

    The code of the pass runs with other globals, since a patch of its module would also affect other models.
    """
    code = type(fuser).fusion_pass
    if "rematerialize" not in code.__globals__:  # a fuser that does not rematerialise
        return fuser.fusion_pass(trace)
    globals_ = {**code.__globals__, "rematerialize": lambda trace: trace}
    pass_alone = FunctionType(code.__code__, globals_, code.__name__, code.__defaults__, code.__closure__)
    fused: TraceCtx = pass_alone(fuser, trace)
    return fused
