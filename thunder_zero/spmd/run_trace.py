"""Runs the lines of our own traces once on the CPU, with drawn values, and records them."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from thunder_zero.compat.slice_generators import GENERATOR_OF_SLICE
from thunder_zero.plan.mesh import ALL, DATA, TENSOR, Axis
from thunder_zero.plan.params import Plan
from thunder_zero.spmd.collectives import Collective, collective_kind, fill
from thunder_zero.spmd.lines import Parameter, Ref
from thunder_zero.spmd.processes import NotChecked
from thunder_zero.spmd.tape import Tape, changed_by, tensors_of
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import is_collective, operator_of
from thunder_zero.traces.symbols import Facts

from thunder.core import dtypes, prims
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

SPLITS = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")
SAVES_STATE, WITH_STATE = "run_and_save_rng_state", "run_with_rng_state"


class TraceRun:
    """One run of a joint trace's lines. All tensors stay alive, so that storages keep their addresses."""

    def __init__(self, traces: Traces) -> None:
        lowered = traces.scheduled.lowered
        self._traces, self._facts, self._plan = traces, lowered.facts, traces.plan
        self._joint = lowered.trace.bound_symbols
        self._dice = torch.Generator().manual_seed(0)
        self.tensors: dict[str, Tensor] = {}
        self._handles: dict[str, Any] = {}
        self.tape = Tape()
        self.values: dict[Ref, Tensor] = {}
        self.names: list[tuple[str | None, ...]] = []  # of what each line writes
        self.placed: dict[str, Parameter] = {}  # keyed by name: parameters, and inputs
        self._param_tensors: dict[str, Tensor] = {}
        self.own: dict[Ref, int] = {}  # this rank's part of an equal value: how far the neighbour's part is from it
        self.of_slices: set[int] = set()  # lines that draw for this rank's slice
        self.aliases: dict[str, str] = {}
        self._shifts, self._lookups = _lookups_in_slices(self._joint, self._facts, self._plan)
        self.shifted: dict[int, int] = {}
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
        elif symbol in executor.launches:
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
        drawn = _drawn(proxy, self._lookups.get(name), self._plan.mesh.tensor, self._dice)
        tensor = self.tensors[name] = self._facts.constants.get(name, drawn).cpu()
        is_data = name not in self._facts.constants and name not in self._traces.others and tensor.dim() > 0
        placements: dict[str, int | str] = dict.fromkeys(DATA, 0) if is_data else {}
        self.placed[name] = Parameter(name, self.tape.ref(tensor), placements)

    def _add_parameter(self, name: str, path: str) -> None:
        param = self._plan.by_name[path]
        if path not in self._param_tensors:
            scale = max(param.shape[-1] if param.shape[1:] else 4, 1) ** -0.5
            drawn = scale * torch.randn(param.shape, generator=self._dice) + (0.0 if param.shape[1:] else 0.5)
            self._param_tensors[path] = drawn.to(param.compute_dtype)
        tensor = self.tensors[name] = self._param_tensors[path]
        placements: dict[str, int | str] = {} if param.sliced is None else {TENSOR: param.sliced}
        self.placed[name] = Parameter(path, self.tape.ref(tensor), placements)

    def _add_tangent(self, line: BoundSymbol) -> None:
        self._is_backward = True
        output = self.tensors[line.args[0].name]
        tangent = self.tensors[line.output.name] = torch.randn(output.shape, generator=self._dice).to(output.dtype)
        operator = torch.ops.aten.clone.default if output.dim() else torch.ops.aten.ones_like.default
        self._record(line, operator, (output,), {}, [tangent], [line.output.name])

    # lines

    def _run_operator(self, line: BoundSymbol) -> None:
        operator, args, kwargs = operator_of(line), tuple(line.args), dict(line.kwargs)
        outputs = line.output
        if operator is GENERATOR_OF_SLICE:
            self.tensors[line.output.name] = torch.get_rng_state()
            return
        if str(operator) == WITH_STATE:
            if args[0].name not in self.tensors or _draws_for_slice(args[0].name, self._joint):
                self.of_slices.add(len(self.tape.lines))
            operator, args = args[1], args[2:]
        elif str(operator) == SAVES_STATE:
            self.tensors[outputs[0].name] = torch.get_rng_state()
            operator, args, outputs = args[0], args[1:], outputs[1]
        names = [item.name if isinstance(item, TensorProxy) else None for item in tree_leaves(outputs)]
        if is_collective(operator) and operator.overloadpacket.__name__.startswith("wait_tensor"):
            self.tensors[names[0] or ""] = self.tensors[args[0].name]
            self.aliases[names[0] or ""] = args[0].name
            return
        args, kwargs = tree_map_only(Proxy, self._value_of, (args, kwargs))
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        if collective_kind(str(operator)) is not None:
            self._communicate(line, operator, args, kwargs)
            return
        is_changing = operator._schema.is_mutable
        if is_changing:
            _keep_values(self.values, self.tape, (args, kwargs))
        try:
            before = tree_map_only(Tensor, self.tape.ref, (args, kwargs))
            result = operator(*args, **kwargs)
        except Exception as error:
            raise NotChecked(f"{operator} does not run on the CPU: {str(error)[:100]}") from error
        results = tensors_of(result)
        named = [name for name, item in zip(names, tree_leaves(result), strict=True) if isinstance(item, Tensor)]
        shift = self._shifts.get(id(line))
        if shift is not None:
            self.shifted[len(self.tape.lines)] = shift
        self._record(line, operator, args, kwargs, results, named, before if is_changing else None)
        if operator.overloadpacket.__name__ in SPLITS:
            self._note_own_part(line, results)

    def _value_of(self, proxy: Proxy) -> Any:
        if isinstance(proxy, NumberProxy):
            raise NotChecked("sizes are symbols")
        return self.tensors[proxy.name]

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
        """Record a line that ran. ``before`` has the refs of its arguments, if it changes some of them.

        The results of a collective are filled here.
        """
        if collective is not None:
            fill(collective, collective.pairs(operator, args, dict(kwargs), results))
        tensors = tensors_of((args, kwargs))
        arguments = tree_map_only(Tensor, self.tape.ref, (tuple(args), dict(kwargs))) if before is None else before
        inputs = (item for item in tree_leaves(arguments) if isinstance(item, Ref))
        for ref, tensor in zip(inputs, tensors, strict=True):
            self.values.setdefault(ref, tensor)
        changed = [] if before is None else changed_by(operator, args, kwargs)
        self.tensors.update((name, item) for name, item in zip(names, results, strict=True) if name is not None)
        new = [item for item in results if not any(item is other for other in changed)]
        by_id = {id(item): name for name, item in zip(names, results, strict=True)}
        self.names.append(tuple(by_id.get(id(item)) for item in (*changed, *new)))
        facts = {"where": where_of(line), "backward": self._is_backward, "collective": collective}
        self.tape.write(operator, arguments, tensors, changed, new, **facts)

    def _note_own_part(self, line: BoundSymbol, parts: Sequence[Tensor]) -> None:
        """Note that of the parts of a value, one for each rank, only this rank's is read."""
        mesh = self._plan.mesh.tensor
        if mesh.size > 1 and len(parts) == mesh.size and self._read_parts[_split_of(line)] == {mesh.place}:
            part, other = parts[mesh.place], parts[(mesh.place + 1) % mesh.size]
            self.own[self.tape.ref(part)] = int(other.storage_offset()) - int(part.storage_offset())

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
        collective = Collective(kind, op, mesh.size(axes), tuple(axes))
        self._record(line, operator, args, kwargs, results, [item.name for item in proxies], collective=collective)

    def _reduce(self, launch: BoundSymbol, output: TensorProxy) -> None:
        """Record the mean of a gradient as a sum: on each axis it is what the sum is.

        A gradient that is reduced to its owner stays a share of a sum: other ranks have zeros.
        """
        grad, path, *axis = launch.args
        if launch.sym == self._facts.executor.reduce_to_owner:
            tensor = self.tensors[grad.name]
            self._record(launch, torch.ops.aten.clone.default, (tensor,), {}, [tensor.clone()], [output.name])
            return
        param, mesh = self._plan.by_name[path], self._plan.mesh
        over = axis[0] if axis else self._plan.reduced_over(param)[-1]
        axes = DATA if over == ALL else (over,)
        scatters = launch.sym == self._facts.executor.reduce_scatter
        kind = "reduce_scatter" if scatters else "all_reduce"
        functional = torch.ops._c10d_functional
        operator = functional.reduce_scatter_tensor.default if scatters else functional.all_reduce.default
        result = torch.zeros(tuple(map(int, output.shape)), dtype=dtypes.to_torch_dtype(output.dtype))
        tensor = self.tensors[grad.name]
        collective = Collective(kind, "sum", mesh.size(axes), tuple(axes))
        self._record(launch, operator, (tensor,), {}, [result], [output.name], collective=collective)


def _keep_values(values: dict[Ref, Tensor], tape: Tape, tree: Any) -> None:
    """Copy the values that were recorded, before a line changes them."""
    tensors = tensors_of(tree)
    storages = {tape.ref(item).storage for item in tensors}
    values.update((ref, item.clone()) for ref, item in [*values.items()] if ref.storage in storages)
    values.update((tape.ref(item), item.clone()) for item in tensors)


def _drawn(proxy: TensorProxy, rows: int | None, axis: Axis, dice: torch.Generator) -> Tensor:
    """Return drawn values. Whole numbers are 0 or 1, which any table has, or rows of each slice of ``rows`` rows."""
    shape, dtype = tuple(map(int, proxy.shape)), dtypes.to_torch_dtype(proxy.dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=dice, dtype=dtype)
    if dtype.is_floating_point:
        return (0.5 + torch.rand(shape, generator=dice)).to(dtype)
    if rows is None:
        return torch.randint(2, shape, generator=dice).to(dtype)
    numbers = torch.arange(prod(shape))
    return ((axis.place + numbers) % axis.size * rows + numbers % rows).reshape(shape).to(dtype)


def _draws_for_slice(name: str, lines: Sequence[BoundSymbol]) -> bool:
    return any(line.output.name == name for line in lines if operator_of(line) is GENERATOR_OF_SLICE)


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
