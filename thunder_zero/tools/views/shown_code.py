"""Shortens the code of traces for printing: views inside lines, no ``del`` of activations.

::

    t = torch.ops.aten.t.default(w)
    del w
    view = torch.ops.aten.reshape.default(x, [16, 4])
    addmm = torch.ops.aten.addmm.default(b, view, t)     ->    y = aten.addmm(b, x.reshape([16, 4]), w.t())
    del b, t, view                                                     .reshape([4, 4, 4])
    y = torch.ops.aten.reshape.default(addmm, [4, 4, 4])       del b, w
    del addmm

Views that undo each other are left out, as in ``w.t().t()``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thunder_zero.tools.printing.words import short
from thunder_zero.traces.operators import is_collective, operator_of
from thunder_zero.traces.symbols import ZeroExecutor
from thunder_zero.traces.work import makes_view

from thunder.core import prims
from thunder.core.codeutils import prettyprint
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.pythonex import clear_mutable_collection

NAME = re.compile(r"(?<![.'\w])[A-Za-z_]\w*\b(?!=)")  # the name of a value, not of a keyword argument
METHODS = frozenset(dir(Tensor))
HIDDEN = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE, clear_mutable_collection.id, "zero_enter")


@dataclass(frozen=True, slots=True)
class _Step:
    """A view: the operator's name, its arguments after the first, and the shape of the result."""

    name: str
    args: str
    shape: tuple[Any, ...]

    def apply(self, code: str) -> str:
        """Return the code that applies this view to an expression."""
        args = ", ".join(part for part in (code, self.args) if part)
        return f"{code}.{self.name}({self.args})" if self.name in METHODS else f"aten.{self.name}({args})"


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain of views: ``steps`` are applied to ``root`` in order."""

    root: TensorProxy
    steps: tuple[_Step, ...] = ()

    def then(self, step: _Step) -> _Chain:
        """Return the chain with a further view. Earlier views that the further view undoes are removed."""
        steps = self.steps
        if steps and steps[-1].name == step.name == "reshape":
            steps = steps[:-1]
        elif steps and step.name in ("t", "transpose") and (steps[-1].name, steps[-1].args) == (step.name, step.args):
            return _Chain(self.root, steps[:-1])
        is_same = step.name == "reshape" and step.shape == (steps[-1].shape if steps else _shape(self.root))
        return _Chain(self.root, steps if is_same else (*steps, step))

    def apply(self, code: str) -> str:
        """Return the code of the chain's last view, from the code of the root."""
        for step in self.steps:
            code = step.apply(code)
        return code


def shown(trace: TraceCtx, freed: Mapping[int, Sequence[str]]) -> Iterator[tuple[int, str, int | None]]:
    """Yield (position, code, position of a view that the code has at its end) of the lines to show.

    ``freed`` has the gathered parameters that the ``del`` line at a position frees."""
    chains, inside, appended = _views(trace)
    folded = {name: chains[name].apply(chains[name].root.name) for name in inside}
    hidden = {*inside, *appended.values()}
    position_of = {
        proxy.name: position for position, bsym in enumerate(trace.bound_symbols) for proxy in bsym.flat_proxy_outs
    }
    for position, bsym in enumerate(trace.bound_symbols):
        results = [proxy.name for proxy in bsym.flat_proxy_outs]
        if bsym.sym.id is prims.PrimIDs.DEL:
            if position in freed:
                yield position, f"del {', '.join(freed[position])}", None
        elif bsym.sym.id not in HIDDEN and hidden.isdisjoint(results):
            if operator_of(bsym) is None:
                yield position, _line(bsym), None
                continue
            name, _, call = short(_python(bsym)).rpartition(" = ")
            if _stands_inside(bsym):
                chain = chains.get(name) or _Chain(bsym.flat_proxy_args[0], (_step(bsym),))
                call = chain.apply(chain.root.name)
            call = NAME.sub(lambda match: folded.get(match[0], match[0]), call)
            view = appended.get(name)
            if view is not None:
                name, call = view, chains[view].apply(call)
            yield position, f"{name} = {call}" if name else call, position_of.get(view or "")


def _views(trace: TraceCtx) -> tuple[dict[str, _Chain], set[str], dict[str, str]]:
    """Return the chains of views by name, and two groups of views that are printed in an operator's line.

    The first group has the views that only one operator reads, which are printed inside its line. The second maps an
    operator's result to the view that is its only reader, which is printed at the end of the operator's line.
    """
    reads: Counter[str] = Counter()
    read_by_others: set[str] = set()  # values that lines without an operator read
    writer: dict[str, BoundSymbol] = {}
    for bsym in trace.bound_symbols:
        if bsym.sym.id is not prims.PrimIDs.DEL:
            names = {proxy.name for proxy in bsym.flat_proxy_args}
            reads.update(names)
            read_by_others.update(() if operator_of(bsym) else names)
            writer.update((proxy.name, bsym) for proxy in bsym.flat_proxy_outs)
    chains: dict[str, _Chain] = {}
    folded: set[str] = set()
    appended: dict[str, str] = {}
    for bsym in trace.bound_symbols:
        if isinstance(bsym.output, TensorProxy) and operator_of(bsym) is not None and _stands_inside(bsym):
            base, name = bsym.flat_proxy_args[0], bsym.output.name
            chain = chains[name] = (chains[base.name] if base.name in folded else _Chain(base)).then(_step(bsym))
            if reads[name] == 1 and name not in read_by_others:
                folded.add(name)
            elif reads[chain.root.name] == 1 and _makes_one_value(writer.get(chain.root.name)):
                appended[chain.root.name] = name
    return chains, folded, appended


def _makes_one_value(bsym: BoundSymbol | None) -> bool:
    """Return whether a line calls an operator that returns a single value, which is not a view."""
    return (
        bsym is not None
        and operator_of(bsym) is not None
        and isinstance(bsym.output, TensorProxy)
        and not _stands_inside(bsym)
    )


def _stands_inside(bsym: BoundSymbol) -> bool:
    """Return whether a line makes a view that may be printed inside another line. Collectives never are."""
    return makes_view(bsym) and not is_collective(operator_of(bsym))


def _step(bsym: BoundSymbol) -> _Step:
    name = bsym.sym.name.removeprefix("_unsafe_")
    args = ", ".join(
        [*map(prettyprint, bsym.args[1:]), *(f"{key}={prettyprint(value)}" for key, value in bsym.kwargs.items())]
    )
    return _Step(name, args, _shape(bsym.output) if isinstance(bsym.output, TensorProxy) else ())


def _shape(proxy: TensorProxy) -> tuple[Any, ...]:
    """Return a shape in which names replace symbols."""
    return tuple(size.name if isinstance(size, Proxy) else size for size in proxy.shape)


def _line(bsym: BoundSymbol) -> str:
    """Return the code of a line that calls no operator.

    Paths are left out if the names of values show the paths. A return statement has the outputs and the saved values.
    """
    if isinstance(bsym.sym.executor, ZeroExecutor) and bsym.flat_proxy_outs and len(bsym.args) > 1:
        values, paths, *axes = bsym.args
        args = [prettyprint(tuple(values))] if isinstance(values, tuple | list) else [values.name, repr(paths)]
        args += [f"over={axis!r}" for axis in axes]
        return f"{prettyprint(bsym.output)} = {bsym.sym.name}({', '.join(args)})"
    if bsym.sym.id is prims.PrimIDs.RETURN and isinstance(bsym.args[0], dict) and len(bsym.args) == 2:
        result, (tensors, saved_numbers) = bsym.args
        return f"return {prettyprint(tuple(result['output']))}, {prettyprint((*tensors, *saved_numbers))}"
    return _python(bsym)


def _python(bsym: BoundSymbol) -> str:
    return "\n".join(bsym.python(indent=0, print_depth=1))
