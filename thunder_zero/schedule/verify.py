"""Proves that a timeline is right: after each pass, after the last pass, and before it runs.

The three proofs are ``check_pass``, ``check_schedule`` and ``check``. Each proof raises for the first broken rule; each
rule is one function below. The rules read only sizes and orders, in near-linear time. ``verify_in_flight.py`` has the
rules of bytes in flight, ``verify_recompute.py`` the rules of recomputing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from thunder_zero.plan.mesh import SHARD
from thunder_zero.schedule.derived import gathered_from, needed_in_backward, regathered
from thunder_zero.schedule.lifetimes import last_reads
from thunder_zero.schedule.ops import (
    Compute,
    Defer,
    Free,
    Gather,
    Launch,
    Op,
    Reduce,
    Return,
    Wait,
    ends,
    identities,
)
from thunder_zero.schedule.timeline import ScheduleError, Timeline, fault, name_of
from thunder_zero.schedule.verify_in_flight import check_in_flight, check_making


@runtime_checkable
class HasTimeline(Protocol):
    """An object with a timeline, such as the result of ``tz.traces_of``. (This room must not import its class.)"""

    @property
    def timeline(self) -> Timeline:
        """The timeline of both phases of a step."""


def check(timeline: Timeline | HasTimeline, trained: Collection[str] = ()) -> None:
    """Prove that the timeline of the traces that run is right, or raise ScheduleError for the first broken rule.

    Backward must return the gradients of the parameters whose paths are in ``trained``.
    """
    if isinstance(timeline, HasTimeline):
        timeline = timeline.timeline
    if not isinstance(timeline, Timeline):
        raise TypeError(f"check takes a Timeline or Traces, got {type(timeline).__name__}; pass tz.traces_of(model)")
    _check_communication(timeline)
    _check_results(timeline, trained)
    _check_crossing(timeline)
    _check_frees(timeline)


def check_pass(timeline: Timeline, lifted: Timeline) -> None:
    """Prove that the timeline after a pass is right. Backward's gathers may still be missing. Each
    operation of ``lifted``, the timeline before the first pass, must occur exactly once, and read its original values
    or their copies. Backward must return the gradients of ``lifted``."""
    _check_communication(timeline)
    _check_same(timeline, lifted)
    _check_results(timeline, [path for path, _ in lifted.gradients])


def check_schedule(timeline: Timeline, lifted: Timeline) -> None:
    """Prove that the timeline after the last pass is right. Its regions, and its frees, are still missing."""
    check_pass(timeline, lifted)
    check_making(timeline)
    _check_crossing(timeline)
    _check_gathered_for(timeline, lifted)


def _check_communication(timeline: Timeline) -> None:
    _check_order(timeline)
    _check_launches(timeline)
    _check_waits(timeline)
    _check_reductions(timeline)
    check_in_flight(timeline)
    _check_copies(timeline)


def _check_results(timeline: Timeline, trained: Collection[str]) -> None:
    _check_gradients(timeline, trained)
    _check_inputs(timeline)


def _check_crossing(timeline: Timeline) -> None:
    _check_regathered(timeline)
    _check_saved(timeline)


def _check_order(timeline: Timeline) -> None:
    """Check that a return ends each phase, backward follows forward, and each value is written once, before it is
    read."""
    ops = timeline.ops
    if not ops:
        raise ScheduleError("the timeline has no operations, so it has no return")
    written: dict[str, int] = {}
    first_read: dict[str, int] = {}
    backward = False
    for index, op in enumerate(ops):
        if unknown := [path for path in op.params if path not in timeline.plan.by_name]:
            raise fault(timeline, index, f"names {unknown[0]}, which is not a parameter of the plan")
        if backward and not op.backward:
            raise fault(timeline, index, "belongs to forward, but comes after operations of backward")
        backward = op.backward
        is_last = index + 1 == len(ops) or ops[index + 1].backward is not backward
        if is_last is not isinstance(op, Return):
            raise fault(timeline, index, "is last in its phase, but it is not the return" if is_last else "is not last")
        for name in op.reads:
            first_read.setdefault(name, index)
        for name in op.writes:
            if name in written:
                raise fault(timeline, index, f"writes {name}, which op {written[name]} already wrote")
            if name in first_read:
                rule = f"reads {name}, which {name_of(timeline, index)} writes only later"
                raise fault(timeline, first_read[name], rule)
            written[name] = index


def _check_inputs(timeline: Timeline) -> None:
    """Check that each tensor is an input or written by an operation."""
    given = timeline.tangents.union(timeline.inputs)
    available = given.union(name for op in timeline.ops for name in op.writes)
    for index, op in enumerate(timeline.ops):
        if inputs := [name for name in op.writes if name in given]:
            raise fault(timeline, index, f"writes {inputs[0]}, which is an input")
        if missing := [name for name in op.reads if name in timeline.values and name not in available]:
            raise fault(timeline, index, f"reads {missing[0]}, which is neither an input nor written by any operation")


def _check_launches(timeline: Timeline) -> None:
    """Check that a bucket holds shards or gradients of one dtype and kind, within the size limit, and that only gathers
    read shards."""
    by_name = timeline.plan.by_name
    shards = {name: path for name, path in timeline.inputs.items() if path is not None and by_name[path].sharded}
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Launch):
            _check_bucket(timeline, index, op)
            _check_axis(timeline, index, op)
        if isinstance(op, Gather):
            _check_gather(timeline, index, op, shards)
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Compute) and op.writes and (used := [name for name in op.reads if name in shards]):
            raise fault(timeline, index, f"reads {used[0]}, the shard of {shards[used[0]]}, not the gathered parameter")


def _check_bucket(timeline: Timeline, index: int, op: Launch) -> None:
    if not 0 < len(op.reads) == len(op.params) == len(set(op.params)):
        raise fault(timeline, index, "must read one value for each of its parameters")
    params = timeline.params_of(op)
    limit = timeline.plan.sizes.bucket_bytes
    if not all(name in timeline.values for name in (*op.reads, *op.writes)):
        raise fault(timeline, index, "reads or writes a value whose bytes and dtype are unknown")
    read = [timeline.values[name].dtype for name in op.reads]
    if len({*zip(read, (timeline.travels_as(op, param) for param in params), strict=True)}) > 1:
        raise fault(timeline, index, "mixes dtypes or formats in one bucket")
    if len({(param.sharded, param.resident, param.owner is None) for param in params}) > 1:
        raise fault(timeline, index, "mixes sharded, resident, replicated and owned parameters in one bucket")
    if isinstance(op, Reduce) and len({timeline.plan.reduced_over(param) for param in params}) > 1:
        raise fault(timeline, index, "mixes gradients that are reduced over different axes in one bucket")
    if len(params) > 1 and (full := timeline.traffic(op).full) > limit:
        raise fault(timeline, index, f"is a bucket of {full} bytes; bucket_bytes is {limit}")


def _check_axis(timeline: Timeline, index: int, op: Launch) -> None:
    """Check that the reductions of a gradient run over the plan's axes in order, and each reads the means of the
    reduction before it."""
    for name, param in zip(op.reads, timeline.params_of(op), strict=True):
        axes = (SHARD,) if isinstance(op, Gather) else timeline.plan.reduced_over(param)
        if op.over not in axes:
            raise fault(timeline, index, f"goes over {op.over!r}; the plan has {' and then '.join(map(repr, axes))}")
        writer = timeline.ops[timeline.writer[name]] if name in timeline.writer else None
        before = writer.launch if writer and ends(writer, Reduce) else None
        needs = axes[: axes.index(op.over)][-1:]
        if needs != ((before.over,) if before else ()):
            needed = f"the means over {needs[0]!r}" if needs else "a gradient that nothing has averaged"
            raise fault(timeline, index, f"goes over {op.over!r} and must read {needed} of {param.path}, not {name}")
        if writer and before and writer.params[writer.writes.index(name)] != param.path:
            raise fault(timeline, index, f"averages {name} as {param.path}, but it is another parameter's mean")


def _check_gather(timeline: Timeline, index: int, op: Gather, shards: Mapping[str, str]) -> None:
    if not timeline.params_of(op)[0].sharded:
        raise fault(timeline, index, "gathers a replicated parameter, which every rank has in full")
    for name, path in zip(op.reads, op.params, strict=True):
        if shards.get(name) != path:
            actual = f"the shard of {shards[name]}" if name in shards else "not a shard"
            raise fault(timeline, index, f"gathers {name} as {path}, but it is {actual}")


def _check_waits(timeline: Timeline) -> None:
    """Check that exactly one wait ends each launch, in the same phase, and that only waits read handles."""
    in_flight: dict[str, int] = {}
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Wait):
            if (launched := in_flight.pop(op.launch.handle, None)) is None:
                raise fault(timeline, index, f"waits for {op.launch.handle}, which is not in flight")
            if op.launch != timeline.ops[launched] or len(op.writes) != len(op.params):
                raise fault(timeline, index, f"does not wait for what op {launched} launched")
        elif handles := [name for name in op.reads if name in timeline.launches]:
            raise fault(timeline, index, f"reads {handles[0]}, a handle that only a wait may read")
        if isinstance(op, Launch):
            in_flight[op.handle] = index
    for launched in in_flight.values():
        raise fault(timeline, launched, "is never waited for")


def _check_reductions(timeline: Timeline) -> None:
    """Check that backward reduces each gradient at most once over an axis, or defers all gradients to a later
    backward."""
    verbs: dict[type[Op], tuple[str, str]] = {Reduce: ("reduces", "reduced"), Defer: ("defers", "deferred")}
    handled: dict[tuple[str, str], int] = {}
    first: tuple[type[Op], int] | None = None
    for index, op in enumerate(timeline.ops):
        if not isinstance(op, Reduce | Defer):
            continue
        verb, past = verbs[type(op)]
        first = first or (type(op), index)
        if type(op) is not first[0]:
            raise fault(timeline, index, f"{verb} a gradient, but op {first[1]} {verbs[first[0]][0]} one")
        for param in timeline.params_of(op):
            if not param.requires_grad:
                raise fault(timeline, index, f"{verb} a gradient of {param.path}, which is frozen")
            key = param.path, op.over if isinstance(op, Reduce) else ""
            if key in handled:
                raise fault(timeline, index, f"{verb} {param.path}, which op {handled[key]} already {past}")
            handled[key] = index


def _check_gradients(timeline: Timeline, trained: Collection[str]) -> None:
    """Check that backward returns exactly the reduced gradients (means), each as the gradient of its own parameter. For
    a deferred gradient, backward returns the placeholder."""
    means = {
        (path, name): index
        for index, op in enumerate(timeline.ops)
        if (ends(op, Reduce) and not timeline.feeds_reduction(op)) or isinstance(op, Defer)
        for path, name in zip(op.params, op.writes, strict=True)
    }
    read = set(timeline.ops[-1].reads)
    returned: set[str] = set()
    for path, name in timeline.gradients:
        if path in returned:
            raise ScheduleError(
                f"backward returns a second gradient of {path}, {name}, which torch would add to the first"
            )
        if (path, name) not in means:
            raise ScheduleError(
                f"backward returns {name} as the gradient of {path}, but no reduction of {path} writes it"
            )
        if name not in read:
            raise ScheduleError(f"backward's return does not read {name}, the gradient of {path}")
        returned.add(path)
    for (path, name), index in means.items():
        if path not in returned:
            action = "ends the reduction of" if isinstance(timeline.ops[index], Wait) else "defers the gradient of"
            raise fault(timeline, index, f"{action} {path}, but {name} is not returned as its gradient")
    if lost := sorted(set(trained) - returned):
        raise ScheduleError(f"backward returns no gradient of {lost[0]}, which is trained")


def _check_copies(timeline: Timeline) -> None:
    """Check that only repeatable computations are repeated."""
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Compute) and op.repeated and not op.repeatable:
            raise fault(timeline, index, "is done again, but is not repeatable")


def _check_frees(timeline: Timeline) -> None:
    """Check that nothing uses a value after its free, and that every gathered parameter is freed, once, right after the
    last use of it and its views, unless it is resident or a phase returns it."""
    made_from = gathered_from(timeline)
    last = last_reads(timeline, made_from)
    path_of = {name: param.path for _, name, param in timeline.gathered if not param.resident}
    dropped: dict[str, int] = {}
    freed: dict[str, int] = {}
    latest_use = -1  # index of the latest operation that is not a FREE
    for index, op in enumerate(timeline.ops):
        if used := [name for name in (*op.reads, *op.writes) if name in dropped]:
            raise fault(timeline, index, f"uses {used[0]}, which op {dropped[used[0]]} already freed")
        if not isinstance(op, Free):
            latest_use = index
            continue
        dropped.update(dict.fromkeys(op.reads, index))
        sources = dict.fromkeys(name for read in op.reads for name in made_from.get(read, ()) if name in path_of)
        for path in op.params:
            name = next((name for name in sources if path_of[name] == path and name not in freed), None)
            if name is None:
                raise fault(timeline, index, f"frees {path}, and drops no value of it")
            if last[name] > index:
                raise fault(timeline, index, f"frees {name}, but op {last[name]} still reads it or a view of it")
            # Forward may save a value for another loss: then backward begins by dropping it.
            if last[name] < latest_use and index != timeline.backward_start:
                raise fault(timeline, index, f"frees {name} too late: op {last[name]} was the last to read it")
            freed[name] = index
    returned = (name for op in timeline.ops if isinstance(op, Return) for name in op.returned)
    escaped = {name for read in returned for name in made_from.get(read, ())}
    for index, name, param in timeline.gathered:
        if name in path_of and name not in freed and name not in escaped:
            raise fault(timeline, index, f"gathers {param.path} as {name}, which is never freed")


def _check_regathered(timeline: Timeline) -> None:
    """Check that a parameter has one gather if it is kept unsharded, or else one gather in each phase. With
    ``gather_per_unit`` forward may have several gathers."""
    gathered: dict[tuple[str, bool], int] = {}
    for index, op in enumerate(timeline.ops):
        for param in timeline.params_of(op) if isinstance(op, Gather) else ():
            phase = (param.path, op.backward and not param.kept_unsharded)
            if phase in gathered and (op.backward or param.kept_unsharded or not param.gather_per_unit):
                why = "is kept unsharded" if param.kept_unsharded else "needs one gather in each phase"
                raise fault(timeline, index, f"gathers {param.path} again after op {gathered[phase]}; it {why}")
            gathered[phase] = index


def _check_gathered_for(timeline: Timeline, lifted: Timeline) -> None:
    """Check that backward gathers no parameter for recomputed operations alone. Biases of units that are recomputed
    whole are an exception."""
    before = replace(lifted, plan=timeline.plan)
    needed = needed_in_backward(before, regathered(before))
    read = {param.path for _, name, param in before.gathered if name in needed}
    for index, op in enumerate(timeline.ops):
        for param in timeline.params_of(op) if isinstance(op, Gather) and op.backward else ():
            if param.path not in read and not timeline.plan.may_serve_copies(param):
                raise fault(timeline, index, f"gathers {param.path} in backward, which only copies read")


def _check_saved(timeline: Timeline) -> None:
    """Check that backward reads no derived value of forward, unless its parameters are kept unsharded."""
    crossing = regathered(timeline)
    for index, op in enumerate(timeline.ops):
        if op.backward and not isinstance(op, Return) and (saved := [name for name in op.reads if name in crossing]):
            raise fault(
                timeline, index, f"reads forward's {saved[0]}, which depends on parameters that backward gathers again"
            )


def _check_same(timeline: Timeline, lifted: Timeline) -> None:
    """Check that every lifted operation occurs once, and reads its original values or their copies."""
    originals = {part.identity: (op, part) for op in lifted.ops for part in _parts(op)}
    untouched = set(map(id, lifted.ops))
    canonical: dict[str, str] = {}  # name that a copy writes -> name that its original writes
    seen: set[Hashable] = set()
    for index, op in enumerate(timeline.ops):
        is_usual = id(op) in untouched and seen.isdisjoint(identities(op)) and canonical.keys().isdisjoint(op.reads)
        seen.update(identities(op) if is_usual else ())
        for part in () if is_usual else _parts(op):
            original, expected = originals.get(part.identity, (None, None))
            if original is None or expected is None or not _is_copy(op, original):
                raise fault(timeline, index, "is not an operation of the lifted trace")
            if op.repeated:
                canonical.update(zip(part.writes, expected.writes, strict=True))
            elif part.identity in seen:
                raise fault(timeline, index, "runs twice what the lifted trace runs once")
            elif op.backward != original.backward:
                raise fault(timeline, index, "is in a different phase than in the lifted trace")
            elif part.writes != expected.writes:
                raise fault(timeline, index, "writes other values than in the lifted trace")
            else:
                seen.add(part.identity)
            if tuple(canonical.get(name, name) for name in part.reads) != expected.reads:
                raise fault(timeline, index, "reads other values than in the lifted trace")
    if lost := [op for identity, (op, _) in originals.items() if identity not in seen]:
        raise ScheduleError(
            f"{' '.join((lost[0].kind, *(lost[0].params or lost[0].writes)))} of the lifted trace is missing"
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """An operation, or its part for one parameter of a bucket. Handles are left out, since buckets have their own."""

    identity: Hashable
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def _parts(op: Op) -> Iterator[_Part]:
    match op:
        case Gather() | Reduce():
            yield from (_Part(key, (read,), ()) for key, read in zip(identities(op), op.reads, strict=True))
        case Wait():
            yield from (_Part(key, (), (name,)) for key, name in zip(identities(op), op.writes, strict=True))
        case _:
            yield from (_Part(key, op.reads, op.writes) for key in identities(op))


def _is_copy(op: Op, original: Op) -> bool:
    """Return whether a computation differs from the lifted one at most in its phase, and in the values that it reads
    and writes."""
    if not isinstance(op, Compute):
        return True  # the identity of another operation says all
    return op is original or (
        isinstance(original, Compute)
        and op.line is original.line
        and op == replace(original, reads=op.reads, writes=op.writes, backward=op.backward, repeated=op.repeated)
    )
