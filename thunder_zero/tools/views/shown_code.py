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
View = tuple[str, str, tuple[Any, ...]]  # the operator's name, its arguments after the first, the shape of the result
Chain = tuple[TensorProxy, tuple[View, ...]]  # a value, and views of it that are applied in order


def shown(trace: TraceCtx, freed: Mapping[int, Sequence[str]]) -> Iterator[tuple[int, str, int | None]]:
    """Yield (position, code, position of a view that the code has at its end) of the lines to show.

    ``freed`` has the gathered parameters that the ``del`` line at a position frees."""
    chains, inside, appended = _views(trace)
    folded = {name: _code(chains[name]) for name in inside}
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
                call = _code(chains.get(name) or (bsym.flat_proxy_args[0], (_view(bsym),)))
            call = NAME.sub(lambda match: folded.get(match[0], match[0]), call)
            view = appended.get(name)
            if view is not None:
                name, call = view, _code(chains[view], call)
            yield position, f"{name} = {call}" if name else call, position_of.get(view or "")


def _views(trace: TraceCtx) -> tuple[dict[str, Chain], set[str], dict[str, str]]:
    """Return the chains of views by name, and two groups of views that are printed in an operator's line.

    The first group has the views that only one operator reads, which are printed inside its line. The second maps an
    operator's result to the view that is its only reader, which is printed at the end of the operator's line.
    """
    reads: Counter[str] = Counter()
    read_by_others: set[str] = set()  # values that lines without an operator read
    made: set[str] = set()  # the only values of operators, except views
    for bsym in trace.bound_symbols:
        if bsym.sym.id is not prims.PrimIDs.DEL:
            names = {proxy.name for proxy in bsym.flat_proxy_args}
            reads.update(names)
            read_by_others.update(() if operator_of(bsym) else names)
            if operator_of(bsym) and isinstance(bsym.output, TensorProxy) and not _stands_inside(bsym):
                made.add(bsym.output.name)
    chains: dict[str, Chain] = {}
    folded: set[str] = set()
    appended: dict[str, str] = {}
    for bsym in trace.bound_symbols:
        if isinstance(bsym.output, TensorProxy) and operator_of(bsym) is not None and _stands_inside(bsym):
            base, name = bsym.flat_proxy_args[0], bsym.output.name
            root, _ = chains[name] = _then(chains[base.name] if base.name in folded else (base, ()), _view(bsym))
            if reads[name] == 1 and name not in read_by_others:
                folded.add(name)
            elif reads[root.name] == 1 and root.name in made:
                appended[root.name] = name
    return chains, folded, appended


def _stands_inside(bsym: BoundSymbol) -> bool:
    """Return whether a line makes a view that may be printed inside another line. Collectives never are."""
    return makes_view(bsym) and not is_collective(operator_of(bsym))


def _view(bsym: BoundSymbol) -> View:
    name = bsym.sym.name.removeprefix("_unsafe_")
    further = [*map(prettyprint, bsym.args[1:]), *(f"{key}={prettyprint(arg)}" for key, arg in bsym.kwargs.items())]
    return name, ", ".join(further), _shape(bsym.output) if isinstance(bsym.output, TensorProxy) else ()


def _then(chain: Chain, view: View) -> Chain:
    """Return the chain with a further view. Earlier views that the further view undoes are removed."""
    (root, views), (name, args, shape) = chain, view
    if name in ("t", "transpose") and views and views[-1][:2] == (name, args):
        return root, views[:-1]
    views = views[:-1] if name == "reshape" and views and views[-1][0] == name else views
    before = views[-1][2] if views else _shape(root)
    return root, views if name == "reshape" and shape == before else (*views, view)


def _code(chain: Chain, code: str = "") -> str:
    """Return the code of the chain's last view, applied to ``code`` (default: the chain's value)."""
    code = code or chain[0].name
    for name, args, _ in chain[1]:
        inside = ", ".join(filter(None, (code, args)))
        code = f"{code}.{name}({args})" if name in METHODS else f"aten.{name}({inside})"
    return code


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
