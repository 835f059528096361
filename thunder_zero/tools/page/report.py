"""``tz.tools.report``: writes one HTML file that shows a step."""

from __future__ import annotations

import json
from importlib.resources import files
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

from thunder_zero.capture.zero_module import traces_of
from thunder_zero.compat.jitted import plain_of
from thunder_zero.plan.amounts import name_of
from thunder_zero.plan.policy import STAGES, Times
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.devices.named import device_of
from thunder_zero.tools.forecast.around import memory_and_timeline
from thunder_zero.tools.forecast.for_loss import for_loss
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.replay import Loss
from thunder_zero.tools.forecast.watch import NoForecast
from thunder_zero.tools.page.data import data_of, top_of
from thunder_zero.tools.page.differences import differences
from thunder_zero.tools.page.measured import by_profile, by_times
from thunder_zero.tools.page.program import Data, PageProgram
from thunder_zero.tools.printing.words import count
from thunder_zero.tools.table.table import table_of
from thunder_zero.tools.time.estimate import estimate, step_time
from thunder_zero.tools.views.save_timeline import events_of
from thunder_zero.traces.compiled import Traces

if TYPE_CHECKING:
    from thunder.core.module import ThunderModule

Measured = Times | str | PathLike[str]
BY_TIMES = (
    "Compute between the waits of gathers, and the speed of gathers, are those of measure_times; lines between two "
    "waits share the time as in the forecast, and what was not measured is scaled like the rest."
)
BY_PROFILE = (
    "Launches and waits are where the profile has them, as the host saw them: a collective is drawn from its launch to "
    "the end of its wait. Lines between them share the time as in the forecast."
)


def report(
    model_or_traces: ThunderModule | Traces,
    path: str | PathLike[str],
    *,
    device: Device | str,
    measured: Measured | None = None,
    beside: Traces | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    title: str = "",
) -> None:
    """Write an HTML file that links each line of a step to its time, its memory, its bytes and its parameters.

    Open the file in a browser, without a network or a server. ``report.html#op=412`` opens it at an operation. Times
    come from :func:`thunder_zero.tools.estimate`, and memory comes from :func:`thunder_zero.tools.memory`. The bytes
    sent are the bytes of this rank.

    >>> tz.tools.report(traces, "report.html", device="h100", loss=loss, optimizer=torch.optim.AdamW)
    >>> tz.tools.report(zero3, "report.html", device="h100", beside=zero2)  # two stages and their differences

    Args:
        model_or_traces: a model with ZeroTransform that was called, or the result of :func:`thunder_zero.trace`.
        path: the file to write.
        device: the device of the forecast, as for :func:`thunder_zero.tools.estimate`.
        measured: times to show beside the forecast: the result of :func:`thunder_zero.tools.measure_times`, or a file
            from ``torch.profiler.profile.export_chrome_trace``.
        beside: other traces of the module to show on the page, such as traces of another stage.
        loss, optimizer: as for :func:`thunder_zero.tools.memory` (default: the step has no loss and no optimizer).
        title: the title of the page, such as the model's name (default: the model's class, if a model is given).
    """
    data = page_of(model_or_traces, device, measured, beside, loss=loss, optimizer=optimizer, title=title)
    Path(path).write_text(html_of(data), encoding="utf-8")


def page_of(
    model_or_traces: ThunderModule | Traces,
    device: Device | str,
    measured: Measured | None = None,
    beside: Traces | None = None,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    title: str = "",
) -> Data:
    """Return the page as JSON data. The arguments are those of :func:`report`."""
    described = device_of(device)
    traces = model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)

    def forecast(name: str, traces: Traces) -> PageProgram:
        traces = for_loss(traces, loss) if loss else traces
        try:
            memory, timeline = memory_and_timeline(traces, loss=loss, optimizer=optimizer)
        except NoForecast as error:
            time = estimate(traces, described, loss=loss, optimizer=optimizer)
            no_memory = f"There is no forecast of memory: {error}."
            return PageProgram(name, table_of(traces, time=time), time, no_memory)
        time = step_time(timeline, described, model=traces.lifted)
        return PageProgram(name, table_of(traces, memory, time), time)

    programs = [forecast(STAGES[traces.plan.policy.stage].name, traces)]
    if measured is not None:
        programs.append(_measured(programs[0], measured))
    if beside is not None:
        if not isinstance(beside, Traces):
            raise TypeError(f"beside is of type {type(beside).__name__}; give what trace or traces_of returns")
        other = STAGES[beside.plan.policy.stage].name
        programs.append(forecast(f"{other}, second" if other == programs[0].name else other, beside))
    parameters = sum(prod(traces.plan.whole_shape(param)) for param in traces.plan.params)
    name = "A step" if isinstance(model_or_traces, Traces) else type(plain_of(model_or_traces)).__name__
    dtypes = dict.fromkeys(name_of(param.compute_dtype) for param in traces.plan.params)
    return {
        "title": title or name,
        "facts": [f"{count(parameters)} parameters", f"compute in {', '.join(dtypes)}", f"on {described.name}"],
        "top": top_of(programs),
        "programs": [data_of(program) for program in programs],
        "differences": differences(programs),
    }


def _measured(first: PageProgram, measured: Measured) -> PageProgram:
    traces, memory = first.table.traces, first.table.memory
    if isinstance(measured, Times):
        name, time, note = "measured times", by_times(first.estimate, measured), BY_TIMES
    else:
        forecast = estimate(traces, first.estimate.device)  # launches in a profile do not delimit the loss
        name, time, note = "profile", by_profile(forecast, events_of(Path(measured))), BY_PROFILE
    return PageProgram(name, table_of(traces, memory, time), time, note=note)


def html_of(data: Any) -> str:
    """Return the HTML file: the template with its style, its script and its data."""
    parts = {name: files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js")}
    template = files(__package__).joinpath("page.html.jinja").read_text("utf-8")
    inline = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(page=data, data=Markup(inline), style=Markup(parts["page.css"]), script=Markup(parts["page.js"]))
