"""``thunder-zero why``: runs a training script and prints its measured step beside the forecast.

::

    optimizer.step()    data, forward, loss, backward    optimizer.step()    data, ...
                        |----- a step: the model's clock runs -----------|

In: a script with its arguments, on every rank. Torch's hooks around each optimizer's step mark the end of a step. Out:
on rank 0 a page for each model that an optimizer steps. A page has the programs, and a step's forecast and measured
seconds and bytes. A sentence describes the largest difference.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thunder_zero.capture.compilations import resident_bytes
from thunder_zero.capture.zero_module import ZeroModule, captured_forward, traces_of
from thunder_zero.plan.amounts import duration, folded, size
from thunder_zero.plan.policy import STAGES
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.optimizers import parameters_of
from thunder_zero.sharded.sharded_model import owner_of
from thunder_zero.sharded.state import State
from thunder_zero.tools.compiled_programs import programs
from thunder_zero.tools.devices.device import DEVICES, Device, device_of
from thunder_zero.tools.printing.words import aligned
from thunder_zero.tools.table.table import Table, step_table
from thunder_zero.traces.compiled import Traces

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
STEP, COMPUTE, WAITS, OPTIMIZER = "a step", "forward, backward", "waits for collectives", "the optimizer's step"
CORE, FORWARDS, PEAK = "with a core (process)", "forwards", "most memory of tensors"
PARTS = (COMPUTE, WAITS, OPTIMIZER)
NO_DEVICE = (
    "no forecast of time: run thunder-zero calibrate machine.json, under torchrun as the script runs, and pass "
    "--device machine.json"
)
CAUSES = {
    COMPUTE: "measured, they have the loss, the data and Python's own time, too, and what else runs on the machine",
    WAITS: "another rank comes late, or the network is not that of the forecast",
}


@dataclass(frozen=True)
class Followed:
    """A model with measured steps. A step ends when the model's first optimizer steps."""

    model: ZeroModule
    optimizer: Optimizer
    # for each measured step: seconds of STEP, its PARTS and the process's CPU, the number of FORWARDS, and the most
    # bytes of CUDA tensors, or of the process's resident memory (0 if unknown)
    steps: list[Mapping[str, float]]
    # the seconds of each step's waits, keyed by (True for a gather, path of the bucket's first parameter)
    waits: list[Mapping[tuple[bool, str], float]]

    def marks(self) -> Generator[None]:
        """Measure steps. The caller goes on when the optimizer begins to step, and when it has stepped."""
        state = self.model.state
        yield  # the first step compiles
        while True:
            if state.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(state.device)
            with suppress(OSError):
                CLEAR.write_text("5")
            with state.clock.running() as waited:
                core, forwards, begun = process_time(), state.training_forwards, state.clock.now()
                yield
                stepping = state.clock.now()
                yield
                ended = state.clock.now()
            waits = defaultdict[tuple[bool, str], float](float)
            for wait in waited:
                waits[wait.gather, wait.path] += wait.called.until(wait.returned)
            seconds, optimizer, all_waits = begun.until(ended), stepping.until(ended), sum(waits.values())
            figures = {STEP: seconds, WAITS: all_waits, OPTIMIZER: optimizer, CORE: process_time() - core}
            figures[COMPUTE] = seconds - optimizer - all_waits
            figures |= {FORWARDS: state.training_forwards - forwards, PEAK: _peak(state.device)}
            self.steps.append(figures)
            self.waits.append(waits)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


@contextmanager
def following(steps: int, show: Callable[[Followed], None]) -> Iterator[None]:
    """Measure each model that an optimizer steps. Call ``show`` after ``steps`` steps or at the end of the block."""
    models: dict[State, tuple[Followed, Generator[None]]] = {}
    shown: WeakSet[State] = WeakSet()

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Go on with the model of the optimizer, before and after each of its steps."""
        owner = next(filter(None, map(owner_of, parameters_of(optimizer))), None)
        if owner is None or (state := owner[0]) in shown:
            return
        if state not in models:
            every = (item for item in gc.get_objects() if issubclass(type(item), ZeroModule))
            followed = Followed(next(model for model in every if model.state is state), optimizer, [], [])
            models[state] = followed, followed.marks()
        followed, marks = models[state]
        if followed.optimizer is optimizer:
            next(marks)
        if len(followed.steps) == steps:
            shown.add(state)
            end(state)

    def end(state: State) -> None:
        followed, marks = models.pop(state)
        marks.close()
        show(followed)

    hooks = register_optimizer_step_pre_hook(stepped), register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for state in list(models):
        end(state)


def why(script: Path, arguments: Sequence[str], *, steps: int, device: str | None) -> None:
    """Run a script like ``python`` does. Rank 0 prints a page for each model, after ``steps`` steps or at the end."""
    if not script.is_file():
        raise SystemExit(f"thunder-zero: there is no file {script}; give a script that trains, and its arguments")
    if steps < 1:
        raise SystemExit(f"thunder-zero: --steps is {steps}; give how many steps to measure, 1 or more")
    try:
        described = None if device is None else device_of(device)
    except (OSError, ValueError) as error:
        raise SystemExit(f"thunder-zero: {error}") from None
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    resident_before, pages = resident_bytes(), list[str]()

    def show(followed: Followed) -> None:
        pages.append(_page(followed, resident_before, described or _device_here()))
        print(pages[-1], flush=True)

    is_first = os.environ.get("RANK", "0") == "0"
    with following(steps, show) if is_first else nullcontext():
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    if is_first and not pages:
        print(f"why: in {script} no optimizer stepped a model of thunder_zero; tz.compile(module, ...) makes one")


def _device_here() -> Device | None:
    gpu = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((device for name, device in DEVICES.items() if name in gpu.replace("rtx ", "rtx")), None)


def _page(followed: Followed, resident_before: int, device: Device | None) -> str:
    """Return the page of a model. ``resident_before`` is the process's resident memory before the script, in bytes."""
    state, steps = followed.model.state, followed.steps
    graphs = captured_forward(followed.model).ran
    kinds = [(index, kind) for index, graph in enumerate(graphs) for kind in {entry.synced for entry in graph}]
    name = f"{state.name}: {STAGES[state.plan.policy.stage].name}, {state.plan.mesh}"
    if not steps or not any(kind for _, kind in kinds):
        return f"why: {name}: no step was measured, as the first compiles; let the script take three or more"
    measured = {figure: median(step[figure] for step in steps) for figure in steps[0]}
    more = round(measured[FORWARDS]) - 1
    kept = (item for states in followed.optimizer.state.values() for item in states.values())
    states = sum(local(item).nbytes for item in kept if isinstance(item, Tensor))  # the forecast does not see them
    tables, no_forecast = _tables([traces_of(followed.model, kind, index) for index, kind in kinds], device, states)
    synced, deferred = ([table for table in tables if table.traces.facts.synced is kind] for kind in (True, False))
    runs = [*synced, *[table for _ in range(more) for table in deferred or synced]]  # the programs of one step
    lines = [row for table in runs for row in table.all_rows]
    waits = sum(row.exposed for row in lines)
    compute = sum((row.end or 0.0) - (row.start or 0.0) for row in lines) - waits
    forecast = {} if no_forecast else {COMPUTE: compute, WAITS: waits}
    shown = {part: duration(seconds) for part, seconds in forecast.items()}
    rows = [
        (STEP, duration(sum(forecast.values())) if forecast else "", duration(measured[STEP])),
        *((f"  {part}", shown.get(part, ""), duration(measured[part])) for part in PARTS),
        (f"  {CORE}", "", duration(measured[CORE])),
        ("sent by this rank", size(sum(table.sent for table in runs)), ""),
        (PEAK, *_memory(followed, synced, round(measured[PEAK]), resident_before)),
    ]
    forwards = f" of {more + 1} forwards each" * (more > 0)
    title = f"{name}, median of {len(steps)} step{'s' * (len(steps) > 1)}{forwards}"
    text = aligned([("", "forecast", "measured"), *rows])
    listed = f"programs\n{compiled!r}" if (compiled := programs(followed.model)) else ""
    largest = _largest(forecast, measured, followed.waits)
    return "\n".join(filter(None, (title, text, folded(no_forecast), largest, listed)))


def _tables(all_traces: Sequence[Traces], device: Device | None, states: int) -> tuple[list[Table], str]:
    """Return the tables of programs, with the bytes of the optimizer's states, and why they have no times, or ""."""
    reason = NO_DEVICE
    if device is not None:
        try:
            return [step_table(traces, device=device, reserve=states) for traces in all_traces], ""
        except ValueError as error:  # the device was calibrated with other ranks or dtypes
            reason = f"no forecast of time: {error}"
    return [step_table(traces, reserve=states) for traces in all_traces], reason


def _memory(followed: Followed, tables: Sequence[Table], peak: int, resident_before: int) -> tuple[str, str]:
    """Return the forecast peak and the measured peak of memory as text.

    On a CPU, the measured peak leaves out the memory before the script and the memory of compilations.
    """
    on_cpu = followed.model.state.device.type == "cpu"
    if peak and on_cpu:
        peak = max(peak - resident_before - sum(program["nbytes"] for program in programs(followed.model)), 0)
    forecast = tables[0].memory if len(tables) == 1 else None
    words = size(forecast.peak) if forecast else "several graphs" if tables[1:] else "unknown"
    return words, f"{size(peak)}{', the process' * on_cpu}" if peak else "unknown"


def _largest(
    forecast: Mapping[str, float], measured: Mapping[str, float], waits: Sequence[Mapping[tuple[bool, str], float]]
) -> str:
    """Describe the largest difference from the forecast (or else the longest part), and the longest wait."""
    sizes = {part: measured[part] - forecast.get(part, 0.0) for part in forecast or PARTS}
    part = max(sizes, key=lambda part: abs(sizes[part]))
    if not forecast:
        words = f"{part}: {measured[part] / sum(sizes.values()):.0%} of the step"
    elif sizes[part] > 0:
        words = f"the largest difference: {part} take {duration(sizes[part])} longer; {CAUSES[part]}"
    else:
        words = f"the largest difference: {part} take {duration(-sizes[part])} less than the forecast"
    medians = {wait: median(of_step.get(wait, 0.0) for of_step in waits) for wait in waits[-1]}
    if medians:
        (is_gather, path), longest = max(medians.items(), key=lambda item: item[1])
        kind = "gather" if is_gather else "reduction"
        words += f"; the longest wait, {duration(longest)}, is for the {kind} of {path}"
    return folded(words)
