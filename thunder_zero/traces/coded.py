"""Folds lines that encode and decode into launches and waits, and proves that they belong there.

::

    q4 = zero_encode(t_w, 'w')            (folded)
    t5 = zero_all_gather(q4, 'w')         gather fut <- t_w    w
    q6 = zero_wait(t5)                    (folded)
    w  = zero_decode(q6, 'w')             wait   w   <- fut    w
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, ScheduleError
from thunder_zero.traces.symbols import Facts, axis_of

from thunder.core.symbol import BoundSymbol, Symbol


def fold(ops: Iterable[Op], lines: Sequence[BoundSymbol], facts: Facts) -> Iterator[Op]:
    """Yield the operations of a phase without those that encode and decode. A launch reads what was encoded for it, a
    wait writes what was decoded of it; ``source`` ends with the positions of these lines.

    Raises:
        ScheduleError: a launch sends, or somebody reads, what is not coded as the plan says.
    """
    folding = _Folding(facts)
    for op in ops:
        yield from folding.take(op, lines[op.source[0]])
    folding.close()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What a line has encoded of a value: for which parameter, by which symbol, over which axis, where."""

    value: str
    path: str
    code: Symbol
    over: str
    position: int


class _Folding:
    """What was encoded and not sent yet, and what has arrived and was not decoded yet."""

    def __init__(self, facts: Facts) -> None:
        self._executor = facts.executor
        self._encoded: dict[str, _Encoded] = {}
        self._launched: dict[str, Op] = {}  # by handle
        self._arrived: dict[tuple[str, ...], tuple[Op, Op]] = {}  # a launch and its wait

    def take(self, op: Op, line: BoundSymbol) -> Iterator[Op]:
        """Go on to the next operation."""
        code = self._executor.codes.get(line.sym.name)
        if code in (self._executor.encode, self._executor.encode_grad):
            self._encode(op, line, code)
        elif code is not None:
            yield self._decoded(op, line, code)
        elif op.kind in LAUNCHES:
            self._launched[op.writes[0]] = op
            yield self._sent(op)
        elif (launch := self._coded_launch(op)) is not None:
            self._arrived[op.writes] = launch, op
        else:
            self._require_untouched(op)
            yield op

    def _coded_launch(self, op: Op) -> Op | None:
        """The launch that a wait ends, if what arrives is coded."""
        launch = self._launched.get(op.reads[0]) if op.kind is Kind.WAIT else None
        return launch if launch and self._executor.code_behind(launch) else None

    def close(self) -> None:
        """Raise if anything is left."""
        for each in self._encoded.values():
            raise ScheduleError(f"line {each.position} encodes {each.path}, which no launch sends")
        for launch, wait in self._arrived.values():
            raise ScheduleError(f"line {wait.source[0]} waits for {_names(launch)}, which no line decodes")

    def _encode(self, op: Op, line: BoundSymbol, code: Symbol) -> None:
        for value, name, path in zip(op.reads, op.writes, paths_of(line), strict=True):
            self._encoded[name] = _Encoded(value, path, code, axis_of(line), op.source[0])

    def _sent(self, launch: Op) -> Op:
        code = self._executor.code_before(launch)
        given = [self._encoded.pop(name, None) for name in launch.reads]
        right = [(path, code, launch.over) if code else None for path in launch.params]
        if right != [each and (each.path, each.code, each.over) for each in given]:
            what = f"what {code.name} makes of it" if code else "it as it is"
            raise ScheduleError(f"line {launch.source[0]} sends {_names(launch)}; the plan sends {what}")
        encoded = [each for each in given if each]
        reads = tuple(each.value for each in encoded) or launch.reads
        return replace(launch, reads=reads, source=(*launch.source, *sorted({each.position for each in encoded})))

    def _decoded(self, op: Op, line: BoundSymbol, code: Symbol) -> Op:
        launch, wait = self._arrived.pop(op.reads, (None, None))
        if launch is None or wait is None:
            raise ScheduleError(f"line {op.source[0]} decodes {', '.join(op.reads)}, which has not just arrived")
        right = self._executor.code_behind(launch), launch.params, launch.over
        if right != (code, paths_of(line), axis_of(line)):
            raise ScheduleError(f"line {op.source[0]} decodes {_names(launch)} as something else")
        return replace(wait, writes=op.writes, source=(*wait.source, *op.source))

    def _require_untouched(self, op: Op) -> None:
        coded = self._encoded.keys() | {name for names in self._arrived for name in names}
        if op.kind is not Kind.FREE and not coded.isdisjoint(op.reads):
            raise ScheduleError(f"line {op.source[0]} reads {sorted(coded.intersection(op.reads))[0]}, which is coded")


def paths_of(line: BoundSymbol) -> tuple[str, ...]:
    """Return the paths of the parameters of a line of ours."""
    return (line.args[1],) if isinstance(line.args[1], str) else tuple(line.args[1])


def _names(op: Op) -> str:
    return ", ".join(op.params)
