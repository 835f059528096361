"""The checks of schedules catch each fault that is planted in a good timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timelines import ALONE, Use, model, same_results, timelines, with_policy
from thunder_zero.plan.amounts import size
from thunder_zero.plan.policy import MiB, Policy
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Kind, Op, ScheduleError, Timeline, Value
from thunder_zero.schedule.verify import check, check_pass, check_schedule

USES = (
    Use("a.w", ("view",)),
    Use("a.v"),
    Use("a.half"),
    Use("a.scalar"),
    Use("b.w", random=True),
    Use("b.v"),
    Use("c.frozen"),
    Use("c.w"),
    Use("c.bias", needed=False),
)


def lifted(stage: int) -> Timeline:
    """Return a lifted timeline of three units a, b and c; each parameter has 4 bytes, ``a.half`` 2."""
    policy = Policy(stage, bucket_bytes=8, in_flight_bytes=12, reshard_after_forward=True)
    half: dict[str, object] = {"dtype": torch.bfloat16}
    return model(policy, *USES, a_half=half, a_scalar={"shape": ()}, c_frozen={"requires_grad": False})


def deferring(timeline: Timeline) -> Timeline:
    """Return the timeline under ``no_sync``, which defers the reduction of each gradient."""
    mean = {op.reads[0]: op.writes[0] for op in timeline.ops if timeline.ends(op, Kind.REDUCE)}
    ops = (
        replace(op, kind=Kind.DEFER, writes=(mean[op.writes[0]],)) if op.kind is Kind.REDUCE else op
        for op in timeline.ops
        if not timeline.ends(op, Kind.REDUCE)
    )
    return timeline.with_ops(ops)


ZERO3 = lifted(3)
LIFTED = {"ZeRO-2": lifted(2), "ZeRO-3": ZERO3, "no_sync": deferring(ZERO3)}
LIFTED["copies"] = model(Policy(3, bucket_bytes=8, in_flight_bytes=12), "a.w", "b.w", "b.v", replicas=2)
LIFTED["one ahead"] = model(replace(ALONE, in_flight_bytes=8, prefetch=1), "a.w", "b.w", "c.w", "d.w")
LIFTED["all ahead"] = with_policy(ZERO3, in_flight_bytes=MiB)


@cache
def scheduled(name: str) -> Timeline:
    return run(LIFTED[name])


# Changes of a timeline at a place, which is a position or a phrase


def find(t: Timeline, place: str | int) -> int:
    """Return the position of an operation that a phrase names.

    "gather a.w" is the first gather of a.w, "gather a.w again" the last. "reads y0" is the first reader, "writes y0"
    the writer, "backward" the first operation of backward, and "return" the last operation.
    """
    if isinstance(place, int):
        return place
    if place == "return":
        return len(t.ops) - 1
    verb, name, last = (*place.split(), "", "")[:3]

    def is_meant(op: Op) -> bool:
        if verb in ("reads", "writes"):
            return name in (op.reads if verb == "reads" else op.writes)
        return op.backward if verb == "backward" else op.kind == verb and name in op.params

    result = [index for index, op in enumerate(t.ops) if is_meant(op)]
    return result[-1 if last else 0]


def without(t: Timeline, *places: str | int) -> Timeline:
    positions = [find(t, place) for place in places]
    return t.with_ops(op for index, op in enumerate(t.ops) if index not in positions)


def with_ops(t: Timeline, place: str | int, *ops: Op) -> Timeline:
    """Insert operations before a place."""
    index = find(t, place)
    values = {name: Value(4, "float32") for op in ops for name in op.writes if name not in t.values}
    return t.with_ops([*t.ops[:index], *ops, *t.ops[index:]], values)


def moved(t: Timeline, place: str | int, to: str | int, behind: int = 0) -> Timeline:
    """Move an operation before another one, or ``behind`` places further."""
    index, to = find(t, place), find(t, to) + behind
    return without(with_ops(t, to, t.ops[index]), index + 1 if to <= index else index)


def copied(t: Timeline, place: str | int, to: str | int = "", **fields: object) -> Timeline:
    """Insert a changed copy of an operation before ``to``; by default right after the original."""
    index = find(t, place)
    return with_ops(t, to or index + 1, replace(t.ops[index], **fields))  # type: ignore[arg-type]


def changed(t: Timeline, place: str | int, **fields: object) -> Timeline:
    index = find(t, place)
    return t.with_ops([*t.ops[:index], replace(t.ops[index], **fields), *t.ops[index + 1 :]])  # type: ignore[arg-type]


def reading(t: Timeline, place: str | int, names: Mapping[str, str]) -> Timeline:
    """Replace values that an operation reads. "" stands for no value."""
    reads = (names.get(name, name) for name in t.ops[find(t, place)].reads)
    return changed(t, place, reads=tuple(dict.fromkeys(filter(None, reads))))


def emitted(timeline: Timeline) -> Timeline:
    """Return the schedule as read back from the lines that run: copies have no mark, and forward has a return."""
    unmarked = timeline.with_ops(replace(op, repeated=False) for op in timeline.ops)
    return with_ops(unmarked, "backward", Op(Kind.COMPUTE, ("y8",)))


# Faults


def returning(t: Timeline, **gradients: str) -> Timeline:
    """Replace the returned gradients of parameters of unit b. "" returns no gradient."""
    new = {f"b.{name}": value for name, value in gradients.items()}
    pairs = tuple((path, new.get(path, value)) for path, value in t.gradients)
    swap = {old: new[path] for path, old in t.gradients if path in new}
    return replace(reading(t, "return", swap), gradients=tuple(pair for pair in pairs if pair[1]))


def reduction_lost(t: Timeline) -> Timeline:
    return returning(without(t, "reduce b.w", "writes mean_b.w"), w="", v="")


def reduction(name: str, path: str, backward: bool = True) -> tuple[Op, Op]:
    wait = Op(Kind.WAIT, ("h",), ("f",), (path,), backward)
    return Op(Kind.REDUCE, (name,), ("h",), (path,), backward), wait


def deferred_and_reduced(t: Timeline) -> Timeline:
    op = t.ops[find(t, "defer b.w")]
    return without(with_ops(t, "defer b.w", *reduction(op.reads[0], "b.w")), "defer b.w")


def gather_across_the_border(t: Timeline) -> Timeline:
    return moved(changed(t, "gather c.w again", backward=False), "gather c.w again", "backward")


def second_gather_in_backward(t: Timeline) -> Timeline:
    t = copied(t, "gather b.v again", "return", writes=("h",))
    return copied(t, "writes b.v_again", "return", **SECOND)


def gathered_twice(t: Timeline) -> Timeline:
    t = copied(t, "gather c.w", "return", writes=("h",), **IN_BACKWARD)
    return copied(t, "wait c.w", "return", **SECOND, **IN_BACKWARD)


def freed_before_a_view_by_a_view(t: Timeline) -> Timeline:
    # In Thunder's lines a free names the last view.
    by_view = changed(t, "free a.w", reads=("c0.0",))
    check(emitted(by_view))
    return moved(by_view, "free a.w", "writes c0.0", 1)


def second_reduction(t: Timeline) -> Timeline:
    return copied(copied(t, "reduce b.w", writes=("h",)), "writes mean_b.w", **SECOND)


Fault = Callable[[Timeline], Timeline]
Faults = Sequence[tuple[Fault, str]]  # a change, and words of the error: of check_schedule | of check
GATHER_REPLICATED = (
    Op(Kind.GATHER, ("t_a.scalar",), ("h",), ("a.scalar",), source=(999,)),
    Op(Kind.WAIT, ("h",), ("scalar",), ("a.scalar",), source=(998,)),
)
SHARD = Op(Kind.COMPUTE, (), ("t_c.bias",), source=(999,))
SWAPPED = {"mean_b.w": "mean_c.w", "mean_c.w": "mean_b.w"}
SECOND: dict[str, Any] = {"reads": ("h",), "writes": ("x0", "x1")}  # a wait for a second launch
IN_BACKWARD: dict[str, Any] = {"backward": True, "repeated": True}

ORDER: Faults = (
    (
        lambda t: moved(t, "wait a.w", 0),
        r"^.*op 0 \(wait a.w.*\) reads fut_a.w, which op \d+ \(gather a.w.*\) writes only later",
    ),
    (lambda t: changed(t, "writes y2", writes=("y1",)), "writes y1, which op .* already wrote"),
    (lambda t: moved(t, "return", "return", -1), "is last, but it is not the return"),
    (lambda t: changed(t, "gather b.w again", backward=False), "belongs to forward, but comes after .* backward"),
    (lambda t: without(t, "writes gx0"), r"\(compute\) of the lifted trace is missing|reads gx0, which is neither"),
)
LAUNCHES_AND_WAITS: Faults = (
    (lambda t: without(t, "wait a.w"), "gather a.w, a.v.*never waited for"),
    (lambda t: copied(t, "wait b.w", writes=("x0", "x1")), "wait b.w.*which is not in flight"),
    (lambda t: changed(t, "wait b.w", params=("b.v", "b.w")), "waits for other parameters than op"),
    (lambda t: changed(t, "wait b.w", writes=("b.v", "b.w")), "writes other values|memory that is not a gathered"),
    (gather_across_the_border, "waits in backward for what op .* launched in forward"),
    (lambda t: reading(t, "reads b.w", {"b.w": "fut_b.w"}), "reads fut_b.w, a handle that only a wait may read"),
    (lambda t: reading(t, "reads b.w", {"b.w": "t_b.w"}), "reads t_b.w, the shard of b.w, not the gathered"),
)
GATHERS: Faults = (
    (lambda t: with_ops(t, "gather c.bias", SHARD), "differs from position 999|writes t_c.bias, which is an input"),
    (lambda t: reading(t, "gather c.bias", {"t_c.bias": "y1"}), "gathers y1 as c.bias, but it is not a shard"),
    (lambda t: reading(t, "gather c.bias", {"t_c.bias": "?"}), "a value whose bytes and dtype are unknown"),
    (lambda t: changed(t, "gather b.w", reads=("t_b.w",)), "must read one value for each of its parameters"),
    (lambda t: changed(t, "gather b.w", reads=("t_b.v", "t_b.w")), "gathers t_b.. as b.., but it is the shard of b.."),
    (lambda t: with_ops(t, 3, *GATHER_REPLICATED), "gathers a replicated parameter"),
    (second_gather_in_backward, "gathers b.v again after op .*; it needs one gather in each phase"),
    (lambda t: reading(t, "reads c0.0_again", {"c0.0_again": "c0.0"}), "reads other|reads forward's c0.0, which"),
    (lambda t: changed(t, "free a.v", params=("z.w",)), "names z.w, which is not a parameter of the plan"),
)
FREES: Faults = (
    (lambda t: moved(t, "free a.w", "writes c0.0", 1), "frees a.w, but op .* still reads it or a view of it"),
    (freed_before_a_view_by_a_view, "frees a.w, but op .* still reads it or a view of it"),
    (lambda t: copied(t, "free a.v"), "frees a.v, which op .* already freed"),
    (lambda t: without(t, "free a.v"), "gathers a.v as a.v, which is never freed"),
    (lambda t: moved(t, "free a.v", "free a.v", 2), "frees a.v too late"),
    (lambda t: changed(t, "free a.v", params=("a.w",)), "frees memory that is not a gathered parameter's"),
)
GRADIENTS: Faults = (
    (second_reduction, "reduces b.v, which op .* already reduced"),
    (lambda t: with_ops(t, "reads gx6", *reduction("gx6", "c.frozen")), "a gradient of c.frozen, which is frozen"),
    (lambda t: with_ops(t, "reads y0", *reduction("y0", "a.w", False)), "reduces a gradient in forward"),
    (lambda t: returning(t, w="g_b.w"), "reads other|g_b.w as the gradient of b.w, but no reduction"),
    (lambda t: returning(t, w="mean_b.v", v="mean_b.w"), "reads other|mean_b.w as the gradient of b.v, but no"),
    (reduction_lost, "reads other|returns no gradient of b.v, which is trained"),
    (lambda t: returning(t, w=""), "reads other|ends the reduction of b.w, but mean_b.w is not returned"),
    (lambda t: replace(t, gradients=(*t.gradients, ("b.w", "mean_b.w"))), "returns a second gradient of b.w, mean_b.w"),
    (lambda t: reading(t, "return", {"mean_b.w": ""}), "reads other|does not read mean_b.w, the gradient of b.w"),
)
COPIES: Faults = (
    (lambda t: changed(t, "reduce b.w", repeated=True), "is done again, but is neither"),
    (lambda t: reading(t, "writes c0.0_again", {"a.w_again": "a.v_again"}), "reads other|frees a.v_again, but op"),
)
LIMITS: Faults = (
    (lambda t: reading(t, "gather a.w", {"t_a.v": "t_a.half"}), "mixes dtypes or formats in one bucket"),
    (lambda t: changed(t, "gather a.w", params=("a.w", "a.scalar")), "mixes sharded, resident and replicated"),
    (lambda t: with_policy(t, bucket_bytes=7), "is a bucket of 8 bytes; bucket_bytes is 7"),
    (lambda t: moved(t, "gather b.w", "wait a.w"), "bytes in flight; in_flight_bytes is 12"),
    (lambda t: moved(t, "writes mean_c.w", "return"), "puts 1[46] bytes in flight; in_flight_bytes is 12"),
)
ONLY_BY_LIFTED: Faults = (  # only a comparison with the lifted timeline finds these
    (lambda t: copied(t, "writes d4", writes=("other",)), "runs position .* of the lifted trace twice"),  # random
    (lambda t: changed(t, "writes y0", source=(2, 3)), "must come from one line of the trace"),
    (lambda t: moved(changed(t, "writes g", backward=False), "writes g", "backward"), "is in a different phase than"),
    (lambda t: reading(t, "return", SWAPPED), "reads other values than position"),
    (lambda t: moved(t, "writes mean_c.w", "reduce b.w"), "makes 8 bytes of gradients while 8 bytes are in flight"),
)
UNDER_NO_SYNC: Faults = (
    (deferred_and_reduced, "reduces a gradient, but op .* defers one"),
    (lambda t: returning(t, w=""), "reads other|defers the gradient of b.w, but mean_b.w is not returned"),
)
BETWEEN_COPIES: Faults = (
    (lambda t: changed(t, "reduce b.w", over="all"), "goes over 'all'; the plan has 'shard' and then 'replicate'"),
    (lambda t: changed(t, "gather b.w", over="replicate"), "goes over 'replicate'; the plan has 'shard'"),
    (lambda t: changed(t, "reduce b.w", over="replicate"), "must read the means over 'shard' of b.v, not g_b.v"),
    (lambda t: changed(t, "reduce b.w again", over="shard"), "a gradient that nothing has averaged of b.v, not mean_"),
    (
        lambda t: changed(t, "reduce b.w again", params=("b.w", "b.v")),
        "averages mean_shard_b.v as b.w, but it is another",
    ),
    (lambda t: returning(t, w="mean_shard_b.w"), "reads other|mean_shard_b.w as the gradient of b.w, but no reduction"),
)
ANYWHERE = (*ORDER, *LAUNCHES_AND_WAITS, *GATHERS, *FREES, *GRADIENTS, *COPIES, *LIMITS)
CASES = [
    *(("ZeRO-3", *row, True) for row in ANYWHERE),
    *(("ZeRO-3", *row, False) for row in ONLY_BY_LIFTED),
    ("ZeRO-2", gathered_twice, "gathers c.frozen again after op .*; it is kept unsharded", True),
    ("all ahead", lambda t: with_policy(t, prefetch=1), "gathers 2 units ahead; prefetch is 1", True),
    ("one ahead", lambda t: moved(t, "writes mean_d.w", "gather a.w again", 1), "starts 4 bytes ahead beside 8", False),
    *(("no_sync", *row, True) for row in UNDER_NO_SYNC),
    *(("copies", *row, False) for row in BETWEEN_COPIES),
]


@pytest.mark.parametrize(("name", "plant", "words", "in_lines"), CASES)
def test_a_planted_fault_is_caught(name: str, plant: Fault, words: str, in_lines: bool) -> None:
    good = scheduled(name)
    bad = plant(good)
    assert bad != good
    with pytest.raises(ScheduleError, match=words):
        check_schedule(bad, LIFTED[name])
    if in_lines:
        trained = {use.path for use in USES} - {"c.frozen"}
        check(emitted(good), trained=trained)
        with pytest.raises(ScheduleError, match=words):
            check(plant(emitted(good)), trained=trained)


def test_only_the_last_line_without_outputs_is_the_return() -> None:
    look = Op(Kind.COMPUTE, ("y0",), backward=True, source=(999,))
    before = with_ops(ZERO3, "return", look)
    good = run(before)
    with pytest.raises(ScheduleError, match=r"compute y0\) is last, but it is not the return"):
        check_schedule(moved(good, good.ops.index(look), len(good.ops)), before)


def test_a_lifetime_that_does_not_end_is_an_error_only_after_the_last_pass() -> None:
    check_pass(ZERO3, ZERO3)
    with pytest.raises(ScheduleError, match=r"reads forward's|never freed"):
        check_schedule(ZERO3, ZERO3)


def test_the_public_check_takes_only_objects_with_a_timeline() -> None:
    check(SimpleNamespace(timeline=scheduled("ZeRO-3")))
    with pytest.raises(ScheduleError, match="is never waited for"):
        check(SimpleNamespace(timeline=ZERO3.with_ops(op for op in ZERO3.ops if op.kind is not Kind.WAIT)))
    with pytest.raises(TypeError, match=r"takes a Timeline or Traces, got str; pass tz\.traces_of"):
        check("model")  # type: ignore[arg-type]


def test_a_timeline_shows_a_few_lines_however_long_it_is() -> None:
    timeline = run(model(replace(ALONE, stage=2), *(f"unit{number}.w" for number in range(300))))
    first, forward, backward = repr(timeline).splitlines()
    assert "ZeRO-2, rank" in first
    assert "300 parameters" in first
    assert f"{len(timeline.ops)} operations" in first
    sent = sum(timeline.bytes_sent(op) for op in timeline.ops if op.backward)
    assert "300 gather" in forward
    assert "300 reduce" in backward
    assert f"sends {size(sent)}" in backward
    assert max(map(len, (first, forward, backward))) < 160


def test_an_error_names_the_operations_and_the_parameter() -> None:
    good = scheduled("ZeRO-3")
    index = find(good, "free a.v")
    sentence = rf"^op {index - 1} \(free a.v\) frees a.v, but op {index} still reads it or a view of it$"
    with pytest.raises(ScheduleError, match=sentence):
        check(moved(good, index, index - 1))


# Random changes


def one_change(good: Timeline, data: st.DataObject) -> tuple[str, Op, Timeline]:
    """Draw a change of an operation. Return its name, the operation, and the changed timeline."""
    index, to = data.draw(st.integers(0, len(good.ops) - 1)), data.draw(st.integers(0, len(good.ops)))
    op = good.ops[index]
    names = sorted({name for op in good.ops for name in (*op.reads, *op.writes)})
    paths = [param.path for param in good.plan.params]

    def one_of(values: tuple[str, ...], pool: list[str]) -> tuple[str, ...]:
        number = data.draw(st.integers(0, len(values) - 1)) if values else 0
        return (*values[:number], data.draw(st.sampled_from(pool)), *values[number + 1 :])

    changes = {
        "drop": lambda: without(good, index),
        "repeat": lambda: with_ops(good, to, op),
        "move": lambda: moved(good, index, to),
        "read": lambda: changed(good, index, reads=one_of(op.reads, names)),
        "write": lambda: changed(good, index, writes=one_of(op.writes, names)),
        "params": lambda: changed(good, index, params=one_of(op.params, paths)),
        "phase": lambda: changed(good, index, backward=not op.backward),
        "repeated": lambda: changed(good, index, repeated=not op.repeated),
    }
    change = data.draw(st.sampled_from(list(changes)), label="how")
    return change, op, changes[change]()


@given(timelines(), st.data())
def test_a_random_change_is_caught_or_harmless(timeline: Timeline, data: st.DataObject) -> None:
    # ``check`` knows no lifted timeline. It sees changes of collectives, waits and frees, but not of computations.
    good = run(timeline)
    unmarked = good.with_ops(replace(op, repeated=False) for op in good.ops)
    trained = {path for path, _ in good.gradients}
    for _ in range(3):
        _, _, bad = one_change(good, data)
        try:
            check_schedule(bad, timeline)
        except ScheduleError:
            pass
        else:
            assert same_results(bad, timeline)
        change, op, bad = one_change(unmarked, data)
        if op.kind is Kind.COMPUTE or (change, op.kind) == ("read", Kind.REDUCE):
            continue
        try:
            check(bad, trained=trained)
        except ScheduleError:
            continue
        assert same_results(bad, timeline)
