"""Types of the values of our own traces, on each axis of the mesh.

In: ``Traces``. Out: ``TraceTypes``. The plain module's lines run once on the CPU, with drawn values in place of the
model's. Our own lines are known: a gather makes a parameter, a reduction sums a gradient::

    w = zero_wait(zero_all_gather(t_w, 'w'))     dp:R tp:S      placed as planned
    y = aten.mm(x, w)                            dp:S tp:P      by experiments (flow.py)
    z = all_reduce(y, 'sum', 2, '3')             dp:S tp:R      by the table of collectives
    y_grad = get_grad(y)                         as y           a scalar's is equal on all ranks

Another rank differs from this one where it looks up its own rows of an embedding, where it takes its own part of an
equal value, and where it draws for its own slice.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from thunder_zero.compat.slice_generators import GENERATOR_OF_SLICE
from thunder_zero.plan.amounts import WIDTH, size, summed_up
from thunder_zero.plan.mesh import ALL, DATA, REPLICATE, SHARD, TENSOR, Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.ops import Compute, Reduce, Return, Wait, ends
from thunder_zero.spmd.collectives import NO_SHARE, Collective, collective_kind, fill
from thunder_zero.spmd.ending import MEANINGS
from thunder_zero.spmd.flow import AxisTypes, Fault, Memo, Walk
from thunder_zero.spmd.processes import NotChecked
from thunder_zero.spmd.record import RANDOM, Parameter, Ref, StepRecord, Tape, changed_by, shadow_of
from thunder_zero.spmd.verdict import TIMES_TRUE
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import is_collective, operator_of
from thunder_zero.traces.symbols import Facts

from thunder.core import dtypes, prims
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

LIMIT = 1 << 30  # bytes of values and experiments
COPIES_OF_EXPERIMENTS = 20  # of a line's values, in float64
SPLITS = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")
UNDECIDED = (MEANINGS["V"], MEANINGS["X"], NO_SHARE, TIMES_TRUE)  # said of a value without a law, or of a meant mean
SAVES_STATE, WITH_STATE = "run_and_save_rng_state", "run_with_rng_state"


@dataclass(frozen=True, repr=False)
class TraceTypes:
    """What the values of a program are on each axis.

    Attributes:
        values: the types of each value, such as ``"dp:S tp:P"``, keyed by its name in the traces.
        faults: what is wrong between ranks of tensor parallelism.
        gradients: the type of each parameter's gradient between ranks of tensor parallelism, keyed by path.
        not_checked: why there are no types; "" if there are.
        odd_heads: a line that cuts a slice into an odd number of heads, whose halves cannot be exchanged. Types of what
            follows from it may be wrong; "" if there is none.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    not_checked: str = ""
    odd_heads: str = ""

    def __repr__(self) -> str:
        return summed_up(self, self.not_checked or f"{len(self.values)} values, {len(self.faults)} faults")


def types_of_trace(traces: Traces, *, only: Sequence[str] | None = None) -> TraceTypes:
    """Return what each value of a program is on the axes of its mesh. ``only`` names axes (default: all)."""
    axes = [axis.name for axis in traces.plan.mesh.axes if axis.size > 1 and (only is None or axis.name in only)]
    try:
        _require_small(traces)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            recording = _Recording(traces)
            walked = {axis: recording.types_on(axis) for axis in axes}
    except NotChecked as reason:
        return TraceTypes(not_checked=str(reason))
    values = recording.by_value(walked, names_of_axes(traces.plan.mesh))
    on_tensor = walked.get(TENSOR)
    if on_tensor is None:
        return TraceTypes(values)
    gradients = {path: types for path, (types, _) in on_tensor.gradients.items()}
    odd_heads = recording.odd_heads(on_tensor)
    return TraceTypes(values, tuple(recording.faults(on_tensor)), gradients, odd_heads=odd_heads)


def require_right_types(traces: Traces) -> None:
    """Raise RuntimeError if a value of a sliced module is wrong between ranks of tensor parallelism.

    Nothing is raised where a value keeps no law (V), or where ranks have an odd number of heads, such as one: there
    gradients are compared at the first step (``sharded/unsliced.py``).
    """
    if traces.plan.mesh.tensor.size == 1 or traces.backward is None:
        return
    types = types_of_trace(traces, only=(TENSOR,))
    for fault in () if types.odd_heads else types.faults:
        if fault.kind == "error" and not any(words in fault.text for words in UNDECIDED):
            raise RuntimeError(_message(fault))


def _message(fault: Fault) -> str:
    where = f" ({shorten(fault.where, WIDTH, placeholder=' ...')})" if fault.where else ""
    if fault.parameters:
        return (
            f"the gradient of parameter {fault.parameters[0]!r} {fault.text.removeprefix('gradient ')} of tensor "
            f"parallelism{where}; place its module by torch's SequenceParallel, along the dimension of the slices"
        )
    return f"{fault.text}, on ranks of tensor parallelism{where}; sum shares over these ranks once"


def names_of_axes(mesh: Mesh) -> dict[str, str]:
    """Return the printed names of axes."""
    data = {SHARD: SHARD, REPLICATE: REPLICATE}
    if mesh.replicate.size == 1:
        data[SHARD] = "dp"
    elif mesh.shard.size == 1:
        data[REPLICATE] = "dp"
    return {**data, TENSOR: "tp"}


def _require_small(traces: Traces) -> None:
    timeline = traces.lifted
    if traces.facts.symbolic_shapes:
        raise NotChecked("sizes are symbols")
    computes = [op for op in timeline.ops if isinstance(op, Compute)]
    largest = max((sum(map(timeline.nbytes, (*op.reads, *op.writes))) for op in computes), default=0)
    needed = sum(value.nbytes for value in timeline.values.values()) + COPIES_OF_EXPERIMENTS * largest
    if needed > LIMIT:
        raise NotChecked(f"experiments would take {size(needed)}, over {size(LIMIT)}")


class _Recording:
    """One run of a joint trace's lines. All tensors stay alive, so that storages keep their addresses."""

    def __init__(self, traces: Traces) -> None:
        lowered = traces.scheduled.lowered
        self._traces, self._facts, self._plan = traces, lowered.facts, traces.plan
        self._joint = lowered.trace.bound_symbols
        self._dice = torch.Generator().manual_seed(0)
        self._tensors: dict[str, Tensor] = {}
        self._handles: dict[str, Any] = {}
        self._tape = Tape()
        self._values: dict[Ref, Tensor] = {}
        self._names: list[tuple[str | None, ...]] = []  # of what each line writes
        self._placed: dict[str, Parameter] = {}  # keyed by name: parameters, and inputs
        self._param_tensors: dict[str, Tensor] = {}
        self._own: dict[Ref, int] = {}  # this rank's part of an equal value: how far the neighbour's part is from it
        self._of_slices: set[int] = set()  # lines that draw for this rank's slice
        self._aliases: dict[str, str] = {}
        self._shifts, self._lookups = _lookups_in_slices(self._joint, self._facts, self._plan)
        self._shifted: dict[int, int] = {}
        self._read_parts = _read_parts(self._joint)
        self._is_backward = False
        torch.default_generator.manual_seed(0)
        for line in self._joint:
            self._run(line)

    def _run(self, line: BoundSymbol) -> None:
        """Run a line, and record it."""
        executor, symbol = self._facts.executor, line.sym
        if symbol.id is prims.PrimIDs.UNPACK_TRIVIAL:
            self._add_input(line.output)
        elif symbol is prims.get_grad:
            self._add_tangent(line)
        elif operator_of(line) is not None:
            self._run_operator(line)
        elif symbol == executor.cast:
            self._add_parameter(line.output.name, line.args[1])
        elif symbol in (executor.all_gather, executor.all_reduce, executor.reduce_scatter):
            self._handles[line.output.name] = line
        elif symbol == executor.wait:
            launch = self._handles[line.args[0].name]
            if launch.sym == executor.all_gather:
                self._add_parameter(line.output.name, launch.args[1])
            else:
                self._reduce(launch, line.output)

    # inputs

    def _add_input(self, proxy: Any) -> None:
        if not isinstance(proxy, TensorProxy):
            raise NotChecked("sizes are symbols")
        name, path = proxy.name, self._facts.inputs.get(proxy.name)
        if path is not None:
            if not self._plan.by_name[path].sharded:
                self._add_parameter(name, path)
            return
        tensor = self._tensors[name] = self._facts.constants.get(name, self._draw(proxy)).cpu()
        is_data = name not in self._facts.constants and name not in self._traces.others and tensor.dim() > 0
        placements: dict[str, int | str] = dict.fromkeys(DATA, 0) if is_data else {}
        self._placed[name] = Parameter(name, self._tape.ref(tensor), placements)

    def _add_parameter(self, name: str, path: str) -> None:
        param = self._plan.by_name[path]
        if path not in self._param_tensors:
            scale = max(param.shape[-1] if param.shape[1:] else 4, 1) ** -0.5
            drawn = scale * torch.randn(param.shape, generator=self._dice) + (0.0 if param.shape[1:] else 0.5)
            self._param_tensors[path] = drawn.to(param.compute_dtype)
        tensor = self._tensors[name] = self._param_tensors[path]
        placements: dict[str, int | str] = {} if param.sliced is None else {TENSOR: param.sliced}
        self._placed[name] = Parameter(path, self._tape.ref(tensor), placements)

    def _draw(self, proxy: TensorProxy) -> Tensor:
        """Return drawn values: whole numbers are 0 or 1, which any table has rows for, or rows of each slice."""
        shape, dtype = tuple(map(int, proxy.shape)), dtypes.to_torch_dtype(proxy.dtype)
        if dtype.is_complex:
            return torch.randn(shape, generator=self._dice, dtype=dtype)
        if not dtype.is_floating_point:
            if proxy.name not in self._lookups:
                return torch.randint(2, shape, generator=self._dice).to(dtype)
            rows, mesh, numbers = self._lookups[proxy.name], self._plan.mesh.tensor, torch.arange(prod(shape))
            return ((mesh.place + numbers) % mesh.size * rows + numbers % rows).reshape(shape).to(dtype)
        return (0.5 + torch.rand(shape, generator=self._dice)).to(dtype)

    def _add_tangent(self, line: BoundSymbol) -> None:
        self._is_backward = True
        output = self._tensors[line.args[0].name]
        tangent = self._tensors[line.output.name] = torch.randn(output.shape, generator=self._dice).to(output.dtype)
        operator = torch.ops.aten.clone.default if output.dim() else torch.ops.aten.ones_like.default
        self._record(line, operator, (output,), {}, [tangent], [line.output.name])

    # lines

    def _run_operator(self, line: BoundSymbol) -> None:
        operator, args, kwargs = operator_of(line), tuple(line.args), dict(line.kwargs)
        outputs = line.output
        if operator is GENERATOR_OF_SLICE:
            self._tensors[line.output.name] = torch.get_rng_state()
            return
        if str(operator) == WITH_STATE:
            if args[0].name not in self._tensors or self._draws_for_slice(args[0].name):
                self._of_slices.add(len(self._tape.lines))
            operator, args = args[1], args[2:]
        elif str(operator) == SAVES_STATE:
            self._tensors[outputs[0].name] = torch.get_rng_state()
            operator, args, outputs = args[0], args[1:], outputs[1]
        names = [item.name if isinstance(item, TensorProxy) else None for item in tree_leaves(outputs)]
        if is_collective(operator) and operator.overloadpacket.__name__.startswith("wait_tensor"):
            self._tensors[names[0] or ""] = self._tensors[args[0].name]
            self._aliases[names[0] or ""] = args[0].name
            return
        args, kwargs = tree_map_only(Proxy, self._value_of, (args, kwargs))
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        if collective_kind(str(operator)) is not None:
            self._communicate(line, operator, args, kwargs)
            return
        is_changing = operator._schema.is_mutable
        if is_changing:
            self._keep_values((args, kwargs))
        try:
            before = tree_map_only(Tensor, self._tape.ref, (args, kwargs))
            result = operator(*args, **kwargs)
        except Exception as error:
            raise NotChecked(f"{operator} does not run on the CPU: {str(error)[:100]}") from error
        results = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        named = [name for name, item in zip(names, tree_leaves(result), strict=True) if isinstance(item, Tensor)]
        shift = self._shifts.get(id(line))
        if shift is not None:
            self._shifted[len(self._tape.lines)] = shift
        self._record(line, operator, args, kwargs, results, named, before if is_changing else None)
        if operator.overloadpacket.__name__ in SPLITS:
            self._note_own_part(line, results)

    def _draws_for_slice(self, name: str) -> bool:
        lines = (line for line in self._joint if operator_of(line) is GENERATOR_OF_SLICE)
        return any(line.output.name == name for line in lines)

    def _value_of(self, proxy: Proxy) -> Any:
        if isinstance(proxy, NumberProxy):
            raise NotChecked("sizes are symbols")
        return self._tensors[proxy.name]

    def _record(
        self,
        line: BoundSymbol,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
        names: Sequence[str | None],
        before: Any = None,
        collective: Collective | None = None,
    ) -> None:
        """Record a line that ran. ``before`` has the refs of its arguments, if it changes some of them."""
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        arguments = tree_map_only(Tensor, self._tape.ref, (tuple(args), dict(kwargs))) if before is None else before
        inputs = (item for item in tree_leaves(arguments) if isinstance(item, Ref))
        for ref, tensor in zip(inputs, tensors, strict=True):
            self._values.setdefault(ref, tensor)
        changed = [] if before is None else changed_by(operator, args, kwargs)
        self._tensors.update((name, item) for name, item in zip(names, results, strict=True) if name is not None)
        new = [item for item in results if not any(item is other for other in changed)]
        by_id = {id(item): name for name, item in zip(names, results, strict=True)}
        self._names.append(tuple(by_id.get(id(item)) for item in (*changed, *new)))
        facts = {"where": where_of(line), "backward": self._is_backward, "collective": collective}
        self._tape.write(operator, arguments, tensors, changed, new, **facts)

    def _keep_values(self, tree: Any) -> None:
        """Copy the values that were recorded, before a line changes them."""
        storages = {self._tape.ref(item).storage for item in tree_leaves(tree) if isinstance(item, Tensor)}
        for ref in [ref for ref in self._values if ref.storage in storages]:
            self._values[ref] = self._values[ref].clone()
        for item in (item for item in tree_leaves(tree) if isinstance(item, Tensor)):
            self._values[self._tape.ref(item)] = item.clone()

    def _note_own_part(self, line: BoundSymbol, parts: Sequence[Tensor]) -> None:
        """Note that of the parts of a value, one for each rank, only this rank's is read."""
        mesh = self._plan.mesh.tensor
        if mesh.size > 1 and len(parts) == mesh.size and self._read_parts[_split_of(line)] == {mesh.place}:
            part, other = parts[mesh.place], parts[(mesh.place + 1) % mesh.size]
            self._own[self._tape.ref(part)] = int(other.storage_offset()) - int(part.storage_offset())

    # collectives

    def _communicate(self, line: BoundSymbol, operator: Any, args: Any, kwargs: Any) -> None:
        """Record a collective of the module. It sends nothing."""
        mesh, kind = self._plan.mesh, collective_kind(str(operator))
        assert kind is not None
        axes = [TENSOR] if mesh.joins_slices(args[-1]) else [axis.name for axis in mesh.axes if axis.name in DATA]
        op = str(args[1]) if "reduce" in kind else ""
        proxies = [item for item in tree_leaves(line.output) if isinstance(item, TensorProxy)]
        results = [
            torch.zeros(tuple(map(int, item.shape)), dtype=dtypes.to_torch_dtype(item.dtype)) for item in proxies
        ]
        self._launch(line, operator, args, kwargs, Collective(kind, op, mesh.size(axes), tuple(axes)), proxies, results)

    def _reduce(self, launch: BoundSymbol, output: TensorProxy) -> None:
        """Record the mean of a gradient as a sum: on each axis it is what the sum is."""
        grad, path, *axis = launch.args
        param, mesh = self._plan.by_name[path], self._plan.mesh
        over = axis[0] if axis else self._plan.reduced_over(param)[-1]
        axes = DATA if over == ALL else (over,)
        scatters = launch.sym == self._facts.executor.reduce_scatter
        kind = "reduce_scatter" if scatters else "all_reduce"
        functional = torch.ops._c10d_functional
        operator = functional.reduce_scatter_tensor.default if scatters else functional.all_reduce.default
        result = torch.zeros(tuple(map(int, output.shape)), dtype=dtypes.to_torch_dtype(output.dtype))
        tensor = self._tensors[grad.name]
        collective = Collective(kind, "sum", mesh.size(axes), tuple(axes))
        self._launch(launch, operator, (tensor,), {}, collective, [output], [result])

    def _launch(
        self,
        line: BoundSymbol,
        operator: Any,
        args: Any,
        kwargs: Any,
        collective: Collective,
        proxies: Sequence[TensorProxy],
        results: list[Tensor],
    ) -> None:
        fill(collective, collective.pairs(operator, args, kwargs, results))
        self._record(line, operator, args, kwargs, results, [item.name for item in proxies], collective=collective)

    # types

    def types_on(self, axis: str) -> AxisTypes:
        """Return the types on an axis.

        A part that is read alone may be this rank's own, or the same part on all ranks. The second reading is tried if
        the first has a fault.
        """
        memo: Memo = {}
        record = self._record_of_step()
        readings = []
        for own in (True, False) if axis == TENSOR and self._own else (True,):
            neighbour = self._neighbour(record, axis, own)
            readings.append(Walk(record, axis, neighbour, None, batches_differ=axis in DATA, memo=memo).run())
            if not readings[-1].faults:
                break
        return min(readings, key=lambda types: sum(fault.kind == "error" for fault in types.faults))

    def faults(self, types: AxisTypes) -> Iterator[Fault]:
        """Yield the faults between ranks of tensor parallelism, with the lines that read the parameters."""
        ends = (op for op in self._traces.lifted.ops if isinstance(op, Return) and not op.backward)
        returned = {name for op in ends for name in op.returned}
        known = {item.ref: "S" if TENSOR in item.placements else "R" for item in self._placed.values()}
        for index, (line, names, letters) in enumerate(zip(self._tape.lines, self._names, types.lines, strict=True)):
            if any(name in returned and letter == "P" for name, letter in zip(names, letters, strict=True)):
                yield Fault(TENSOR, "error", "forward returns a share of a sum that is never summed", line.where, index)
            is_sliced = any(known.get(ref) == "S" for ref in line.inputs)
            if line.name in RANDOM and is_sliced and "V" in letters and index not in self._of_slices:
                yield Fault(TENSOR, "error", f"{line.name} draws equal masks for different slices", line.where, index)
            known.update(zip((*line.written, *line.results), letters, strict=True))
        for fault in types.faults:
            text = fault.text.replace(f"; sum it over {TENSOR}", "").replace(f" over {TENSOR}", "")
            where = fault.where or next((self._reader_of(path) for path in fault.parameters), "")
            yield replace(fault, text=text, where=where)

    def odd_heads(self, types: AxisTypes) -> str:
        """Return a line that cuts the last dimension of a slice into an odd number of parts; "" if there is none."""
        known = {item.ref: "S" if TENSOR in item.placements else "R" for item in self._placed.values()}
        for line, letters in zip(self._tape.lines, types.lines, strict=True):
            if line.is_view and known.get(line.inputs[0]) == "S" and _cuts_oddly(line.inputs[0], line.results[0]):
                return f"{line.name} ({line.where})"
            known.update(zip((*line.written, *line.results), letters, strict=True))
        return ""

    def _reader_of(self, path: str) -> str:
        """Return the user's line that reads a parameter first."""
        storages = {item.ref.storage for item in self._placed.values() if item.path == path}
        readers = (line for line in self._tape.lines if any(ref.storage in storages for ref in line.inputs))
        return next((line.where for line in readers if line.where), "")

    def _record_of_step(self) -> StepRecord:
        gradients = [
            Parameter(path, self._tape.ref(self._tensors[name]), {}, len(self._tape.lines))
            for path, name in self._traces.lifted.gradients
            if name in self._tensors
        ]
        parameters = [item for name, item in self._placed.items() if item.path in self._plan.by_name]
        buffers = [item for name, item in self._placed.items() if item.path not in self._plan.by_name]
        axes = {axis.name: axis.size for axis in self._plan.mesh.axes}
        shadows = tuple(shadow_of(line, (*line.written, *line.results)) for line in self._tape.lines)
        lines = tuple(self._tape.lines)
        return StepRecord(axes, lines, shadows, self._values, tuple(parameters), tuple(gradients), tuple(buffers))

    def _neighbour(self, record: StepRecord, axis: str, own: bool) -> StepRecord:
        """Return what the neighbouring rank would have run."""
        if axis != TENSOR:
            return StepRecord(record.axes, shadows=record.shadows)
        shadows = list(record.shadows)
        for index, shift in self._shifted.items():
            first = self._plan.mesh.tensor.place * shift
            own_rows = range(first, first + shift + 1)
            scalars = tuple(
                item + shift if type(item) is int and item in own_rows else item for item in shadows[index].scalars
            )
            shadows[index] = replace(shadows[index], scalars=scalars)
        for index in self._of_slices:
            shadows[index] = replace(shadows[index], drawn=("of another slice",))
        for index, line in enumerate(record.lines if own else ()):
            if any(item in self._own for item in line.inputs):
                offsets = tuple(item.offset + self._own.get(item, 0) for item in line.inputs)
                shadows[index] = replace(shadows[index], offsets=offsets)
        return StepRecord(record.axes, shadows=tuple(shadows))

    def by_value(self, walked: Mapping[str, AxisTypes], names: Mapping[str, str]) -> dict[str, str]:
        """Return the types of each value of the traces, as text."""
        of: dict[str, dict[str, str]] = {}
        for axis, types in walked.items():
            for name, item in self._placed.items():
                of.setdefault(name, {})[axis] = "S" if axis in item.placements else "R"
            for written, letters in zip(self._names, types.lines, strict=True):
                for written_name, letter in zip(written, letters, strict=True):
                    if written_name is not None:
                        of.setdefault(written_name, {})[axis] = letter
        for alias, name in self._aliases.items():
            of[alias] = of.get(name, {})
        texts = {
            name: " ".join(f"{names[axis]}:{letter}" for axis, letter in item.items()) for name, item in of.items()
        }
        return {**texts, **dict(self._scheduled(texts))}

    def _scheduled(self, texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the types of values that the passes have added: copies of values, and parameters gathered again."""
        originals = self._traces.lifted.ops
        of_path = {item.path: texts[name] for name, item in self._placed.items()}
        gradients = {path: name for path, name in self._traces.lifted.gradients}
        for op in self._traces.scheduled.timeline.ops:
            if isinstance(op, Compute) and op.repeated and op.number >= 0:
                pairs = zip(op.writes, originals[op.number].writes, strict=True)
                yield from ((copy, texts[name]) for copy, name in pairs if name in texts)
            elif isinstance(op, Wait) and not ends(op, Reduce):
                yield from ((name, of_path[path]) for name, path in zip(op.writes, op.params, strict=True))
            elif isinstance(op, Wait):
                named = zip(op.writes, (gradients.get(path, "") for path in op.params), strict=True)
                yield from ((copy, texts[name]) for copy, name in named if name in texts and copy not in texts)


def _cuts_oddly(source: Ref, view: Ref) -> bool:
    """Return whether a view cuts the last dimension of its source into an odd number of parts."""
    if len(view.shape) <= len(source.shape) or source.shape[-1:] == () or view.shape[-1] > source.shape[-1]:
        return False
    if view.shape[-1] == source.shape[-1]:  # one head, or other dimensions are cut
        return view.shape[-2] == 1 and view.shape.count(1) > source.shape.count(1)
    numbers = accumulate(reversed(view.shape), mul)
    heads = next(
        (size for size, number in zip(reversed(view.shape), numbers, strict=True) if number == source.shape[-1]), 2
    )
    return heads % 2 == 1


def _split_of(line: BoundSymbol) -> str:
    return f"{line.sym.name} {line.flat_proxy_args[0].name} {line.args[1:]}"


def _read_parts(lines: Sequence[BoundSymbol]) -> dict[str, set[int]]:
    """Return which parts are read of each value that is split. Several lines may split it alike."""
    read = {proxy.name for line in lines for proxy in line.flat_proxy_args}
    result: dict[str, set[int]] = {}
    for line in lines:
        if line.sym.name in SPLITS:
            parts = result.setdefault(_split_of(line), set())
            parts |= {index for index, proxy in enumerate(line.flat_outs) if proxy is not None and proxy.name in read}
    return result


def _lookups_in_slices(lines: Sequence[BoundSymbol], facts: Facts, plan: Plan) -> tuple[dict[int, int], dict[str, int]]:
    """Return the lines, by ``id``, that compute indices of rows in a slice of a table, and the inputs that they read.

    Both are mapped to the number of rows of the first rank's slice.
    """
    makers = {proxy.name: line for line in lines for proxy in line.flat_proxy_outs}
    result: dict[int, int] = {}
    inputs: dict[str, int] = {}
    for line in lines:
        is_lookup = operator_of(line) is torch.ops.aten.embedding.default
        param = plan.by_name.get(_path_of(line.args[0], makers, facts)) if is_lookup else None
        if param is None or param.sliced != 0:
            continue
        rows, pending = -(-plan.whole_shape(param)[0] // plan.mesh.tensor.size), [line.args[1]]
        while pending:
            name = pending.pop().name
            maker = makers.get(name)
            if maker is None or operator_of(maker) is None:
                inputs[name] = rows
            elif id(maker) not in result:
                result[id(maker)] = rows
                pending += [item for item in maker.flat_proxy_args if isinstance(item, TensorProxy)]
    return result, inputs


def _path_of(table: TensorProxy, makers: Mapping[str, BoundSymbol], facts: Facts) -> str:
    """Return the path of the parameter that a value is, perhaps cast; "" if it is none."""
    name = table.name
    while name not in facts.inputs:
        line = makers.get(name)
        if line is None or not line.flat_proxy_args:
            return ""
        name = line.flat_proxy_args[0].name
    return facts.inputs[name]


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def where_of(line: BoundSymbol) -> str:
    """Return the user's line, such as ``"model.py:12: x = self.up(x)"``; "" if it is unknown."""
    name, positions = line.source_filename, line.source_positions
    if name is None or positions is None or positions.lineno is None:
        return ""
    return f"{Path(name).name}:{positions.lineno}: {linecache.getline(name, positions.lineno).strip()}"
