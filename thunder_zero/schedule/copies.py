"""Copies operations of forward that are done again, with new names for what they write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from thunder_zero.schedule.timeline import Op, Timeline, Value

NOT_A_TENSOR = Value(0, "")


def copies(
    timeline: Timeline,
    value: str,
    chain: Mapping[str, int],
    names: dict[str, str],
    values: dict[str, Value],
    *,
    backward: bool,
) -> tuple[list[Op], list[int]]:
    """Copies of the operations of ``chain`` that lead to ``value`` and have no copies in ``names`` yet, in order.

    Adds the names of the copied values to ``names``, and their sizes to ``values``.

    Returns:
        The copies, and the positions of what they copy.
    """
    if value not in chain or value in names:  # mostly
        return [], []
    found: set[int] = set()
    needed = [value]
    while needed:
        name = needed.pop()
        if name in chain and name not in names and chain[name] not in found:
            found.add(chain[name])
            needed += timeline.ops[chain[name]].reads
    positions = sorted(found)
    made = []
    for at in positions:
        op = timeline.ops[at]
        for name in op.writes:
            names[name] = _unused(f"{name}_again", values)
            values[names[name]] = values.get(name, NOT_A_TENSOR).copied(names)
        writes = tuple(names[name] for name in op.writes)
        made.append(replace(reads_renamed(op, names), writes=writes, backward=backward, repeated=True))
    return made, positions


def reads_renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The operation, reading the values of these names in place of the original ones."""
    if names.keys().isdisjoint(op.reads):  # mostly
        return op
    return replace(op, reads=tuple(names.get(read, read) for read in op.reads))


def _unused(name: str, values: Mapping[str, Value]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}{number}") in values:
        number += 1
    return candidate
