"""Puts what a command has measured into its data file, and between its two marks of a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping


def marks(name: str, command: str) -> tuple[str, str]:
    """The lines between which a page has the section of this name, and the command that makes it."""
    return f"<!-- {name}: python -m {command} -->\n", f"<!-- end of {name} -->"


def with_section(text: str, name: str, command: str, body: str) -> str:
    """The text of a page whose section has this body.

    Raises:
        ValueError: the page has no such section.
    """
    first, last = marks(name, command)
    head, begin, rest = text.partition(first)
    _, end, tail = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"the page has no place for {name}; add the lines {first.strip()} and {last}")
    return head + begin + body + end + tail


def json_of(rows: Iterable[Mapping[str, object]]) -> str:
    """The text of a data file: a row a line."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"rows": [\n{lines}\n]}}\n'
