"""``thunder-zero why``: runs a training script and prints its measured step beside the forecast.

In: a script with its arguments, on every rank. Out: on rank 0 a page for each model that an optimizer steps. A page has
the programs, and a step's forecast and measured seconds and bytes. A sentence describes the largest difference.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch

from thunder_zero.capture.compilations import resident_bytes
from thunder_zero.plan.amounts import duration, size
from thunder_zero.plan.policy import STAGES
from thunder_zero.tools.compiled_programs import ProgramTable
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.devices.named import DEVICES, device_of
from thunder_zero.tools.forecast.memory import memory
from thunder_zero.tools.forecast.watch import NoForecast
from thunder_zero.tools.printing.text import table_of, text_of_table
from thunder_zero.tools.printing.words import WIDTH, folded
from thunder_zero.tools.time.estimate import estimate
from thunder_zero.tools.why.follow import Followed, MeasuredStep, following
from thunder_zero.traces.compiled import Traces

COMPUTE, WAITS, OPTIMIZER = "forward, backward", "waits for collectives", "the optimizer's step"
CAUSES = {
    COMPUTE: "measured, they have the loss, the data and Python's own time, too, and what else runs on the machine",
    WAITS: "another rank comes late, or the network is not that of the forecast",
}


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
        pages.append(page(followed, resident_before, described or _device_here()))
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


def page(followed: Followed, resident_before: int, device: Device | None) -> str:
    """Return the page of a model. ``resident_before`` is the process's resident memory before the script, in bytes."""
    plan, steps, (synced, deferred) = followed.state.plan, followed.steps, followed.traces or ((), ())
    name = f"{followed.state.name}: {STAGES[plan.policy.stage].name}, {plan.mesh}"
    if not steps or not synced:
        return f"why: {name}: no step was measured, as the first compiles; let the script take three or more"
    more = round(median(step.forwards for step in steps)) - 1
    runs = [*synced, *[traces for _ in range(more) for traces in deferred or synced]]  # the traces of one step
    forecast, no_forecast = _forecast(runs, device)
    measured = {
        COMPUTE: median(step.seconds - step.optimizer - sum(step.waits.values()) for step in steps),
        WAITS: median(sum(step.waits.values()) for step in steps),
        OPTIMIZER: median(step.optimizer for step in steps),
    }
    seconds = median(step.seconds for step in steps)
    rows = [
        ("a step", duration(sum(forecast.values())) if forecast else "", duration(seconds)),
        *(
            (f"  {part}", duration(forecast[part]) if part in forecast else "", duration(measured[part]))
            for part in measured
        ),
        ("  with a core (process)", "", duration(median(step.core for step in steps))),
        (
            "sent by this rank",
            size(sum(traces.timeline.traffic(op).sent for traces in runs for op in traces.timeline.ops)),
            "",
        ),
        ("most memory of tensors", *_memory(followed, synced, resident_before)),
    ]
    title = f"{name}, median of {len(steps)} step{'s' * (len(steps) > 1)}" + f" of {more + 1} forwards each" * (
        more > 0
    )
    table = text_of_table(table_of(("", "forecast", "measured"), rows), WIDTH)
    programs = f"programs\n{ProgramTable(followed.programs)!r}" if followed.programs else ""
    return "\n".join(filter(None, (title, table, folded(no_forecast), _largest(forecast, measured, steps), programs)))


def _device_here() -> Device | None:
    """Return the ready-made device for this GPU, or None if the GPU is unknown."""
    gpu = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((device for name, device in DEVICES.items() if name in gpu), None)


def _forecast(runs: Sequence[Traces], device: Device | None) -> tuple[dict[str, float], str]:
    """Return (seconds keyed by part of the step, ""). If there is no forecast, return ({}, reason)."""
    if device is None:
        return {}, (
            "no forecast of time: run thunder-zero calibrate machine.json, under torchrun as the script runs, and pass "
            "--device machine.json"
        )
    try:
        estimates = [estimate(traces, device) for traces in runs]
    except ValueError as error:  # the device was calibrated with other ranks or dtypes
        return {}, f"no forecast of time: {error}"
    return {
        COMPUTE: sum(forecast.compute_seconds for forecast in estimates),
        WAITS: sum(forecast.exposed_seconds for forecast in estimates),
    }, ""


def _memory(followed: Followed, traces: Sequence[Traces], resident_before: int) -> tuple[str, str]:
    """Return the forecast peak and the measured peak of memory as text.

    On a CPU, the measured peak leaves out the memory before the script and the memory of compilations.
    """
    peak = round(median(step.peak for step in followed.steps))
    if peak and followed.state.device.type == "cpu":
        peak = max(peak - resident_before - sum(program.nbytes for program in followed.programs), 0)
    try:
        forecast = size(memory(traces[0]).peak + followed.at_rest) if len(traces) == 1 else "several graphs"
    except NoForecast:
        forecast = "unknown"
    scope = ", the process" if followed.state.device.type == "cpu" else ""
    return forecast, f"{size(peak)}{scope}" if peak else "unknown"


def _largest(forecast: Mapping[str, float], measured: Mapping[str, float], steps: Sequence[MeasuredStep]) -> str:
    """Describe the largest difference from the forecast (or else the longest part), and the longest wait."""
    differences = {part: measured[part] - seconds for part, seconds in forecast.items()}
    part = max(differences or measured, key=lambda part: abs((differences or measured)[part]))
    if not differences:
        words = f"{part}: {measured[part] / sum(measured.values()):.0%} of the step"
    elif differences[part] > 0:
        words = f"the largest difference: {part} take {duration(differences[part])} longer; {CAUSES[part]}"
    else:
        words = f"the largest difference: {part} take {duration(-differences[part])} less than the forecast"
    waits = {wait: median(step.waits.get(wait, 0.0) for step in steps) for wait in steps[-1].waits}
    if waits:
        (is_gather, path), longest = max(waits.items(), key=lambda item: item[1])
        words += (
            f"; the longest wait, {duration(longest)}, is for the {'gather' if is_gather else 'reduction'} of {path}"
        )
    return folded(words)
