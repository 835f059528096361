"""``tz.tools.report``: writes one HTML file that shows a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment
from markupsafe import Markup

from thunder_zero.capture.compilations import uncollected
from thunder_zero.capture.zero_module import as_traces
from thunder_zero.compat.jitted import plain_of
from thunder_zero.plan.amounts import duration, float_dtype, name_of, size
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import STAGES, Policy, Times
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.spmd.verdict import Verdict
from thunder_zero.tools.devices.device import Device, Link, device_of
from thunder_zero.tools.dry_run import ProgramSource
from thunder_zero.tools.forecast.for_loss import Loss
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.models import MODELS
from thunder_zero.tools.plan.plan_training import PRECISION
from thunder_zero.tools.plan.subject import subject_of
from thunder_zero.tools.printing.words import count
from thunder_zero.tools.table.table import step_table, table_of
from thunder_zero.tools.time.estimate import by_times
from thunder_zero.tools.views.page.data import Data, data_of, data_of_step, differences, top_of
from thunder_zero.traces.compiled import Traces

if TYPE_CHECKING:
    from thunder.core.module import ThunderModule

BY_TIMES = (
    "Compute between the waits of gathers, and the speed of gathers, are those of measure_times; lines between two "
    "waits share the time as in the forecast, and what was not measured is scaled like the rest."
)


def report(
    model_or_traces: ThunderModule | Traces | Verdict,
    path: str | PathLike[str],
    *,
    device: Device | str,
    measured: Times | None = None,
    beside: Traces | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    title: str = "",
    types: bool = False,
    between: Link | str | None = None,
) -> None:
    """Write an HTML file that links each line of a step to its time, its memory, its bytes and its parameters.

    Open the file in a browser, without a network or a server. ``report.html#op=412`` opens it at an operation. Times
    come from :func:`thunder_zero.tools.estimate`, and memory comes from :func:`thunder_zero.tools.memory`. The bytes
    sent are the bytes of this rank.

    >>> tz.tools.report(traces, "report.html", device="h100", loss=loss, optimizer=torch.optim.AdamW)
    >>> tz.tools.report(zero3, "report.html", device="h100", beside=zero2)  # two stages and their differences

    ``measured`` is the result of :func:`thunder_zero.tools.measure_times`, and is shown beside the forecast.
    With ``types``, each line shows what it writes on each axis of the mesh. ``between`` is the link between sites, as
    for :func:`thunder_zero.tools.estimate`, for traces with an outer step.

    A verdict of :func:`thunder_zero.tools.check_step` shows the step that was checked, with the types; it takes no
    other arguments than ``device`` and ``title``.
    """
    if isinstance(model_or_traces, Verdict):
        Path(path).write_text(html_of(page_of_step(model_or_traces, device, title)), encoding="utf-8")
        return
    step: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "between": between}
    data = page_of(model_or_traces, device, measured, beside, **step, title=title, types=types)
    Path(path).write_text(html_of(data), encoding="utf-8")


def page_of(
    model_or_traces: ThunderModule | Traces,
    device: Device | str,
    measured: Times | None = None,
    beside: Traces | None = None,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    title: str = "",
    types: bool = False,
    between: Link | str | None = None,
) -> Data:
    """Return the page as JSON data. The arguments are those of :func:`report`."""
    device = device_of(device)
    traces = as_traces(model_or_traces)
    if beside is not None and not isinstance(beside, Traces):
        raise TypeError(f"beside is of type {type(beside).__name__}; give what trace or traces_of returns")
    if measured is not None and not isinstance(measured, Times):
        raise TypeError(f"measured is of type {type(measured).__name__}; give what measure_times returns")
    first, *others = (
        step_table(each, device=device, loss=loss, optimizer=optimizer, between=between)
        for each in (traces, beside)
        if each is not None
    )
    shown = {STAGES[traces.plan.policy.stage].name: first}
    if measured is not None:
        assert first.time is not None
        shown["measured times"] = table_of(first.traces, first.memory, by_times(first.time, measured))
    for table in others:
        name = STAGES[table.traces.plan.policy.stage].name
        shown[f"{name}, second" if name in shown else name] = table
    if types:
        shown = {name: table.typed() for name, table in shown.items()}
    tables = list(shown.values())
    programs = [data_of(name, table, BY_TIMES * (name == "measured times")) for name, table in shown.items()]
    parameters = sum(prod(traces.plan.whole_shape(param)) for param in traces.plan.params)
    model = "A step" if isinstance(model_or_traces, Traces) else type(plain_of(model_or_traces)).__name__
    dtypes = dict.fromkeys(name_of(param.compute_dtype) for param in traces.plan.params)
    facts = f"{count(parameters)} parameters", f"compute in {', '.join(dtypes)}", f"on {device.name}"
    return _page(title or model, facts, programs, device, differences(programs, tables))


def page_of_step(verdict: Verdict, device: Device | str, title: str = "") -> Data:
    """Return the page of a step that was checked as JSON data."""
    if verdict.step is None:
        raise ValueError(f"the step was not recorded: {verdict.faults[0].text if verdict.faults else 'no faults'}")
    device = device_of(device)
    data = data_of_step(verdict, verdict.step, device)
    numel = sum(count for _, count in verdict.step.parameters.values())
    faults = sum(fault.kind != "warning" for fault in verdict.faults)
    said = f"{faults} faults" if faults else "nothing wrong"
    facts = f"{count(numel)} parameters on this rank", f"on {device.name}", f"{said} on these inputs"
    return _page(title or "A step", facts, [data], device, [])


def _page(title: str, facts: Sequence[str], programs: Sequence[Data], device: Device, differences: list[Data]) -> Data:
    # the top of the picture of memory, with room above the highest line
    most = 1.06 * max((highest or 0 for program in programs for highest in program["lines"]["highest"]), default=0)
    return {
        "title": title,
        "facts": [*facts],
        "top": top_of(programs, device.memory_bytes),
        "programs": programs,
        "most_bytes": most or 1.0,
        "scale": [size(round(most * part)) for part in (0.0, 0.5, 1.0)],
        "differences": differences,
    }


@uncollected()
def report_of(
    model: str,
    *,
    world_size: int,
    stage: int,
    beside: int | None,
    device: str,
    dtype: str | None,
    blocks: int | None,
    types: bool = False,
) -> Data:
    """Return the page of a model for the arguments of ``thunder-zero report``, with AdamW and the model's loss."""
    described, subject = device_of(device), subject_of(model)
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks is {blocks}; give how many of the {subject.blocks} alike blocks to keep, at least 1")
    precision = PRECISION if model in MODELS else MixedPrecision()
    if dtype is not None:
        precision = replace(PRECISION, param_dtype=float_dtype("dtype", dtype))
    first, *others = (Policy(number, mixed_precision=precision) for number in (stage, beside) if number is not None)
    with subject.with_blocks(subject.blocks if blocks is None else blocks) as module:
        captured = ProgramSource(module, subject.args, subject.kwargs, first, Mesh.of(world_size), device=described)
        traces, *beside_traces = (captured.under(policy) for policy in (first, *others))
    part = f", {blocks} of {subject.blocks} blocks" if blocks is not None and blocks < subject.blocks else ""
    return page_of(
        traces,
        described,
        beside=beside_traces[0] if beside_traces else None,
        loss=subject.loss,
        optimizer=torch.optim.AdamW,
        title=f"{subject.name}{part}",
        types=types,
    )


def html_of(data: Any) -> str:
    """Return the HTML file: the template with its style, its script and its data."""
    template, style, script = (
        files(__package__).joinpath(f"page.{name}").read_text("utf-8") for name in ("html.jinja", "css", "js")
    )
    inline = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = duration
    page = environment.from_string(template)
    return page.render(page=data, data=Markup(inline), style=Markup(style), script=Markup(script))
