"""Lifts a lowered joint trace into operations, once. All later steps rewrite operations.

::

    p0 = zero_all_gather(t_w, 'w')                   gather  p0 <- t_w     w
    w = zero_wait(p0)                                wait    w  <- p0      w
    y = torch.ops.aten.mm.default(x, w)      ->      compute y  <- x, w
    y_grad = get_grad(y)                             return  y             y_grad is an input of backward
    ...                                              ...

A line belongs to forward if forward's outputs need it. Lines of backward that nothing needs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from thunder_zero.plan.traffic import slice_traffic
from thunder_zero.schedule.ops import Compute, Exchange, Gather, Launch, Op, Reduce, Return, Wait, Work
from thunder_zero.schedule.timeline import NUMBER, ScheduleError, Timeline, Value
from thunder_zero.traces.operators import is_collective, operator_of
from thunder_zero.traces.symbols import JointTrace, dtype_name
from thunder_zero.traces.work import flops_of, is_cheap, is_repeatable, makes_view, updated_by, work_of

from thunder.core import prims
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, gather_tags

PREAMBLE = {prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE, prims.PrimIDs.COMMENT}
MAY_HAVE_FLOPS = {Work.ATTENTION, Work.CONVOLUTION, Work.MATMUL, Work.OTHER}
MOVES = {  # names of collectives of torch's tensor parallelism -> ``Exchange.moves``
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "scatter",
    "all_to_all_single": "all_to_all",
}


def lift(lowered: JointTrace) -> Timeline:
    """Return the timeline of a lowered joint trace, forward first."""
    trace, facts = lowered.trace, lowered.facts
    *lines, end = trace.bound_symbols
    result, is_forward = end.args[0], forward_lines(trace.bound_symbols)
    phases: tuple[list[BoundSymbol], list[BoundSymbol]] = [], []
    for line, belongs in zip(lines, is_forward[:-1], strict=True):
        if line.sym.id not in PREAMBLE and line.sym is not prims.get_grad:
            phases[not belongs].append(line)
    lifting = _Lifting(lowered)
    ops = [lifting.op(line, backward=False) for line in phases[0]]
    inputs = {arg.name: facts.inputs.get(arg.name) for arg in trace.args}
    gradients: tuple[tuple[str, str], ...] = ()
    tangents = frozenset[str]()
    if is_joint(result):
        ops.append(Return(_names(result["fw_flat_out"])))
        needed = _needed_lines(phases[1], {proxy.name for proxy in proxies_in(result["output"])})
        ops += [lifting.op(line, backward=True) for line in needed]
        pairs = zip(_names(result["flat_args"]), _names(result["output"]), strict=True)
        gradients = tuple((facts.inputs[arg], grad) for arg, grad in pairs if arg and grad and arg in facts.inputs)
        tangents = frozenset(line.output.name for line in lines if line.sym is prims.get_grad)
        ops.append(Return(_names(result["output"]), backward=True))
    else:
        ops.append(Return(_names(result["output"])))
    numbered = (replace(op, number=index) if isinstance(op, Compute) else op for index, op in enumerate(ops))
    values = _values_of(trace.bound_symbols)
    return Timeline(tuple(numbered), values, facts.executor.plan, inputs, tangents, gradients)


class _Lifting:
    """The lines of a trace as operations. Handles of collectives are known from the lines so far."""

    def __init__(self, lowered: JointTrace) -> None:
        self._executor, self._plan = lowered.facts.executor, lowered.facts.executor.plan
        self._launches: dict[str, Launch] = {}
        self._exchanges: set[str] = set()  # handles of torch's tensor parallelism

    def op(self, line: BoundSymbol, *, backward: bool) -> Op:
        """Return the operation of a line."""
        executor = self._executor
        if operator_of(line) is not None:  # the usual case
            return self._between_slices(line, computation(line, backward=backward))
        if line.sym == executor.wait:
            return Wait(self._launches[line.args[0].name], (line.output.name,))
        if line.sym not in executor.launches:
            return computation(line, backward=backward)
        (tensor, path, *axis), handle = line.args, line.output.name
        if line.sym == executor.all_gather:
            launch: Launch = Gather((tensor.name,), handle, (path,), backward)
        else:
            launch = Reduce((tensor.name,), handle, (path,), *axis)
            self._require_planned(line, launch)
        self._launches[handle] = launch
        return launch

    def _require_planned(self, line: BoundSymbol, launch: Reduce) -> None:
        """Raise ScheduleError if the plan requires another symbol for a reduction."""
        planned = self._executor.reduction(self._plan.by_name[launch.params[0]], launch.over)
        if line.sym != planned:
            raise ScheduleError(
                f"a line reduces {launch.params[0]} with {line.sym.name}; the plan needs {planned.name}"
            )

    def _between_slices(self, line: BoundSymbol, op: Compute) -> Compute:
        """Return the operation with what it does if it is a collective of torch's tensor parallelism, or its wait."""
        plan = self._plan
        if not plan.mesh.is_sliced or not is_collective(operator_of(line)):
            return op
        if line.sym.name == "wait_tensor":
            return op if self._exchanges.isdisjoint(read_by(line)) else replace(op, work=Work.AWAIT)
        if line.sym.name not in MOVES or not plan.mesh.joins_slices(line.args[-1]):
            return op
        self._exchanges.update(written_by(line))
        tensor = line.flat_proxy_args[0]
        numel, itemsize = prod(map(int, tensor.shape)), int(tensor.dtype.bytes)
        traffic = slice_traffic(plan, line.sym.name, numel, itemsize)
        return replace(op, work=Exchange(MOVES[line.sym.name], traffic))


def computation(line: BoundSymbol, *, backward: bool) -> Compute:
    """Return the operation of a line that computes, with its class of work and FLOPs."""
    repeatable, work = is_repeatable(line), work_of(line)
    return Compute(
        tuple(read_by(line)),
        tuple(written_by(line)),
        line,
        backward,
        repeatable=repeatable,
        work=work,
        cheap=repeatable and is_cheap(line),
        updates=() if repeatable else tuple(dict.fromkeys(proxy.name for proxy in updated_by(line))),
        flops=flops_of(line) if work in MAY_HAVE_FLOPS else 0,
    )


def read_by(line: BoundSymbol) -> dict[str, Proxy]:
    """Return a mapping from names to the proxies that a line reads."""
    return {proxy.name: proxy for proxy in line.flat_proxy_args}


def written_by(line: BoundSymbol) -> dict[str, Proxy]:
    """Return a mapping from names to the proxies that a line writes, except arguments that it returns."""
    inputs = {proxy.name for proxy in line.flat_proxy_args}
    return {proxy.name: proxy for proxy in line.flat_proxy_outs if proxy.name not in inputs}


def proxies_in(tree: Any) -> list[Proxy]:
    """Return the proxies in a tree of arguments."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Proxy)]


def _names(results: Sequence[Any]) -> tuple[str | None, ...]:
    return tuple(result.name if isinstance(result, Proxy) else None for result in results)


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
    """Return, for each line of a joint trace, whether forward's outputs need it."""
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


def _needed_lines(lines: Sequence[BoundSymbol], needed: set[str]) -> Iterator[BoundSymbol]:
    """Yield the lines that make the values in ``needed``, and lines with side effects."""
    kept = []
    for line in reversed(lines):
        if any(proxy.name in needed for proxy in line.flat_proxy_outs) or prims.OpTags.DONT_DCE in gather_tags(line):
            needed.update(proxy.name for proxy in line.flat_proxy_args)
            kept.append(line)
    yield from reversed(kept)


def is_joint(result: Any) -> bool:
    """Return whether a trace with this result has a backward phase, too."""
    return isinstance(result, dict) and "fw_flat_out" in result
