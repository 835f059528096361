"""Names the user's line, the parameters and the unit where a compiled program raises.

In: an error whose traceback ends in Thunder's generated code. Out: the error, with a note::

    IndexError: index out of range in self
    in t35 = torch.nn.functional.embedding(tokens, t6, ...)
    from model.py:41: x = self.embedding(tokens)
    which reads 'embedding.weight', of unit 'embedding'
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable
from inspect import unwrap
from traceback import walk_tb
from typing import Any

from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.ops import Op, Wait
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.compiled import Traces

from thunder.core.symbol import BoundSymbol

WRITTEN = "thunder."  # the beginning of file names of Thunder's generated code
WIDTH = 100


def note_failed_line(error: BaseException, programs: Iterable[tuple[Callable[..., Any], Callable[[], Traces]]]) -> None:
    """Add a note to an error if the forward of one of ``programs``, with a function of its traces, raised the error."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    filename, line_number = next((frame for frame in reversed(frames) if frame[0].startswith(WRITTEN)), ("", 0))
    for forward, make_traces in programs:
        if unwrap(forward).__code__.co_filename == filename:
            code = linecache.getline(filename, line_number).strip()
            traces = make_traces()
            index = _index_of(code, traces.timeline)
            if index is not None:
                line = traces.forward.bound_symbols[traces.lines[index][0]]
                error.add_note(_note(code, traces.timeline.ops[index], traces.timeline, line))
            return


def _index_of(code: str, timeline: Timeline) -> int | None:
    """Return the index of forward's operation that computes the values to which a line of code assigns, or None."""
    names = {name.strip(" ()") for name in code.partition(" = ")[0].split(",")}
    ops = timeline.ops[: timeline.backward_start]
    return next((index for index, op in enumerate(ops) if not names.isdisjoint(op.writes)), None)


def _note(code: str, op: Op, timeline: Timeline, line: BoundSymbol) -> str:
    code = code.partition("  # ")[0]
    lines = [f"in {code if len(code) <= WIDTH else code[:WIDTH] + ' ...'}"]
    if line.source_filename is not None and line.source_positions is not None:
        line_number = line.source_positions.lineno or 0
        text = linecache.getline(line.source_filename, line_number).strip()
        lines.append(f"from {line.source_filename}:{line_number}: {text}")
    sources, writers = gathered_from(timeline), timeline.writer
    waits = dict.fromkeys(wait for name in op.reads for wait in sources.get(name, ()))
    for name in waits:
        wait = timeline.ops[writers[name]]
        if isinstance(wait, Wait):
            path = wait.params[wait.writes.index(name)]
            unit = timeline.plan.by_name[path].unit
            lines.append(f"which reads {path!r}, of {f'unit {unit!r}' if unit else 'the root unit'}")
    return "\n".join(lines)
