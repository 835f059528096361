"""Compiles the programs of a graph, which is acquired, differentiated and lowered once for all.

A program reduces gradients or defers them (``no_sync``), or has none. Reducing and deferring ones part late, when the
lowered joint trace is scheduled. The order of Thunder's passes is that of ``thunder.jit``, without those that change
nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thunder_zero.compat.torch_gaps import at_end_of_backward, running_backward
from thunder_zero.frontends.compiled import Compiled
from thunder_zero.frontends.dynamo.acquire import Acquired
from thunder_zero.frontends.program_transform import ProgramTransform
from thunder_zero.sharded.calls import Calls
from thunder_zero.sharded.state import State
from thunder_zero.traces.symbols import Program

from thunder import _cache_info_ctx, compile_data, compile_stats
from thunder.common import transform_to_torch_types
from thunder.core import prims
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.langctxs import langctx
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import (
    _inplace_copy_sanity_check,
    dce,
    remove_context_manager_prims_from_trace,
    unwrap_return_value,
    wrap_return_value_together_with_arguments,
)
from thunder.core.update_aliases import insert_alias_updates
from thunder.executors.passes import _transform_for_operator_executor_execution, del_last_used
from thunder.executors.torch_autograd import connect_to_autograd
from thunder.extend import Executor, FusionExecutor, get_always_executors
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward


@dataclass(frozen=True)
class Mode:
    """What chooses a program of a graph: whether gradients are on and something needs one, whether they are reduced,
    and which inputs share memory, in groups by position, where the graph writes to any."""

    differentiates: bool
    synced: bool
    aliases: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Entry:
    """A compiled program, with the traces that Thunder's cache would keep of it: as acquired, and as they run.
    ``computation_fn`` returns a tuple of tensors; with a backward, with what to save for it."""

    computation_traces: Sequence[TraceCtx]
    backward_traces: Sequence[TraceCtx]
    computation_fn: Callable[..., Any]
    backward_fn: Callable[..., Any] | None
    epilogue_traces: Sequence[TraceCtx] = ()  # none: dynamo makes what the model returns

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What it returns, connected to autograd."""
        result = self.computation_fn(*inputs)
        if self.backward_fn is None:
            return tuple(result)
        data, (tensors, others) = result
        connect_to_autograd(
            backward_fn=self.backward_fn,
            flat_args=data["flat_args"],
            flat_output=data["flat_output"],
            saved_tensors=tensors,
            saved_other=others,
            return_none_instead_of_grads=False,
            disable_split_autograd=False,
            is_differentiable_outputs=None,
        )
        return tuple(data["output"])


@dataclass(eq=False)
class Programs:
    """The programs of one graph with one choice of parameters; the one that ran last is the last entry. ``jitted``,
    never called, is what Thunder knows of the graph: its options and executors."""

    jitted: ThunderModule
    acquired: Acquired
    transform: ProgramTransform
    state: State
    runtime: GraphCalls
    entries: dict[Mode, Entry] = field(default_factory=dict)
    _lowered: dict[Any, TraceCtx] = field(default_factory=dict)  # by what of a mode decides it

    def __post_init__(self) -> None:
        acquired = self.acquired
        self._paths = list(acquired.paths.values())
        self._differentiable = any(arg.requires_grad for arg in acquired.trace.args)
        self._outputs = [proxy.name for proxy in acquired.trace.bound_symbols[-1].args[0]]

    def made(self) -> list[tuple[Compiled, Entry]]:
        """The compiled programs, the one that ran last at the end."""
        return [(self.transform.compiled, entry) for entry in self.entries.values()]

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What the graph returns for inputs, by the program that this call needs."""
        acquired = self.acquired
        given = [inputs[position] for position in acquired.positions.values()]
        records = torch.is_grad_enabled() or (acquired.enables and not torch.is_inference_mode_enabled())
        differentiates = self._differentiable and records
        aliases = _aliases(given) if acquired.writes else ()
        entry = self.program(Mode(differentiates, self.runtime.synced, aliases), inputs)
        rows = self.runtime.take_rows([self.state.shards[path] for path in self._paths], self._paths)
        values = dict(zip([*acquired.positions, *acquired.paths], [*given, *rows], strict=True), **acquired.constants)
        with torch.set_grad_enabled(differentiates):
            returned = entry.run([values[arg.name] for arg in acquired.trace.args])
        outputs = dict(zip(self._outputs, returned, strict=True))
        return tuple(outputs[each.name] if isinstance(each, Proxy) else each for each in acquired.returns)

    def program(self, mode: Mode, inputs: Sequence[Any]) -> Entry:
        """The program for a mode, compiled if it has not been."""
        entry = self.entries.pop(mode, None)
        if entry is None:
            with torch.set_grad_enabled(mode.differentiates), compiling(self.jitted, inputs):
                entry = self._compile(mode)
        self.entries[mode] = entry
        return entry

    def _compile(self, mode: Mode) -> Entry:
        executor, executors = self.transform.compiled.executor, compile_data(self.jitted).executors_list
        trace = self._lowered_for(mode, executors)
        executor.program = Program(executor.plan, self.acquired.paths, synced=mode.synced)
        for fuser in (each for each in executors if isinstance(each, FusionExecutor)):
            trace = fuser.fusion_pass(trace)
        trace = _claimed(trace)
        backward = None
        if mode.differentiates:
            trace, backward = split_into_forward_and_backward(trace)
        trace = del_last_used(trace)
        _inplace_copy_sanity_check(trace)
        trace = self.transform.transform_trace_post_optimization(trace)
        if backward is None:
            forward = transform_to_torch_types(unwrap_return_value(trace))
            return Entry((self.acquired.trace, trace, forward), (), forward.python_callable(), None)
        backward = del_last_used(backward, clear_mutable_collections=True)
        backward = self.transform.transform_trace_post_optimization(backward)
        forward = transform_to_torch_types(trace)
        callables = forward.python_callable(), backward.python_callable()
        return Entry((self.acquired.trace, trace, forward), (backward,), *callables)

    def _lowered_for(self, mode: Mode, executors: Sequence[Executor]) -> TraceCtx:
        """The joint trace, or that of forward alone, with every line a call; made once, with reductions."""
        key = mode.differentiates, mode.aliases
        if key not in self._lowered:
            trace = wrap_return_value_together_with_arguments(_copied(self.acquired.trace))
            trace = insert_alias_updates(remove_context_manager_prims_from_trace(trace), mode.aliases)
            trace = dce(self.transform.synchronize(trace, self.acquired.paths))
            if mode.differentiates:
                trace = grad_transform_on_trace(trace)
            self._lowered[key] = dce(_transform_for_operator_executor_execution(trace, executors))
        return _copied(self._lowered[key])


def _aliases(tensors: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """The positions of tensors that share memory, a group for each memory."""
    groups: dict[tuple[int, int], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel():
            groups.setdefault(_memory(tensor), []).append(position)
    shared = [group for group in groups.values() if len(group) > 1]
    unlike = [group for group in shared if not all(tensors[position].is_contiguous() for position in group)]
    unlike += [[groups[one][0], groups[other][0]] for one, other in pairwise(sorted(groups)) if other[0] < one[1]]
    if unlike:
        shapes = " and ".join(str(tuple(tensors[position].shape)) for position in unlike[0])
        raise RuntimeError(
            f"forward writes in place, and two of its inputs or buffers, of shapes {shapes}, are views of the same "
            f"memory, so that Thunder would compute with other values; pass a clone()"
        )
    return tuple(map(tuple, shared))


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _copied(trace: TraceCtx) -> TraceCtx:
    """A trace of the same lines with names of its own, which Thunder shares among the traces made of one."""
    new = from_trace(trace)
    new.names, new.bound_symbols = trace.names.copy(), list(trace.bound_symbols)
    return new


def _claimed(trace: TraceCtx) -> TraceCtx:
    """The trace with the lines that no executor has taken given to those that take everything."""
    taken = (line.sym.executor or line.sym.python_impl or line.sym == prims.get_grad for line in trace.bound_symbols)
    if all(taken):
        return trace
    return _transform_for_operator_executor_execution(trace, get_always_executors())


@contextmanager
def compiling(jitted: ThunderModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Thunder's context of a compilation, as ``thunder.jit`` enters it, with torch's settings."""
    data, stats = compile_data(jitted), compile_stats(jitted)
    info: dict[str, Any] = {}
    token = _cache_info_ctx.set(info)
    try:
        data.populate_cache_info(info, *inputs)
        with langctx(data.langctx), compile_data_and_stats(data, stats):
            yield
    finally:
        _cache_info_ctx.reset(token)


class GraphCalls(Calls):
    """The functions that the traces of all graphs of one model call."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._at_end_of = -1  # the last backward that will reduce at its end, by autograd's number

    def reduce_deferred(self, paths: Sequence[str]) -> None:
        """Reduce the deferred gradients of parameters that no graph of this backward reaches, once it ends: until then
        nobody knows which those are."""
        backward = running_backward()
        if backward != self._at_end_of:
            self._at_end_of = backward
            at_end_of_backward(self._reduce_rest)

    def _reduce_rest(self) -> None:
        super().reduce_deferred([param.path for param in self._state.plan.params if param.requires_grad])
