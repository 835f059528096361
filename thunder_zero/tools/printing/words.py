"""Formats short texts of at most 100 columns, without rich: ``<Estimate: step 3 ms>``, ``1.23 T``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from textwrap import wrap
from typing import Any, ClassVar

WIDTH = 100  # columns, without a terminal
OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+\(")


def summed_up(thing: object, words: str) -> str:
    """Return the folded ``repr`` of large data, such as ``<Estimate: step 3 ms on H100>``."""
    return folded(f"<{type(thing).__name__}: {words}>")


def folded(words: str) -> str:
    """Fold words into lines of at most 100 columns."""
    return "\n".join(wrap(" ".join(words.split()), WIDTH, subsequent_indent="  "))


class PrintedRows(tuple[Mapping[str, Any], ...]):
    """Rows keyed by column, that print as a table, with or without heads."""

    forms: ClassVar[Mapping[str, Callable[[Any], str]]]  # a function from a value to text for each column
    has_heads: ClassVar[bool] = True

    def __repr__(self) -> str:
        rows = [list(self.forms)] * self.has_heads
        rows += [[form(row[column]) for column, form in self.forms.items()] for row in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def count(number: float) -> str:
    """Return a number such as ``1.23 G``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.3g}"


def short(code: str) -> str:
    """Shorten names of operators in code, such as ``torch.ops.aten.mm.default`` to ``aten.mm``."""
    return OPERATOR.sub(r"aten.\1(", code)


def clip(text: str, width: int) -> str:
    """Return the text. If the text is too long, return its beginning and an ellipsis."""
    return text if len(text.rstrip()) <= width else text[: width - 1] + "…"
