"""Measures the steps of all models that an unchanged script trains.

::

    optimizer.step()    data, forward, loss, backward    optimizer.step()    data, ...
                    begin()   the model's clock runs                      end() -> MeasuredStep; begin()

Torch's hooks around each optimizer's step mark the end of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thunder_zero.capture.zero_module import ZeroModule, captured_forward, traces_of
from thunder_zero.sharded.optimizers import parameters_of
from thunder_zero.sharded.sharded_model import owner_of
from thunder_zero.sharded.state import State
from thunder_zero.sharded.waits import Moment, Waited
from thunder_zero.tools.compiled_programs import CompiledProgram, programs
from thunder_zero.traces.compiled import Traces

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step."""

    seconds: float  # seconds of the step
    optimizer: float  # seconds of the optimizer's step
    core: float  # CPU seconds of the process
    # seconds of waits, keyed by (True for a gather, path of the bucket's first parameter)
    waits: Mapping[tuple[bool, str], float]
    forwards: int  # the number of forwards
    peak: int  # the most bytes of CUDA tensors, or of the process's resident memory; 0 if unknown


@dataclass
class Followed:
    """A model with measured steps. A step ends when the model's first optimizer steps."""

    model: ref[ZeroModule]
    state: State
    optimizer: ref[Optimizer]
    steps: list[MeasuredStep] = field(default_factory=list)  # the measured steps
    programs: Sequence[CompiledProgram] = ()  # the compiled programs of the model
    # two lists of each graph's traces, one for programs that reduce gradients and one for ``no_sync``
    traces: Sequence[Sequence[Traces]] = ()
    at_rest: int = 0  # bytes of the optimizer's states
    # an exit stack. Closing the stack, at the end of a step, stops the model's clock.
    open: ExitStack = field(default_factory=ExitStack)
    waits: list[Waited] = field(default_factory=list)
    begun: Moment | None = None
    stepping: Moment | None = None
    core: float = 0.0
    forwards: int = 0

    def end(self) -> None:
        """End a step. Record the model's programs and the bytes of the optimizer."""
        now = self.state.clock.now()
        self.open.close()
        if self.begun is not None and self.stepping is not None:
            waits: dict[tuple[bool, str], float] = {}
            for wait in self.waits:
                seconds = waits.get((wait.gather, wait.path), 0.0)
                waits[wait.gather, wait.path] = seconds + wait.called.until(wait.returned)
            seconds, optimizer = self.begun.until(now), self.stepping.until(now)
            core, forwards = process_time() - self.core, self.state.training_forwards - self.forwards
            self.steps.append(MeasuredStep(seconds, optimizer, core, waits, forwards, _peak(self.state.device)))
        model, stepped = self.model(), self.optimizer()
        if model is not None and stepped is not None:
            self.programs = programs(model)
            self.traces = [list(_traces(model, synced)) for synced in (True, False)]
            self.at_rest = sum(_nbytes(value) for values in stepped.state.values() for value in values.values())

    def begin(self) -> None:
        """Begin the next step."""
        _forget_peak(self.state.device)
        self.waits = self.open.enter_context(self.state.clock.running())
        self.core, self.forwards = process_time(), self.state.training_forwards
        self.begun = self.state.clock.now()


def _traces(model: ZeroModule, synced: bool) -> Iterator[Traces]:
    for number, graph in enumerate(captured_forward(model).ran):
        if any(entry.synced is synced for entry in graph):
            yield traces_of(model, synced, number)


def _nbytes(value: object) -> int:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.nbytes if isinstance(local, Tensor) else 0


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        CLEAR.write_text("5")


@contextmanager
def following(steps: int, show: Callable[[Followed], None]) -> Iterator[None]:
    """Measure each model that an optimizer steps. Call ``show`` after ``steps`` steps or at the end of the block."""
    followed_models: dict[State, Followed] = {}
    shown: WeakSet[State] = WeakSet()

    def stepped_by(optimizer: Optimizer) -> Followed | None:
        owner = next(filter(None, map(owner_of, parameters_of(optimizer))), None)
        if owner is None or owner[0] in shown:
            return None
        if owner[0] not in followed_models:
            models = (item for item in gc.get_objects() if issubclass(type(item), ZeroModule))
            model = next(model for model in models if model.state is owner[0])
            followed_models[owner[0]] = Followed(ref(model), owner[0], ref(optimizer))
        followed = followed_models[owner[0]]
        return followed if followed.optimizer() is optimizer else None

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (followed := stepped_by(optimizer)) is not None:
            followed.stepping = followed.state.clock.now()

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (followed := stepped_by(optimizer)) is not None:
            followed.end()
            if len(followed.steps) == steps:
                shown.add(followed.state)
                show(followed_models.pop(followed.state))
            else:
                followed.begin()

    hooks = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for followed in followed_models.values():
        followed.open.close()
        show(followed)
