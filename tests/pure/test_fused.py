"""Pointwise lines between products are one kernel: what it reads and writes, by hand-made timelines."""

from __future__ import annotations

from thunder_zero.cost.fused import fused_traffic
from thunder_zero.plan import Plan
from thunder_zero.policy import Policy
from thunder_zero.schedule.timeline import Kind, Op, Timeline, Value, Work

PLAN = Plan(Policy(0), 2, 0, ())
P, M, V = Work.POINTWISE, Work.MATMUL, Work.VIEW


def line(work: Work, to: str, *reads: str, backward: bool = False) -> Op:
    return Op(Kind.COMPUTE, reads, (to,), work=work, backward=backward)


def traffic(*ops: Op, views: dict[str, str] | None = None) -> tuple[int, ...]:
    """Each value has 10 bytes."""
    names = {name for op in ops for name in (*op.reads, *op.writes)}
    values = {name: Value(10, "float32", (views or {}).get(name, "")) for name in names}
    end = Op(Kind.COMPUTE, (ops[-1].writes[0],), backward=ops[-1].backward)
    return fused_traffic(Timeline((*ops, end), values, PLAN))[:-1]


def test_lines_between_products_read_and_write_once() -> None:
    ops = line(M, "h", "x", "w"), line(P, "a", "h"), line(P, "b", "a", "x"), line(M, "y", "b", "w")
    assert traffic(*ops) == (30, 0, 30, 30)  # reads h and x, writes b


def test_what_another_kernel_or_half_reads_is_written() -> None:
    ops = line(P, "a", "x"), line(P, "b", "a"), line(M, "y", "b", "w"), line(P, "c", "a", "y")
    assert traffic(*ops) == (0, 30, 30, 30)  # reads x, writes a and b; then a and y, c
    assert traffic(line(P, "a", "x"), line(P, "b", "a"), line(P, "g", "a", "b", backward=True)) == (0, 30, 30)


def test_a_line_may_come_as_late_as_its_reader() -> None:
    """As one that backward computes again from what is saved."""
    ops = line(M, "h", "x", "w"), line(P, "again", "saved"), line(P, "b", "h", "again"), line(M, "y", "b", "w")
    assert traffic(*ops) == (30, 0, 30, 30)  # reads h and saved, writes b


def test_views_are_free_and_their_memory_is_read_once() -> None:
    ops = line(V, "v", "x"), line(P, "a", "v"), line(P, "b", "a", "x"), line(M, "y", "b", "w")
    assert traffic(*ops, views={"v": "x"}) == (0, 0, 20, 30)


def test_kernels_that_no_value_connects_are_apart() -> None:
    assert traffic(line(P, "a", "x"), line(P, "b", "z"), line(M, "y", "a", "b")) == (20, 20, 30)


def test_a_reshape_is_free_and_what_it_shows_is_written() -> None:
    """Strides decide whether it copies; a trace does not know them, and a forecast is a lower bound."""
    assert traffic(line(V, "v", "x"), line(M, "y", "v", "w")) == (0, 30)
    assert traffic(line(P, "a", "x"), line(V, "v", "a"), line(M, "y", "v", "w")) == (0, 20, 30)
