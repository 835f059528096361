"""Gathers again the parameters that forward frees: for backward, and for each unit that uses them.

A parameter that is not kept unsharded is freed in forward, so no value derived from it (``derived.py``) may cross to
backward. Right before the first reader, backward gathers and computes these values again::

    gather  fut <- t_w                      gather  fut <- t_w
    wait    w   <- fut                      wait    w   <- fut
    compute wt  <- w                        compute wt  <- w
    compute y   <- x, wt                    compute y   <- x, wt
    ... backward ...               -->      ... backward ...
                                            gather  fut_again <- t_w
                                            wait    w_again   <- fut_again
                                            compute wt_again  <- w_again
    compute gx  <- gy, wt                   compute gx  <- gy, wt_again

With ``gather_per_unit``, forward also gathers a parameter again before its next use if another unit has gathered in
between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from thunder_zero.schedule.derived import needed_in_backward, regathered
from thunder_zero.schedule.ops import Compute, Gather, Op, Return, Wait, reading
from thunder_zero.schedule.timeline import Timeline, Value
from thunder_zero.schedule.units import first_touches

NOT_A_TENSOR = Value(0, "")


def regather(timeline: Timeline) -> Timeline:
    """Gather again, for backward and for each unit of forward, the parameters that are not kept unsharded."""
    # Backward comes first: it copies the original operations, once for all readers.
    return _regather_in_forward(_regather_in_backward(timeline))


def _regather_in_backward(timeline: Timeline) -> Timeline:
    chain = regathered(timeline)
    early = _needed_early(timeline, chain)
    values = dict(timeline.values)
    names: dict[str, str] = {}
    ops: list[Op] = []
    for index, op in enumerate(timeline.ops):
        if op.backward and not isinstance(op, Return):
            for read in (*early.get(index, ()), *op.reads):
                ops += copy_chain(timeline, read, chain, names, values, backward=True)[0]
            op = reading(op, names)
            let_views_follow(op, names, values)
        ops.append(op)
    return timeline.with_ops(ops, values)


def _needed_early(timeline: Timeline, chain: Mapping[str, int]) -> dict[int, list[str]]:
    """Return a mapping from the index where backward first needs a unit to the values that backward gathers again
    there. In units that are recomputed whole, these values are biases and parameters that backward needs. The choice
    does not depend on which operations are recomputed."""
    recomputed = timeline.plan.recomputed
    if not recomputed or not chain:
        return {}
    needed = needed_in_backward(timeline, chain)
    first = {unit: index for unit, index in first_touches(timeline).items() if unit in recomputed}
    early: dict[int, list[str]] = {}
    for _, name, param in timeline.gathered:
        if name in chain and param.unit in first and (name in needed or timeline.plan.may_serve_copies(param)):
            early.setdefault(first[param.unit], []).append(name)
    return early


def _regather_in_forward(timeline: Timeline) -> Timeline:
    if not any(param.gather_per_unit for param in timeline.plan.params) or not (chains := _chains_by_unit(timeline)):
        return timeline
    unit_of = {name: unit for unit, chain in chains.items() for name in chain}
    unit_of_gathered = {name: param.unit for _, name, param in timeline.gathered}
    values = dict(timeline.values)
    gathers: Counter[str] = Counter()  # by unit
    gathers_before: dict[str, Counter[str]] = {}  # value -> gathers before it was written
    copied: dict[str, tuple[Counter[str], dict[str, str]]] = {}  # unit -> gathers before its latest copies, their names
    ops: list[Op] = []
    for op in timeline.ops:
        if op.backward or isinstance(op, Return):
            ops.append(op)
            continue
        gathers.update(param.unit for param in timeline.params_of(op) if isinstance(op, Gather))
        renamed: dict[str, str] = {}
        names_of_units: dict[str, str] = {}
        reader_units = {unit_of_gathered[read] for read in op.reads if read in unit_of_gathered}
        for read in op.reads:
            unit = unit_of.get(read)
            if unit is None or not _others_gathered(gathers_before[read], gathers, reader_units | {unit}):
                continue
            if unit not in copied or _others_gathered(copied[unit][0], gathers, reader_units | {unit}):
                copied[unit] = gathers.copy(), {}
            names = copied[unit][1]
            ops += copy_chain(timeline, read, chains[unit], names, values, backward=False)[0]
            renamed[read] = names[read]
            names_of_units |= names
        gathers_before |= {name: gathers.copy() for name in op.writes if name in unit_of}
        ops.append(reading(op, renamed))
        let_views_follow(ops[-1], names_of_units, values)
    return timeline.with_ops(ops, values)


def _others_gathered(before: Counter[str], gathers: Counter[str], units: Collection[str]) -> bool:
    """Return whether units other than ``units``, whose parameters one operation reads, have gathered since."""
    return any(count > before[unit] for unit, count in gathers.items() if unit not in units)


def _chains_by_unit(timeline: Timeline) -> dict[str, dict[str, int]]:
    """Return, for each unit, a mapping from values (and handles) of forward to the index of their writer. The values
    derive from ``gather_per_unit`` parameters of the unit alone."""
    unit_of: dict[str, str] = {}
    chains: dict[str, dict[str, int]] = {}
    for name, index in regathered(timeline).items():
        op = timeline.ops[index]
        units = {unit_of[read] for read in op.reads if read in unit_of}
        for param in timeline.params_of(op) if isinstance(op, Gather) else ():
            if param.gather_per_unit and not param.kept_unsharded:
                units.add(param.unit)
        if len(units) == 1:
            (unit_of[name],) = units
            chains.setdefault(unit_of[name], {})[name] = index
    return chains


def copy_chain(
    timeline: Timeline,
    value: str,
    chain: Mapping[str, int],
    names: dict[str, str],
    values: dict[str, Value],
    *,
    backward: bool,
) -> tuple[list[Op], list[int]]:
    """Copy the operations of ``chain`` that lead to ``value``, in order, except operations that are already copied.
    Return the copies, and the indices of their originals. Add the names of copies to ``names``, and their sizes to
    ``values``."""
    if value not in chain or value in names:  # the usual case
        return [], []
    chosen: set[int] = set()
    needed = [value]
    while needed:
        name = needed.pop()
        if name in chain and name not in names and chain[name] not in chosen:
            chosen.add(chain[name])
            needed += timeline.ops[chain[name]].reads
    positions = sorted(chosen)
    copied = []
    for index in positions:
        op = timeline.ops[index]
        for name in op.writes:
            names[name] = _unused_name(f"{name}_again", values)
            values[names[name]] = values.get(name, NOT_A_TENSOR).copied(names)
        copied.append(_copy(op, names, backward=backward))
    return copied, positions


def _copy(op: Op, names: Mapping[str, str], *, backward: bool) -> Op:
    """Return a copy of an operation that reads and writes copies."""
    writes = tuple(names[name] for name in op.writes)
    match op:
        case Gather():
            return replace(op, handle=writes[0], backward=backward, repeated=True)
        case Wait(launch=Gather() as launch):
            handle = names[launch.handle]
            return Wait(replace(launch, handle=handle, backward=backward, repeated=True), writes)
        case Compute():
            reads = tuple(names.get(name, name) for name in op.reads)
            return replace(op, reads=reads, writes=writes, backward=backward, repeated=True)
    raise AssertionError(f"a {op.kind} is never done again")


def let_views_follow(op: Op, names: Mapping[str, str], values: dict[str, Value]) -> None:
    """Update the bases of the values that an operation writes: views of a copied value become views of its copy."""
    memories = {(values[read].base if read in values else "") or read for read in op.reads}
    for name in op.writes:
        if name in values and names.get(values[name].base) in memories:
            values[name] = values[name].copied(names)


def _unused_name(name: str, values: Mapping[str, Value]) -> str:
    count = 1
    while (candidate := name if count == 1 else f"{name}{count}") in values:
        count += 1
    return candidate
