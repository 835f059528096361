"""Inserts a synchronise before each parameter's first use; names phases for ranks to compare.

The trace that Thunder acquires reads full parameters. Its inputs become this rank's shards. A synchronise of each
parameter comes before the first line that reads it::

    y = ltorch.linear(x, t_w, t_b)                    t0 = zero_synchronize(t_w, 'w')
                                             ->       t1 = zero_synchronize(t_b, 'b')
                                                      y = ltorch.linear(x, t0, t1)

A synchronise gathers nothing yet: autodiff and lowering replace it with gather, wait and reduction (``symbols.py``).
The names of a tied parameter share one synchronise, so autodiff sums its gradients, and the sum is reduced once.

The module's parameters are DTensors of the full shape. At the end of the prologue, :func:`take_rows` inserts the line
that takes their rows on this rank::

    (t0, t1) = zero_rows((t_w, t_b), ('w', 'b'))

At the start of the prologue, :func:`take_rows` inserts ``zero_check_call``. This line makes Thunder choose a program
that fits ``no_sync`` and the call's guard (``compat/thunder/guards.py``). Thunder's checks of the DTensors are removed,
since ``frontends/placement.py`` checks DTensors before each forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from typing import Any

from thunder_zero.compat.lines import set_look
from thunder_zero.plan.mesh import SHARD
from thunder_zero.plan.params import Param
from thunder_zero.traces.coded import paths_of
from thunder_zero.traces.symbols import Facts, ZeroExecutor, axis_of

from thunder.core import prims
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

UNPACKED = (prims.unpack_parameter, prims.unpack_buffer)


def module_inputs(prologue: TraceCtx, computation: TraceCtx) -> dict[str, str]:
    """Return a mapping from names of inputs of the computation to the paths of the module's parameters and buffers."""
    paths = {line.output.name: line.args[1] for line in prologue.bound_symbols if line.sym in UNPACKED}
    pairs = zip(prologue.output[0], computation.args, strict=True)
    return {comp.name: paths[pro.name] for pro, comp in pairs if pro.name in paths}


def facts_of(names: Mapping[str, str], executor: ZeroExecutor) -> Facts:
    """Return the facts of a program that is compiled now.

    Args:
        names: a mapping from names of inputs to the paths of the module's parameters and buffers.
        executor: the model's symbols.
    """
    by_name = executor.plan.by_name
    inputs = {name: by_name[path].path for name, path in names.items() if path in by_name}
    others = {name: path for name, path in names.items() if path not in by_name}
    return Facts(executor, executor.plan, inputs, others, synced=executor.runtime.synced)


def insert_synchronize(computation: TraceCtx, facts: Facts) -> TraceCtx:
    """Return the trace (before autodiff) with shards as inputs, each synchronised before its first use."""
    proxies = {proxy.name: proxy for proxy in computation.args if proxy.name in facts.inputs}
    _put_inputs_at_rest(computation, facts)
    new = from_trace(computation)
    full: dict[str, TensorProxy] = {}  # by path
    replacements: dict[Any, Proxy] = {}  # by input
    with tracectx(new):
        for line in computation.bound_symbols:
            if line.sym is prims.python_return:
                _require_no_parameters(line, facts)
                new.bound_symbols.append(line)
                continue
            if line.sym is prims.unpack_trivial:
                new.bound_symbols.append(line)
                continue
            read = [proxies[proxy.name] for proxy in line.flat_proxy_args if proxy.name in proxies]
            for proxy in read:
                path = facts.inputs[proxy.name]
                if path not in full:
                    full[path] = facts.executor.synchronize(proxy, path)
                replacements[variableify(proxy)] = full[path]
            new.bound_symbols.append(line.from_bsym_swap_proxies(replacements, skip_output=True) if read else line)
    new.set_provenance(TraceProvenance("Insert synchronise (thunder_zero)"))
    return new


def take_rows(prologue: TraceCtx, facts: Facts, guard: int) -> None:
    """Insert into the prologue, in place, the line that takes rows, and the line that checks the call. A program runs
    only for calls with the program's ``guard`` and ``synced``."""
    executor, plan = facts.executor, facts.plan
    unpacked: dict[str, tuple[TensorProxy, Param]] = {}
    for line in prologue.bound_symbols:
        if line.sym is prims.unpack_parameter and line.args[1] in plan.by_name:
            param = plan.by_name[line.args[1]]
            line.output = copy(line.output)  # the computation shares the proxy, but with the shape of the rows
            _put_at_rest(line.output, param, param.rest_shape, executor)
            unpacked[line.output.name] = line.output, param
    prologue.bound_symbols = [
        line
        for line in prologue.bound_symbols
        if line.sym is not prims.check_tensor_shape_and_metadata or line.args[0].name not in unpacked
    ]
    with tracectx(prologue):
        serves = executor.check_call.bind(facts.synced, guard, output=None)
    prologue.bound_symbols.insert(0, serves)
    _return_rows(prologue, unpacked, executor)


def _return_rows(prologue: TraceCtx, unpacked: Mapping[str, tuple[TensorProxy, Param]], executor: ZeroExecutor) -> None:
    """Make the prologue return ``zero_rows(shards)`` instead of the shards, if forward uses any shard."""
    result = prologue.bound_symbols.pop()
    taken = [unpacked[proxy.name] for proxy in result.flat_proxy_args if proxy.name in unpacked]
    if not taken:
        prologue.bound_symbols.append(result)
        return
    with tracectx(prologue):
        rows = executor.rows(tuple(shard for shard, _ in taken), tuple(param.path for _, param in taken))
    replacements = {variableify(shard): row for (shard, _), row in zip(taken, rows, strict=True)}
    prologue.bound_symbols.append(result.from_bsym_swap_proxies(replacements))


def _put_inputs_at_rest(trace: TraceCtx, facts: Facts) -> None:
    """Set the shape of each input that is a parameter to the shape of its rows."""
    for proxy in trace.args:
        if path := facts.inputs.get(proxy.name):
            param = facts.plan.by_name[path]
            _put_at_rest(proxy, param, facts.plan.shard_shape(param), facts.executor)


def _put_at_rest(proxy: TensorProxy, param: Param, shape: tuple[int, ...], executor: ZeroExecutor) -> None:
    """Set the shape of an input. Set its dtype and device to those of the parameter at rest."""
    device = executor.device_at_rest(param) or proxy.device
    set_look(proxy, shape, to_dtype(param.rest_dtype), device, is_number=not param.shape)


def _require_no_parameters(line: BoundSymbol, facts: Facts) -> None:
    """Raise ValueError if forward returns a parameter itself."""
    returned = line.args[0]["output"]
    for proxy in returned if isinstance(returned, tuple) else (returned,):
        if isinstance(proxy, Proxy) and proxy.name in facts.inputs:
            raise ValueError(
                f"forward returns the parameter {facts.inputs[proxy.name]!r} itself, which is sharded; return a value "
                f"computed from it, or read it with thunder_zero.full_state_dict"
            )


def launches_of(trace: TraceCtx, executor: ZeroExecutor) -> list[str]:
    """Return the launches of a phase in order, such as ``all_gather h.0.w, h.0.b``. Frees and waits are left out, since
    they may differ between ranks: recomputing depends on the shapes of a rank's inputs."""
    launches = []
    for line in trace.bound_symbols:
        if (symbol := executor.launches.get(line.sym.name)) is not None:
            name = symbol.name.removeprefix("zero_")
            suffix = f" over {axis_of(line)}" * bool(executor.axis(SHARD))
            launches.append(f"{name} {', '.join(paths_of(line))}{suffix}")
    return launches


def add_enter(trace: TraceCtx, phase: str, facts: Facts) -> TraceCtx:
    """Insert a line before the first launch of a phase, with the phase's name and the digest of its launches::

        zero_enter('backward', '1f0c5a9e')
        t5 = zero_all_gather(t_h_0_w, 'h.0.w')

    Ranks compare name and digest, so that they cannot mix up messages. A phase without launches gets no line: another
    rank may run no such phase.
    """
    executor = facts.executor
    index = next((index for index, line in enumerate(trace.bound_symbols) if line.sym.name in executor.launches), None)
    if index is None:
        return trace
    launches = launches_of(trace, executor)
    digest = hashlib.sha256("\n".join(launches).encode()).hexdigest()[:8]
    executor.runtime.note_launches(digest, launches)
    new = from_trace(trace)
    with tracectx(new):
        line = executor.enter.bind(facts.named(phase), digest, output=None)
    new.bound_symbols = [*trace.bound_symbols[:index], line, *trace.bound_symbols[index:]]
    new.set_provenance(TraceProvenance("Name the phase (thunder_zero)"))
    return new
