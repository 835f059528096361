"""Reads traces into timelines, and writes a timeline back as a joint trace.

``lift`` reads the joint trace, lowered but not yet fused or split, for the passes. ``lift_phases`` reads the forward
and the backward trace that run, for proofs and reports. Their ``del`` lines become FREEs.

``emit`` mostly reorders lines. A compute line is the lifted line, renamed where the timeline reads (or, in a copy,
writes) other values. Collectives are new lines, since passes may have merged them into buckets. New lines also encode
values before a launch and decode values after a wait::

    gather fut <- t_w, t_b   w b        (q3, q4) = zero_encode_coalesced((t_w, t_b), ('w', 'b'))
    wait   w, b <- fut       w b   ->   t5 = zero_all_gather_coalesced((q3, q4), ('w', 'b'))
                                        (q6, q7) = zero_wait_coalesced(t5)
                                        (w, b) = zero_decode_coalesced((q6, q7), ('w', 'b'))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

from thunder_zero.plan.mesh import SHARD, TENSOR
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.timeline import NUMBER, Kind, Op, ScheduleError, Timeline, Value, Work
from thunder_zero.traces.coded import fold, paths_of
from thunder_zero.traces.operators import is_collective, operator_of
from thunder_zero.traces.symbols import Facts, ZeroExecutor, axis_of, dtype_name
from thunder_zero.traces.work import (
    flops_of,
    is_cheap,
    is_repeatable,
    makes_view,
    updated_by,
    work_of,
)

from thunder.core import prims
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.executors.pythonex import clear_mutable_collection

PREAMBLE = {prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE, prims.PrimIDs.COMMENT}
MAY_HAVE_FLOPS = {Work.ATTENTION, Work.CONVOLUTION, Work.MATMUL, Work.OTHER}


def lift(trace: TraceCtx, facts: Facts, *, coded: bool = False) -> Timeline:
    """Return the timeline of a joint trace: one operation for each line, forward first.

    A line belongs to forward if forward's outputs need it.

    Args:
        trace: the joint trace.
        facts: the facts of its program.
        coded: True if the trace has lines that encode and decode.
    """
    lines = trace.bound_symbols
    needed = forward_lines(lines)
    ops = [op for index, line in enumerate(lines) for op in _lift_line(line, index, not needed[index], facts)]
    if coded:
        ops = list(fold(ops, lines, facts))
    ops.sort(key=lambda op: op.backward)
    result = lines[-1].args[0]
    returned = _gradients(result["flat_args"], result["output"], facts) if is_joint(result) else ()
    return Timeline(tuple(_add_params(ops)), _values_of(lines), facts.plan, _inputs(trace.args, facts), returned)


def lift_phases(forward: TraceCtx, backward: TraceCtx | None, facts: Facts) -> Timeline:
    """Return the timeline of the two traces that run. ``Op.source`` has indices into the trace of its phase."""
    phases = [forward.bound_symbols, [] if backward is None else backward.bound_symbols]
    ops: list[Op] = []
    for is_backward, lines in enumerate(phases):
        lifted = (op for index, line in enumerate(lines) for op in _lift_line(line, index, bool(is_backward), facts))
        ops += fold(lifted, lines, facts)
    values = _values_of([*phases[0], *phases[1]])
    inputs = _inputs(forward.args, facts)
    returned: tuple[tuple[str, str], ...] = ()
    if backward is not None:
        inputs |= _inputs(backward.args[1], facts)  # gradients of outputs; args[0] has what forward saved
        flat_args = forward.bound_symbols[-1].args[0]["flat_args"]
        returned = _gradients(flat_args, backward.bound_symbols[-1].args[0], facts)
    return _keep_frees_of_gathered(Timeline(tuple(_add_params(ops)), values, facts.plan, inputs, returned))


def _inputs(args: Any, facts: Facts) -> dict[str, str | None]:
    """Return a mapping from names of tensor arguments to paths, or to None if they are not parameters."""
    return {proxy.name: facts.inputs.get(proxy.name) for proxy in proxies_in(args)}


def _gradients(args: Sequence[Any], returned: Sequence[Any], facts: Facts) -> tuple[tuple[str, str], ...]:
    """Return (path, gradient) pairs of the parameters that have a gradient. Forward's arguments and backward's results
    correspond one to one."""
    pairs = zip(args, returned, strict=True)
    named = ((arg.name, grad.name) for arg, grad in pairs if isinstance(arg, Proxy) and isinstance(grad, Proxy))
    return tuple((facts.inputs[name], grad) for name, grad in named if name in facts.inputs)


def _lift_line(line: BoundSymbol, index: int, backward: bool, facts: Facts) -> Iterator[Op]:
    """Yield the operation of a line, or nothing for a line that unpacks arguments, is a comment, or names the phase."""
    if operator_of(line) is not None:  # the usual case: a computation
        yield _lift_computation(line, index, backward, facts)
        return
    executor = facts.executor
    if line.sym.id in PREAMBLE or line.sym in (clear_mutable_collection, executor.enter):
        return
    kind, paths, axis = Kind.COMPUTE, tuple[str, ...](), SHARD
    if line.sym.id is prims.PrimIDs.DEL:
        kind = Kind.FREE
    elif symbol := executor.launches.get(line.sym.name):
        kind = Kind.GATHER if symbol is executor.all_gather else Kind.REDUCE
        paths = paths_of(line)
        axis = axis_of(line)
        _require_planned_symbol(symbol, paths, axis, facts)
    elif line.sym.name in executor.waits:
        kind = Kind.WAIT
    elif line.sym == executor.defer:
        kind, paths = Kind.DEFER, (line.args[1],)
    if kind is Kind.COMPUTE:
        yield _lift_computation(line, index, backward, facts)
    else:
        yield Op(kind, tuple(read_by(line)), tuple(written_by(line)), paths, backward, source=(index,), over=axis)


def _lift_computation(line: BoundSymbol, index: int, backward: bool, facts: Facts) -> Op:
    """Return the operation of a line that computes, with its class of work and FLOPs."""
    repeatable, work = is_repeatable(line), work_of(line)
    is_torchs = facts.plan.mesh.is_sliced and _is_tensor_parallel(line, facts.plan)
    return Op(
        Kind.COMPUTE,
        tuple(read_by(line)),
        tuple(written_by(line)),
        backward=backward,
        repeatable=repeatable,
        source=(index,),
        work=work,
        cheap=repeatable and is_cheap(line),
        updates=() if repeatable else tuple(dict.fromkeys(proxy.name for proxy in updated_by(line))),
        flops=flops_of(line) if work in MAY_HAVE_FLOPS else 0,
        over=TENSOR if is_torchs else SHARD,
        sends=_sent_by(line, facts.plan) if is_torchs else 0,
        moves=MOVES.get(line.sym.name, "") if is_torchs else "",
    )


def _is_tensor_parallel(line: BoundSymbol, plan: Plan) -> bool:
    """Return whether a line is a collective of torch's tensor parallelism, or a wait that may belong to it."""
    if not is_collective(operator_of(line)):
        return False
    name = line.sym.name
    return name == "wait_tensor" or (name in MOVES and plan.mesh.joins_slices(line.args[-1]))


MOVES = {  # names of collectives of torch's tensor parallelism -> ``Op.moves``
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "scatter",
    "all_to_all_single": "all_to_all",
}


def _sent_by(line: BoundSymbol, plan: Plan) -> int:
    """Return the bytes that a rank sends in a collective of torch's tensor parallelism."""
    tensor = line.flat_proxy_args[0]
    return plan.slice_sends(line.sym.name, prod(map(int, tensor.shape))) * int(tensor.dtype.bytes)


def _require_planned_symbol(symbol: Symbol, paths: Sequence[str], axis: str, facts: Facts) -> None:
    """Raise ScheduleError if the plan requires another symbol for a reduction. A timeline only has REDUCE."""
    for path in paths if symbol is not facts.executor.all_gather else ():
        if symbol is not (planned := facts.executor.reduction(facts.plan.by_name[path], axis)):
            raise ScheduleError(f"a line reduces {path} with {symbol.name}; the plan needs {planned.name}")


def read_by(line: BoundSymbol) -> dict[str, Proxy]:
    """Return a mapping from names to the proxies that a line reads. A ``get_grad`` names an output of forward but reads
    its gradient. Forward's return reads the outputs. Saved values are read in backward."""
    if line.sym is prims.get_grad:
        return {}
    is_forward_return = line.sym is prims.python_return and len(line.args) == 2 and isinstance(line.args[0], dict)
    read = proxies_in(line.args[0]["flat_output"]) if is_forward_return else line.flat_proxy_args
    return {proxy.name: proxy for proxy in read}


def written_by(line: BoundSymbol) -> dict[str, Proxy]:
    """Return a mapping from names to the proxies that a line writes, except arguments that it returns."""
    inputs = {proxy.name for proxy in line.flat_proxy_args}
    return {proxy.name: proxy for proxy in line.flat_proxy_outs if proxy.name not in inputs}


def proxies_in(tree: Any) -> list[Proxy]:
    """Return the proxies in a tree of arguments."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Proxy)]


def _add_params(ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the operations, and give each wait the parameters of its launch. A wait for a torch collective becomes a
    plain computation if the collective is not tensor-parallel."""
    params: dict[str, tuple[str, ...]] = {}
    handles: set[str] = set()  # handles of tensor-parallel collectives
    for op in ops:
        if op.moves:
            handles.update(op.writes)
        elif op.is_torchs and handles.isdisjoint(op.reads):
            op = replace(op, over=SHARD)
        if op.kind in (Kind.GATHER, Kind.REDUCE):
            params[op.writes[0]] = op.params
        yield replace(op, params=params[op.reads[0]]) if op.kind is Kind.WAIT else op


def _keep_frees_of_gathered(timeline: Timeline) -> Timeline:
    """Replace the ``del`` lines of a trace (FREEs of any values, without params) by FREEs of gathered parameters. A
    gathered parameter is freed once its value and all possible views are deleted. Deletions of resident parameters, and
    of all other values, are dropped."""
    made_from, position = gathered_from(timeline), timeline.derived
    path_of = {name: param.path for _, name, param in timeline.gathered}
    holders = Counter(chain.from_iterable(made_from.values()))
    # Ties are broken by the order of parameters, since names of values have no meaningful order.
    order = {param.path: index for index, param in enumerate(timeline.plan.params)}
    ops: list[Op] = []
    for op in timeline.ops:
        if op.kind is not Kind.FREE:
            ops.append(op)
            continue
        for read in op.reads:
            for value in sorted(made_from.get(read, ()), key=lambda name: (position[name], order[path_of[name]])):
                holders[value] -= 1
                if not holders[value] and not timeline.plan.by_name[path_of[value]].resident:
                    ops.append(replace(op, reads=(value,), params=(path_of[value],)))
    return timeline.with_ops(ops)


def _values_of(lines: Sequence[BoundSymbol]) -> dict[str, Value]:
    """Return a mapping from values that the lines read or write to their sizes and dtypes."""
    values: dict[str, Value] = {}
    for line in lines:
        base = ""
        if makes_view(line):
            viewed = line.flat_proxy_args[0].name
            if viewed not in values:
                raise ScheduleError(
                    f"{line.sym.name} reads {viewed}, which is neither an input nor written by any operation"
                )
            base = values[viewed].base or viewed
        for proxy in (*line.flat_proxy_outs, *line.flat_proxy_args):
            if proxy.name not in values and isinstance(proxy, TensorProxy | FutureTensorProxy):
                values[proxy.name] = Value(prod(proxy.shape) * int(proxy.dtype.bytes), dtype_name(proxy.dtype), base)
            elif isinstance(proxy, NumberProxy):
                values[proxy.name] = Value(0, NUMBER)
    return values


def forward_lines(lines: Sequence[BoundSymbol]) -> list[bool]:
    """Return, for each line, whether forward's outputs need it."""
    result = lines[-1].args[0]
    if not is_joint(result):
        return [True] * len(lines)
    needed = {proxy.name for proxy in proxies_in((result["fw_flat_out"], result["flat_args"]))}
    forward = [False] * len(lines)
    for index in reversed(range(len(lines) - 1)):
        line = lines[index]
        if line.sym is prims.get_grad:
            continue
        makes = any(proxy.name in needed for proxy in line.flat_proxy_outs)
        if makes or line.sym.id in PREAMBLE:
            forward[index] = True
            needed.update(proxy.name for proxy in line.flat_proxy_args)
    return forward


def is_joint(result: Any) -> bool:
    """Return whether a trace with this result has a backward phase, too."""
    return isinstance(result, dict) and "fw_flat_out" in result


def emit(trace: TraceCtx, timeline: Timeline, executor: ZeroExecutor) -> TraceCtx:
    """Return the joint trace that runs ``timeline``, which was lifted from ``trace``."""
    lines = trace.bound_symbols
    proxies = {proxy.name: proxy for line in lines for proxy in (*line.flat_proxy_args, *line.flat_proxy_outs)}
    new = from_trace(trace)
    new.names = set(trace.names)  # a copy: ``trace`` does not change
    new.bound_symbols = [line for line in lines if line.sym.id in PREAMBLE]
    with tracectx(new):
        for op in timeline.ops:
            for line in _emit_op(op, timeline, lines, proxies, executor):
                if op.backward and (op.repeated or op.kind is not Kind.COMPUTE):
                    line.tags.add(BoundSymbolTag.BACKWARD)
                new.bound_symbols.append(line)
    new.set_provenance(TraceProvenance("Schedule collectives (thunder_zero)"))
    return new


def _emit_op(
    op: Op, timeline: Timeline, lines: Sequence[BoundSymbol], proxies: dict[str, Proxy], executor: ZeroExecutor
) -> Iterator[BoundSymbol]:
    """Yield the lines that run an operation, or nothing for a FREE."""
    if op.kind in (Kind.COMPUTE, Kind.DEFER):
        yield _emit_compute(op, lines[op.source[0]], proxies)
    elif op.kind is Kind.WAIT:
        yield from _emit_wait(op, timeline.launches[op.reads[0]], proxies, executor)
    elif op.kind is not Kind.FREE:
        yield from _emit_launch(op, executor.launches[lines[op.source[0]].sym.name], proxies, executor)


def _emit_compute(op: Op, line: BoundSymbol, proxies: dict[str, Proxy]) -> BoundSymbol:
    """Return the lifted line, with the names of the values that the operation reads and writes."""
    written = written_by(line)
    for name, original in zip(op.writes, written.values(), strict=True):
        if name not in proxies:
            proxies[name] = original.replace_name(name)
    old_names, new_names = [*read_by(line), *written], [*op.reads, *op.writes]
    pairs = zip(old_names, new_names, strict=True)
    replacements = {variableify(proxies[old]): proxies[new] for old, new in pairs if new != old}
    return line.from_bsym_swap_proxies(replacements) if replacements else line


def _emit_launch(op: Op, symbol: Symbol, proxies: dict[str, Proxy], executor: ZeroExecutor) -> Iterator[BoundSymbol]:
    tensors = tuple(proxies[name] for name in op.reads)
    sent, axis = tensors, executor.axis(op.over)
    if (code := executor.encoder_of(op)) is not None:
        sent = executor.payloads_of(tensors, op, after_wait=False)
        yield _bind(executor, code, tensors, op.params, axis, sent)
    handle = proxies[op.writes[0]] = executor.handle_of(symbol, tensors, op.params, op.over)
    yield _bind(executor, symbol, sent, op.params, axis, handle)


def _emit_wait(op: Op, launch: Op, proxies: dict[str, Proxy], executor: ZeroExecutor) -> Iterator[BoundSymbol]:
    handle = proxies[op.reads[0]]
    for name, path in zip(op.writes, op.params, strict=True):
        if name not in proxies:  # only the wait for a repeated gather writes a new name
            shape = executor.plan.by_name[path].shape
            proxies[name] = TensorProxy(name, shape=shape, device=handle.device, dtype=handle.dtype)
    outputs = tuple(proxies[name] for name in op.writes)
    received, code = outputs, executor.decoder_of(launch)
    if code is not None:
        received = executor.payloads_of(outputs, launch, after_wait=True)
    if len(outputs) == 1:
        yield executor.wait.bind(handle, output=received[0])
    else:
        yield executor.coalesced[executor.wait].bind(handle, output=received)
    if code is not None:
        yield _bind(executor, code, received, op.params, executor.axis(launch.over), outputs)


def _bind(
    executor: ZeroExecutor,
    symbol: Symbol,
    tensors: Sequence[Proxy],
    paths: Sequence[str],
    axis: Sequence[str],
    output: Any,
) -> BoundSymbol:
    """Return a line that calls one of our symbols. Its output is one proxy for each tensor, or a handle."""
    if len(tensors) > 1:
        return executor.coalesced[symbol].bind(tuple(tensors), tuple(paths), *axis, output=output)
    return symbol.bind(tensors[0], paths[0], *axis, output=output[0] if isinstance(output, tuple) else output)
