"""Shortens the code of traces for printing: names of operators, views inside of their readers.

::

    t = torch.ops.aten.t.default(w)
    view = torch.ops.aten.view.default(x, [16, 16])    ->    addmm = aten.addmm(b, aten.view(x, [16, 16]), aten.t(w))
    addmm = torch.ops.aten.addmm.default(b, view, t)         del w, x
    del t, view, w, x
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from thunder_zero.traces.operators import operator_of
from thunder_zero.traces.work import makes_view

from thunder.core import prims
from thunder.core.trace import TraceCtx

OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+\(")
NAME = re.compile(r"(?<![.\w])[A-Za-z_]\w*")


def shown(trace: TraceCtx) -> Iterator[tuple[int, str]]:
    """Yield the lines to show, by position, as code. What views inside of other lines are views of is deleted with the
    last of them."""
    folded = _views_of_one_reader(trace)
    expressions: dict[str, str] = {}
    root: dict[str, str] = {}  # of a folded view: the value in whose place it stands
    alive: Counter[str] = Counter()  # of a root: its folded views, and itself
    for position, bsym in enumerate(trace.bound_symbols):
        if bsym.sym.id is prims.PrimIDs.DEL:
            if names := list(_dead([proxy.name for proxy in bsym.flat_proxy_args], root, alive)):
                yield position, f"del {', '.join(names)}"
            continue
        code = OPERATOR.sub(r"aten.\1(", "\n".join(bsym.python(indent=0, print_depth=1)))
        made, equals, call = code.partition(" = ")
        if equals and operator_of(bsym) is not None:
            call = _filled(call, expressions)
            code = f"{made}{equals}{call}"
        if position in folded:
            name, of = folded[position]
            expressions[name], root[name] = call, root.get(of, of)
            alive[root[name]] = max(alive[root[name]], 1) + 1
        else:
            yield position, code


def _views_of_one_reader(trace: TraceCtx) -> dict[int, tuple[str, str]]:
    """Return the views that one operator alone reads: by position, their names, and what they are views of."""
    reads: Counter[str] = Counter()
    others: set[str] = set()
    for bsym in trace.bound_symbols:
        if bsym.sym.id is not prims.PrimIDs.DEL:
            names = {proxy.name for proxy in bsym.flat_proxy_args}
            reads.update(names)
            if operator_of(bsym) is None:
                others |= names
    found = {}
    for position, bsym in enumerate(trace.bound_symbols):
        made = [proxy.name for proxy in bsym.flat_proxy_outs]
        is_view = operator_of(bsym) is not None and makes_view(bsym) and len(made) == 1
        if is_view and reads[made[0]] == 1 and made[0] not in others:
            found[position] = made[0], bsym.flat_proxy_args[0].name
    return found


def _dead(names: list[str], root: Mapping[str, str], alive: Counter[str]) -> Iterator[str]:
    """Yield the names to show as deleted: a value with views inside of other lines goes with the last of them."""
    for name in names:
        of = root.get(name, name)
        if alive[of]:
            alive[of] -= 1
        if not alive[of]:
            yield of


def _filled(code: str, expressions: Mapping[str, str]) -> str:
    return NAME.sub(lambda found: expressions.get(found[0], found[0]), code)
