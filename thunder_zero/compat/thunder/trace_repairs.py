"""Mends lines of traces that Thunder gets wrong.

In: a trace. Out: one whose lines do what torch does, on every rank alike. In the order in which they run::

    draw_once            the acquired trace, before autodiff           frontends/program_transform.py
    broadcast_scalars    the same, with parameters synchronised        frontends/program_transform.py
    sort_aliases         the lowered joint trace, before scheduling    frontends/program_transform.py
    fused_only           the scheduled trace, once more through a fuser whose pass saved too much: the same file
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

# needed while: Thunder lists what is changed in place in the order of a set.


def sort_aliases(trace: TraceCtx) -> TraceCtx:
    """The trace whose ``update_aliases`` lines, which Thunder inserts around operations in place, list values in the
    order in which they were written. Thunder lists them in the order of a set, which differs between ranks, and so
    would the places where they are freed."""
    new = from_trace(trace)
    written = {proxy.name: at for at, proxy in enumerate(trace.args)}
    for bsym in trace.bound_symbols:
        if bsym.sym.name == prims.update_aliases.name:
            pairs = sorted(zip(bsym.args[0], bsym.output, strict=True), key=lambda pair: written[pair[0].name])
            given, gives = zip(*pairs, strict=True)
            bsym = bsym.from_bsym(args=(given,), output=gives)
        for proxy in bsym.flat_proxy_outs:
            written.setdefault(proxy.name, len(written))
        new.bound_symbols.append(bsym)
    return new


# needed while: Thunder does not sum the gradient of a broadcast 0-dim tensor on the CPU.
# It takes one for a number. Forward gets the line that says so, before autodiff, whose gradient sums:
#
#     t1 = ltorch.sum(t0)                              t1 = ltorch.sum(t0)
#     t2 = ltorch.true_divide(t0, t1)         ->       t2 = ltorch.expand(t1, (3, 4))
#                                                      t3 = ltorch.true_divide(t0, t2)
#
# All of them are, parameters too: the parts of a gradient that meet must have one shape.

_NAMES = (
    "add addcdiv addcmul clamp div lerp masked_fill maximum minimum mul pow sub true_divide where "
    "add_ addcdiv_ addcmul_ clamp_ div_ lerp_ masked_fill_ mul_ pow_ sub_ true_divide_"
)
ELEMENTWISE = frozenset(_NAMES.split())


def broadcast_scalars(computation: TraceCtx) -> TraceCtx:
    """The trace, before autodiff and with parameters synchronised, in which 0-dim operands of elementwise operations
    have the shape of what is computed.

    Where any of them has another dtype than the result, as under mixed precision, all stay as they are: with more
    dimensions it would decide the result's, and the parts of a gradient that meet must have one shape.
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


# needed while: Thunder draws random numbers again where backward recomputes.
# Makes backward use the random numbers that forward drew, or refuses. Thunder tags every line of an activation
# checkpoint as one that backward computes again, a dropout too, whose mask is then another one. Lines that draw lose
# the tag, so that their results are saved; Thunder's own checkpoint, which tags its lines only in autodiff, becomes
# these lines:
#
#     y = ltorch.checkpoint(f, x, w)         h = ltorch.mul(x, w)           # again in backward
#                                       ->   d = ltorch.dropout(h, 0.5)     # its mask is saved
#                                            y = ltorch.exp(d)


@dataclass(frozen=True, slots=True)
class Switch:
    """An argument, by position or by one of its names, that turns an operator's random numbers off by 0 or False."""

    position: int
    names: tuple[str, ...]
    default: float

    def is_on(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments leaves it on."""
        named = (kwargs[name] for name in self.names if name in kwargs)
        value = args[self.position] if self.position < len(args) else next(named, self.default)
        return bool(value.value if isinstance(value, NumberProxy) else value)


def _switches(probability: int, training: int, *, default: float = 1, trains: bool = True) -> tuple[Switch, Switch]:
    return Switch(probability, ("p", "dropout", "dropout_p"), default), Switch(training, ("training", "train"), trains)


# Operators that Thunder registers automatically, with a gradient that runs torch's forward once more, and draws again.
DRAWN_AGAIN: dict[str, tuple[Switch, ...]] = {
    **dict.fromkeys(("dropout", "feature_dropout", "native_dropout"), _switches(1, 2)),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), _switches(1, 2)),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _switches(1, 2, trains=False)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _switches(5, 6)),
    "multi_head_attention_forward": _switches(10, 13, default=0),
    **dict.fromkeys(("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"), ()),
    **dict.fromkeys(("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"), ()),
}


Draws = Callable[[str], bool]  # whether the operator of this name draws random numbers


def draw_once(computation: TraceCtx, draws: Draws) -> TraceCtx:
    """The trace, before autodiff, in which no random number is drawn a second time for backward. ``draws`` says by an
    operator's name whether it draws; Thunder does not tag all that do."""
    for bsym in _leaves(computation.bound_symbols):
        _refuse_drawn_again(bsym)
    new = from_trace(computation)
    new.bound_symbols = [line for bsym in computation.bound_symbols for line in _opened(bsym, draws)]
    return new


def _opened(bsym: BoundSymbol, draws: Draws) -> Iterator[BoundSymbol]:
    """A line that draws, without the tags of torch's checkpoint; the lines of Thunder's own, tagged but for those."""
    if not _is_random(bsym, draws):
        yield bsym
    elif bsym.sym == ltorch.checkpoint:
        given = {proxy.name for proxy in bsym.flat_proxy_args}
        for inner in bsym.subsymbols:
            for proxy in inner.flat_proxy_outs:
                if proxy.name not in given:
                    proxy.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
            yield from _opened(inner, draws)
        for proxy in bsym.flat_proxy_outs:  # what a checkpoint returns is saved, if backward reads it
            proxy.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
            yield prims.shallow_copy.bind(proxy, output=proxy)
    else:
        for proxy in bsym.flat_proxy_outs:
            proxy.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
        yield bsym


def _is_random(bsym: BoundSymbol, draws: Draws) -> bool:
    """Whether a line draws random numbers: one of its primitives does."""
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


# needed while: a fuser's pass rematerialises by dtypes alone.
# Thunder weighs a tensor by its dtype, so forward may save more bytes than were scheduled (``fusion_repair.py``:
# backward may also read what forward gathered). :func:`thunder_zero.frontends.program_transform.repair_fused` answers
# both.


def fused_only(fuser: FusionExecutor, trace: TraceCtx) -> TraceCtx:
    """The trace after a fuser's pass, without Thunder's rematerialisation, which such a pass calls by this name. Runs
    the pass's code with other globals: a patch of its module would change other models too."""
    code = type(fuser).fusion_pass
    if "rematerialize" not in code.__globals__:  # a fuser that does not rematerialise
        return fuser.fusion_pass(trace)
    names = {**code.__globals__, "rematerialize": lambda trace: trace}
    only = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    fused: TraceCtx = only(fuser, trace)
    return fused
