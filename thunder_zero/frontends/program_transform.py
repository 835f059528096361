"""ProgramTransform: Thunder's hooks for traces, which call the steps of ``traces/pipeline.py``.

For each program, Thunder calls these hooks in order::

    transform_traces_pre_prologue        acquired trace, before autodiff: takes shards, synchronised at first use
    the first executor, _scheduled       lowered joint trace, before Thunder's fusers: scheduled
    the last executor, _repaired         fused joint trace: repaired where the fusers broke it
    transform_trace_post_optimization    forward, then backward: proved, compared between ranks, named by zero_enter

In: Thunder's traces. Out: the traces that run. ``entry`` returns the program of an entry of Thunder's cache. The first
hook creates a :class:`Compilation`, in which hooks pass results to later hooks. If a rank cannot prove the first
program of a kind, all ranks raise: they learn of the failure when ranks compare schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thunder_zero.compat import thunder as room
from thunder_zero.compat.jitted import plain_of
from thunder_zero.compat.never_fuses import NeverFuses
from thunder_zero.compat.uncapturable import RefusedPart, require_traceable
from thunder_zero.frontends.compiled import Entry, Traces
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.recompute import saved_bytes
from thunder_zero.traces import pipeline
from thunder_zero.traces.insert import add_enter, facts_of, insert_synchronize, module_inputs, take_rows
from thunder_zero.traces.lift import emit, lift
from thunder_zero.traces.pipeline import JointTrace, Program, Scheduled
from thunder_zero.traces.symbols import Facts, Runtime, ZeroExecutor
from thunder_zero.traces.work import draws_random_numbers

from thunder import compile_data, get_default_executors
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transform_common import Transform
from thunder.extend import FusionExecutor

FUSERS = ("nvfuser", "torchcompile")  # executors that fuse all pointwise lines


class JointPass(NeverFuses, FusionExecutor):
    """An executor that Thunder calls as a fuser, and that applies a function to the joint trace."""

    def __init__(self, name: str, run: Callable[[TraceCtx], TraceCtx]) -> None:
        super().__init__(name)
        self.run = run

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """Apply the function to the trace."""
        return self.run(trace)


@dataclass
class Compilation:
    """The state of one compilation. Earlier hooks set the fields that later hooks read."""

    facts: Facts
    scheduled: Scheduled = field(init=False)
    forward: TraceCtx = field(init=False)


class ProgramTransform(Transform):
    """Thunder's hooks for the programs of one module.

    Attributes:
        fusers: Thunder's executors that fuse.
        fuses: True if the fusers fuse pointwise lines on a GPU.
        programs: a mapping from the forward trace that runs to the scheduled trace of its program.
    """

    used = False  # True once this transform shards a module

    def __init__(self) -> None:
        self._executor: ZeroExecutor | None = None
        self._compilation: Compilation
        self.programs: WeakKeyDictionary[TraceCtx, Scheduled] = WeakKeyDictionary()
        self._program_of: WeakKeyDictionary[Callable[..., Any], Program] = WeakKeyDictionary()  # by forward's function
        self._plain: torch.nn.Module  # set by install
        self._tracing: room.Tracing  # set by install

    def parts(self) -> tuple[RefusedPart, ...]:
        """Return the kinds of submodules that are refused when a program is compiled."""
        return room.UNTRACEABLE

    @property
    def executor(self) -> ZeroExecutor:
        """The executor with the model's symbols.

        Raises:
            TypeError: Thunder was given a function, so it has not called ``transform_module``.
        """
        if self._executor is None:
            raise TypeError(
                "ZeroTransform shards a module, and thunder.jit was given a function; jit the module alone, and call "
                "the jitted module from a function that is not jitted"
            )
        return self._executor

    def install(self, model: ThunderModule, plan: Plan, runtime: Runtime) -> None:
        """Put our executors around Thunder's executors: symbols and schedule first, repair of fused regions last.

        Args:
            model: the jitted module.
            plan: a ``Param`` for each parameter.
            runtime: the object whose methods the symbols call.
        """
        self._tracing = room.Tracing()
        self._tracing.follow(model)
        self._plain = plain_of(model)
        self._executor = ZeroExecutor(plan, runtime)
        data = compile_data(model)
        front_executors = room.executors_in_front(data.executors_list)
        # tz.Recipe also adds executors in front.
        other_executors = [executor for executor in data.executors_list if executor not in front_executors]
        is_default = {*get_default_executors()} <= {*other_executors}
        self.fuses = is_default or any(executor.name in FUSERS for executor in other_executors)
        self.fusers = tuple(executor for executor in other_executors if isinstance(executor, FusionExecutor))
        schedule_pass = JointPass("thunder_zero_schedule", self._scheduled)
        repair_pass = JointPass("thunder_zero_repair_fusion", self._repaired)
        data.executors_list = (self._executor, schedule_pass, *front_executors, *other_executors, repair_pass)

    def transform_traces_pre_prologue(
        self, prologue: TraceCtx, computation: TraceCtx, epilogue: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Rewrite the traces so that they take rows, synchronise rows at first use, and draw random numbers once."""
        executor = self.executor
        require_traceable(self._plain, self.parts())
        if torch.is_grad_enabled() and any(param.requires_grad for param in executor.plan.params):
            room.require_gradients(computation, type(self._plain).__name__)
        facts = facts_of(module_inputs(prologue, computation), executor)
        self._compilation = Compilation(facts)
        computation = room.draw_once(computation, draws_random_numbers)
        computation = room.broadcast_scalars(insert_synchronize(computation, facts))
        take_rows(prologue, facts, executor.runtime.guard(self._tracing.lookups()))
        return prologue, computation, epilogue

    def _scheduled(self, trace: TraceCtx) -> TraceCtx:
        compilation = self._compilation
        compilation.scheduled = pipeline.schedule_trace(JointTrace(room.sort_aliases(trace), compilation.facts))
        return compilation.scheduled.trace

    def _repaired(self, trace: TraceCtx) -> TraceCtx:
        return repair_fused(trace, self._compilation.scheduled, self.fusers)

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Prove the traces that will run, and insert ``zero_enter`` into each phase."""
        compilation = self._compilation
        if TraceTag.BACKWARD in trace.tags:
            pipeline.prove(compilation.scheduled, compilation.forward, trace)
            return add_enter(trace, "backward", compilation.facts)
        if TraceTag.AUGMENTED_FORWARD in trace.tags:
            room.require_unwritten(trace, type(self._plain).__name__)
        compilation.forward, phase = trace, "forward"
        if _saves_nothing(trace):  # otherwise a backward follows, and both are proved together
            phase = pipeline.FORWARD_ALONE
            pipeline.prove(compilation.scheduled, trace)
        entered = add_enter(trace, phase, compilation.facts)
        self.programs[entered] = compilation.scheduled
        return entered

    def entry(self, cached: Any) -> Entry:
        """Return the program of an entry of Thunder's cache."""
        if (program := self._program_of.get(cached.computation_fn)) is None:
            program = self._program_of[cached.computation_fn] = self._program(cached)
        epilogue = cached.epilogue_traces[-1] if cached.epilogue_traces else None
        traces = partial(Traces.of, program, fuses=self.fuses, epilogue=epilogue)
        return Entry(program.scheduled.facts.synced, cached.computation_fn, traces)

    def _program(self, cached: Any) -> Program:
        traces, backward = cached.computation_traces, cached.backward_traces
        scheduled = next(self.programs[trace] for trace in traces if trace in self.programs)
        return Program(scheduled, traces[-1], backward[-1] if backward else None)


def repair_fused(trace: TraceCtx, scheduled: Scheduled, fusers: Sequence[FusionExecutor]) -> TraceCtx:
    """Return the fused joint trace, repaired after Thunder's rematerialisation.

    Rematerialisation may let a region of backward recompute from an input of a region of forward, even from a gathered
    parameter (``compat/thunder/fusion_repair.py``). Rematerialisation also weighs a tensor by its dtype alone, so
    forward may save more bytes than were scheduled. In that case the fusers run again without rematerialisation, and
    the trace that saves fewer bytes is returned.
    """
    if not any(bsym.sym.is_fusion for bsym in trace.bound_symbols):
        return trace
    facts, timeline = scheduled.facts, lift(trace, scheduled.facts)
    if saved_bytes(timeline) > saved_bytes(lift(scheduled.trace, facts)):
        fused_again = scheduled.trace
        for fuser in fusers:
            fused_again = room.fused_only(fuser, fused_again)
        timeline_again = lift(fused_again, facts)
        if saved_bytes(timeline_again) < saved_bytes(timeline):
            trace, timeline = fused_again, timeline_again
    repaired = room.repair_fusion(timeline)
    return trace if repaired is timeline else emit(trace, repaired, facts.executor)


def _saves_nothing(forward: TraceCtx) -> bool:
    """Return whether a forward trace saves nothing for backward. Such a trace waits for all its collectives."""
    return TraceTag.AUGMENTED_FORWARD not in forward.tags or not any(forward.bound_symbols[-1].args[1])
