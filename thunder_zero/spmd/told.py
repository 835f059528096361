"""The faults of a step on one axis, each told once, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from thunder_zero.spmd.laws import Outcome
from thunder_zero.spmd.lines import RecordedLine
from thunder_zero.spmd.verdict import Fault


class Told:
    """``line`` is the index of the line that is typed now."""

    def __init__(self, axis: str) -> None:
        self._axis, self.line = axis, 0
        self._faults: dict[tuple[str, str], Fault] = {}
        self._assumed: set[str] = set()

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self._faults.values())

    @property
    def assumed(self) -> tuple[str, ...]:
        return tuple(sorted(self._assumed))

    def say(self, kind: str, text: str, where: str = "", path: str = "") -> None:
        """Keep a fault. Parameters with the same fault share it."""
        key = text, "" if path else where
        fault = self._faults.get(key, Fault(self._axis, kind, text, where, self.line))
        paths = dict.fromkeys((*fault.parameters, path) if path else fault.parameters)
        self._faults[key] = replace(fault, parameters=tuple(paths))

    def hear(self, outcome: Outcome, line: RecordedLine, note: Fault | None) -> Fault | None:
        """Tell an outcome's fault. Return it, or what may be told later, as the cause of later faults."""
        text, kind = outcome.text, outcome.kind
        if not text:
            return None
        if kind == "assumed":
            self._assumed.add(text)
        if kind in ("error", "warning"):
            because = f": {note.text} ({note.where})" if note is not None and line.collective is not None else ""
            self.say(kind, f"{text}{because}", line.where)
        if kind in ("assumed", "warning"):
            return None
        return Fault(self._axis, kind, text, line.where, self.line)

    def unknown(self, causes: Iterable[Fault | None]) -> None:
        """Report values that are not typed, where they reach a collective or a gradient."""
        for cause in causes:
            if cause is not None and cause.kind == "unknown":
                self.say("unknown", cause.text, cause.where)
