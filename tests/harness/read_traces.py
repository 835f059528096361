"""Reads the two traces that run back into operations, and compares them with those that they were written from.

::

    (q3, q4) = zero_encode_coalesced((t_w, t_b), ('w', 'b'))
    fut = zero_all_gather_coalesced((q3, q4), ('w', 'b'))               gather fut  <- t_w, t_b   w b
    del q3, q4
    (w, b) = zero_wait_coalesced(fut)                            ->     wait   w, b <- fut        w b
    del fut
    wt = torch.ops.aten.t.default(w)                                    compute wt <- w
    del w                                                               free   w

The reader shares with the writer only what a line that computes reads, writes and costs (``lift.computation``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import thunder_zero as tz
from thunder_zero.plan.mesh import SHARD
from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Launch, Op, Reduce, Return, Wait
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.lift import PREAMBLE, computation, proxies_in
from thunder_zero.traces.work import work_of

from thunder.core import prims
from thunder.core.proxies import CollectionProxy, Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.pythonex import clear_mutable_collection

LAUNCHES = ("zero_all_gather", "zero_all_reduce", "zero_reduce_scatter")
Read = tuple[Op, tuple[int, ...]]  # an operation, and the positions of its lines


def require_written(traces: tz.tools.Traces) -> None:
    """Raise AssertionError unless the traces are the operations of their timeline, one after another."""
    timeline = traces.timeline
    read = [*_Phase(traces.plan, backward=False).read(traces.forward)]
    if traces.backward is not None:
        read += _Phase(traces.plan, backward=True).read(traces.backward)
        _require_connected(traces, [op for op, _ in read if isinstance(op, Return)])
    ops = _freeing(timeline, [op for op, _ in read])
    pairs = zip(plain(ops), plain(timeline.ops), strict=False)
    for index, (op, expected) in enumerate(pairs):
        assert op == expected, f"line {read[index][1][0]} is {op}; the timeline has {expected}"
        positions = traces.lines[index]
        assert read[index][1] == tuple(positions), f"{op} is in lines {read[index][1]}, not in {positions}"
        _require_line(traces, timeline.ops[index], positions[0])
    assert len(ops) == len(timeline.ops) == len(traces.lines), f"{len(ops)} operations of {len(timeline.ops)}"


class _Phase:
    """The lines of a phase so far: payloads that are not sent, handles without a wait, values that are not decoded."""

    def __init__(self, plan: tz.schedule.Plan, *, backward: bool) -> None:
        self.plan, self.backward = plan, backward
        self.encoded: dict[str, tuple[str, str, str, str, int]] = {}  # payload -> code, axis, path, value, position
        self.launches: dict[str, Launch] = {}
        self.arrived: dict[tuple[str, ...], tuple[Launch, int]] = {}
        self.helpers: set[str] = set()  # handles and payloads in memory
        self.freed: list[Read] = []  # between the lines of a launch
        self.is_entered = False

    def read(self, trace: TraceCtx) -> Iterator[Read]:
        """Yield the operations of a trace."""
        for index, line in enumerate(trace.bound_symbols):
            if line.sym.id not in PREAMBLE and line.sym is not clear_mutable_collection:
                yield from self._read(line, index)
        assert not self.encoded, f"encodes {[item[2] for item in self.encoded.values()]}, which no launch sends"
        assert not self.arrived, f"waits for {[*self.arrived]}, which no line decodes"
        assert not self.helpers, f"no line deletes {self.helpers}"

    def _read(self, line: BoundSymbol, index: int) -> Iterator[Read]:
        name = line.sym.name.removesuffix("_coalesced")
        reads, writes = (
            tuple(dict.fromkeys(proxy.name for proxy in proxies))
            for proxies in (line.flat_proxy_args, line.flat_proxy_outs)
        )
        if line.sym.id is prims.PrimIDs.DEL:
            yield from self._delete(line, reads, index)
            return
        axis = line.args[2] if len(line.args) > 2 else SHARD
        if name in ("zero_decode", "zero_decode_grad"):
            launch, place = self.arrived.pop(reads, (None, 0))
            assert launch, f"line {index} decodes {', '.join(reads)}, which has not just arrived"
            expected = (self._decoder(launch), launch.over, launch.params)
            assert expected == (name, axis, paths_of(line)), f"line {index} decodes {launch.params} as something else"
            yield Wait(launch, writes), (place, index)
            return
        coded = [name for name in reads if name in self.encoded or any(name in names for names in self.arrived)]
        assert name in LAUNCHES or not coded, f"line {index} reads {coded[0]}, which is coded"
        if name == "zero_enter":
            assert not self.is_entered, "a phase is entered once"
            self.is_entered = True
        elif name in ("zero_encode", "zero_encode_grad"):
            self.helpers.update(writes)
            for payload, path, value in zip(writes, paths_of(line), reads, strict=True):
                self.encoded[payload] = name, axis, path, value, index
        elif name in LAUNCHES:
            yield from self._launch(name, axis, paths_of(line), reads, writes[0], index)
        elif name == "zero_wait":
            assert reads[0] in self.launches, f"line {index} waits for {reads[0]}, which is not in flight"
            launch = self.launches.pop(reads[0])
            if self._decoder(launch):
                self.helpers.update(writes)
                self.arrived[writes] = launch, index
            else:
                yield Wait(launch, writes), (index,)
        elif name == "zero_defer_reduction":
            yield Defer(tuple(reads), tuple(writes), (line.args[1],)), (index,)
        elif line.sym.id is prims.PrimIDs.RETURN:
            yield self._return(line), (index,)
        else:
            yield replace(computation(line, backward=self.backward), line=None), (index,)

    def _delete(self, line: BoundSymbol, names: tuple[str, ...], index: int) -> Iterator[Read]:
        if self.helpers.issuperset(names):
            self.helpers.difference_update(names)
        elif not any(isinstance(proxy, CollectionProxy) for proxy in line.args):  # which the start of backward unpacked
            assert self.helpers.isdisjoint(names), f"line {index} deletes a handle or a payload beside values"
            free = Free(names, backward=self.backward), (index,)
            if self.encoded:  # the launch of these payloads comes first
                self.freed.append(free)
            else:
                yield free

    def _launch(
        self, name: str, axis: str, paths: tuple[str, ...], sent: tuple[str, ...], handle: str, index: int
    ) -> Iterator[Read]:
        params = [self.plan.by_name[path] for path in paths]
        launch: Launch = Reduce(sent, handle, paths, axis)
        if name == "zero_all_gather":
            launch = Gather(sent, handle, paths, self.backward)
        else:
            scatters = [param.sharded and axis == SHARD for param in params]
            planned = f"zero_{'reduce_scatter' if all(scatters) else 'all_reduce'}"
            assert name == planned, f"line {index} reduces {paths} with {name}; the plan needs {planned}"
        code = self._encoder(launch)
        encoded = [self.encoded.pop(payload, None) for payload in sent]
        assert [item and item[:3] for item in encoded] == [code and (code, axis, path) for path in paths], (
            f"line {index} sends {', '.join(paths)}; the plan sends {f'what {code} makes of it' if code else 'tensors'}"
        )
        assert self.is_entered, f"line {index} launches before zero_enter"
        launch = replace(launch, reads=tuple(item[3] for item in encoded if item) or sent)
        self.launches[handle] = launch
        self.helpers.add(handle)
        yield launch, (index, *sorted({item[4] for item in encoded if item}))
        yield from self.freed
        self.freed = []

    def _encoder(self, launch: Launch) -> str | None:
        params = [self.plan.by_name[path] for path in launch.params]
        if isinstance(launch, Gather):
            return "zero_encode" if self.plan.encodes(*params) else None
        return "zero_encode_grad" if self.plan.encodes_gradient(launch.over, *params) else None

    def _decoder(self, launch: Launch) -> str | None:
        params = [self.plan.by_name[path] for path in launch.params]
        if isinstance(launch, Gather):
            return "zero_decode" if self.plan.decodes(*params) else None
        return "zero_decode_grad" if self.plan.decodes_gradient(launch.over, *params) else None

    def _return(self, line: BoundSymbol) -> Return:
        result, *saved = line.args
        outputs = result["flat_output"] if isinstance(result, dict) and saved else result
        return Return(_names(outputs), self.backward, _names([*saved[0][0], *saved[0][1]] if saved else ()))


def _names(results: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(result.name if isinstance(result, Proxy) else None for result in results)


def _require_connected(traces: tz.tools.Traces, returns: Sequence[Return]) -> None:
    """Check that backward unpacks what forward saves, takes the tangents, and returns each gradient at its argument."""
    assert traces.backward is not None
    saved, tangents = traces.backward.args
    assert _names(proxies_in(saved)) == returns[0].saves, "backward unpacks other values than forward saves"
    assert set(_names(proxies_in(tangents))) == traces.timeline.tangents, "backward takes other tangents"
    pairs = zip(traces.forward.bound_symbols[-1].args[0]["flat_args"], returns[1].results, strict=True)
    paths = [(traces.timeline.inputs.get(arg.name), grad) for arg, grad in pairs if isinstance(arg, Proxy) and grad]
    gradients = tuple((path, grad) for path, grad in paths if path)
    assert gradients == traces.timeline.gradients, f"backward returns the gradients {gradients}"


def _freeing(timeline: Timeline, ops: Sequence[Op]) -> list[Op]:
    """Add the parameters to FREEs: a gathered parameter is freed once it and all values that may view it are."""
    read = timeline.with_ops(ops)
    made_from, path_of = gathered_from(read), {name: param for _, name, param in read.gathered}
    holders = Counter(chain.from_iterable(made_from.values()))
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Free):
            sources = [source for name in op.reads for source in made_from.get(name, ())]
            holders.subtract(sources)
            last = (path_of[name] for name in dict.fromkeys(sources) if not holders[name])
            op = replace(op, params=tuple(param.path for param in last if not param.resident))
        result.append(op)
    return result


def plain(ops: Sequence[Op]) -> list[Op]:
    """Return the operations without what no line says: their lines and copies' marks. Handles have numbers."""
    launches = [op for op in ops if isinstance(op, Gather | Reduce)]
    numbers = {(op.handle, op.backward): str(number) for number, op in enumerate(launches)}

    def one(op: Op) -> Op:
        match op:
            case Gather():
                return replace(op, handle=numbers[op.handle, op.backward], repeated=False)
            case Reduce():
                return replace(op, handle=numbers[op.handle, op.backward])
            case Wait():
                return replace(op, launch=one(op.launch))  # type: ignore[arg-type]
            case Compute(work=work):  # a line alone does not say that it is between slices
                work = work_of(op.line) if op.between_slices else work
                return replace(op, line=None, repeated=False, work=work, number=-1)
            case Free():
                return replace(op, params=tuple(sorted(op.params)))
            case Return():
                return replace(op, saves=tuple(sorted(op.saves)))
        return op

    return [one(op) for op in ops]


def _require_line(traces: tz.tools.Traces, op: Op, position: int) -> None:
    """Check that the line of a computation calls what its operation says, with the same constants."""
    trace = traces.backward if op.backward else traces.forward
    assert trace is not None
    if isinstance(op, Compute):
        line, expected = trace.bound_symbols[position], op.line
        assert _call(line) == _call(expected), f"line {position} calls something else than {expected}"


def _call(line: Any) -> Any:
    args = tree_map(lambda leaf: "value" if isinstance(leaf, Proxy) else leaf, (tuple(line.args), dict(line.kwargs)))
    return line.sym, args


def paths_of(line: BoundSymbol) -> tuple[str, ...]:
    """Return the paths of the parameters in the arguments of one of our lines."""
    return (line.args[1],) if isinstance(line.args[1], str) else tuple(line.args[1])
