"""Writes the traces that run, forward and backward, straight from operations, one after another.

::

    gather fut <- t_w, t_b   w b        (q3, q4) = zero_encode_coalesced((t_w, t_b), ('w', 'b'))
                                        fut = zero_all_gather_coalesced((q3, q4), ('w', 'b'))
                                        del q3, q4
    wait   w, b <- fut       w b   ->   (q6, q7) = zero_wait_coalesced(fut)
                                        del fut
                                        (w, b) = zero_decode_coalesced((q6, q7), ('w', 'b'))
                                        del q6, q7
    compute wt <- w                     wt = torch.ops.aten.t.default(w)
    free   w                            del w

A computation is its line, renamed where the operation reads (or, in a copy, writes) other values. Before the first
launch of a phase, ``zero_enter`` names the phase and the digest of its launches, which ranks compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, assert_never

from thunder_zero.plan.mesh import SHARD
from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Launch, Op, Reduce, Return, Wait
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.lift import PREAMBLE, is_joint, read_by, written_by
from thunder_zero.traces.symbols import JointTrace

from thunder.core import prims
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, from_trace, tracectx
from thunder.executors.pythonex import clear_mutable_collection

FORWARD_ALONE = "forward without backward"  # the name of a phase
Lines = tuple[tuple[int, ...], ...]


class Role(Enum):
    """What a line does for its operation."""

    RUNS = auto()
    CODES = auto()  # it encodes or decodes
    HELPS = auto()  # it frees what only the lines of this operation read
    FREES_NEXT = auto()  # it is the line of the next operation


@dataclass(frozen=True, eq=False)
class Written:
    """A trace that runs. ``lines`` has, for each operation, the positions of its lines: the line that runs it first,
    then a line that encodes or decodes."""

    trace: TraceCtx | None
    lines: Lines


def saved_by(timeline: Timeline) -> tuple[str, ...]:
    """Return the values that forward saves for backward."""
    return next((op.saves for op in timeline.ops if isinstance(op, Return)), ())


class Writer:
    """Writes operations as lines of one program. It knows the proxy of each value so far."""

    def __init__(self, lowered: JointTrace) -> None:
        self.facts = lowered.facts
        self._executor, self._lowered = lowered.facts.executor, lowered.trace
        lines = lowered.trace.bound_symbols
        self.proxies = {proxy.name: proxy for line in lines for proxy in (*line.flat_proxy_args, *line.flat_proxy_outs)}
        self._names = from_trace(lowered.trace)  # the names of values: a copy, as the lowered trace does not change
        self._names.names = set(lowered.trace.names)
        self._result = lines[-1].args[0]

    def forward(self, timeline: Timeline) -> Written:
        """Write forward, which also returns the values that it saves if there is a backward."""
        trace = from_trace(self._lowered)
        trace.names = self._names.names
        trace.bound_symbols = [line for line in self._lowered.bound_symbols if line.sym.id in PREAMBLE]
        if not is_joint(self._result):
            return self._phase(trace, timeline, FORWARD_ALONE, self._result["output"])
        trace.tags.add(TraceTag.AUGMENTED_FORWARD)
        outputs = self._result["fw_flat_out"]
        entries = {name: part for name, part in self._result.items() if name != "fw_flat_out"}
        result = {**entries, "output": outputs, "flat_output": tuple(outputs)}
        return self._phase(trace, timeline, "forward", result, self._by_type(saved_by(timeline)))

    def backward(self, timeline: Timeline) -> Written:
        """Write backward, which unpacks the values that forward saved, and the tangents."""

        def backward_fn(saved_for_backward: Any, cotangents: Any) -> None:
            """Define the signature of the trace."""

        trace = TraceCtx(fn=backward_fn)
        trace.tags.add(TraceTag.BACKWARD)
        trace.names, trace.name_ctr = self._names.names, self._lowered.name_ctr
        trace.names -= {"saved_for_backward", "cotangents", "C0", "C1"}
        used = {name for op in timeline.ops if op.backward for name in op.reads}
        with tracectx(trace):
            parts = [
                CollectionProxy(list(part), name=name)
                for part, name in zip(self._by_type(saved_by(timeline)), ("C0", "C1"), strict=True)
            ]
            all_saved = CollectionProxy(list(parts), name="saved_for_backward")
            tangents = CollectionProxy(self._tangents(timeline), name="cotangents")
            trace.args = ([part.collection() for part in parts], tangents.collection())
            for collection in (all_saved, tangents):
                prims.unpack_trivial(collection, name=collection.name)
            for collection in (all_saved, tangents, *(part for part in parts if part.coll)):
                prims.unpack_sequence(collection, len(collection.coll))
                emptied = [part for part in parts if not part.coll] if collection is all_saved else []
                for empty in (collection, *emptied):
                    trace.bound_symbols.append(clear_mutable_collection.bind(empty, output=None))
                items = tangents.coll if collection is tangents else ()
                unread = [item for item in items if item is not None and item.name not in used]
                trace.bound_symbols.append(_del((collection, *emptied, *unread)))
        results = [op.results for op in timeline.ops if isinstance(op, Return) and op.backward]
        grads = (None if name is None else self.proxies[name] for name in results[0])
        return self._phase(trace, timeline, "backward", tuple(grads))

    def _by_type(self, saved: Sequence[str]) -> tuple[tuple[Proxy, ...], tuple[Proxy, ...]]:
        """Return the proxies of tensors, and those of numbers."""
        proxies = [self.proxies[name] for name in saved]
        tensors = tuple(proxy for proxy in proxies if isinstance(proxy, TensorProxy))
        return tensors, tuple(proxy for proxy in proxies if not isinstance(proxy, TensorProxy))

    def _tangents(self, timeline: Timeline) -> list[Proxy | None]:
        """Return the tangent of each output. If forward returns a value several times, its tangents are in reverse
        order."""
        by_output: dict[str, list[Proxy]] = {}
        for line in self._lowered.bound_symbols:
            if line.sym is prims.get_grad:
                by_output.setdefault(line.args[0].name, []).append(line.output)
        outputs = (
            by_output.get(output.name) if isinstance(output, TensorProxy) else None
            for output in self._result["fw_flat_out"]
        )
        tangents = (left.pop() if left else None for left in outputs)
        return [tangent if tangent is not None and tangent.name in timeline.tangents else None for tangent in tangents]

    def computation(self, op: Compute) -> BoundSymbol:
        """Return the line of a computation, with the names of the values that the operation reads and writes."""
        line: Any = op.line
        written = written_by(line)
        originals = read_by(line) | written
        pairs = [*zip(read_by(line), op.reads, strict=True), *zip(written, op.writes, strict=True)]
        with tracectx(self._names):
            for old, new in pairs:
                if new not in self.proxies:
                    self.proxies[new] = originals[old] if new == old else originals[old].replace_name(new)
        swaps = {variableify(originals[old]): self.proxies[new] for old, new in pairs if old != new}
        result: BoundSymbol = line.from_bsym_swap_proxies(swaps) if swaps else line
        return result

    def _phase(self, trace: TraceCtx, timeline: Timeline, phase: str, *result: Any) -> Written:
        """Append the lines of a phase's operations to a trace."""
        ops = [op for op in timeline.ops if op.backward is (phase == "backward")]
        positions: list[list[int]] = [[] for _ in ops]
        is_entered = False
        with tracectx(trace):
            for index, op in enumerate(ops):
                if isinstance(op, Return):
                    lines = [(Role.RUNS, prims.python_return.bind(*result, output=None))]
                elif not (isinstance(op, Free) and positions[index]):
                    lines = list(self._lines(op, ops[index + 1]))
                else:
                    continue  # the lines of the launch before have freed already
                for role, line in lines:
                    if role is Role.RUNS and isinstance(op, Launch) and not is_entered:
                        trace.bound_symbols.append(self._enter(phase, ops))
                        is_entered = True
                    if role is not Role.HELPS:
                        own = positions[index + (role is Role.FREES_NEXT)]
                        own.insert(0 if role is Role.RUNS else len(own), len(trace.bound_symbols))
                    trace.bound_symbols.append(line)
        trace.set_provenance(TraceProvenance(f"Write {phase} (thunder_zero)"))
        return Written(trace, tuple(map(tuple, positions)))

    def _lines(self, op: Launch | Wait | Defer | Compute | Free, following: Op) -> Iterator[tuple[Role, BoundSymbol]]:
        """Yield the lines of an operation. An encoded launch sends after the FREE of what it encodes."""
        match op:
            case Compute():
                yield Role.RUNS, self.computation(op)
            case Gather() | Reduce():
                tensors: Any = tuple(self.proxies[name] for name in op.reads)
                sent, code = tensors, self._executor.encoder_of(op)
                if code is not None:
                    sent = self._executor.payloads_of(tensors, op, after_wait=False)
                    yield Role.CODES, self._bind(code, tensors, op, sent)
                    if isinstance(following, Free):
                        yield Role.FREES_NEXT, self._del(following.reads)
                symbol = self._executor.launch_of(op)
                self.proxies[op.handle] = self._executor.handle_of(symbol, tensors, op.params, op.over)
                yield Role.RUNS, self._bind(symbol, sent, op, self.proxies[op.handle])
                if code is not None:
                    yield Role.HELPS, _del(sent)
            case Wait():
                outputs = self._outputs(op)
                received, code = outputs, self._executor.decoder_of(op.launch)
                if code is not None:
                    received = self._executor.payloads_of(outputs, op.launch, after_wait=True)
                handle, wait = self.proxies[op.launch.handle], self._executor.wait
                if len(outputs) > 1:
                    yield Role.RUNS, self._executor.coalesced[wait].bind(handle, output=received)
                else:
                    yield Role.RUNS, wait.bind(handle, output=received[0])
                yield Role.HELPS, _del((handle,))
                if code is not None:
                    yield Role.CODES, self._bind(code, received, op.launch, outputs)
                    yield Role.HELPS, _del(received)
            case Defer():
                grad, placeholder = self.proxies[op.reads[0]], self.proxies[op.writes[0]]
                yield Role.RUNS, self._executor.defer.bind(grad, op.params[0], output=placeholder)
            case Free():
                yield Role.RUNS, self._del(op.reads)
            case _:
                assert_never(op)

    def _outputs(self, wait: Wait) -> tuple[TensorProxy, ...]:
        """Return the proxies that a wait writes. Only the wait for a repeated gather writes a new name."""
        handle: Any = self.proxies[wait.launch.handle]
        for name, path in zip(wait.writes, wait.params, strict=True):
            if name not in self.proxies:
                shape = self._executor.plan.by_name[path].shape
                self.proxies[name] = TensorProxy(name, shape=shape, device=handle.device, dtype=handle.dtype)
        outputs: tuple[Any, ...] = tuple(self.proxies[name] for name in wait.writes)
        return outputs

    def _bind(self, symbol: Symbol, tensors: Sequence[Proxy], launch: Launch, output: Any) -> BoundSymbol:
        """Return a line that calls one of our symbols. Its output is one proxy for each tensor, or a handle."""
        axis = self._executor.axis(launch.over)
        if len(tensors) > 1:
            return self._executor.coalesced[symbol].bind(tuple(tensors), launch.params, *axis, output=output)
        return symbol.bind(
            tensors[0], launch.params[0], *axis, output=output[0] if isinstance(output, tuple) else output
        )

    def _enter(self, phase: str, ops: Sequence[Op]) -> BoundSymbol:
        """Return the line with the name of a phase and the digest of its launches. A phase without launches has no such
        line: another rank may run no such phase."""
        launches = self.launches_of(ops)
        digest = hashlib.sha256("\n".join(launches).encode()).hexdigest()[:8]
        self._executor.runtime.note_launches(digest, launches)
        return self._executor.effect("zero_enter").bind(self.facts.named(phase), digest, output=None)

    def launches_of(self, ops: Iterable[Op]) -> list[str]:
        """Return the launches in order, such as ``all_gather h.0.w, h.0.b``. Frees and waits are left out, since they
        may differ between ranks: recomputing depends on the shapes of a rank's inputs."""
        launches = []
        for op in ops:
            if isinstance(op, Launch):
                name = self._executor.launch_of(op).name.removeprefix("zero_")
                over = f" over {op.over}" * bool(self._executor.axis(SHARD))
                launches.append(f"{name} {', '.join(op.params)}{over}")
        return launches

    def _del(self, names: Iterable[str]) -> BoundSymbol:
        return _del(self.proxies[name] for name in names)


def _del(proxies: Iterable[Proxy]) -> BoundSymbol:
    return BoundSymbol(prims.python_del, tuple(proxies), {}, None)
