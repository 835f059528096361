"""Holds the life of one parameter in one program: frozen data with a printed form.

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
from thunder_zero.plan.traffic import reduce_traffic
from thunder_zero.tools.printing.text import place_of
from thunder_zero.tools.printing.words import WIDTH, clip, summed_up
from thunder_zero.tools.table.rows import Row

HANGING = 12  # columns
MOST = 2  # the most gathers in a summary


@dataclass(frozen=True, slots=True)
class Gathered:
    """A gather of the parameter, from the launch to the free."""

    bucket: tuple[str, ...]  # paths of all parameters of the launch, including the explained parameter
    bucket_bytes: int  # the full bytes of the bucket
    launch: Row  # the line that starts the gather
    why_launch: str  # the reason why the gather does not start earlier
    wait: Row  # the line that ends the gather. Later lines can read the parameter.
    # first_read, last_read: the first and the last line that reads the parameter, or a view or a cast of it. None if no
    # line reads the parameter.
    first_read: Row | None
    last_read: Row | None
    free: Row | None  # the line that frees the parameter; None if the parameter stays gathered
    why_free: str  # the reason why the parameter is freed at this line, or stays gathered
    # sent_bytes, received_bytes: bytes of this parameter that this rank sends and receives
    sent_bytes: int
    received_bytes: int
    nbytes: int  # the bytes of the full parameter, which are allocated from the launch to the free
    gathered_at_most: int  # the most bytes of gathered parameters alive at once between launch and free
    wire_seconds: float | None = None  # how long its bucket is on the wires; None without a device
    exposed_seconds: float | None = None  # how long compute waits for its bucket; None without a device


@dataclass(frozen=True, slots=True)
class Reduced:
    """The gradient of the parameter."""

    made: Row | None  # the line that computes the full gradient; None if several lines compute it
    launch: Row  # the line that starts its reduction; under ``no_sync``, the line that defers it
    across: Row | None  # the line that starts the reduction over replicas; None without replicas
    wait: Row | None  # the line that ends the reduction; None if it is deferred
    why_wait: str  # the reason for the position of the wait, or for the deferral of the gradient
    # paths of all parameters whose gradients the launch reduces, including the explained parameter
    bucket: tuple[str, ...]
    bucket_bytes: int  # the full bytes of the bucket's gradients
    # sent_bytes, received_bytes: bytes of this gradient that this rank sends and receives
    sent_bytes: int
    received_bytes: int
    nbytes: int  # the full size of the gradient
    wire_seconds: float | None = None  # how long its bucket is on the wires; None without a device
    exposed_seconds: float | None = None  # how long compute waits for its bucket; None without a device


@dataclass(frozen=True, repr=False)
class Explanation:
    """The life of one parameter in a step of one rank.

    Attributes:
        param: the parameter's entry in the plan: path, shape, dtypes, unit, lifetime.
        plan: the plan of all parameters, with the rank and the world size.
        rows: the rows of this rank, as (first row, last row + 1); None if the rank has all rows.
        resting_bytes: the bytes of this rank's rows, padding included, which it holds between steps.
        lifetime: a description of when the stage gathers and frees the parameter.
        gathers: the gathers of the parameter, in the order in which they run.
        gradient: the gradient of the parameter, if any.
        why_no_gradient: the reason why the parameter has no gradient; "" if it has a gradient.
        device: the name of the device whose seconds are forecast; None without a device.
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
        """Bytes that this rank sends for the parameter in a step."""
        return sum(gather.sent_bytes for gather in self.gathers) + (self.gradient.sent_bytes if self.gradient else 0)

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives for the parameter in a step."""
        return sum(gather.received_bytes for gather in self.gathers) + (
            self.gradient.received_bytes if self.gradient else 0
        )

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds that compute waits for the buckets of the parameter in a step; None without a device."""
        parts = [gather.exposed_seconds for gather in self.gathers]
        parts += [self.gradient.exposed_seconds] if self.gradient else []
        return None if self.device is None else sum(part for part in parts if part is not None)

    def __repr__(self) -> str:
        return summed_up(self, f"{_name(self.param)}; {place_of(self.plan)}; {_totals(self)}")

    def __str__(self) -> str:
        """Return text in 100 columns: the rows, the first gathers, the gradient and the bytes of a step."""
        return "\n".join(_lines(self, MOST))

    def table(self) -> str:
        """Return the text of ``str(self)``, but with all gathers."""
        return "\n".join(_lines(self, len(self.gathers)))


def _lines(explanation: Explanation, max_gathers: int) -> Iterator[str]:
    param, plan = explanation.param, explanation.plan
    yield from wrap(f"{_name(param)}; {place_of(plan)}", WIDTH)
    if plan.mesh.is_sliced:
        yield from _part("slice", _slice(param, plan))
    yield from _part("at rest", _at_rest(explanation))
    yield from _part("", explanation.lifetime)
    if param.sharded and not explanation.gathers:
        yield from _part("gathers", "none: this program does not read it")
    for gathered in explanation.gathers[:max_gathers]:
        yield from _gather_lines(gathered, explanation)
    if hidden_gathers := len(explanation.gathers[max_gathers:]):
        yield f"... and {hidden_gathers} more gathers: table() has them"
    if explanation.gradient is None:
        yield from _part("gradient", f"none: {explanation.why_no_gradient}")
    else:
        yield from _gradient_lines(explanation.gradient, explanation)
    yield from _part("a step", _totals(explanation))


def _name(param: Param) -> str:
    dtype = name_of(param.dtype)
    aliases = f", also {', '.join(param.aliases)}" if param.aliases else ""
    unit = f"unit {param.unit}" if param.unit else "the root unit"
    return f"{param.path}{aliases}: {_shape(param.shape)} {dtype}, in {unit}"


def _slice(param: Param, plan: Plan) -> str:
    """Describe this rank's slice of the parameter, from torch's tensor parallelism."""
    axis, whole = plan.mesh.tensor, _shape(plan.whole_shape(param))
    if param.sliced is None:
        return f"none: each of the {axis.size} ranks of tensor parallelism computes with all of it"
    return f"part {axis.place} of {axis.size} of {whole}, along dimension {param.sliced}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{length:,}" for length in shape) or "0-dim"


def _at_rest(explanation: Explanation) -> str:
    param = explanation.param
    place = " in host memory" if explanation.plan.rests_on_host(param) else ""
    if explanation.rows is None:
        return f"all of it on this rank, {size(explanation.resting_bytes)}{place}"
    first, stop = explanation.rows
    count = param.shape[0]
    padded = explanation.plan.geometry(param).padding
    padding = f", with {padded} row{'s' * (padded > 1)} of padding" if padded else ""
    whole = size(param.rest_bytes)
    if first == stop:
        return f"no rows of {count:,} on this rank; {size(explanation.resting_bytes)} of padding{place}"
    padding += f", as {param.frozen_format}" if param.frozen_format else ""
    rows = f"row {first:,}" if stop - first == 1 else f"rows {first:,} to {stop - 1:,}"
    return f"{rows} of {count:,} on this rank, {size(explanation.resting_bytes)} of {whole}{padding}{place}"


def _gather_lines(gathered: Gathered, explanation: Explanation) -> Iterator[str]:
    yield gathered.launch.phase
    yield from _code("gather", gathered.launch)
    yield from _part(
        "", f"{_company(gathered.bucket, gathered.bucket_bytes, explanation.param)}; {gathered.why_launch}"
    )
    yield from _code("wait", gathered.wait)
    if gathered.first_read is not None and gathered.last_read is not None:
        yield from _code("first use", gathered.first_read, gathered.launch)
        if gathered.last_read != gathered.first_read:
            yield from _code("last use", gathered.last_read, gathered.launch)
    if gathered.free is None:
        yield from _part("  free", f"never: {gathered.why_free}")
    else:
        yield from _code("free", gathered.free, gathered.launch)
        yield from _part("", gathered.why_free)
    memory = f"; at most {size(gathered.gathered_at_most)} of all gathered parameters are alive meanwhile"
    memory = memory if gathered.free is not None else ""
    yield from _part("  memory", f"{size(gathered.nbytes)} of its own{memory}")
    condition = ", if an optimizer has changed it since the last gather" if explanation.param.resident else ""
    param = explanation.param
    encoding = param.frozen_format or (param.gather_format if explanation.plan.gathers_bytes(param) else None)
    yield from _part("  bytes", f"{_traffic(gathered, encoding, rounds='to nearest')}{condition}")
    yield from _time(gathered, explanation)


def _gradient_lines(reduced: Reduced, explanation: Explanation) -> Iterator[str]:
    yield "gradient"
    if reduced.made is not None:
        yield from _code("made", reduced.made)
    if reduced.wait is None:
        yield from _code("defer", reduced.launch)
        yield from _part("", reduced.why_wait)
        return
    yield from _code("reduce", reduced.launch)
    starts = "as soon as the last of these gradients is made" if len(reduced.bucket) > 1 else "as soon as it is made"
    yield from _part("", f"{_company(reduced.bucket, reduced.bucket_bytes, explanation.param)}; it starts {starts}")
    if reduced.across is not None:
        yield from _code("across", reduced.across)
        yield from _part("", "its mean inside of this copy is handed on where the next reduction starts")
    yield from _code("wait", reduced.wait)
    yield from _part("", reduced.why_wait)
    param, plan = explanation.param, explanation.plan
    encoded_on = {axis: plan.reduces_bytes(param, axis) for axis in plan.reduced_over(param)}
    encoding = param.reduce_format if encoded_on.get(SHARD) else None
    yield from _part("  bytes", _traffic(reduced, encoding, rounds="at random"))
    if (encoding := param.reduce_format) is not None and encoded_on.get(REPLICATE):
        sent, whole = (reduce_traffic(plan, param, axis).sent for axis in (REPLICATE, SHARD))
        error = f"off by at most {encoding.error('at random')}, and {encoding.error('to nearest')} of the mean"
        yield from _part(
            "", f"{whole:,} B of them inside of this copy, exactly; {sent:,} B between copies, as {encoding}: {error}"
        )
    yield from _time(reduced, explanation)


def _traffic(step: Gathered | Reduced, encoding: Format | None, rounds: str) -> str:
    text = f"this rank sends {step.sent_bytes:,} B and receives {step.received_bytes:,} B of it"
    rounding = "" if encoding is None else f", as {encoding}: rounded {rounds}, off by at most {encoding.error(rounds)}"
    return text + rounding


def _company(bucket: Sequence[str], nbytes: int, param: Param) -> str:
    count = len(bucket) - 1
    if not count:
        return "alone"
    return f"in a bucket of {size(nbytes)} with {count} other{'s' * (count > 1)} of {param.unit or 'the root unit'}"


def _time(step: Gathered | Reduced, explanation: Explanation) -> Iterator[str]:
    if step.wire_seconds is None or step.exposed_seconds is None:
        return
    subject = "its bucket" if len(step.bucket) > 1 else "it"
    exposed = (
        f"compute waits {duration(step.exposed_seconds)} for {subject}"
        if step.exposed_seconds
        else "hidden behind compute"
    )
    yield from _part("  time", f"{duration(step.wire_seconds)} on the wire of {explanation.device}, {exposed}")


def _totals(explanation: Explanation) -> str:
    count = len(explanation.gathers)
    times = ["not gathered", "gathered once", "gathered twice"][count] if count < 3 else f"gathered {count} times"
    exposed = explanation.exposed_seconds
    waits = "" if exposed is None else f"; {duration(exposed)} exposed" if exposed else "; no time exposed"
    return (
        f"{times}; this rank sends {explanation.sent_bytes:,} B and receives {explanation.received_bytes:,} B "
        f"for it{waits}"
    )


def _code(name: str, line: Row, previous: Row | None = None) -> Iterator[str]:
    """Yield the text of a trace's line. The phase is included if it differs from the phase of ``previous``."""
    phase = f"  (in {line.phase})" if previous is not None and line.phase != previous.phase else ""
    yield clip(f"  {name:{HANGING - 2}}{line.statement}", WIDTH - len(phase)) + phase


def _part(name: str, text: str) -> Iterator[str]:
    indent = " " * HANGING
    yield from wrap(text, WIDTH, initial_indent=f"{name:{HANGING}}", subsequent_indent=indent)
