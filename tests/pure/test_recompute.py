"""What backward computes again instead of saving: the choice, the places of the copies, and planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given

from tests.harness.tiers import of_tier
from tests.harness.timelines import Terms, interpret, make_param, timelines
from thunder_zero.plan import Plan
from thunder_zero.policy import Policy
from thunder_zero.schedule.fault import ScheduleError
from thunder_zero.schedule.min_cut import cheapest_to_keep
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.recompute import recompute
from thunder_zero.schedule.timeline import Kind, Op, Timeline, Value, Work, gathered_bytes
from thunder_zero.schedule.units import runs
from thunder_zero.schedule.verify import check_schedule
from thunder_zero.schedule.verify_recompute import check_recompute

CHEAP, UNITS = Policy(stage=3), Policy(stage=3, recompute="units")
WORK = {"": Work.POINTWISE, "*": Work.MATMUL, "?": Work.OTHER, "~": Work.RANDOM, "/": Work.VIEW}


def program(text: str, policy: Policy = CHEAP, nbytes: Mapping[str, int] = MappingProxyType({})) -> Timeline:
    """A timeline from lines such as ``y <-* x w`` (forward, then after ``--`` backward).

    The mark says the work: none for cheap pointwise work, ``*`` a matmul, ``?`` unknown, ``~`` random, ``/`` a view,
    ``!`` overwrites the second value that it reads. ``gather w`` gathers a parameter ``unit.w`` (and waits). Values
    have 8 bytes unless ``nbytes`` says otherwise.
    """
    paths = dict.fromkeys(re.findall(r"gather (\S+)", text))
    params = tuple(
        make_param(path, (9,) if "bias" in path else (3, 3), path.rpartition(".")[0], policy) for path in paths
    )
    ops: list[Op] = []
    values = {"x": Value(nbytes.get("x", 8), "float32")}
    backward = False
    for line in filter(None, map(str.strip, text.strip().splitlines())):
        at = (len(ops),)
        if line == "--":
            backward = True
            ops.append(Op(Kind.COMPUTE, (), ("g",), backward=True, source=at))
        elif line.startswith("gather "):
            path = line.split()[1]
            ops.append(Op(Kind.GATHER, (f"t_{path}",), (f"fut_{path}",), (path,), source=at))
            ops.append(Op(Kind.WAIT, (f"fut_{path}",), (path,), (path,), source=(len(ops),)))
            values[f"t_{path}"] = Value(20, "float32")
            values |= dict.fromkeys((f"fut_{path}", path), Value(36, "float32"))
        else:
            writes, mark, reads = re.fullmatch(r"(.*) <-(\S*)(.*)", line).groups()
            work, read, wrote = WORK.get(mark, Work.POINTWISE), tuple(reads.split()), tuple(writes.split())
            can = mark not in ("~", "!")
            updates = (read[1],) if mark == "!" else ()
            ops.append(Op(Kind.COMPUTE, read, wrote, (), backward, can, False, at, work, mark in ("", "/"), updates))
            base = values[read[0]].base or read[0] if mark == "/" else ""
            values |= {name: Value(nbytes.get(name, 8), "float32", base) for name in wrote}
    inputs = {"x": None, **{f"t_{path}": path for path in paths}}
    outputs = tuple(name for name in values if name.startswith("out"))
    ops.append(Op(Kind.COMPUTE, (*outputs, ops[-1].writes[0]), (), backward=backward, source=(len(ops),)))
    return Timeline(tuple(ops), values, Plan(policy, 2, 0, params), inputs)


def saved(timeline: Timeline) -> set[str]:
    """What backward reads of forward, without parameters and inputs."""
    written = {name for op in timeline.ops if not op.backward for name in op.writes}
    reads = {name for op in timeline.ops[:-1] if op.backward for name in op.reads}
    return {name for name in reads & written if name not in timeline.plan.by_name}


def again(timeline: Timeline) -> list[str]:
    """What each computation that is done again writes, as forward calls it."""
    return [" ".join(op.writes).replace("_again", "") for op in timeline.ops if op.again and op.kind is Kind.COMPUTE]


THREE = """
    h <-* x
    a <- h
    b <- a
    --
    gw <-* g b
    gh <- g a
"""


def test_copies_come_right_before_their_first_reader() -> None:
    after = recompute(program(THREE, nbytes={"b": 4, "a": 16}))
    assert [f"{' '.join(op.writes)} <- {' '.join(op.reads)}" for op in after.ops if op.backward][1:-1] == [
        "a_again <- h",
        "b_again <- a_again",
        "gw <- g b_again",
        "gh <- g a_again",
    ]
    assert after.values["a_again"] == after.values["a"]


@pytest.mark.parametrize(
    ("text", "nbytes", "kept"),
    [
        (THREE, {}, {"a"}),
        (THREE, {"a": 9}, {"h"}),
        (THREE, {"h": 40, "a": 40, "b": 4}, {"a"}),
        ("h <-* x\na <-* h\n--\ngw <- g a h", {}, {"h", "a"}),  # a matmul is not cheap
        ("h <-? x\na <-? h\n--\ngw <- g a h", {}, {"h", "a"}),  # nor is what nobody knows
        ("h <-* x\nm <-~ h\nd <- h m\n--\ngw <- g d", {}, {"d"}),
        ("h <-* x\nm <-~ h\nd <- h m\n--\ngw <- g d h", {"m": 2}, {"h", "m"}),  # the mask is kept
        ("k <- \nh <-* x\na <- h k\n--\ngw <- g a h k", {}, {"h"}),  # a constant
        ("a <- x\n--\ngw <- g a", {}, {"a"}),  # the caller may have dropped the input
        ("a <- x\n--\ngw <- g a x", {}, set()),  # backward has it anyway
        ("h <-* x\ne <-/ h\n--\ngw <- g e", {"e": 80}, {"h"}),  # an expanded view
        ("h <-* x\ne <-/ h\n--\ngw <- g e", {"h": 80}, {"h"}),  # a part keeps all of h
        ("h <-* x\ns <-/ h\na <- s\n--\ngw <- g a", {"h": 80, "a": 9}, {"a"}),
        ("h <-* x\na <- h\nb <- h\n--\ngw <- g a b", {"h": 15}, {"h"}),  # 15 rather than 8 + 8
        ("h <-* x\na <- h\nb <- h\n--\ngw <- g a b", {"h": 16}, {"a", "b"}),  # alike: no work is done again
        ("a <- x\nu <-! a x\n--\ngw <- g a", {}, {"a"}),  # x is another one in backward
        ("v <-/ x\na <- v\nu <-! a x\n--\ngw <- g a", {}, {"a"}),  # so is its view
        ("out <-* x\na <- out\n--\ngw <- g a", {"a": 99}, {"a"}),  # the caller may overwrite an output
        ("out <-* x\na <- out\n--\ngw <- g a out", {"a": 99}, {"out"}),  # unless backward reads it anyway
    ],
)
def test_the_fewest_bytes_are_saved(text: str, nbytes: dict[str, int], kept: set[str]) -> None:
    timeline = program(text, nbytes=nbytes)
    after = recompute(timeline)
    assert saved(after) == kept
    check_recompute(after, timeline)
    terms: Terms = {}
    assert interpret(after, terms) == interpret(timeline, terms)
    nothing = replace(timeline, plan=replace(timeline.plan, policy=Policy(recompute="none")))
    assert recompute(nothing) is nothing


NORM = """
    gather u.w
    gather u.bias
    gather u.v
    h <-* x u.v
    n <- h u.w
    b <- n u.bias
    out <-* b u.v
    --
    gb <-* g u.v
    gv <-* g b
    gw <- g n
    gn <- g u.w
    gh <- g h
    gx <-* gh u.v
"""


@pytest.mark.parametrize(
    ("stage", "fields", "kept", "gathered"),
    [
        (3, {"recompute": "none", "gather_last_units_once": False}, {"h", "n", "b"}, {"u.w", "u.v"}),
        (3, {"gather_last_units_once": False}, {"h", "b"}, {"u.w", "u.v"}),  # backward has the weight, not the bias
        (3, {"gather_last_units_once": False, "recompute": "units"}, {"h"}, {"u.w", "u.v", "u.bias"}),
        (2, {}, {"h", "b"}, set()),  # forward has freed the bias
        (2, {"recompute": "units"}, {"h"}, set()),
        (1, {}, {"h"}, set()),
        (0, {}, {"h"}, set()),
    ],
)
def test_what_reads_a_parameter_is_computed_again_where_backward_has_it(
    stage: int, fields: dict[str, object], kept: set[str], gathered: set[str]
) -> None:
    text = NORM if stage else re.sub("gather .*", "", NORM).replace("u.", "t_u.")
    after = run(program(text, Policy(stage=stage, **fields)))  # type: ignore[arg-type]
    assert saved(after) == kept
    assert {path for op in after.ops if op.kind is Kind.GATHER and op.backward for path in op.params} == gathered


def test_a_parameter_that_comes_later_or_is_gone_is_not_waited_for() -> None:
    """``b`` is needed before the weight is gathered in the first text, and after its last use in the second."""
    early = "gather u.w\nh <-* x\nb <- h u.w\n--\ngb <- g b\ngw <-* g u.w h"
    late = "gather u.w\nh <-* x\nb <- h u.w\n--\ngw <-* g u.w h\ngb <- gw b"
    textbook = replace(CHEAP, gather_last_units_once=False)
    assert [saved(run(program(text, textbook))) for text in (early, late)] == [{"h", "b"}] * 2
    assert saved(run(program(early, Policy(stage=2)))) == {"h"}, "forward's is still there"
    assert saved(run(program(late, Policy(stage=2)))) == {"h", "b"}
    both = "gather u.w\nh <-* x\nb <- h u.w\n--\ngw <-* g u.w h\ngb <- gw b\ngz <-* gb u.w"
    assert saved(run(program(both, Policy(stage=2)))) == {"h"}


TWO_UNITS = """
    gather embedding
    x0 <-* x embedding
    gather u.w
    gather u.bias
    x1 <-* x0 u.w
    x2 <- x1 u.bias
    m <-~ x2
    x3 <- x2 m x0
    gather v.w
    gather v.bias
    n <- x3
    y1 <-* n v.w
    y2 <- y1 v.bias
    y3 <- y2 x3
    gather head
    z <-* y3 head
    --
    gr <- g y3
    gy <-* g head
    ga <- gy y2
    gb <-* ga v.w
    gc <-* gb n
    gd <- gc x3
    ge <- gd m x2
    gf <-* ge u.w
    gh <-* gf x0
"""


def test_units_save_their_borders_and_what_was_drawn() -> None:
    policy = replace(UNITS, gather_last_units_once=False, prefetch=0)
    timeline = program(TWO_UNITS, policy, {"m": 1})
    after = run(timeline)
    assert saved(after) == {"x0", "x3", "y3", "m"}
    assert again(after) == ["n", "y1", "y2", "x1", "x2"]
    assert saved(run(program(TWO_UNITS, policy, {"x3": 99, "m": 1}))) == {"x0", "x2", "y3", "m"}, "the border moves"
    terms: Terms = {}
    assert interpret(after, terms) == interpret(timeline, terms)


def test_an_operation_of_two_units_belongs_to_the_later_one() -> None:
    text = "gather u9.w\ngather u10.w\ny <-* x u9.w u10.w\n--\ngx <-* g y"
    assert [run.unit for run in runs(program(text, UNITS))] == ["u10"]


def test_units_gather_their_biases_with_them() -> None:
    def gathers(mode: str) -> list[tuple[str, ...]]:
        policy = replace(UNITS, gather_last_units_once=False, prefetch=0, recompute=mode)
        return [op.params for op in run(program(TWO_UNITS, policy)).ops if op.kind is Kind.GATHER and op.backward]

    assert gathers("cheap") == gathers("none") == [("head",), ("v.w",), ("u.w",)]
    assert gathers("units") == [("head",), ("v.w", "v.bias"), ("u.w", "u.bias")]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_that_is_gathered_once_keeps_its_biases_too(stage: int) -> None:
    after = run(program(TWO_UNITS, Policy(stage=stage, recompute="units")))
    assert saved(after) == {"x0", "x3", "y3", "m"}
    assert not any(op.kind is Kind.GATHER and op.backward for op in after.ops)
    freed = {path: op.backward for op in after.ops if op.kind is Kind.FREE for path in op.params}
    assert freed == {"embedding": False, **dict.fromkeys(("u.w", "u.bias", "v.w", "v.bias", "head"), True)}


def test_launches_do_not_depend_on_sizes() -> None:
    def launches(timeline: Timeline) -> list[tuple[str, tuple[str, ...]]]:
        return [(op.kind, op.params) for op in timeline.ops if op.params]

    parameter = "gather u.w\nh <-* x u.w\na <- h\nb <- a\n--\ngw <-* g b\ngh <- g a\ngx <-* gh u.w"
    for mode, text, name in (("cheap", parameter, "a"), ("units", TWO_UNITS, "x3")):
        policy = replace(CHEAP, recompute=mode, gather_last_units_once=False)
        small, large = program(text, policy), program(text, policy, {name: 99})
        small, large = run(small), run(large)
        assert again(small) != again(large)
        assert launches(small) == launches(large)


@given(timelines())
@pytest.mark.slow
def test_cheap_changes_no_launch_and_no_gathered_byte(timeline: Timeline) -> None:
    def with_policy(mode: str) -> Timeline:
        policy = replace(timeline.plan.policy, recompute=mode)
        return run(replace(timeline, plan=replace(timeline.plan, policy=policy)))

    def others(after: Timeline) -> list[tuple[object, ...]]:
        pairs = zip(after.ops, gathered_bytes(after), strict=True)
        return [(op.kind, op.params, nbytes) for op, nbytes in pairs if not (op.again and op.kind is Kind.COMPUTE)]

    assert others(with_policy("cheap")) == others(with_policy("none"))


# Faults

Fault = Callable[[Timeline], Timeline]


def copy_of(timeline: Timeline, name: str) -> Op:
    (op,) = (op for op in timeline.ops if name in op.writes)
    return replace(op, writes=(f"{name}_copy",), backward=True, again=True)


def with_copy(name: str, before: str) -> Fault:
    """Computes a value again right before backward writes another one, and reads it there."""

    def plant(timeline: Timeline) -> Timeline:
        (at,) = (at for at, op in enumerate(timeline.ops) if before in op.writes)
        ops = list(timeline.ops)
        reads = (f"{name}_copy" if read == name else read for read in ops[at].reads)
        ops[at] = replace(ops[at], reads=tuple(reads))
        return timeline.with_ops([*ops[:at], copy_of(timeline, name), *ops[at:]])

    return plant


def swapped(timeline: Timeline) -> Timeline:
    *ops, one, two, last = timeline.ops
    return timeline.with_ops([*ops, two, one, last])


FAULTY = """
    gather u.w
    h <-* x
    m <-~ h
    b <- h u.w
    c <- h
    u <-! c x
    e <- x
    --
    ga <- g u.w m c
    gb <- ga e b m h
    gc <- gb
"""


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (with_copy("m", "gb"), "m_copy.* does random work again, which recompute='cheap' does not allow"),
        (with_copy("h", "gb"), "h_copy.*does matmul work again"),
        (with_copy("e", "gb"), "e_copy.*computed again from x, whose memory an operation overwrites"),
        (with_copy("b", "gb"), r"reads u\.w for a copy, after all that read it without recomputing"),
        (swapped, "stands where the order without recomputing has compute"),
        (lambda timeline: timeline.with_ops(timeline.ops[:-2] + timeline.ops[-1:]), "stands where the order without"),
    ],
)
def test_a_faulty_choice_is_refused(plant: Fault, sentence: str) -> None:
    timeline = program(FAULTY, Policy(stage=2))
    check_recompute(timeline, timeline)
    with pytest.raises(ScheduleError, match=sentence):
        check_recompute(plant(timeline), timeline)


def test_a_unit_that_is_computed_again_allows_nothing_to_others() -> None:
    timeline = program(TWO_UNITS, Policy(stage=2, recompute_units=("v",)))
    check_recompute(with_copy("y1", "ga")(timeline), timeline)  # a matmul of v
    with pytest.raises(ScheduleError, match=r"x1_copy.*does matmul work again"):
        check_recompute(with_copy("x1", "gd")(timeline), timeline)


def test_no_copy_of_what_draws_passes_the_proof_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from thunder_zero.schedule import passes

    faults = {
        "is done again, but is neither": with_copy("m", "gb"),
        "depends on parameters that backward gathers again": with_copy("b", "gb"),
    }
    for sentence, plant in faults.items():
        plant.__name__ = "faulty"
        monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:-1], plant, passes.PASSES[-1]))
        with pytest.raises(ScheduleError, match=sentence):
            run(program(FAULTY, replace(CHEAP, gather_last_units_once=False)))
        monkeypatch.undo()


def test_a_gather_for_copies_alone_is_refused() -> None:
    timeline = program(TWO_UNITS, replace(UNITS, gather_last_units_once=False))
    after = run(timeline)
    cheap = replace(after.plan, policy=replace(after.plan.policy, recompute="cheap"))
    with pytest.raises(ScheduleError, match=r"gathers v\.bias in backward, which only copies read"):
        check_schedule(replace(after, plan=cheap), timeline)


# The minimum cut


def fewest_bytes(nbytes: list[int], made_from: list[set[int] | None], wanted: set[int]) -> int:
    """The fewest bytes, by trying all choices of what to keep."""
    numbers = range(len(nbytes))
    sums = []
    for kept in (set(some) for count in range(len(nbytes) + 1) for some in combinations(numbers, count)):
        have = set(kept)
        for number in numbers:
            if (made := made_from[number]) is not None and made <= have:
                have.add(number)
        if wanted <= have:
            sums.append(sum(nbytes[number] for number in kept))
    return min(sums)


@pytest.mark.parametrize("seed", range(of_tier(20, 1000)))
def test_the_cut_is_as_good_as_the_best_of_all_choices(seed: int) -> None:
    random = Random(seed)
    count = random.randint(1, 8)
    nbytes = [random.randint(0, 5) for _ in range(count)]
    made_from = [
        None if random.random() < 0.25 else {parent for parent in range(at) if random.random() < 0.35}
        for at in range(count)
    ]
    wanted = {at for at in range(count) if random.random() < 0.4}
    kept, computed = cheapest_to_keep(nbytes, made_from, wanted)
    have = set(kept)
    for number in sorted(computed):
        made = made_from[number]
        assert made is not None
        assert made <= have
        have.add(number)
    assert wanted <= have
    assert not kept & computed
    assert sum(nbytes[number] for number in kept) == fewest_bytes(nbytes, made_from, wanted)
