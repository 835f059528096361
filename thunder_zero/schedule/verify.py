"""Proves that a timeline is right: after each pass, after the last pass, and before it runs.

The three proofs are ``check_pass``, ``check_schedule`` and ``check``. Each proof raises for the first broken rule; each
rule is one function below. The rules read only sizes and orders, in near-linear time. ``verify_in_flight.py`` has the
rules of bytes in flight, ``verify_recompute.py`` the rules of recomputing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from thunder_zero.plan.mesh import SHARD
from thunder_zero.schedule.derived import gathered_from, needed_in_backward, regathered
from thunder_zero.schedule.lifetimes import last_reads
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, ScheduleError, Timeline, fault, name_of
from thunder_zero.schedule.verify_in_flight import check_in_flight, check_making


@runtime_checkable
class HasTimeline(Protocol):
    """An object with a timeline, such as the result of ``tz.traces_of``. (This room must not import its class.)"""

    @property
    def timeline(self) -> Timeline:
        """The timeline of both phases of a step."""


def check(timeline: Timeline | HasTimeline, trained: Collection[str] = ()) -> None:
    """Prove that the timeline of the traces that run is right.

    Args:
        timeline: a timeline, or ``Traces`` with a timeline, as ``tz.traces_of`` and ``tz.trace`` return them.
        trained: paths of the parameters whose gradients backward must return.

    Raises:
        ScheduleError: the timeline breaks a rule; the message states the first broken rule.
        TypeError: ``timeline`` is neither a timeline nor traces.
    """
    if isinstance(timeline, HasTimeline):
        timeline = timeline.timeline
    if not isinstance(timeline, Timeline):
        raise TypeError(f"check takes a Timeline or Traces, got {type(timeline).__name__}; pass tz.traces_of(model)")
    _check_communication(timeline)
    _check_results(timeline, trained)
    _check_lifetimes(timeline)


def check_pass(timeline: Timeline, lifted: Timeline) -> None:
    """Prove that the timeline after a pass is right. Backward's gathers, and the frees, may still be missing. Each
    operation of ``lifted``, the timeline before the first pass, must occur exactly once, and read its original values
    or their copies. Backward must return the gradients of ``lifted``."""
    _check_communication(timeline)
    _check_same(timeline, lifted)
    _check_results(timeline, [path for path, _ in lifted.gradients])
    made_from = gathered_from(timeline)
    _check_frees(timeline, made_from, last_reads(timeline, made_from))


def check_schedule(timeline: Timeline, lifted: Timeline) -> None:
    """Prove that the timeline after the last pass is right: the rules of :func:`check_pass` and of :func:`check`."""
    _check_communication(timeline)
    _check_same(timeline, lifted)
    check_making(timeline)
    _check_results(timeline, [path for path, _ in lifted.gradients])
    _check_lifetimes(timeline)
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


def _check_lifetimes(timeline: Timeline) -> None:
    made_from = gathered_from(timeline)
    last = last_reads(timeline, made_from)
    _check_regathered(timeline)
    _check_saved(timeline)
    _check_frees(timeline, made_from, last)
    _check_ends(timeline, made_from, last)


def _check_order(timeline: Timeline) -> None:
    """Check that the return is last, backward follows forward, and each value is written once, before it is read."""
    ops = timeline.ops
    if not ops or ops[-1].kind is not Kind.COMPUTE or ops[-1].writes:
        raise ScheduleError(f"op {len(ops) - 1} is last, but it is not the return: a compute that writes nothing")
    written: dict[str, int] = {}
    first_read: dict[str, int] = {}
    backward = False
    for index, op in enumerate(ops):
        if unknown := [path for path in op.params if path not in timeline.plan.by_name]:
            raise fault(timeline, index, f"names {unknown[0]}, which is not a parameter of the plan")
        if backward and not op.backward:
            raise fault(timeline, index, "belongs to forward, but comes after operations of backward")
        backward = op.backward
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
    available = {name for op in timeline.ops for name in op.writes}.union(timeline.inputs)
    for index, op in enumerate(timeline.ops):
        if inputs := [name for name in op.writes if name in timeline.inputs]:
            raise fault(timeline, index, f"writes {inputs[0]}, which is an input")
        if missing := [name for name in op.reads if name in timeline.values and name not in available]:
            raise fault(timeline, index, f"reads {missing[0]}, which is neither an input nor written by any operation")


def _check_launches(timeline: Timeline) -> None:
    """Check that a bucket holds shards or gradients of one dtype and kind, within the size limit, and that only gathers
    read shards."""
    by_name = timeline.plan.by_name
    shards = {name: path for name, path in timeline.inputs.items() if path is not None and by_name[path].sharded}
    for index, op in enumerate(timeline.ops):
        if op.kind in LAUNCHES:
            _check_bucket(timeline, index, op)
            _check_axis(timeline, index, op)
        if op.kind is Kind.GATHER:
            _check_gather(timeline, index, op, shards)
    for index, op in enumerate(timeline.ops):
        if op.kind is Kind.COMPUTE and op.writes and (used := [name for name in op.reads if name in shards]):
            raise fault(timeline, index, f"reads {used[0]}, the shard of {shards[used[0]]}, not the gathered parameter")


def _check_bucket(timeline: Timeline, index: int, op: Op) -> None:
    if len(op.writes) != 1 or not 0 < len(op.reads) == len(op.params) == len(set(op.params)):
        raise fault(timeline, index, "must read one value for each of its parameters, and write one handle")
    params = timeline.params_of(op)
    limit = timeline.plan.sizes.bucket_bytes
    if not all(name in timeline.values for name in (*op.reads, *op.writes)):
        raise fault(timeline, index, "reads or writes a value whose bytes and dtype are unknown")
    read = [timeline.values[name].dtype for name in op.reads]
    if len({*zip(read, (timeline.travels_as(op, param) for param in params), strict=True)}) > 1:
        raise fault(timeline, index, "mixes dtypes or formats in one bucket")
    if len({(param.sharded, param.resident) for param in params}) > 1:
        raise fault(timeline, index, "mixes sharded, resident and replicated parameters in one bucket")
    if op.kind is Kind.REDUCE and len({timeline.plan.reduced_over(param) for param in params}) > 1:
        raise fault(timeline, index, "mixes gradients that are reduced over different axes in one bucket")
    if len(params) > 1 and timeline.full_bytes(op) > limit:
        raise fault(timeline, index, f"is a bucket of {timeline.full_bytes(op)} bytes; bucket_bytes is {limit}")


def _check_axis(timeline: Timeline, index: int, op: Op) -> None:
    """Check that each launch runs over the right axis: a gather over ``shard``, and the reductions of a gradient over
    the plan's axes in order. Each reduction reads the means of the reduction before it."""
    for name, param in zip(op.reads, timeline.params_of(op), strict=True):
        axes = (SHARD,) if op.kind is Kind.GATHER else timeline.plan.reduced_over(param)
        if op.over not in axes:
            raise fault(timeline, index, f"goes over {op.over!r}; the plan has {' and then '.join(map(repr, axes))}")
        writer = timeline.ops[timeline.writer[name]] if name in timeline.writer else None
        before = timeline.launches[writer.reads[0]] if writer and timeline.ends(writer, Kind.REDUCE) else None
        needs = axes[: axes.index(op.over)][-1:]
        if needs != ((before.over,) if before else ()):
            needed = f"the means over {needs[0]!r}" if needs else "a gradient that nothing has averaged"
            raise fault(timeline, index, f"goes over {op.over!r} and must read {needed} of {param.path}, not {name}")
        if writer and before and writer.params[writer.writes.index(name)] != param.path:
            raise fault(timeline, index, f"averages {name} as {param.path}, but it is another parameter's mean")


def _check_gather(timeline: Timeline, index: int, op: Op, shards: Mapping[str, str]) -> None:
    if not timeline.params_of(op)[0].sharded:
        raise fault(timeline, index, "gathers a replicated parameter, which every rank has in full")
    for name, path in zip(op.reads, op.params, strict=True):
        if shards.get(name) != path:
            actual = f"the shard of {shards[name]}" if name in shards else "not a shard"
            raise fault(timeline, index, f"gathers {name} as {path}, but it is {actual}")


def _check_waits(timeline: Timeline) -> None:
    """Check that exactly one wait ends each launch, later in the same phase, and that only waits read handles."""
    in_flight: dict[str, int] = {}
    for index, op in enumerate(timeline.ops):
        if op.kind is Kind.WAIT:
            launched = in_flight.pop(op.reads[0], None) if len(op.reads) == 1 else None
            if launched is None:
                raise fault(timeline, index, f"waits for {', '.join(op.reads) or 'nothing'}, which is not in flight")
            launch = timeline.ops[launched]
            if op.params != launch.params or len(op.writes) != len(op.params):
                raise fault(timeline, index, f"waits for other parameters than op {launched} launched")
            if op.backward != launch.backward:
                raise fault(timeline, index, f"waits in backward for what op {launched} launched in forward")
        elif handles := [name for name in op.reads if name in timeline.launches]:
            raise fault(timeline, index, f"reads {handles[0]}, a handle that only a wait may read")
        if op.kind in LAUNCHES:
            in_flight[op.writes[0]] = index
    for launched in in_flight.values():
        raise fault(timeline, launched, "is never waited for")


def _check_reductions(timeline: Timeline) -> None:
    """Check that backward reduces each gradient at most once over an axis, or defers all gradients to a later
    backward."""
    verbs = {Kind.REDUCE: ("reduces", "reduced"), Kind.DEFER: ("defers", "deferred")}
    handled: dict[tuple[str, str], int] = {}
    first: tuple[Kind, int] | None = None
    for index, op in enumerate(timeline.ops):
        if op.kind not in verbs:
            continue
        verb, past = verbs[op.kind]
        first = first or (op.kind, index)
        if op.kind is not first[0]:
            raise fault(timeline, index, f"{verb} a gradient, but op {first[1]} {verbs[first[0]][0]} one")
        if not op.backward:
            raise fault(timeline, index, f"{verb} a gradient in forward")
        for param in timeline.params_of(op):
            if not param.requires_grad:
                raise fault(timeline, index, f"{verb} a gradient of {param.path}, which is frozen")
            key = param.path, op.over
            if key in handled:
                raise fault(timeline, index, f"{verb} {param.path}, which op {handled[key]} already {past}")
            handled[key] = index


def _check_gradients(timeline: Timeline, trained: Collection[str]) -> None:
    """Check that backward returns exactly the reduced gradients (means), each as the gradient of its own parameter. For
    a deferred gradient, backward returns the placeholder."""
    means = {
        (path, name): index
        for index, op in enumerate(timeline.ops)
        if (timeline.ends(op, Kind.REDUCE) and not timeline.is_continued(op)) or op.kind is Kind.DEFER
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
            action = "ends the reduction of" if timeline.ops[index].kind is Kind.WAIT else "defers the gradient of"
            raise fault(timeline, index, f"{action} {path}, but {name} is not returned as its gradient")
    if lost := sorted(set(trained) - returned):
        raise ScheduleError(f"backward returns no gradient of {lost[0]}, which is trained")


def _check_copies(timeline: Timeline) -> None:
    """Check that only gathers, their waits and repeatable computations are repeated."""
    for index, op in enumerate(timeline.ops):
        if op.repeated and not (op.kind is Kind.GATHER or op.repeatable or timeline.ends(op, Kind.GATHER)):
            raise fault(
                timeline, index, "is done again, but is neither a gather, its wait nor a repeatable computation"
            )


def _check_frees(timeline: Timeline, made_from: Mapping[str, Sequence[str]], last: Mapping[str, int]) -> None:
    """Check that each FREE frees a gathered parameter, once, after the last read of the parameter or a view."""
    freed: dict[str, int] = {}
    for index, op in enumerate(timeline.ops):
        if op.kind is not Kind.FREE:
            continue
        gathered = _gathered(timeline, made_from, op)
        if gathered is None or timeline.params_of(op)[0].resident:
            raise fault(timeline, index, "frees memory that is not a gathered parameter's")
        if gathered in freed:
            raise fault(timeline, index, f"frees {gathered}, which op {freed[gathered]} already freed")
        if last[gathered] > index:
            raise fault(timeline, index, f"frees {gathered}, but op {last[gathered]} still reads it or a view of it")
        freed[gathered] = index


def _check_ends(timeline: Timeline, made_from: Mapping[str, Sequence[str]], last: Mapping[str, int]) -> None:
    """Check that every gathered parameter is freed right after its last use, unless it is resident or forward returns
    it."""
    freed: set[str | None] = set()
    latest_use = -1  # index of the latest operation that is not a FREE
    for index, op in enumerate(timeline.ops):
        if op.kind is not Kind.FREE:
            latest_use = index
            continue
        gathered = _gathered(timeline, made_from, op)
        if gathered is not None and last[gathered] < latest_use:
            raise fault(timeline, index, f"frees {gathered} too late: op {last[gathered]} was the last to read it")
        freed.add(gathered)
    returns = (op for op in timeline.ops if op.kind is Kind.COMPUTE and not op.writes)
    escaped = {name for op in returns for read in op.reads for name in made_from.get(read, ())}
    for index, name, param in timeline.gathered:
        if name not in freed and name not in escaped and not param.resident:
            raise fault(timeline, index, f"gathers {param.path} as {name}, which is never freed")


def _gathered(timeline: Timeline, made_from: Mapping[str, Sequence[str]], free: Op) -> str | None:
    """Return the gathered value whose memory a FREE releases: the value that it reads, or the source of that value."""
    if not len(free.reads) == len(free.params) == 1:
        return None
    for name in made_from.get(free.reads[0], ()):
        wait = timeline.ops[timeline.derived[name]]
        if wait.params[wait.writes.index(name)] == free.params[0]:
            return name
    return None


def _check_regathered(timeline: Timeline) -> None:
    """Check that a parameter has one gather if it is kept unsharded, or else one gather in each phase. With
    ``gather_per_unit`` forward may have several gathers."""
    gathered: dict[tuple[str, bool], int] = {}
    for index, op in enumerate(timeline.ops):
        for param in timeline.params_of(op) if op.kind is Kind.GATHER else ():
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
        for param in timeline.params_of(op) if op.kind is Kind.GATHER and op.backward else ():
            if param.path not in read and not timeline.plan.may_serve_copies(param):
                raise fault(timeline, index, f"gathers {param.path} in backward, which only copies read")


def _check_saved(timeline: Timeline) -> None:
    """Check that backward reads no derived value of forward, unless its parameters are kept unsharded."""
    crossing = regathered(timeline)
    for index, op in enumerate(timeline.ops[:-1]):
        if op.backward and (saved := [name for name in op.reads if name in crossing]):
            raise fault(
                timeline, index, f"reads forward's {saved[0]}, which depends on parameters that backward gathers again"
            )


def _check_same(timeline: Timeline, lifted: Timeline) -> None:
    """Check that every lifted operation occurs once, and reads its original values or their copies."""
    originals = {op.source[0]: op for op in lifted.ops}
    canonical: dict[str, str] = {}  # name that a copy writes -> name that its original writes
    seen: set[int] = set()
    for index, op in enumerate(timeline.ops):
        if _is_untouched(op, originals, seen) and canonical.keys().isdisjoint(op.reads):
            seen.update(op.source)
            continue
        for part in _parts(timeline, index, op) if op.kind is not Kind.FREE else ():
            (source,) = part.source
            original = originals.get(source)
            if original is None or not _is_copy(part, original):
                raise fault(timeline, index, f"differs from position {source} of the lifted trace")
            if op.repeated:
                canonical.update(zip(part.writes, original.writes, strict=True))
            elif source in seen:
                raise fault(timeline, index, f"runs position {source} of the lifted trace twice")
            elif op.backward != original.backward:
                raise fault(timeline, index, f"is in a different phase than position {source} of the lifted trace")
            elif op.kind not in LAUNCHES and part.writes != original.writes:
                raise fault(timeline, index, f"writes other values than position {source} of the lifted trace")
            else:
                seen.add(source)
            if op.kind is not Kind.WAIT and tuple(canonical.get(name, name) for name in part.reads) != original.reads:
                raise fault(timeline, index, f"reads other values than position {source} of the lifted trace")
    if lost := sorted(originals.keys() - seen):
        shown = " ".join((originals[lost[0]].kind, *originals[lost[0]].params))
        raise ScheduleError(f"position {lost[0]} ({shown}) of the lifted trace is missing")
    if timeline.ops[-1].source != lifted.ops[-1].source:
        raise fault(timeline, len(timeline.ops) - 1, "is last, but it is not the return")


def _is_untouched(op: Op, originals: Mapping[int, Op], seen: Collection[int]) -> bool:
    """Return whether an operation is an unchanged lifted operation (the usual case), and occurs for the first time."""
    return len(op.source) == 1 and originals.get(op.source[0]) is op and op.source[0] not in seen


def _is_copy(op: Op, original: Op) -> bool:
    """Return whether an operation equals a lifted operation, except for the values that it reads and writes."""
    same = (op.kind, op.params, op.repeatable, op.over) == (
        original.kind,
        original.params,
        original.repeatable,
        original.over,
    )
    return same and len(op.writes) == len(original.writes)


def _parts(timeline: Timeline, index: int, op: Op) -> Iterator[Op]:
    """Yield the operations that were merged into a bucket, one for each parameter."""
    if len(op.source) == 1:
        yield op
        return
    if op.kind is Kind.COMPUTE or not 0 < len(op.source) == len(op.params):
        raise fault(
            timeline, index, "must come from one line of the trace, or for a bucket from one line for each parameter"
        )
    for member, (source, path) in enumerate(zip(op.source, op.params, strict=True)):
        reads = op.reads if op.kind is Kind.WAIT else (op.reads[member],)
        writes = (op.writes[member],) if op.kind is Kind.WAIT else op.writes
        yield replace(op, reads=reads, writes=writes, params=(path,), source=(source,))
