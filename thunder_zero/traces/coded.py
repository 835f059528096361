"""Folds encoding and decoding lines into launches and waits, and proves that they match the plan.

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
    """Yield the operations of a phase without encoding and decoding operations.

    A launch then reads the values before encoding, and a wait writes the values after decoding. The ``source`` of the
    launch or wait ends with the indices of the folded lines.

    Raises:
        ScheduleError: a launch sends a value that is not encoded as the plan requires, or another line reads an encoded
            value.
    """
    folding = _Folding(facts)
    for op in ops:
        yield from folding.take(op, lines[op.source[0]])
    folding.close()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An encoded value: its parameter, and the symbol, axis and index of the line that encodes it."""

    value: str
    path: str
    code: Symbol
    axis: str
    position: int


class _Folding:
    """The encoded values that are not yet sent, and the received values that are not yet decoded."""

    def __init__(self, facts: Facts) -> None:
        self._executor = facts.executor
        self._encoded: dict[str, _Encoded] = {}
        self._launched: dict[str, Op] = {}  # handle -> its launch
        self._arrived: dict[tuple[str, ...], tuple[Op, Op]] = {}  # received values -> their launch and wait

    def take(self, op: Op, line: BoundSymbol) -> Iterator[Op]:
        """Yield the next operation after folding, or nothing if a later operation includes it."""
        code = self._executor.codes.get(line.sym.name)
        if code in (self._executor.encode, self._executor.encode_grad):
            self._encode(op, line, code)
        elif code is not None:
            yield self._fold_wait(op, line, code)
        elif op.kind in LAUNCHES:
            self._launched[op.writes[0]] = op
            yield self._fold_launch(op)
        elif (launch := self._coded_launch(op)) is not None:
            self._arrived[op.writes] = launch, op
        else:
            self._require_untouched(op)
            yield op

    def _coded_launch(self, op: Op) -> Op | None:
        """Return the launch that a wait ends, or None if the received values need no decoding."""
        launch = self._launched.get(op.reads[0]) if op.kind is Kind.WAIT else None
        return launch if launch and self._executor.decoder_of(launch) else None

    def close(self) -> None:
        """Raise if an encoded value was not sent, or if a received value was not decoded."""
        for encoded in self._encoded.values():
            raise ScheduleError(f"line {encoded.position} encodes {encoded.path}, which no launch sends")
        for launch, wait in self._arrived.values():
            raise ScheduleError(f"line {wait.source[0]} waits for {_names(launch)}, which no line decodes")

    def _encode(self, op: Op, line: BoundSymbol, code: Symbol) -> None:
        for value, name, path in zip(op.reads, op.writes, paths_of(line), strict=True):
            self._encoded[name] = _Encoded(value, path, code, axis_of(line), op.source[0])

    def _fold_launch(self, launch: Op) -> Op:
        """Return a launch that reads the original values instead of the encoded values."""
        code = self._executor.encoder_of(launch)
        sent = [self._encoded.pop(name, None) for name in launch.reads]
        expected = [(path, code, launch.over) if code else None for path in launch.params]
        if expected != [item and (item.path, item.code, item.axis) for item in sent]:
            needed = f"what {code.name} makes of it" if code else "it as it is"
            raise ScheduleError(f"line {launch.source[0]} sends {_names(launch)}; the plan sends {needed}")
        encoded = [item for item in sent if item]
        reads = tuple(item.value for item in encoded) or launch.reads
        return replace(launch, reads=reads, source=(*launch.source, *sorted({item.position for item in encoded})))

    def _fold_wait(self, op: Op, line: BoundSymbol, code: Symbol) -> Op:
        """Return a wait that writes the decoded values."""
        launch, wait = self._arrived.pop(op.reads, (None, None))
        if launch is None or wait is None:
            raise ScheduleError(f"line {op.source[0]} decodes {', '.join(op.reads)}, which has not just arrived")
        expected = self._executor.decoder_of(launch), launch.params, launch.over
        if expected != (code, paths_of(line), axis_of(line)):
            raise ScheduleError(f"line {op.source[0]} decodes {_names(launch)} as something else")
        return replace(wait, writes=op.writes, source=(*wait.source, *op.source))

    def _require_untouched(self, op: Op) -> None:
        coded = self._encoded.keys() | {name for names in self._arrived for name in names}
        if op.kind is not Kind.FREE and not coded.isdisjoint(op.reads):
            raise ScheduleError(f"line {op.source[0]} reads {sorted(coded.intersection(op.reads))[0]}, which is coded")


def paths_of(line: BoundSymbol) -> tuple[str, ...]:
    """Return the paths of the parameters in the arguments of one of our lines."""
    return (line.args[1],) if isinstance(line.args[1], str) else tuple(line.args[1])


def _names(op: Op) -> str:
    return ", ".join(op.params)
