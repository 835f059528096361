"""One parameter in one program, step by step: frozen data, and as text.

::

    at rest     rows 0 to 7 of 64 on this rank, 2.00 KiB of 16.0 KiB
    forward
      gather    fut0 = zero_all_gather(t_w, 'h.0.w')
                alone; it starts with forward, so that it ends as soon as it can
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from thunder_zero.plan.amounts import duration, name_of, size
from thunder_zero.plan.formats import Format
from thunder_zero.plan.mesh import REPLICATE, SHARD
from thunder_zero.plan.params import Param, Plan
from thunder_zero.tools.printing.text import clip, place_of
from thunder_zero.tools.printing.words import WIDTH, summed_up

HANGING = 12  # columns
MOST = 2  # gathers in a summary


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the trace of a phase, "forward" or "backward", with its position there, as in ``Op.source``."""

    phase: str
    position: int
    code: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """From a gather of the parameter to its free.

    Attributes:
        bucket: paths of the parameters that travel together, this one among them.
        bucket_bytes: of all of them, full.
        launch: starts the gather.
        why_launch: why it is there, and not earlier.
        wait: ends the gather; the parameter can be read.
        first_read, last_read: the first and the last line that computes with it, or with a value made of
            parameters alone, which may be a view of it; None if its bucket is gathered for others only.
        free: frees it; None if it stays.
        why_free: why it is freed there, or stays.
        sent_bytes, received_bytes: of this parameter by this rank.
        nbytes: its full bytes, which it occupies from the launch to the free.
        gathered_at_most: the most bytes of gathered parameters alive meanwhile, of all parameters.
        wire_seconds: of its bucket on the wires; None without a device.
        exposed_seconds: how long compute waits for its bucket; None without a device.
    """

    bucket: tuple[str, ...]
    bucket_bytes: int
    launch: Line
    why_launch: str
    wait: Line
    first_read: Line | None
    last_read: Line | None
    free: Line | None
    why_free: str
    sent_bytes: int
    received_bytes: int
    nbytes: int
    gathered_at_most: int
    wire_seconds: float | None = None
    exposed_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """The gradient of the parameter.

    Attributes:
        made: the line that makes the full gradient; None if it is not made by one line.
        launch: starts its reduction; under ``no_sync``, the line that defers it.
        across: starts the reduction of the means over copies of the model; None if there is one copy.
        wait: ends the reduction; None if it is deferred.
        why_wait: why it is there; why the gradient is deferred.
        bucket: paths of the parameters whose gradients travel together, this one among them.
        bucket_bytes: of all of these gradients, full.
        sent_bytes, received_bytes: of this gradient by this rank.
        nbytes: its full bytes.
        wire_seconds: of its bucket on the wires; None without a device.
        exposed_seconds: how long compute waits for its bucket; None without a device.
    """

    made: Line | None
    launch: Line
    across: Line | None
    wait: Line | None
    why_wait: str
    bucket: tuple[str, ...]
    bucket_bytes: int
    sent_bytes: int
    received_bytes: int
    nbytes: int
    wire_seconds: float | None = None
    exposed_seconds: float | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """What happens to one parameter in a step of one rank.

    Attributes:
        param: its plan: path, shape, dtypes, unit, lifetime.
        plan: the plan of all parameters; it has rank and world size.
        rows: the first row of this rank, and the one after its last; None if the rank has all of it.
        resting_bytes: of the rows on this rank between steps, with padding.
        lifetime: what the stage means for it, in words.
        gathers: in the order in which they run.
        gradient: None if it gets none.
        why_no_gradient: "" if it gets one.
        device: the name of the device of the forecast seconds; None without a device.
    """

    param: Param
    plan: Plan
    rows: tuple[int, int] | None
    resting_bytes: int
    lifetime: str
    gathers: tuple[Gathered, ...]
    gradient: Reduced | None
    why_no_gradient: str
    device: str | None

    @property
    def sent_bytes(self) -> int:
        """What this rank sends for the parameter in a step."""
        return sum(one.sent_bytes for one in self.gathers) + (self.gradient.sent_bytes if self.gradient else 0)

    @property
    def received_bytes(self) -> int:
        """What this rank receives for the parameter in a step."""
        return sum(one.received_bytes for one in self.gathers) + (self.gradient.received_bytes if self.gradient else 0)

    @property
    def exposed_seconds(self) -> float | None:
        """How long compute waits for the buckets of the parameter in a step; None without a device."""
        parts = [one.exposed_seconds for one in self.gathers]
        parts += [self.gradient.exposed_seconds] if self.gradient else []
        return None if self.device is None else sum(part for part in parts if part is not None)

    def __repr__(self) -> str:
        return summed_up(self, f"{_named(self.param)}; {place_of(self.plan)}; {_sum(self)}")

    def __str__(self) -> str:
        """Its rows, its first gathers, its gradient and the bytes of a step, as text of 100 columns."""
        return "\n".join(_lines(self, MOST))

    def table(self) -> str:
        """The same with all gathers."""
        return "\n".join(_lines(self, len(self.gathers)))


def _lines(explanation: Explanation, most: int) -> Iterator[str]:
    param, plan = explanation.param, explanation.plan
    yield from wrap(f"{_named(param)}; {place_of(plan)}", WIDTH)
    if plan.mesh.is_sliced:
        yield from _part("slice", _slice(param, plan))
    yield from _part("at rest", _at_rest(explanation))
    yield from _part("", explanation.lifetime)
    if param.sharded and not explanation.gathers:
        yield from _part("gathers", "none: this program does not read it")
    for one in explanation.gathers[:most]:
        yield from _gather(one, explanation)
    if more := len(explanation.gathers[most:]):
        yield f"... and {more} more gathers: table() has them"
    if explanation.gradient is None:
        yield from _part("gradient", f"none: {explanation.why_no_gradient}")
    else:
        yield from _gradient(explanation.gradient, explanation)
    yield from _part("a step", _sum(explanation))


def _named(param: Param) -> str:
    dtype = name_of(param.dtype)
    also = f", also {', '.join(param.aliases)}" if param.aliases else ""
    unit = f"unit {param.unit}" if param.unit else "the root unit"
    return f"{param.path}{also}: {_shape(param.shape)} {dtype}, in {unit}"


def _slice(param: Param, plan: Plan) -> str:
    """What torch's tensor parallelism makes of the parameter."""
    axis, whole = plan.mesh.tensor, _shape(plan.whole_shape(param))
    if param.sliced is None:
        return f"none: each of the {axis.size} ranks of tensor parallelism computes with all of it"
    return f"part {axis.place} of {axis.size} of {whole}, along dimension {param.sliced}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{length:,}" for length in shape) or "0-dim"


def _at_rest(explanation: Explanation) -> str:
    param = explanation.param
    where = " in host memory" if explanation.plan.rests_on_host(param) else ""
    if explanation.rows is None:
        return f"all of it on this rank, {size(explanation.resting_bytes)}{where}"
    first, stop = explanation.rows
    count = param.shape[0]
    padded = explanation.plan.geometry(param).padding
    padding = f", with {padded} row{'s' * (padded > 1)} of padding" if padded else ""
    whole = size(param.rest_bytes)
    if first == stop:
        return f"no rows of {count:,} on this rank; {size(explanation.resting_bytes)} of padding{where}"
    padding += f", as {param.frozen_format}" if param.frozen_format else ""
    rows = f"row {first:,}" if stop - first == 1 else f"rows {first:,} to {stop - 1:,}"
    return f"{rows} of {count:,} on this rank, {size(explanation.resting_bytes)} of {whole}{padding}{where}"


def _gather(one: Gathered, explanation: Explanation) -> Iterator[str]:
    yield one.launch.phase
    yield from _code("gather", one.launch)
    yield from _part("", f"{_company(one.bucket, one.bucket_bytes, explanation.param)}; {one.why_launch}")
    yield from _code("wait", one.wait)
    if one.first_read is not None and one.last_read is not None:
        yield from _code("first use", one.first_read, one.launch)
        if one.last_read != one.first_read:
            yield from _code("last use", one.last_read, one.launch)
    if one.free is None:
        yield from _part("  free", f"never: {one.why_free}")
    else:
        yield from _code("free", one.free, one.launch)
        yield from _part("", one.why_free)
    memory = f"; at most {size(one.gathered_at_most)} of all gathered parameters are alive meanwhile"
    memory = memory if one.free is not None else ""
    yield from _part("  memory", f"{size(one.nbytes)} of its own{memory}")
    changed = ", if an optimizer has changed it since the last gather" if explanation.param.resident else ""
    param = explanation.param
    form = param.frozen_format or (param.gather_format if explanation.plan.gathers_bytes(param) else None)
    yield from _part("  bytes", f"{_travels(one, form, rounds='to nearest')}{changed}")
    yield from _time(one, explanation)


def _gradient(one: Reduced, explanation: Explanation) -> Iterator[str]:
    yield "gradient"
    if one.made is not None:
        yield from _code("made", one.made)
    if one.wait is None:
        yield from _code("defer", one.launch)
        yield from _part("", one.why_wait)
        return
    yield from _code("reduce", one.launch)
    starts = "as soon as the last of these gradients is made" if len(one.bucket) > 1 else "as soon as it is made"
    yield from _part("", f"{_company(one.bucket, one.bucket_bytes, explanation.param)}; it starts {starts}")
    if one.across is not None:
        yield from _code("across", one.across)
        yield from _part("", "its mean inside of this copy is handed on where the next reduction starts")
    yield from _code("wait", one.wait)
    yield from _part("", one.why_wait)
    param, plan = explanation.param, explanation.plan
    trades = {over: plan.reduces_bytes(param, over) for over in plan.reduced_over(param)}
    form = param.reduce_format if trades.get(SHARD) else None
    yield from _part("  bytes", _travels(one, form, rounds="at random"))
    if (across := param.reduce_format) is not None and trades.get(REPLICATE):
        sent, whole = (plan.reduce_sends(param, over, plan.mesh.shard.place) for over in (REPLICATE, SHARD))
        off = f"off by at most {across.error('at random')}, and {across.error('to nearest')} of the mean"
        yield from _part(
            "", f"{whole:,} B of them inside of this copy, exactly; {sent:,} B between copies, as {across}: {off}"
        )
    yield from _time(one, explanation)


def _travels(one: Gathered | Reduced, form: Format | None, rounds: str) -> str:
    text = f"this rank sends {one.sent_bytes:,} B and receives {one.received_bytes:,} B of it"
    return text if form is None else f"{text}, as {form}: rounded {rounds}, off by at most {form.error(rounds)}"


def _company(bucket: Sequence[str], nbytes: int, param: Param) -> str:
    others = len(bucket) - 1
    if not others:
        return "alone"
    return f"in a bucket of {size(nbytes)} with {others} other{'s' * (others > 1)} of {param.unit or 'the root unit'}"


def _time(one: Gathered | Reduced, explanation: Explanation) -> Iterator[str]:
    if one.wire_seconds is None or one.exposed_seconds is None:
        return
    what = "its bucket" if len(one.bucket) > 1 else "it"
    exposed = (
        f"compute waits {duration(one.exposed_seconds)} for {what}" if one.exposed_seconds else "hidden behind compute"
    )
    yield from _part("  time", f"{duration(one.wire_seconds)} on the wire of {explanation.device}, {exposed}")


def _sum(explanation: Explanation) -> str:
    count = len(explanation.gathers)
    times = ["not gathered", "gathered once", "gathered twice"][count] if count < 3 else f"gathered {count} times"
    exposed = explanation.exposed_seconds
    waits = "" if exposed is None else f"; {duration(exposed)} exposed" if exposed else "; no time exposed"
    return (
        f"{times}; this rank sends {explanation.sent_bytes:,} B and receives {explanation.received_bytes:,} B "
        f"for it{waits}"
    )


def _code(name: str, line: Line, before: Line | None = None) -> Iterator[str]:
    """The line, and its phase if that is another than that of the line before."""
    phase = f"  (in {line.phase})" if before is not None and line.phase != before.phase else ""
    yield clip(f"  {name:{HANGING - 2}}{line.code}", WIDTH - len(phase)) + phase


def _part(name: str, text: str) -> Iterator[str]:
    indent = " " * HANGING
    yield from wrap(text, WIDTH, initial_indent=f"{name:{HANGING}}", subsequent_indent=indent)
