"""The collectives of a step, and why some are not hidden behind compute. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thunder_zero.plan.amounts import duration
from thunder_zero.schedule.timeline import Kind, Op
from thunder_zero.tools.ask.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of time on a lane: of compute, or a ring of the launch of a line.

    Attributes:
        lane: such as "compute", "gather shard" or "reduce replicate": one for each kind of launch and wire; "tensor" of
            torch's tensor parallelism.
        line: position on the page.
        start, end: seconds since the step began.
        waits: compute waits here for the wire.
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
        op: position of the launch in the timeline.
        kind: "gather", "reduce", or "tensor" of torch's tensor parallelism.
        unit: whose parameters travel, or that computes with slices.
        label: these in a few words, or what is sent of which value.
        sent_bytes: by this rank.
        launch, wait: positions of their lines on the page.
        launched, waited: seconds since the step began, when compute starts it, and reaches its wait.
        wire_seconds: on the wires.
        exposed_seconds: how long compute waits for it.
        why: why it stands there.
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
        """The share of its time on the wires that compute does not wait for: 0 to 1."""
        return 1.0 if not self.wire_seconds else max(0.0, 1 - self.exposed_seconds / self.wire_seconds)


OF_SLICES = {
    "all_reduce": "each rank has a part of a sum, and the lines behind it need all of it",
    "gather": "the lines behind it need the parts of all ranks",
    "scatter": "each rank has a part of a sum, and the lines behind it need some of its rows",
    "all_to_all": "the lines behind it need other parts than those that this rank has",
}


def why_there(op: Op, explanations: Mapping[str, Explanation]) -> str:
    """Why a launch is where it is, as the explanation of one of its parameters says."""
    if op.moves:
        return OF_SLICES[op.moves]
    explained = explanations[op.params[0]]
    if op.kind is Kind.GATHER:
        place = "backward" if op.backward else "forward", op.source[0]
        return next(one.why_launch for one in explained.gathers if (one.launch.phase, one.launch.position) == place)
    reduced = explained.gradient
    return "" if reduced is None else f"it starts as soon as its gradients are made; its wait: {reduced.why_wait}"


def why_exposed(wire: float, exposed: float, ahead: float, queued: float, before: str) -> str:
    """Why compute waits for what takes ``wire`` seconds, is launched ``ahead`` of its wait, and stands in the queue of
    its wire first, behind what is there before it."""
    if not exposed:
        return ""
    lies = f"only {duration(ahead)} lie between launch and wait" if ahead else "its wait follows at once"
    queue = f", and for {duration(queued)} the wire still carries {before or 'others'}" if queued else ""
    return f"it takes {duration(wire)} on the wire; {lies}{queue}"
