"""needed while: Thunder lists what is changed in place in the order of a set."""

from __future__ import annotations

from thunder.core import prims
from thunder.core.trace import TraceCtx, from_trace


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
