"""ProgramTransform: Thunder's hooks for traces: synchronise, schedule, prove.

ZeroTransform is one, for all programs of a module; under dynamo each graph has one of its own, for each choice of its
parameters. For each program that Thunder compiles, in this order::

    synchronize                          acquired trace: shards, synchronised at first use; before autodiff
    the executors that install adds      lowered joint trace: scheduled, and repaired after fusion
    transform_trace_post_optimization    forward, then backward: proved, compared between ranks, named by zero_enter

In: Thunder's traces. Out: the traces that run, and in ``Compiled.programs`` the facts about each program. One that
cannot be proved raises on all ranks, if it is the first of its kind: the others hear of it where schedules are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from thunder_zero.compat import lookasides, shortcuts
from thunder_zero.compat.guards import Lookups, Namespace
from thunder_zero.compat.operators.choose import operators
from thunder_zero.compat.trace_repairs import broadcast_scalars, draw_once
from thunder_zero.compat.untraceable import RefusedPart, Untraceable, require_traceable
from thunder_zero.compat.wrong_gradients import require_gradients, require_unwritten
from thunder_zero.frontends.compiled import Compiled
from thunder_zero.plan.params import Plan
from thunder_zero.schedule import verify
from thunder_zero.schedule.timeline import ScheduleError
from thunder_zero.traces.executors import RepairFusion, ScheduleJointTrace
from thunder_zero.traces.insert import insert_synchronize, launches_of, module_inputs, take_rows, with_enter
from thunder_zero.traces.lift import lift_phases
from thunder_zero.traces.symbols import Runtime, ZeroExecutor
from thunder_zero.traces.work import draws_random_numbers

from thunder import compile_data, get_default_executors
from thunder.core.compile_data import get_compile_data
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transform_common import Transform
from thunder.extend import FusionExecutor

FUSERS = ("nvfuser", "torchcompile")  # executors that fuse all pointwise lines


class ProgramTransform(Transform):
    """Thunder's hooks for the programs of one module, or of one graph of it."""

    parts: tuple[RefusedPart, ...] = ()  # refused when a program is compiled
    used = False  # whether it already shards a module

    def __init__(self) -> None:
        self._compiled: Compiled | None = None
        self._forward: TraceCtx | None = None
        self._plain: torch.nn.Module  # install sets it
        self.lookups = Lookups()
        self.refusal: Untraceable | None = None  # of the trace that is made

    @property
    def compiled(self) -> Compiled:
        """The model's symbols and programs.

        Raises:
            TypeError: Thunder has not called ``transform_module``: it was given a function.
        """
        if self._compiled is None:
            raise TypeError(
                "ZeroTransform shards a module, and thunder.jit was given a function; jit the module alone, and call "
                "the jitted module from a function that is not jitted"
            )
        return self._compiled

    def install(self, model: ThunderModule, plan: Plan, runtime: Runtime, graph: str = "") -> None:
        """Put our executors around the others: symbols and schedule first, the repair of fused regions last.

        Args:
            model: the jitted module, or graph of a module.
            plan: of each parameter.
            runtime: what the symbols call.
            graph: the name of the graph, if the program is not all of the module.
        """
        shortcuts.install()
        lookasides.list_members_in_order()
        lookasides.refuse_calls(_is_ours)
        lookasides.watch_traces(_traced)
        lookasides.refuse_what_changes(_is_ours, _refuse, _note)
        lookasides.note_reads(_note)
        lookasides.take_fields_as_constants()
        lookasides.mend_label_smoothing()
        self._plain = model._model
        executor = ZeroExecutor(plan, runtime, graph)
        data = compile_data(model)
        front = operators(data.executors_list)
        others = [other for other in data.executors_list if other not in front]  # tz.Recipe has some, too
        is_default = {*get_default_executors()} <= {*others}
        self._compiled = Compiled(executor, is_default or any(one.name in FUSERS for one in others))
        schedule = ScheduleJointTrace(executor)
        repair = RepairFusion(executor, schedule, tuple(one for one in others if isinstance(one, FusionExecutor)))
        data.executors_list = (executor, schedule, *front, *others, repair)

    def transform_traces_pre_prologue(
        self, prologue: TraceCtx, computation: TraceCtx, epilogue: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Take rows, and synchronise them at first use."""
        computation = self.synchronize(computation, module_inputs(prologue, computation))
        executor = self.compiled.executor
        take_rows(prologue, executor, executor.runtime.guard(self.lookups.taken()))
        return prologue, computation, epilogue

    def trace(self, front_end: Callable[[], Any]) -> Any:
        """Call Thunder's front end, unless what it makes would be wrong in the next call.

        What forward fills once, such as a cache of numbers, is not changed by a second attempt.

        Raises:
            Untraceable: forward decides by values, draws random numbers, or changes what it reads.
        """
        changed: dict[str, Any] = {}
        for _ in range(2):
            self.lookups.taken()
            self.refusal, drawn = None, lookasides.generators()
            try:
                result = front_end()
            except Exception as error:  # maybe of forward, which was refused before, and went on
                if self.refusal is None and (why := lookasides.after_a_number(error)) is not None:
                    self.refusal = Untraceable(why)
                if self.refusal is None:
                    raise
                raise self.refusal from error
            if (kind := lookasides.moved(drawn)) is not None:
                self.refusal = Untraceable(lookasides.draws_by(kind))
            if self.refusal is not None:
                raise self.refusal
            if not (changed := self.lookups.changed()):
                return result
            if any(isinstance(part, Proxy) for part in tree_iter(list(changed.values()))):
                break  # tensors of this trace, which another one would take for its own
        raise Untraceable(
            f"forward changes {', '.join(map(repr, changed))}, which it reads, and only calls that compile would do so"
        )

    def synchronize(self, computation: TraceCtx, names: Mapping[str, str]) -> TraceCtx:
        """Synchronise at first use, and draw random numbers once; runs before autodiff."""
        executor = self.compiled.executor
        require_traceable(self._plain, self.parts)
        if torch.is_grad_enabled() and any(param.requires_grad for param in executor.plan.params):
            require_gradients(computation, type(self._plain).__name__)
        computation = draw_once(computation, draws_random_numbers)
        return broadcast_scalars(insert_synchronize(computation, names, executor))

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Prove the traces that will run, and that all ranks will run the same; let each phase say what it is."""
        executor = self.compiled.executor
        if TraceTag.BACKWARD in trace.tags:
            self._prove({"forward": self._forward, "backward": trace})
            return with_enter(trace, executor.named("backward"), executor)
        if TraceTag.AUGMENTED_FORWARD in trace.tags:
            require_unwritten(trace, type(self._plain).__name__)
        self._forward = trace
        phase = "forward"
        if _saves_nothing(trace):  # otherwise a backward follows, and both are proved together
            self._prove({"forward without backward": trace})
            phase = "forward without backward"
        named = with_enter(trace, executor.named(phase), executor)
        self.compiled.programs[named] = executor.program
        return named

    def _prove(self, phases: Mapping[str, TraceCtx]) -> None:
        _prove_on_all_ranks(phases, self.compiled.executor)


def finish(forward: TraceCtx, backward: TraceCtx | None, executor: ZeroExecutor) -> tuple[TraceCtx, TraceCtx | None]:
    """Prove the traces that will run, and that all ranks will run the same; let each phase say what it is."""
    phases = {"forward without backward": forward} if backward is None else {"forward": forward, "backward": backward}
    _prove_on_all_ranks(phases, executor)
    named = [with_enter(trace, executor.named(phase), executor) for phase, trace in phases.items()]
    return named[0], named[1] if backward is not None else None


def _prove_on_all_ranks(phases: Mapping[str, TraceCtx], executor: ZeroExecutor) -> None:
    try:
        prove(*phases.values(), executor=executor)
    except ScheduleError as error:  # tell the other ranks, which would wait for this one
        for phase in phases:
            executor.runtime.agree_on_schedule(executor.named(phase), [str(error)])
        raise
    for phase, trace in phases.items():
        executor.runtime.agree_on_schedule(executor.named(phase), launches_of(trace, executor))


def _ours() -> ProgramTransform | None:
    """Return the transform of the model that Thunder traces now, if it is a sharded one."""
    data = get_compile_data()
    transforms = () if data is None else data.transforms
    return next((each for each in transforms if isinstance(each, ProgramTransform)), None)


def _is_ours() -> bool:
    return _ours() is not None


def _traced(front_end: Callable[[], Any]) -> Any:
    ours = _ours()
    return front_end() if ours is None else ours.trace(front_end)


def _refuse(why: str) -> Untraceable | None:
    if (ours := _ours()) is None:
        return None
    ours.refusal = Untraceable(why)
    return ours.refusal


def _note(holder: Any, namespace: Namespace, name: str) -> None:
    if (ours := _ours()) is not None:
        ours.lookups.note(holder, namespace, name)


def _saves_nothing(forward: TraceCtx) -> bool:
    """Whether a forward trace saves nothing for backward, so that it must end every collective it starts."""
    return TraceTag.AUGMENTED_FORWARD not in forward.tags or not any(forward.bound_symbols[-1].args[1])


def prove(forward: TraceCtx, backward: TraceCtx | None = None, *, executor: ZeroExecutor) -> None:
    """Prove that the traces that will run are right."""
    timeline = lift_phases(forward, backward, executor)
    if backward is None:
        timeline = replace(timeline, plan=executor.plan)  # forward alone frees everything
    verify.check(timeline, trained=() if backward is None else executor.program.trained)
