"""The proofs can fail: each fault planted in a good timeline is caught by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.harness.timelines import Terms, Use, gpt, interpret, lifted, make_param, timelines
from thunder_zero.plan import Plan
from thunder_zero.policy import Policy
from thunder_zero.schedule.cone import frees_of_gathered
from thunder_zero.schedule.fault import ScheduleError
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Kind, Op, Timeline, Value
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


def plain(stage: int, **fields: int) -> Timeline:
    """A lifted timeline of three units a, b and c; each parameter has 4 bytes, ``a.half`` 2."""
    chosen: dict[str, Any] = {"bucket_bytes": 8, "in_flight_bytes": 12, "gather_last_units_once": False, **fields}
    policy = Policy(stage=stage, **chosen)
    special: dict[str, dict[str, object]] = {
        "a.half": {"dtype": torch.bfloat16},
        "a.scalar": {"shape": ()},
        "c.frozen": {"requires_grad": False},
    }
    params = []
    for use in USES:
        differs: dict[str, object] = {"shape": (1,), **special.get(use.path, {})}
        params.append(make_param(use.path, unit=use.path[0], policy=policy, **differs))  # type: ignore[arg-type]
    return lifted(Plan(policy, 2, 0, tuple(params)), USES)


ZERO2, ZERO3 = plain(2), plain(3)


def find(timeline: Timeline, kind: Kind, path: str, *, backward: bool = False, of: Kind = Kind.GATHER) -> int:
    """Position of the operation of this kind with this parameter; a WAIT is one that ends an ``of``."""
    return next(
        at
        for at, op in enumerate(timeline.ops)
        if op.kind is kind and path in op.params and op.backward is backward
        if kind is not Kind.WAIT or timeline.ends(op, of)
    )


def writer(timeline: Timeline, name: str) -> int:
    return next(at for at, op in enumerate(timeline.ops) if name in op.writes)


def reader(timeline: Timeline, name: str) -> int:
    return next(at for at, op in enumerate(timeline.ops) if name in op.reads)


def without(timeline: Timeline, *positions: int) -> Timeline:
    return timeline.with_ops(op for at, op in enumerate(timeline.ops) if at not in positions)


def with_op(timeline: Timeline, at: int, *ops: Op) -> Timeline:
    weights = {name: Value(4, "float32") for op in ops for name in op.writes if name not in timeline.values}
    return timeline.with_ops([*timeline.ops[:at], *ops, *timeline.ops[at:]], weights)


def moved(timeline: Timeline, at: int, to: int) -> Timeline:
    """The timeline with the operation at ``at`` moved in front of the one at ``to``."""
    op = timeline.ops[at]
    return without(with_op(timeline, to, op), at + 1 if to <= at else at)


def changed(timeline: Timeline, at: int, **fields: object) -> Timeline:
    ops = list(timeline.ops)
    ops[at] = replace(ops[at], **fields)  # type: ignore[arg-type]
    return timeline.with_ops(ops)


def reading(timeline: Timeline, at: int, old: str, new: str) -> Timeline:
    return changed(timeline, at, reads=tuple(new if name == old else name for name in timeline.ops[at].reads))


Fault = Callable[[Timeline], Timeline]
FAULTS: dict[str, tuple[str, Fault]] = {}  # name -> the sentence that must name it, and how it is planted
AT_ZERO2: set[str] = set()  # faults that need ZeRO-2
BY_LIFTED: set[str] = set()  # faults that only a comparison with what was lifted can find


def fault(sentence: str, *, zero2: bool = False, by_lifted: bool = False) -> Callable[[Fault], Fault]:
    def register(plant: Fault) -> Fault:
        FAULTS[plant.__name__] = sentence, plant
        AT_ZERO2.update({plant.__name__} if zero2 else set())
        BY_LIFTED.update({plant.__name__} if by_lifted else set())
        return plant

    return register


@fault("gather a.w, a.v.*never waited for")
def dropped_wait(t: Timeline) -> Timeline:
    return without(t, find(t, Kind.WAIT, "a.w"))


@fault("wait b.w.*which is not in flight")
def double_wait(t: Timeline) -> Timeline:
    at = find(t, Kind.WAIT, "b.w")
    return with_op(t, at + 1, replace(t.ops[at], writes=("x0", "x1")))


@fault(r"reduce c.bias, c.w.*never waited for")
def dropped_wait_of_a_reduction(t: Timeline) -> Timeline:
    return without(t, find(t, Kind.WAIT, "c.w", backward=True, of=Kind.REDUCE))


@fault("writes fut_a.w after op 0 has read it")
def wait_before_launch(t: Timeline) -> Timeline:
    return moved(t, find(t, Kind.WAIT, "a.w"), 0)


@fault(r"writes b.w after op \d+ has read it")
def read_before_wait(t: Timeline) -> Timeline:
    return moved(t, find(t, Kind.WAIT, "b.w"), reader(t, "b.w") + 1)


@fault(r"free a.v.*frees a.v, but op \d+ still reads")
def free_one_line_early(t: Timeline) -> Timeline:
    at = find(t, Kind.FREE, "a.v")
    return moved(t, at, at - 1)


@fault(r"frees a.w, but op \d+ still reads it or a view of it")
def free_before_a_view_is_read(t: Timeline) -> Timeline:
    return moved(t, find(t, Kind.FREE, "a.w"), writer(t, "c0.0") + 1)


@fault(r"frees a.w_again, but op \d+ still reads it or a view of it")
def free_before_a_view_is_read_in_backward(t: Timeline) -> Timeline:
    return moved(t, find(t, Kind.FREE, "a.w", backward=True), writer(t, "c0.0_again") + 1)


@fault(r"frees c.w, but op \d+ still reads", zero2=True)
def free_before_backward_reads(t: Timeline) -> Timeline:
    at = find(t, Kind.FREE, "c.w", backward=True)
    border = next(at for at, op in enumerate(t.ops) if op.backward)
    return moved(changed(t, at, backward=False), at, border)


@fault("frees a.v, which op .* already freed")
def double_free(t: Timeline) -> Timeline:
    at = find(t, Kind.FREE, "a.v")
    return with_op(t, at + 1, t.ops[at])


@fault("gathers a.v as a.v, which is never freed")
def lost_free(t: Timeline) -> Timeline:
    return without(t, find(t, Kind.FREE, "a.v"))


@fault("frees a.v too late")
def late_free(t: Timeline) -> Timeline:
    at = find(t, Kind.FREE, "a.v")
    return moved(t, at, at + 2)


@fault("frees memory that is not a gathered parameter's")
def free_of_an_activation(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.FREE, "a.v"), reads=("y0",))


@fault("frees memory that is not a gathered parameter's")
def free_in_the_name_of_another(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.FREE, "a.v"), params=("a.w",))


@fault(r"reduces b.v, which op \d+ already reduced")
def double_reduction(t: Timeline) -> Timeline:
    at = find(t, Kind.REDUCE, "b.w", backward=True)
    op = replace(t.ops[at], writes=("twice",))
    return with_op(t, at + 1, op, Op(Kind.WAIT, ("twice",), ("x0", "x1"), op.params, True))


@fault(r"of the lifted trace is missing|mean_b\.v as the gradient of b\.v, but no reduction of b\.v writes it")
def missing_reduction(t: Timeline) -> Timeline:
    wait = find(t, Kind.WAIT, "b.w", backward=True, of=Kind.REDUCE)
    return without(t, find(t, Kind.REDUCE, "b.w", backward=True), wait)


def returning(t: Timeline, **gradients: str | None) -> Timeline:
    """The timeline that returns other values, or none, as gradients of parameters of unit b."""
    new = {f"b.{name}": value for name, value in gradients.items()}
    swap = {old: new[path] for path, old in t.gradients if path in new}
    end = len(t.ops) - 1
    reads = tuple(dict.fromkeys(filter(None, (swap.get(name, name) for name in t.ops[end].reads))))
    pairs = ((path, new.get(path, value)) for path, value in t.gradients)
    return replace(changed(t, end, reads=reads), gradients=tuple((path, value) for path, value in pairs if value))


@fault(r"reads other values than position|g_b\.v as the gradient of b\.v, but no reduction of b\.v writes it")
def gradient_returned_unreduced(t: Timeline) -> Timeline:
    return returning(missing_reduction(t), w="g_b.w", v="g_b.v")


@fault(r"reads other values than position|g_b\.w as the gradient of b\.w, but no reduction of b\.w writes it")
def gradient_returned_unreduced_beside_its_reduction(t: Timeline) -> Timeline:
    return returning(t, w="g_b.w")


@fault("reads other values than position|returns no gradient of b.v, which is trained")
def gradient_lost_with_its_reduction(t: Timeline) -> Timeline:
    return returning(missing_reduction(t), w=None, v=None)


@fault("reads other values than position|ends the reduction of b.w, but mean_b.w is not returned as its gradient")
def gradient_lost_behind_its_reduction(t: Timeline) -> Timeline:
    return returning(t, w=None)


@fault(r"reads other values than position|mean_b\.w as the gradient of b\.v, but no reduction of b\.v writes it")
def gradients_of_two_parameters_swapped(t: Timeline) -> Timeline:
    return returning(t, w="mean_b.v", v="mean_b.w")


@fault("returns a second gradient of b.w, mean_b.w, which torch would add to the first")
def gradient_returned_under_two_names(t: Timeline) -> Timeline:
    return replace(t, gradients=(*t.gradients, ("b.w", "mean_b.w")))


@fault("gx6 as the gradient of c.frozen, but no reduction of c.frozen writes it")
def gradient_of_a_frozen_parameter(t: Timeline) -> Timeline:
    return replace(t, gradients=(*t.gradients, ("c.frozen", "gx6")))


@fault("of the lifted trace is missing|return does not read mean_b.w, the gradient of b.w|position")
def gradient_that_the_return_does_not_read(t: Timeline) -> Timeline:
    end = len(t.ops) - 1
    return changed(t, end, reads=tuple(name for name in t.ops[end].reads if name != "mean_b.w"))


@fault("is in a different half than position|returns no gradient of a.half, which is trained")
def all_of_backward_lost(t: Timeline) -> Timeline:
    forward = [op for op in t.ops if not op.backward and (op.writes or op.kind is Kind.FREE)]
    return replace(t.with_ops([*forward, replace(t.ops[-1], reads=("y8",), backward=False)]), gradients=())


@fault("reads other values than position", by_lifted=True)
def gradients_swapped(t: Timeline) -> Timeline:
    end = len(t.ops) - 1
    return reading(reading(reading(t, end, "mean_b.w", "?"), end, "mean_c.w", "mean_b.w"), end, "?", "mean_c.w")


@fault("writes y0 after op .* has read it")
def swapped_order(t: Timeline) -> Timeline:
    return moved(t, writer(t, "y0"), reader(t, "y0") + 1)


@fault("gathers c.frozen again after op .*; it is gathered once", zero2=True)
def gather_again_of_what_is_gathered_once(t: Timeline) -> Timeline:
    gather, wait = t.ops[find(t, Kind.GATHER, "c.w")], t.ops[find(t, Kind.WAIT, "c.w")]
    gather = replace(gather, writes=("h",), backward=True, again=True)
    wait = replace(wait, reads=("h",), writes=("x0", "x1"), backward=True, again=True)
    return with_op(t, len(t.ops) - 1, gather, wait)


@fault("gathers b.v again after op .*; it needs one gather in each half")
def two_gathers_in_backward(t: Timeline) -> Timeline:
    at = find(t, Kind.WAIT, "b.v", backward=True)
    gather, wait = t.ops[find(t, Kind.GATHER, "b.v", backward=True)], t.ops[at]
    free = [Op(Kind.FREE, (f"x{number}",), (), (path,), True) for number, path in enumerate(wait.params)]
    again = replace(wait, reads=("h",), writes=("x0", "x1"))
    return with_op(t, len(t.ops) - 1, replace(gather, writes=("h",)), again, *free)


@fault("reads forward's b.v, which depends on parameters that backward gathers again")
def backward_reads_forwards_value(t: Timeline) -> Timeline:
    forward = find(t, Kind.FREE, "b.v")
    t = reading(t, reader(t, "b.v_again"), "b.v_again", "b.v")
    free = find(t, Kind.FREE, "b.v", backward=True)
    return without(changed(t, free, reads=("b.v",)), forward)


@fault("reads forward's c0.0, which depends on|reads other values")
def backward_reads_a_view_of_forwards_value(t: Timeline) -> Timeline:
    return reading(t, reader(t, "c0.0_again"), "c0.0_again", "c0.0")


@fault("of the lifted trace is missing|reads c.bias, which is neither an input nor written by any operation")
def gather_lost(t: Timeline) -> Timeline:
    gather = find(t, Kind.GATHER, "c.bias")
    assert t.ops[gather].params == ("c.bias",)
    return without(t, gather, find(t, Kind.WAIT, "c.bias"), find(t, Kind.FREE, "c.bias"))


@fault("reads t_c.bias, the shard of c.bias, not the gathered parameter")
def parameter_that_is_never_gathered(t: Timeline) -> Timeline:
    t = gather_lost(t)
    return reading(t, reader(t, "c.bias"), "c.bias", "t_c.bias")


@fault("differs from position 999|writes t_c.bias, which is an input")
def computation_in_the_place_of_a_shard(t: Timeline) -> Timeline:
    return with_op(t, find(t, Kind.GATHER, "c.bias"), Op(Kind.COMPUTE, (), ("t_c.bias",), source=(999,)))


@fault("gathers y1 as c.bias, but it is not a shard")
def gather_of_an_activation(t: Timeline) -> Timeline:
    return reading(t, find(t, Kind.GATHER, "c.bias"), "t_c.bias", "y1")


@fault("but it is the shard of b.v|but it is the shard of b.w")
def bucket_with_its_parameters_in_another_order(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.GATHER, "b.w"), reads=("t_b.v", "t_b.w"))


@fault("waits for other parameters than op")
def wait_with_other_parameters(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.WAIT, "b.w"), params=("b.v", "b.w"))


@fault("reads other values than position|differs from position|no reduction of b.v writes it")
def bucket_of_reductions_with_its_parameters_swapped(t: Timeline) -> Timeline:
    reduce, wait = find(t, Kind.REDUCE, "b.w", backward=True), find(t, Kind.WAIT, "b.w", backward=True, of=Kind.REDUCE)
    params = t.ops[reduce].params[::-1]
    return changed(changed(t, reduce, params=params), wait, params=params)


@fault("writes other values than position|frees memory that is not a gathered parameter's")
def wait_that_writes_in_another_order(t: Timeline) -> Timeline:
    at = find(t, Kind.WAIT, "b.w")
    return changed(t, at, writes=t.ops[at].writes[::-1])


def _joined(t: Timeline, first: str, second: str, kind: Kind) -> Timeline:
    """The timeline with two launches of backward, and their waits, merged in the place of the later."""
    launches = sorted(find(t, kind, path, backward=True) for path in (first, second))
    waits = sorted(find(t, Kind.WAIT, path, backward=True, of=kind) for path in (first, second))
    for pair in (launches, waits):
        one, two = t.ops[pair[0]], t.ops[pair[1]]
        t = changed(
            t,
            pair[1],
            reads=one.reads + two.reads if pair is launches else two.reads,
            writes=two.writes if pair is launches else one.writes + two.writes,
            params=one.params + two.params,
            source=one.source + two.source,
        )
    return without(t, launches[0], waits[0])


@fault("mixes dtypes in one bucket")
def mixed_dtypes(t: Timeline) -> Timeline:
    return _joined(t, "a.half", "a.v", Kind.REDUCE)


@fault("mixes sharded, resident and replicated parameters in one bucket")
def mixed_kinds(t: Timeline) -> Timeline:
    return _joined(t, "a.scalar", "a.v", Kind.REDUCE)


@fault("is a bucket of 16 bytes; bucket_bytes is 8")
def bucket_too_large(t: Timeline) -> Timeline:
    return _joined(t, "b.w", "c.w", Kind.REDUCE)


@fault("bytes in flight; in_flight_bytes is 12")
def launch_too_early(t: Timeline) -> Timeline:
    return moved(t, find(t, Kind.GATHER, "b.w"), find(t, Kind.WAIT, "a.w"))


@fault("gathers 3 units ahead; prefetch is 2")
def too_many_units_ahead(t: Timeline) -> Timeline:
    roomy = replace(t, plan=replace(t.plan, policy=replace(t.plan.policy, in_flight_bytes=10**6)))
    first = find(t, Kind.WAIT, "a.w")
    gathers = [at for at, op in enumerate(t.ops) if op.kind is Kind.GATHER and not op.backward and at > first]
    for number, at in enumerate(gathers):
        roomy = moved(roomy, at, first + number)
    return roomy


@fault("puts 16 bytes in flight; in_flight_bytes is 12|puts 14 bytes")
def wait_of_a_reduction_too_late(t: Timeline) -> Timeline:
    return moved(t, find(t, Kind.WAIT, "c.w", backward=True, of=Kind.REDUCE), len(t.ops) - 1)


@fault("makes 8 bytes of gradients while 8 bytes are in flight; in_flight_bytes is 12", by_lifted=True)
def wait_of_a_reduction_behind_the_making_of_the_next_gradients(t: Timeline) -> Timeline:
    return moved(
        t,
        find(t, Kind.WAIT, "c.w", backward=True, of=Kind.REDUCE),
        find(t, Kind.REDUCE, "b.w", backward=True),
    )


@fault(r"position \d+ \(compute\) of the lifted trace is missing|reads gx0, which is neither")
def operation_lost(t: Timeline) -> Timeline:
    at = writer(t, "gx0")
    end = len(t.ops) - 1
    return without(reading(changed(t, end, writes=()), end, "?", "?"), at)


@fault("runs position .* of the lifted trace twice", by_lifted=True)
def operation_twice(t: Timeline) -> Timeline:
    at = writer(t, "d4")  # random
    return with_op(t, at + 1, replace(t.ops[at], writes=("other",)))


@fault("differs from position 999", by_lifted=True)
def operation_from_nowhere(t: Timeline) -> Timeline:
    return with_op(t, 3, Op(Kind.COMPUTE, ("x",), ("other",), source=(999,)))


@fault("must come from one line of the trace", by_lifted=True)
def computation_from_two_lines(t: Timeline) -> Timeline:
    return changed(t, writer(t, "y0"), source=(2, 3))


@fault("is last, but it is not the return")
def return_not_last(t: Timeline) -> Timeline:
    return moved(t, len(t.ops) - 1, len(t.ops) - 2)


@fault("is last, but it is not the return")
def something_behind_the_return(t: Timeline) -> Timeline:
    return with_op(t, len(t.ops), Op(Kind.COMPUTE, ("x",), ("other",), backward=True))


@fault("belongs to forward, but comes after operations of backward")
def forward_in_backward(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.GATHER, "b.w", backward=True), backward=False)


@fault("waits in backward for what op .* launched in forward")
def gather_across_the_border(t: Timeline) -> Timeline:
    border = next(at for at, op in enumerate(t.ops) if op.backward)
    at = find(t, Kind.GATHER, "c.w", backward=True)
    return moved(changed(t, at, backward=False), at, border)


@fault("is in a different half than position", by_lifted=True)
def backward_in_forward(t: Timeline) -> Timeline:
    border = next(at for at, op in enumerate(t.ops) if op.backward)
    at = writer(t, "g")
    return moved(changed(t, at, backward=False), at, border)


@fault("is done again, but is neither")
def copy_of_a_random_operation(t: Timeline) -> Timeline:
    op = t.ops[writer(t, "d4")]
    at = reader(t, "b.v_again")
    copy = replace(op, writes=("d4_again",), backward=True, again=True)
    return with_op(reading(t, at, "d4", "d4_again"), at, copy)


@fault("is done again, but is neither")
def copy_of_a_reduction(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.REDUCE, "b.w", backward=True), again=True)


@fault(r"reads other values than position|frees a.v_again, but op \d+ still reads it or a view of it")
def copy_of_another_parameter(t: Timeline) -> Timeline:
    return reading(t, writer(t, "c0.0_again"), "a.w_again", "a.v_again")


@fault("writes y1, which op .* already wrote")
def two_writes(t: Timeline) -> Timeline:
    return changed(t, writer(t, "y2"), writes=("y1",))


@fault("reads t_b.w, the shard of b.w, not the gathered parameter")
def computation_on_a_shard(t: Timeline) -> Timeline:
    return reading(t, reader(t, "b.w"), "b.w", "t_b.w")


@fault("reads fut_b.w, a handle that only a wait may read")
def computation_on_a_handle(t: Timeline) -> Timeline:
    return reading(t, reader(t, "b.w"), "b.w", "fut_b.w")


@fault("gathers a replicated parameter")
def gather_of_a_replicated_parameter(t: Timeline) -> Timeline:
    gather = Op(Kind.GATHER, ("t_a.scalar",), ("h",), ("a.scalar",), source=(999,))
    return with_op(t, 3, gather, Op(Kind.WAIT, ("h",), ("scalar",), ("a.scalar",), source=(998,)))


@fault("reduces a gradient of c.frozen, which is frozen")
def reduction_of_a_frozen_parameter(t: Timeline) -> Timeline:
    ops = (Op(Kind.REDUCE, ("gx6",), ("h",), ("c.frozen",), True), Op(Kind.WAIT, ("h",), ("f",), ("c.frozen",), True))
    return with_op(t, writer(t, "gx6") + 1, *ops)


@fault("reduces a gradient in forward")
def reduction_in_forward(t: Timeline) -> Timeline:
    ops = (Op(Kind.REDUCE, ("y0",), ("h",), ("a.w",)), Op(Kind.WAIT, ("h",), ("f",), ("a.w",)))
    return with_op(t, reader(t, "y0"), *ops)


@fault("names z.w, which is not a parameter of the plan")
def unknown_parameter(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.FREE, "a.v"), params=("z.w",))


@fault("must read one value for each of its parameters")
def gather_of_fewer_shards_than_parameters(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.GATHER, "b.w"), reads=("t_b.w",))


@fault("reads or writes a value whose bytes and dtype are unknown")
def gather_of_an_unknown_value(t: Timeline) -> Timeline:
    return reading(t, find(t, Kind.GATHER, "c.bias"), "t_c.bias", "nowhere")


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("fields", [{}, {"in_flight_bytes": 0}, {"bucket_bytes": 0}], ids=str)
def test_good_timelines_pass(stage: int, fields: dict[str, int]) -> None:
    timeline = plain(stage, **fields)
    check_pass(timeline, timeline)
    check_schedule(run(timeline), timeline)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    sentence, plant = FAULTS[name]
    timeline = ZERO2 if name in AT_ZERO2 else ZERO3
    good = run(timeline)
    bad = plant(good)
    assert (bad.ops, bad.gradients) != (good.ops, good.gradients)
    with pytest.raises(ScheduleError, match=sentence):
        check_schedule(bad, timeline)


def emitted(timeline: Timeline) -> Timeline:
    """A schedule as it is read back from the lines that run: copies have no mark, and forward has a return."""
    ops = [replace(op, again=False) for op in timeline.ops]
    border = next(at for at, op in enumerate(ops) if op.backward)
    return timeline.with_ops([*ops[:border], Op(Kind.COMPUTE, ("y8",)), *ops[border:]])


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in BY_LIFTED])
def test_a_planted_fault_is_caught_in_the_lines_that_run(name: str) -> None:
    """Without the lifted timeline: the proof only knows which parameters are trained."""
    sentence, plant = FAULTS[name]
    good = emitted(run(ZERO2 if name in AT_ZERO2 else ZERO3))
    trained = {path for path, _ in good.gradients}
    assert trained == {use.path for use in USES} - {"c.frozen"}
    check(good, trained=trained)
    with pytest.raises(ScheduleError, match=sentence):
        check(plant(good), trained=trained)


def deferring(timeline: Timeline) -> Timeline:
    """A timeline as lifted under ``no_sync``: the reduction of each gradient is deferred."""
    mean = {op.reads[0]: op.writes[0] for op in timeline.ops if timeline.ends(op, Kind.REDUCE)}
    ops = (
        replace(op, kind=Kind.DEFER, writes=(mean[op.writes[0]],)) if op.kind is Kind.REDUCE else op
        for op in timeline.ops
        if not timeline.ends(op, Kind.REDUCE)
    )
    return timeline.with_ops(ops)


def deferred_twice(t: Timeline) -> Timeline:
    at = find(t, Kind.DEFER, "b.w", backward=True)
    return with_op(t, at + 1, replace(t.ops[at], writes=("other",)))


def deferred_and_reduced(t: Timeline) -> Timeline:
    at = find(t, Kind.DEFER, "b.w", backward=True)
    op = t.ops[at]
    reduce = replace(op, kind=Kind.REDUCE, writes=("handle",))
    wait = replace(op, kind=Kind.WAIT, reads=("handle",))
    return without(with_op(t, at + 1, reduce, wait), at)


def deferred_gradient_lost(t: Timeline) -> Timeline:
    return without(returning(t, w=None), find(t, Kind.DEFER, "b.w", backward=True))


def deferred_gradient_not_returned(t: Timeline) -> Timeline:
    return returning(t, w=None)


def deferred_of_a_frozen_parameter(t: Timeline) -> Timeline:
    return changed(t, find(t, Kind.DEFER, "b.w", backward=True), params=("c.frozen",))


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (deferred_twice, r"defers b.w, which op \d+ already deferred"),
        (deferred_and_reduced, r"reduces a gradient, but op \d+ defers one"),
        (deferred_gradient_lost, "returns no gradient of b.w, which is trained"),
        (deferred_gradient_not_returned, "defers the gradient of b.w, but mean_b.w is not returned as its gradient"),
        (deferred_of_a_frozen_parameter, "defers a gradient of c.frozen, which is frozen"),
    ],
)
def test_a_fault_under_no_sync_is_caught(plant: Fault, sentence: str) -> None:
    lifted_ = deferring(ZERO3)
    good = run(lifted_)
    trained = {path for path, _ in lifted_.gradients}
    check_schedule(good, lifted_)
    assert not any(op.kind is Kind.REDUCE for op in good.ops)
    with pytest.raises(ScheduleError, match=sentence):
        check(plant(good), trained=trained)


def test_there_are_many_kinds_of_faults() -> None:
    assert len(FAULTS) >= 60
    assert len(FAULTS.keys() - BY_LIFTED) >= 55


def test_another_line_without_outputs_is_no_return() -> None:
    look = Op(Kind.COMPUTE, ("y0",), backward=True, source=(999,))
    timeline = with_op(ZERO3, len(ZERO3.ops) - 1, look)
    good = run(timeline)
    with pytest.raises(ScheduleError, match=r"compute y0\) is last, but it is not the return"):
        check_schedule(moved(good, good.ops.index(look), len(good.ops)), timeline)


def test_a_lifetime_that_does_not_end_is_an_error_only_after_the_last_pass() -> None:
    check_pass(ZERO3, ZERO3)
    with pytest.raises(ScheduleError, match=r"reads forward's|never freed"):
        check_schedule(ZERO3, ZERO3)


def test_an_error_names_the_operation_and_the_parameter() -> None:
    good = run(ZERO3)
    at = find(good, Kind.FREE, "a.v")
    sentence = rf"^op {at - 1} \(free a.v\) frees a.v, but op {at} still reads it or a view of it$"
    with pytest.raises(ScheduleError, match=sentence):
        check(free_one_line_early(good))


def test_the_lines_that_run_are_checked_too() -> None:
    """Read back from Thunder's traces, a free names the last view, copies have no mark, and forward has a return."""
    good = run(gpt(2, Policy(stage=3, gather_last_units_once=False)))
    border = next(at for at, op in enumerate(good.ops) if op.backward)
    saved = Op(Kind.COMPUTE, ("y27", "y26", "t_wte"))  # forward's return
    ops = [replace(op, again=False, source=()) for op in good.ops]
    emitted = good.with_ops([*ops[:border], saved, *ops[border:]])
    check(emitted)
    at = find(emitted, Kind.FREE, "h.0.qkv.w")
    of_view = changed(emitted, at, reads=("c4.0",))
    check(of_view)
    with pytest.raises(ScheduleError, match=r"frees h\.0\.qkv\.w, but op"):
        check(moved(of_view, at, at - 1))
    with pytest.raises(ScheduleError, match="reads forward's"):
        check(reading(emitted, reader(emitted, "h.0.ln1.w_again"), "h.0.ln1.w_again", "h.0.ln1.w"))


@pytest.mark.parametrize("stage", range(4))
def test_deleted_values_say_where_gathered_parameters_are_freed(stage: int) -> None:
    """Thunder deletes each value after its last read; a view of a parameter holds its memory."""
    good = run(gpt(2, Policy(stage=stage)))
    ops = [op for op in good.ops if op.kind is not Kind.FREE]
    last = {name: at for at, op in enumerate(ops) for name in (*op.reads, *op.writes)}
    deleted: dict[int, list[str]] = {}
    for name, at in last.items():
        deleted.setdefault(at, []).append(name)
    dels = [Op(Kind.FREE, tuple(deleted.get(at, ())), backward=op.backward) for at, op in enumerate(ops)]
    read_back = frees_of_gathered(good.with_ops(op for pair in zip(ops, dels, strict=True) for op in pair))
    check_schedule(read_back, gpt(2, Policy(stage=stage)))
    assert sorted(read_back.ops, key=str) == sorted(good.ops, key=str)


def one_change(good: Timeline, at: int, data: st.DataObject) -> tuple[str, Timeline]:
    """A random change to the operation at ``at``, and what is changed."""
    op = good.ops[at]
    to = data.draw(st.integers(0, len(good.ops)), label="to")
    names = sorted({name for op in good.ops for name in (*op.reads, *op.writes)})
    paths = [param.path for param in good.plan.params]

    def one_of(values: tuple[str, ...], pool: list[str]) -> tuple[str, ...]:
        number = data.draw(st.integers(0, len(values) - 1)) if values else 0
        return (*values[:number], data.draw(st.sampled_from(pool)), *values[number + 1 :])

    how = data.draw(
        st.sampled_from(("drop", "repeat", "move", "read", "write", "params", "half", "again")), label="how"
    )
    changes = {
        "drop": lambda: without(good, at),
        "repeat": lambda: with_op(good, to, op),
        "move": lambda: moved(good, at, to),
        "read": lambda: changed(good, at, reads=one_of(op.reads, names)),
        "write": lambda: changed(good, at, writes=one_of(op.writes, names)),
        "params": lambda: changed(good, at, params=one_of(op.params, paths)),
        "half": lambda: changed(good, at, backward=not op.backward),
        "again": lambda: changed(good, at, again=not op.again),
    }
    return how, changes[how]()


@given(timelines(), st.data())
def test_what_passes_computes_what_it_should(timeline: Timeline, data: st.DataObject) -> None:
    """One random change to a good timeline either is caught or does no harm."""
    good = run(timeline)
    _, bad = one_change(good, data.draw(st.integers(0, len(good.ops) - 1), label="at"), data)
    try:
        check_schedule(bad, timeline)
    except ScheduleError:
        return
    terms: Terms = {}
    assert interpret(bad, terms) == interpret(timeline, terms)


@given(timelines(), st.data())
def test_collectives_are_proved_without_what_was_lifted(timeline: Timeline, data: st.DataObject) -> None:
    """One random change to a collective, a wait or a free is caught in the lines that run, too. Except which value is
    the full gradient: only the lifted timeline knows that."""
    good = run(timeline)
    good = good.with_ops(replace(op, again=False) for op in good.ops)
    ours = [at for at, op in enumerate(good.ops) if op.kind is not Kind.COMPUTE]
    assume(ours)
    at = data.draw(st.sampled_from(ours), label="at")
    how, bad = one_change(good, at, data)
    assume((how, good.ops[at].kind) != ("read", Kind.REDUCE))
    try:
        check(bad, trained={path for path, _ in good.gradients})
    except ScheduleError:
        return
    terms: Terms = {}
    assert interpret(bad, terms) == interpret(timeline, terms)
