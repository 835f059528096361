"""needed while: Thunder draws random numbers again where backward recomputes.

Makes backward use the random numbers that forward drew, or refuses. Thunder tags every line of an activation checkpoint
as one that backward computes again, a dropout too, whose mask is then another one. Lines that draw lose the tag, so
that their results are saved; Thunder's own checkpoint, which tags its lines only in autodiff, becomes these lines::

    y = ltorch.checkpoint(f, x, w)         h = ltorch.mul(x, w)           # again in backward
                                      ->   d = ltorch.dropout(h, 0.5)     # its mask is saved
                                           y = ltorch.exp(d)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import NumberProxy, ProxyTag
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transforms import is_constant_for_vjp


@dataclass(frozen=True, slots=True)
class Switch:
    """An argument that turns an operator's random numbers off by 0 or False.

    Attributes:
        position: among the positional arguments.
        names: by which it may be given instead.
        default: its value where it is not given.
    """

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
    """The trace, before autodiff, in which no random number is drawn a second time for backward.

    Args:
        computation: before autodiff.
        draws: says by an operator's name whether it draws; Thunder does not tag all that do.

    Raises:
        RuntimeError: an operator whose gradient, in Thunder, draws again.
    """
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
