"""A timeline as text."""

from __future__ import annotations

from tests.harness.timelines import make_param
from thunder_zero.plan import Plan
from thunder_zero.policy import Policy
from thunder_zero.report.timeline_text import format_timeline
from thunder_zero.schedule.timeline import Kind, Op, Timeline, Value

POLICY = Policy()
PLAN = Plan(POLICY, 2, 0, (make_param("h.0.w", (4, 2), "h.0", POLICY), make_param("h.0.b", (4,), "h.0", POLICY)))
FORWARD = (
    Op(Kind.GATHER, ("t_w", "t_b"), ("f",), ("h.0.w", "h.0.b")),
    Op(Kind.WAIT, ("f",), ("w", "b"), ("h.0.w", "h.0.b")),
    Op(Kind.COMPUTE, ("x", "w", "b"), ("y",)),
    Op(Kind.FREE, ("w",), params=("h.0.w",)),
)
BACKWARD = (
    Op(Kind.GATHER, ("t_w",), ("f_again",), ("h.0.w",), backward=True, again=True),
    Op(Kind.COMPUTE, ("y",), backward=True),
)


def text(*ops: Op) -> list[str]:
    return format_timeline(Timeline(ops, {"f": Value(40, "float32")}, PLAN)).splitlines()


def test_one_operation_a_line() -> None:
    assert text(*FORWARD, *BACKWARD) == [
        "gather   f <- t_w, t_b                     h.0.w, h.0.b",
        "wait     w, b <- f                         h.0.w, h.0.b",
        "compute  y <- x, w, b",
        "free     w                                 h.0.w",
        "-- backward --",
        "gather   f_again <- t_w                    h.0.w  again",
        "compute  <- y",
    ]


def test_forward_alone_has_no_border() -> None:
    assert text(*FORWARD)[-1].startswith("free")
    assert text(*BACKWARD)[0] == "-- backward --"


def test_long_names_are_not_cut() -> None:
    name = "t_" + "very_" * 10 + "long"
    (line,) = text(Op(Kind.GATHER, (name,), ("f",), ("h.0.w",)))
    assert line == f"gather   f <- {name}  h.0.w"
