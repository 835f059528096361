"""Formats short texts of at most 100 columns, without rich: ``<Estimate: step 3 ms>``, ``1.23 T``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import wrap

WIDTH = 100  # columns, without a terminal
OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+\(")


def summed_up(thing: object, words: str) -> str:
    """Return the folded ``repr`` of large data, such as ``<Estimate: step 3 ms on H100>``."""
    return folded(f"<{type(thing).__name__}: {words}>")


def folded(words: str) -> str:
    """Fold words into lines of at most 100 columns."""
    return "\n".join(wrap(" ".join(words.split()), WIDTH, subsequent_indent="  "))


def aligned(rows: Iterable[Iterable[str]]) -> str:
    """Return a line for each row, with aligned columns."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


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
