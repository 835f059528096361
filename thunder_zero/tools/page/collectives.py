"""Describes the collectives of a step, and why compute waits for each collective. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thunder_zero.plan.amounts import duration
from thunder_zero.schedule.ops import Compute, Gather, Op
from thunder_zero.tools.ask.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval on a lane, in which compute or a collective runs."""

    # "compute", a kind of launch with its wire, such as "gather shard", or "tensor" for torch's tensor parallelism
    lane: str
    line: int  # the position of the bar's line on the page. The bar of a collective has the line of the launch.
    # start, end: times in seconds since the step began
    start: float
    end: float
    waits: bool = False  # True if compute waits for a wire


@dataclass(frozen=True, slots=True)
class Collective:
    """A launch with its wait."""

    op: int  # the position of the launch in the timeline
    kind: str  # "gather", "reduce", or "tensor" for torch's tensor parallelism
    backward: bool  # True if the launch is in backward
    unit: str  # the unit of the parameters. For tensor parallelism, the unit that computes.
    params: tuple[str, ...]  # paths of the parameters
    label: str  # a short name of the parameters. For tensor parallelism, the operation and the value.
    sent_bytes: int  # the bytes that this rank sends
    # launch, wait: positions of the lines of launch and wait on the page
    launch: int
    wait: int
    # launched, waited: the times at which launch and wait begin, in seconds since the step began
    launched: float
    waited: float
    wire_seconds: float  # time on the wires
    exposed_seconds: float  # time that compute waits for the collective
    why: str  # the reason for the position of the launch
    why_exposed: str  # the reason why compute waits for the collective; "" if compute does not wait

    @property
    def hidden_share(self) -> float:
        """The share of ``wire_seconds`` in which compute does not wait, from 0 to 1."""
        return 1.0 if not self.wire_seconds else max(0.0, 1 - self.exposed_seconds / self.wire_seconds)


OF_SLICES = {
    "all_reduce": "each rank has a part of a sum, and the lines behind it need all of it",
    "gather": "the lines behind it need the parts of all ranks",
    "scatter": "each rank has a part of a sum, and the lines behind it need some of its rows",
    "all_to_all": "the lines behind it need other parts than those that this rank has",
}


def why_there(op: Op, position: int, explanations: Mapping[str, Explanation]) -> str:
    """Return the reason for the position of a launch in its phase, from the explanation of its first parameter."""
    if isinstance(op, Compute) and op.exchange is not None:
        return OF_SLICES[op.exchange.moves]
    explanation = explanations[op.params[0]]
    if isinstance(op, Gather):
        place = "backward" if op.backward else "forward", position
        launches = ((gather.launch, gather.why_launch) for gather in explanation.gathers)
        return next(why for launch, why in launches if (launch.phase, launch.position) == place)
    reduced = explanation.gradient
    return "" if reduced is None else f"it starts as soon as its gradients are made; its wait: {reduced.why_wait}"


def why_exposed(wire: float, exposed: float, ahead: float, queued: float, earlier: str) -> str:
    """Return the reason why compute waits for a collective; "" if compute does not wait.

    Seconds: ``wire`` on the wires, ``exposed`` of waiting, ``ahead`` of compute between launch and wait, ``queued``
    behind the ``earlier`` collective on the wire.
    """
    if not exposed:
        return ""
    cause = f"only {duration(ahead)} lie between launch and wait" if ahead else "its wait follows at once"
    queue_text = f", and for {duration(queued)} the wire still carries {earlier or 'others'}" if queued else ""
    return f"it takes {duration(wire)} on the wire; {cause}{queue_text}"
