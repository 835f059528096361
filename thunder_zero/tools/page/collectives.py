"""Describes the collectives of a step, and why some are not hidden behind compute. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thunder_zero.plan.amounts import duration
from thunder_zero.schedule.timeline import Kind, Op
from thunder_zero.tools.ask.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval on a lane: compute, or the ring of a collective.

    Attributes:
        lane: "compute", a kind of launch and its wire such as "gather shard" or "reduce replicate", or "tensor" for
            torch's tensor parallelism.
        line: the position of its line on the page; a ring has the line of its launch.
        start, end: seconds since the step began.
        waits: True if compute waits for a wire.
    """

    lane: str
    line: int
    start: float
    end: float
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """A launch with its wait.

    Attributes:
        op: the position of the launch in the timeline.
        kind: "gather", "reduce", or "tensor" for torch's tensor parallelism.
        backward: True if it is launched in backward.
        unit: the unit of its parameters, or the unit that computes with slices.
        params: paths of its parameters.
        label: its parameters in a few words; for tensor parallelism the operation and the value.
        sent_bytes: the bytes that this rank sends.
        launch, wait: positions of the lines of launch and wait on the page.
        launched, waited: when compute launches it and when compute reaches its wait, in seconds since the step began.
        wire_seconds: how long it is on the wires.
        exposed_seconds: how long compute waits for it.
        why: why the launch is where it is.
        why_exposed: why compute waits; "" if it is hidden.
    """

    op: int
    kind: str
    backward: bool
    unit: str
    params: tuple[str, ...]
    label: str
    sent_bytes: int
    launch: int
    wait: int
    launched: float
    waited: float
    wire_seconds: float
    exposed_seconds: float
    why: str
    why_exposed: str

    @property
    def hidden_share(self) -> float:
        """The share of its time on the wires that compute does not wait for, from 0 to 1."""
        return 1.0 if not self.wire_seconds else max(0.0, 1 - self.exposed_seconds / self.wire_seconds)


OF_SLICES = {
    "all_reduce": "each rank has a part of a sum, and the lines behind it need all of it",
    "gather": "the lines behind it need the parts of all ranks",
    "scatter": "each rank has a part of a sum, and the lines behind it need some of its rows",
    "all_to_all": "the lines behind it need other parts than those that this rank has",
}


def why_there(op: Op, explanations: Mapping[str, Explanation]) -> str:
    """Return why a launch is where it is, from the explanation of its first parameter."""
    if op.moves:
        return OF_SLICES[op.moves]
    explanation = explanations[op.params[0]]
    if op.kind is Kind.GATHER:
        place = "backward" if op.backward else "forward", op.source[0]
        launches = ((gather.launch, gather.why_launch) for gather in explanation.gathers)
        return next(why for launch, why in launches if (launch.phase, launch.position) == place)
    reduced = explanation.gradient
    return "" if reduced is None else f"it starts as soon as its gradients are made; its wait: {reduced.why_wait}"


def why_exposed(wire: float, exposed: float, ahead: float, queued: float, before: str) -> str:
    """Return why compute waits for a collective; "" if it does not.

    Args:
        wire: how long the collective is on the wires, in seconds.
        exposed: how long compute waits for it.
        ahead: seconds of compute between its launch and its wait.
        queued: seconds for which its wire is busy after the launch.
        before: what the wire carries meanwhile.
    """
    if not exposed:
        return ""
    lies = f"only {duration(ahead)} lie between launch and wait" if ahead else "its wait follows at once"
    queue = f", and for {duration(queued)} the wire still carries {before or 'others'}" if queued else ""
    return f"it takes {duration(wire)} on the wire; {lies}{queue}"
