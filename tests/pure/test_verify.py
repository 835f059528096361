"""The checks of schedules catch each fault that is planted in a good timeline."""

from __future__ import annotations

import dataclasses
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
from thunder_zero.schedule.free import free
from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Op, Reduce, Return, Wait, ends
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import ScheduleError, Timeline, Value
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
    mean = {op.launch.handle: op.writes[0] for op in timeline.ops if isinstance(op, Wait)}
    ops = (
        Defer(op.reads, (mean[op.handle],), op.params) if isinstance(op, Reduce) else op
        for op in timeline.ops
        if not ends(op, Reduce)
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
    the writer, "drops y0" its FREE, "border" forward's return, and "return" backward's.
    """
    if isinstance(place, int):
        return place
    if place in ("return", "border"):
        returns = [index for index, op in enumerate(t.ops) if isinstance(op, Return)]
        return returns[-1 if place == "return" else 0]
    verb, name, last = (*place.split(), "", "")[:3]

    def is_meant(op: Op) -> bool:
        if verb in ("reads", "writes"):
            return name in (op.reads if verb == "reads" else op.writes)
        return name in op.reads if verb == "drops" and isinstance(op, Free) else op.kind == verb and name in op.params

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
    """Replace values that an operation reads, or a return returns. "" stands for no value."""
    op = t.ops[find(t, place)]
    if isinstance(op, Return):
        return changed(t, place, results=tuple(names.get(name or "", name) or None for name in op.results))
    return changed(t, place, reads=tuple(dict.fromkeys(names.get(name, name) for name in op.reads)))


def again(t: Timeline, place: str, **fields: object) -> Timeline:
    """Launch a changed copy of a launch, and wait for it, before the return."""
    launch: Any = replace(t.ops[find(t, place)], handle="h", **fields)  # type: ignore[arg-type]
    return with_ops(t, "return", launch, Wait(launch, tuple(f"x{path}" for path in launch.params)))


# Faults


def returning(t: Timeline, **gradients: str) -> Timeline:
    """Replace the returned gradients of parameters of unit b. "" returns no gradient."""
    new = {f"b.{name}": value for name, value in gradients.items()}
    pairs = tuple((path, new.get(path, value)) for path, value in t.gradients)
    swap = {old: new[path] for path, old in t.gradients if path in new}
    return replace(reading(t, "return", swap), gradients=tuple(pair for pair in pairs if pair[1]))


def reduction_lost(t: Timeline) -> Timeline:
    return returning(without(t, "reduce b.w", "writes mean_b.w"), w="", v="")


def reduction(name: str, path: str) -> tuple[Op, Op]:
    launch = Reduce((name,), "h", (path,))
    return launch, Wait(launch, ("f",))


def deferred_and_reduced(t: Timeline) -> Timeline:
    op = t.ops[find(t, "defer b.w")]
    return without(with_ops(t, "defer b.w", *reduction(op.reads[0], "b.w")), "defer b.w")


def of_another_launch(t: Timeline) -> Timeline:
    """Let a wait name another launch than the one that writes its handle."""
    index = find(t, "wait b.w")
    wait: Any = t.ops[index]
    other = replace(wait, launch=replace(wait.launch, params=("b.v", "b.w")))
    return replace(t, ops=(*t.ops[:index], other, *t.ops[index + 1 :]))


Fault = Callable[[Timeline], Timeline]
Faults = Sequence[tuple[Fault, str]]  # a change, and words of the error: of check_schedule | of check
REPLICATED = Gather(("t_a.scalar",), "h", ("a.scalar",))
SHARD = Compute((), ("t_c.bias",), "shard")
IN_BACKWARD = {"backward": True, "repeated": True}
SWAPPED = {"mean_b.w": "mean_c.w", "mean_c.w": "mean_b.w"}

ORDER: Faults = (
    (
        lambda t: moved(t, "wait a.w", 0),
        r"^.*op 0 \(wait a.w.*\) reads fut_a.w, which op \d+ \(gather a.w.*\) writes only later",
    ),
    (lambda t: changed(t, "writes y2", writes=("y1",)), "writes y1, which op .* already wrote"),
    (lambda t: moved(t, "return", "return", -1), "return .* is not last"),
    (lambda t: without(t, "border"), "is last in its phase, but it is not the return"),
    (lambda t: changed(t, "gather b.w again", backward=False), "is last in its phase, but it is not the return"),
    (lambda t: moved(t, "gather a.w", "return", 1), "gather a.w.* belongs to forward, but comes after .* backward"),
    (lambda t: without(t, "writes gx0"), "compute gx0 of the lifted trace is missing|reads gx0, which is neither"),
)
LAUNCHES_AND_WAITS: Faults = (
    (lambda t: without(t, "wait a.w"), "gather a.w, a.v.*never waited for"),
    (lambda t: copied(t, "wait b.w", writes=("x0", "x1")), "wait b.w.*which is not in flight"),
    (of_another_launch, "does not wait for what op .* launched"),
    (
        lambda t: changed(t, "wait b.w", writes=("b.v", "b.w")),
        "writes other values|frees b.., and drops no value of it",
    ),
    (
        lambda t: moved(changed(t, "gather c.w again", backward=False), "gather c.w again", "border"),
        "is last in its phase, but it is not the return",  # before the wait, which belongs to the launch's phase
    ),
    (lambda t: reading(t, "reads b.w", {"b.w": "fut_b.w"}), "reads fut_b.w, a handle that only a wait may read"),
    (lambda t: reading(t, "reads b.w", {"b.w": "t_b.w"}), "reads t_b.w, the shard of b.w, not the gathered"),
)
GATHERS: Faults = (
    (
        lambda t: with_ops(t, "gather c.bias", SHARD),
        "is not an operation of the lifted|writes t_c.bias, which is an input",
    ),
    (lambda t: reading(t, "gather c.bias", {"t_c.bias": "y1"}), "gathers y1 as c.bias, but it is not a shard"),
    (lambda t: reading(t, "gather c.bias", {"t_c.bias": "?"}), "a value whose bytes and dtype are unknown"),
    (lambda t: changed(t, "gather b.w", reads=("t_b.w",)), "must read one value for each of its parameters"),
    (lambda t: changed(t, "gather b.w", reads=("t_b.v", "t_b.w")), "gathers t_b.. as b.., but it is the shard of b.."),
    (lambda t: with_ops(t, 3, REPLICATED, Wait(REPLICATED, ("scalar",))), "gathers a replicated parameter"),
    (lambda t: again(t, "gather b.v again"), "gathers b.v again after op .*; it needs one gather in each phase"),
    (lambda t: reading(t, "reads c0.0_again", {"c0.0_again": "c0.0"}), "reads other|reads forward's c0.0, which"),
    (lambda t: changed(t, "gather c.bias", params=("z.w",)), "names z.w, which is not a parameter of the plan"),
)
FREES: Faults = (
    (lambda t: moved(t, "free a.w", "writes c0.0", 1), "frees a.w, but op .* still reads it or a view of it"),
    (lambda t: changed(t, "drops a.w", params=("a.w",)), "frees a.w, but op .* still reads it or a view of it"),
    (lambda t: copied(t, "free a.v"), "uses a.v, which op .* already freed"),
    (lambda t: without(t, "free a.v"), "gathers a.v as a.v, which is never freed"),
    (lambda t: moved(t, "free a.v", "free a.v", 2), "frees a.v too late"),
    (lambda t: changed(t, "free a.v", params=("a.w",)), "frees a.w, and drops no value of it"),
)
GRADIENTS: Faults = (
    (lambda t: again(t, "reduce b.w"), "reduces b.v, which op .* already reduced"),
    (lambda t: with_ops(t, "reads gx6", *reduction("gx6", "c.frozen")), "a gradient of c.frozen, which is frozen"),
    (lambda t: with_ops(t, "reads y0", *reduction("y0", "a.w")), "is last in its phase, but it is not the"),
    (lambda t: returning(t, w="g_b.w"), "reads other|g_b.w as the gradient of b.w, but no reduction"),
    (lambda t: returning(t, w="mean_b.v", v="mean_b.w"), "reads other|mean_b.w as the gradient of b.v, but no"),
    (reduction_lost, "reads other|returns no gradient of b.v, which is trained"),
    (lambda t: returning(t, w=""), "reads other|ends the reduction of b.w, but mean_b.w is not returned"),
    (lambda t: replace(t, gradients=(*t.gradients, ("b.w", "mean_b.w"))), "returns a second gradient of b.w, mean_b.w"),
    (lambda t: reading(t, "return", {"mean_b.w": ""}), "reads other|does not read mean_b.w, the gradient of b.w"),
)
COPIES: Faults = (
    (lambda t: changed(t, "writes d4", repeated=True), "is done again, but is not repeatable"),
    (
        lambda t: reading(t, "writes c0.0_again", {"a.w_again": "a.v_again"}),
        "reads other|frees a.v_again, but op",
    ),
)
LIMITS: Faults = (
    (lambda t: reading(t, "gather a.w", {"t_a.v": "t_a.half"}), "mixes dtypes or formats in one bucket"),
    (lambda t: changed(t, "gather a.w", params=("a.w", "a.scalar")), "mixes sharded, resident, replicated"),
    (lambda t: with_policy(t, bucket_bytes=7), "is a bucket of 8 bytes; bucket_bytes is 7"),
    (lambda t: moved(t, "gather b.w", "wait a.w"), "bytes in flight; in_flight_bytes is 12"),
    (lambda t: moved(t, "writes mean_c.w", "return"), "puts 1[46] bytes in flight; in_flight_bytes is 12"),
)
ONLY_BY_LIFTED: Faults = (  # only a comparison with the lifted timeline finds these
    (lambda t: copied(t, "writes d4", writes=("other",)), "runs twice what the lifted trace runs once"),  # random
    (lambda t: moved(changed(t, "writes gw8", backward=False), "writes gw8", "border"), "is in a different phase"),
    (lambda t: reading(t, "return", SWAPPED), "reads other values than in the lifted"),
    (lambda t: moved(t, "writes mean_c.w", "reduce b.w"), "makes 8 bytes of gradients while 8 bytes are in flight"),
)
UNDER_NO_SYNC: Faults = (
    (deferred_and_reduced, "reduces a gradient, but op .* defers one"),
    (lambda t: returning(t, w=""), "reads other|defers the gradient of b.w, but mean_b.w is not returned"),
)
BETWEEN_COPIES: Faults = (
    (lambda t: changed(t, "reduce b.w", over="all"), "goes over 'all'; the plan has 'shard' and then 'replicate'"),
    (lambda t: changed(t, "reduce b.w", over="replicate"), "must read the means over 'shard' of b.v, not g_b.v"),
    (lambda t: changed(t, "reduce b.w again", over="shard"), "a gradient that nothing has averaged of b.v, not mean_"),
    (
        lambda t: changed(t, "reduce b.w again", params=("b.w", "b.v")),
        "averages mean_shard_b.v as b.w, but it is another",
    ),
    (lambda t: returning(t, w="mean_shard_b.w"), "reads other|mean_shard_b.w as the gradient of b.w, but no reduction"),
)
BOTH, SCHEDULED, FINISHED = (True, True), (True, False), (False, True)  # without FREEs | with FREEs
CASES = [
    *(("ZeRO-3", *row, BOTH) for row in (*ORDER, *LAUNCHES_AND_WAITS, *GATHERS, *GRADIENTS, *COPIES, *LIMITS)),
    *(("ZeRO-3", *row, FINISHED) for row in FREES),
    *(("ZeRO-3", *row, SCHEDULED) for row in ONLY_BY_LIFTED),
    ("ZeRO-2", lambda t: again(t, "gather c.w", **IN_BACKWARD), "c.frozen again after .* is kept unsharded", BOTH),
    ("all ahead", lambda t: with_policy(t, prefetch=1), "gathers 2 units ahead; prefetch is 1", BOTH),
    (
        "one ahead",
        lambda t: moved(t, "writes mean_d.w", "gather a.w again", 1),
        "starts 4 bytes ahead beside 8",
        SCHEDULED,
    ),
    *(("no_sync", *row, BOTH) for row in UNDER_NO_SYNC),
    *(("copies", *row, BOTH) for row in BETWEEN_COPIES),
]


@pytest.mark.parametrize(("name", "plant", "words", "seen"), CASES)
def test_a_planted_fault_is_caught(name: str, plant: Fault, words: str, seen: tuple[bool, bool]) -> None:
    good, trained = scheduled(name), [path for path, _ in LIFTED[name].gradients]
    checks: list[tuple[Timeline, Callable[[Timeline], None]]] = [
        (good, lambda timeline: check_schedule(timeline, LIFTED[name])),
        (free(good), lambda timeline: check(timeline, trained)),
    ]
    for (timeline, prove), sees in zip(checks, seen, strict=True):
        prove(timeline)
        if sees:
            bad = plant(timeline)
            assert bad != timeline
            with pytest.raises(ScheduleError, match=words):
                prove(bad)


def test_a_lifetime_that_does_not_end_is_an_error_only_after_the_last_pass() -> None:
    check_pass(ZERO3, ZERO3)
    with pytest.raises(ScheduleError, match="reads forward's"):
        check_schedule(ZERO3, ZERO3)


def test_the_public_check_takes_only_objects_with_a_timeline() -> None:
    check(SimpleNamespace(timeline=free(scheduled("ZeRO-3"))))
    with pytest.raises(ScheduleError, match="is never waited for"):
        check(SimpleNamespace(timeline=ZERO3.with_ops(op for op in ZERO3.ops if not isinstance(op, Wait))))
    with pytest.raises(TypeError, match=r"takes a Timeline or Traces, got str; pass tz\.traces_of"):
        check("model")  # type: ignore[arg-type]


def test_a_timeline_shows_a_few_lines_however_long_it_is() -> None:
    timeline = run(model(replace(ALONE, stage=2), *(f"unit{number}.w" for number in range(300))))
    first, forward, backward = repr(timeline).splitlines()
    assert "ZeRO-2, rank" in first
    assert "300 parameters" in first
    assert f"{len(timeline.ops)} operations" in first
    sent = sum(timeline.traffic(op).sent for op in timeline.ops if op.backward)
    assert "300 gather" in forward
    assert "300 reduce" in backward
    assert f"sends {size(sent)}" in backward
    assert max(map(len, (first, forward, backward))) < 160


def test_an_error_names_the_operations_and_the_parameter() -> None:
    good = free(scheduled("ZeRO-3"))
    index = find(good, "free a.v")
    sentence = rf"^op {index - 1} \(free a.v\) frees a.v, but op {index} still reads it or a view of it$"
    with pytest.raises(ScheduleError, match=sentence):
        check(moved(good, index, index - 1))


# Random changes

AXES = ["shard", "replicate", "all"]


def one_change(good: Timeline, data: st.DataObject) -> tuple[str, Op, Timeline]:
    """Draw a change of an operation. Return its name, the operation, and the changed timeline."""
    index, to = data.draw(st.integers(0, len(good.ops) - 1)), data.draw(st.integers(0, len(good.ops)))
    op = good.ops[index]
    paths = [param.path for param in good.plan.params]
    names = sorted({name for op in good.ops for name in (*op.reads, *op.writes)})
    pools: dict[str, list[Any]] = {"params": paths, "param": paths, "over": AXES, "launch": [*good.launches.values()]}
    changes = {
        "drop": lambda: without(good, index),
        "repeat": lambda: with_ops(good, to, op),
        "move": lambda: moved(good, index, to),
    }
    fields = {field.name for field in dataclasses.fields(op)} - {"line", "work", "cheap", "updates", "flops"}
    change = data.draw(st.sampled_from([*changes, *sorted(fields - {"repeatable", "exchange"})]), label="how")
    if change in changes:
        return change, op, changes[change]()
    value, pool = getattr(op, change), pools.get(change, names)
    if isinstance(value, bool):
        return change, op, changed(good, index, **{change: not value})
    new: Any = data.draw(st.sampled_from(pool))
    if isinstance(value, tuple):
        number = data.draw(st.integers(0, max(len(value) - 1, 0)))
        new = (*value[:number], new, *value[number + 1 :])
    return change, op, changed(good, index, **{change: new})


@given(timelines(), st.data())
def test_a_random_change_is_caught_or_harmless(timeline: Timeline, data: st.DataObject) -> None:
    # ``check`` knows no lifted timeline. It sees changes of collectives, waits and frees, but not of computations.
    good = run(timeline)
    trained = {path for path, _ in good.gradients}
    for _ in range(3):
        _, _, bad = one_change(good, data)
        try:
            check_schedule(bad, timeline)
        except ScheduleError:
            pass
        else:
            assert same_results(bad, timeline)
        change, op, bad = one_change(free(good), data)
        if isinstance(op, Compute | Return) or (change, op.kind) == ("reads", "reduce"):
            continue
        try:
            check(bad, trained=trained)
        except ScheduleError:
            continue
        assert same_results(bad, timeline)
