"""Backward recomputes cheap values instead of saving them: the choice, the places of the copies, planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import lines, program, same_results, split, with_policy
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.free import free
from thunder_zero.schedule.ops import Compute, Free, Gather, reading
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.recompute import cheapest_to_keep, recompute
from thunder_zero.schedule.regather import regather
from thunder_zero.schedule.timeline import NUMBER, ScheduleError, Timeline, Value
from thunder_zero.schedule.units import runs
from thunder_zero.schedule.verify import check_schedule
from thunder_zero.schedule.verify_recompute import check_recompute

CHEAP, UNITS = (Policy(recompute=mode, reshard_after_forward=True, prefetch=0) for mode in ("cheap", "units"))


def saved(timeline: Timeline) -> set[str]:
    """Return the values of forward that backward reads, without parameters and inputs."""
    written = {name for op in timeline.ops if not op.backward for name in op.writes}
    reads = {name for op in timeline.ops[:-1] if op.backward for name in op.reads}
    return {name for name in reads & written if name not in timeline.plan.by_name}


def recomputed(timeline: Timeline) -> list[str]:
    """Return the values that each copy writes, by their names in forward."""
    return [" ".join(op.writes).replace("_again", "") for op in timeline.ops if timeline.recomputes(op)]


def gathers_in_backward(timeline: Timeline) -> list[tuple[str, ...]]:
    return [op.params for op in timeline.ops if isinstance(op, Gather) and op.backward]


THREE = "h <-* x; a <- h; b <- a; --; gw <-* g b; gh <- g a"


def test_copies_come_right_before_their_first_reader() -> None:
    after = recompute(program(THREE, CHEAP, {"b": 4, "a": 16}))
    copies = split("a_again <- h; b_again <- a_again; gw <- g b_again; gh <- g a_again")
    assert lines(after, backward=True)[:-1] == copies
    assert after.values["a_again"] == after.values["a"]


@pytest.mark.parametrize(
    ("text", "nbytes", "kept"),
    [
        (THREE, {}, {"a"}),
        (THREE, {"a": 9}, {"h"}),
        ("h <-* x; a <-* h; --; gw <- g a h", {}, {"h", "a"}),  # a matmul is not cheap
        ("h <-? x; a <-? h; --; gw <- g a h", {}, {"h", "a"}),  # unknown work is not cheap
        ("h <-* x; m <-~ h; d <- h m; --; gw <- g d h", {"m": 2}, {"h", "m"}),  # the mask is kept
        ("k <- ; h <-* x; a <- h k; --; gw <- g a h k", {}, {"h"}),  # a constant
        ("a <- x; --; gw <- g a", {}, {"a"}),  # the caller may have dropped the input
        ("a <- x; --; gw <- g a x", {}, set()),  # backward reads x anyway
        ("h <-* x; e <-/ h; --; gw <- g e", {"e": 80}, {"h"}),  # an expanded view
        ("h <-* x; e <-/ h; --; gw <- g e", {"h": 80}, {"h"}),  # a part keeps all of h
        ("h <-* x; s <-/ h; a <- s; --; gw <- g a", {"h": 80, "a": 9}, {"a"}),
        ("h <-* x; a <- h; b <- h; --; gw <- g a b", {"h": 15}, {"h"}),  # 15 rather than 8 + 8
        ("h <-* x; a <- h; b <- h; --; gw <- g a b", {"h": 16}, {"a", "b"}),  # equal bytes: recompute nothing
        ("a <- x; u <-! a x; --; gw <- g a", {}, {"a"}),  # x has other values in backward
        ("v <-/ x; a <- v; u <-! a x; --; gw <- g a", {}, {"a"}),  # so has its view
        ("out <-* x; a <- out; --; gw <- g a", {"a": 99}, {"a"}),  # the caller may overwrite an output
        ("out <-* x; a <- out; --; gw <- g a out", {"a": 99}, {"out"}),  # unless backward reads it anyway
    ],
)
def test_the_fewest_bytes_are_saved(text: str, nbytes: dict[str, int], kept: set[str]) -> None:
    timeline = program(text, CHEAP, nbytes)
    after = recompute(timeline)
    assert saved(after) == kept
    check_recompute(after, timeline)
    assert same_results(after, timeline)
    nothing = with_policy(timeline, recompute="none")
    assert recompute(nothing) is nothing


NORM = """
    gather u.w; gather u.bias; gather u.v
    h <-* x u.v; n <- h u.w; b <- n u.bias; out <-* b u.v
    --
    gb <-* g u.v; gv <-* g b; gw <- g n; gn <- g u.w; gh <- g h; gx <-* gh u.v
"""


@pytest.mark.parametrize(
    ("policy", "kept", "gathered"),
    [
        (CHEAP, {"h", "b"}, {"u.w", "u.v"}),  # backward gathers the weight, not the bias
        (UNITS, {"h"}, {"u.w", "u.v", "u.bias"}),
        (Policy(stage=2), {"h", "b"}, set()),  # forward has freed the bias
        (Policy(stage=2, recompute="units"), {"h"}, set()),
        (Policy(stage=1), {"h"}, set()),
    ],
)
def test_a_reader_of_a_parameter_is_recomputed_only_where_backward_has_the_parameter(
    policy: Policy, kept: set[str], gathered: set[str]
) -> None:
    after = run(program(NORM, policy))
    assert saved(after) == kept
    assert {path for params in gathers_in_backward(after) for path in params} == gathered


@pytest.mark.parametrize(
    ("backward", "of_zero3", "of_zero2"),
    [
        ("gb <- g b; gw <-* g u.w h", {"h", "b"}, {"h"}),  # ZeRO-3 gathers the weight later; ZeRO-2 still has it
        ("gw <-* g u.w h; gb <- gw b", {"h", "b"}, {"h", "b"}),  # freed after its last use
    ],
)
def test_recomputation_does_not_wait_for_a_parameter_gathered_later_or_freed(
    backward: str, of_zero3: set[str], of_zero2: set[str]
) -> None:
    text = f"gather u.w; h <-* x; b <- h u.w; --; {backward}"
    assert saved(run(program(text, CHEAP))) == of_zero3
    assert saved(run(program(text, Policy(stage=2)))) == of_zero2


TWO_UNITS = """
    gather embedding; x0 <-* x embedding
    gather u.w; gather u.bias; x1 <-* x0 u.w; x2 <- x1 u.bias; m <-~ x2; x3 <- x2 m x0
    gather v.w; gather v.bias; n <- x3; y1 <-* n v.w; y2 <- y1 v.bias; y3 <- y2 x3
    gather head; z <-* y3 head
    --
    gr <- g y3; gy <-* g head
    ga <- gy y2; gb <-* ga v.w; gc <-* gb n; gd <- gc x3
    ge <- gd m x2; gf <-* ge u.w; gh <-* gf x0
"""


def test_units_save_their_borders_and_random_values() -> None:
    timeline = program(TWO_UNITS, UNITS, {"m": 1})
    after = run(timeline)
    assert saved(after) == {"x0", "x3", "y3", "m"}
    assert recomputed(after) == ["n", "y1", "y2", "x1", "x2"]
    assert same_results(after, timeline)
    assert saved(run(program(TWO_UNITS, UNITS, {"x3": 99, "m": 1}))) == {"x0", "x2", "y3", "m"}, "the border moves"
    assert gathers_in_backward(after) == [("head",), ("v.w", "v.bias"), ("u.w", "u.bias")], "with the biases"
    assert gathers_in_backward(run(program(TWO_UNITS, CHEAP))) == [("head",), ("v.w",), ("u.w",)]
    two_units = "gather u9.w; gather u10.w; y <-* x u9.w u10.w; --; gx <-* g y"
    assert [run.unit for run in runs(program(two_units, UNITS))] == ["u10"], (
        "a reader of two units belongs to the later unit"
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_that_is_kept_unsharded_keeps_its_biases_too(stage: int) -> None:
    after = run(program(TWO_UNITS, Policy(stage=stage, recompute="units")))
    assert saved(after) == {"x0", "x3", "y3", "m"}
    assert gathers_in_backward(after) == []
    freed = {path: op.backward for op in free(after).ops if isinstance(op, Free) for path in op.params}
    assert freed == {"embedding": False, **dict.fromkeys(("u.w", "u.bias", "v.w", "v.bias", "head"), True)}


# Faults

Fault = Callable[[Timeline], Timeline]


def with_copy(name: str, before: str) -> Fault:
    """Recompute a value right before backward writes ``before``, which then reads the copy."""

    def plant(timeline: Timeline) -> Timeline:
        (original,) = (op for op in timeline.ops if isinstance(op, Compute) and name in op.writes)
        copy = replace(original, writes=(f"{name}_copy",), backward=True, repeated=True)
        (index,) = (index for index, op in enumerate(timeline.ops) if before in op.writes)
        reader = reading(timeline.ops[index], {name: f"{name}_copy"})
        return timeline.with_ops([*timeline.ops[:index], copy, reader, *timeline.ops[index + 1 :]])

    return plant


def swapped(timeline: Timeline) -> Timeline:
    *ops, first, second, last = timeline.ops
    return timeline.with_ops([*ops, second, first, last])


FAULTY = """
    gather u.w; h <-* x; m <-~ h; b <- h u.w; c <- h; u <-! c x; e <- x
    --
    ga <- g u.w m c; gb <- ga e b m h; gc <- gb
"""


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (with_copy("m", "gb"), "m_copy.* does random work again, which recompute='cheap' does not allow"),
        (with_copy("h", "gb"), "h_copy.*does matmul work again"),
        (with_copy("e", "gb"), "e_copy.*computed again from x, whose memory an operation overwrites"),
        (with_copy("b", "gb"), r"reads u\.w for a copy, after all that read it without recomputing"),
        (swapped, "stands where the order without recomputing has compute"),
        (lambda timeline: timeline.with_ops(timeline.ops[:-2] + timeline.ops[-1:]), "stands where the order without"),
    ],
)
def test_a_faulty_choice_is_refused(plant: Fault, words: str) -> None:
    timeline = program(FAULTY, Policy(stage=2))
    with pytest.raises(ScheduleError, match=words):
        check_recompute(plant(timeline), timeline)


def test_recomputing_one_unit_allows_no_work_of_other_units() -> None:
    timeline = program(TWO_UNITS, Policy(stage=2, recompute_units=("v",)))
    check_recompute(with_copy("y1", "ga")(timeline), timeline)  # a matmul of v
    with pytest.raises(ScheduleError, match=r"x1_copy.*does matmul work again"):
        check_recompute(with_copy("x1", "gd")(timeline), timeline)


def test_each_pass_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # This pass copies an operation that draws random numbers.
    from thunder_zero.schedule import passes

    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, with_copy("m", "gb")))
    with pytest.raises(ScheduleError, match="is done again, but is not repeatable"):
        run(program(FAULTY, CHEAP))


def test_a_gather_that_only_copies_read_is_refused() -> None:
    timeline = program(TWO_UNITS, UNITS)
    with pytest.raises(ScheduleError, match=r"gathers v\.bias in backward, which only copies read"):
        check_schedule(with_policy(run(timeline), recompute="cheap"), timeline)


# The minimum cut


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], list[set[int] | None], set[int]]:
    """Draw bytes of values, the sources of each (None if it cannot be computed), and the wanted values."""
    count = draw(st.integers(1, 8))
    bits = st.integers(0, (1 << count) - 1).map(lambda some: {index for index in range(count) if some >> index & 1})
    made_from: list[set[int] | None] = [
        None if draw(st.integers(0, 3)) == 0 else {parent for parent in draw(bits) if parent < index}
        for index in range(count)
    ]
    return draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)), made_from, draw(bits)


def fewest_bytes(nbytes: list[int], made_from: list[set[int] | None], wanted: set[int]) -> int:
    """Return the fewest bytes, by trying all sets of kept values."""
    numbers = range(len(nbytes))
    sums = []
    for kept in (set(some) for count in range(len(nbytes) + 1) for some in combinations(numbers, count)):
        have = set(kept)
        for number in numbers:
            if (sources := made_from[number]) is not None and sources <= have:
                have.add(number)
        if wanted <= have:
            sums.append(sum(nbytes[number] for number in kept))
    return min(sums)


@given(graphs())
def test_the_cut_is_as_good_as_the_best_of_all_choices(
    graph: tuple[list[int], list[set[int] | None], set[int]],
) -> None:
    nbytes, made_from, wanted = graph
    kept, computed = cheapest_to_keep(nbytes, made_from, wanted)
    have = set(kept)
    for number in sorted(computed):
        sources = made_from[number]
        assert sources is not None
        assert sources <= have
        have.add(number)
    assert wanted <= have
    assert not kept & computed
    assert sum(nbytes[number] for number in kept) == fewest_bytes(nbytes, made_from, wanted)


def test_a_view_of_a_parameter_by_a_size_is_recomputed() -> None:
    # A size that differs from call to call is not data. Saving the view would keep the parameter alive.
    text = """
        s <-? x
        gather a.w
        v <-/ a.w s
        y <-* x v
        --
        gx <-* g v
    """
    timeline = program(text, CHEAP)
    assert "v" not in timeline.derived, "a value of data"
    numbers = timeline.with_ops(timeline.ops, {"s": Value(0, NUMBER)})
    assert numbers.derived.keys() == {"a.w", "v"}
    after = regather(numbers)
    assert [op.reads for op in after.ops if isinstance(op, Compute) and op.repeated] == [("a.w_again", "s")]
