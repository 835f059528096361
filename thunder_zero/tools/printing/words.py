"""Fits text into a width of 100 columns: reprs, tables of cells, folded Python statements.

::

    fut = zero_all_gather_coalesced((t_a, t_b, t_c, t_d, t_e), ('h.0.a', 'h.0.b', 'h.0.c', 'h.0.d', 'h.0.e'))

    fut = zero_all_gather_coalesced((t_a, t_b, ... 3 more),
        ('h.0.a', 'h.0.b', ... 3 more))
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from textwrap import shorten
from typing import Any, ClassVar

from thunder_zero.plan.amounts import WIDTH
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES

OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+\(")
INDENT = " " * 4  # indent of continuation lines
WHOLE_LINES = 2  # statements of at most this many lines are not shortened
OPERATOR_ITEMS = 4  # the fewest items shown of a collection in an operator call
TOKENS = re.compile(
    r"""(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    r"""|(?P<comma>, )|(?P<equals> = )|(?P<opens>[(\[{])|(?P<closes>[)\]}])"""
)
METHOD = re.compile(r"(?<!\baten)\.\w+\($")  # matches .view( in x.view(
MOST_ITEMS = 12  # the most items of a collection in a shortened statement


def aligned(rows: Iterable[Sequence[str]], left: Container[int] = (0,), apart: int = 2) -> str:
    """Return a line for each row of cells. Columns are right-aligned, except those whose numbers are in ``left``."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    adjust = [str.ljust if number in left else str.rjust for number in range(len(widths))]
    lines = ([fit(cell, width) for fit, cell, width in zip(adjust, row, widths, strict=True)] for row in rows)
    return "\n".join((" " * apart).join(line).rstrip() for line in lines)


class PrintedRows(tuple[Mapping[str, Any], ...]):
    """Rows keyed by column, that print as a table of their columns, with or without heads."""

    forms: ClassVar[Mapping[str, Callable[[Any], str]]]  # a function from a value to text for each column
    has_heads: ClassVar[bool] = True

    def __repr__(self) -> str:
        rows = [list(row) for row in self[: self.has_heads]]
        rows += [[self.forms[column](value) for column, value in row.items()] for row in self]
        return aligned(rows, left=range(len(self.forms)))


class ByName(dict[str, Any]):
    """Values keyed by name. The text form has a line for each value."""

    def __repr__(self) -> str:
        return "".join(f"\n{shorten(f'{name!r}: {value}', WIDTH, placeholder=' ...')}" for name, value in self.items())


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


def place_of(plan: Plan) -> str:
    """Return a description of the rank, such as ``ZeRO-3, rank 0 of 8, one of 2 copies``."""
    copies = f", one of {count} copies" if (count := plan.mesh.replicate.size) > 1 else ""
    return f"{STAGES[plan.policy.stage].name}, {plan.mesh}{copies}"


def fold(code: str, widths: Sequence[int]) -> list[str]:
    """Return lines that show the statements of ``code``, without its comments.

    A long statement takes the fewest lines. Its collections and argument lists show the first items that fit, and then
    the number of omitted items. Calls of operators keep all arguments. All lines after the last width have the last
    width.
    """
    lines: list[str] = []
    for statement in ast.parse(code).body:
        lines += _fold(statement, widths[min(len(lines), len(widths) - 1) :])
    return lines


def fill(pieces: Sequence[str], widths: Sequence[int], indent: str = "") -> list[str]:
    """Join pieces into lines. Clip only pieces that are longer than any line.

    All lines after the last width have the last width. ``indent`` begins each line except the first.
    """
    lines: list[str] = []
    line = ""
    for piece in pieces:
        while len((line + piece).rstrip()) > (width := widths[min(len(lines), len(widths) - 1)]):
            if not line.strip() and width == max(widths[len(lines) :], default=width):
                break
            lines.append(line.rstrip())
            line = indent
        line += clip(piece, width - len(line))
    return [*lines, line.rstrip()]


def _fold(statement: ast.stmt, widths: Sequence[int]) -> list[str]:
    code = _unparse(statement)
    best = fill(_pieces(code, widths), widths, INDENT)
    if len(best) <= WHOLE_LINES:
        return best
    least = OPERATOR_ITEMS if any(map(_is_operator, ast.walk(statement))) else 1
    for items in range(MOST_ITEMS, least - 1, -1):
        lines = fill(_pieces(_shortened(code, items), widths), widths, INDENT)
        best = lines if len(lines) < len(best) else best
    return best


def _is_operator(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def _shortened(code: str, items: int) -> str:
    """Return a statement that shows only the first items of each collection, and the number of omitted items."""
    (statement,) = ast.parse(code).body
    for node in ast.walk(statement):
        collection = _collection(node)
        if len(collection) > items + 1:  # "... 1 more" would save nothing
            collection[items:] = [ast.Name(f"... {len(collection) - items} more")]
    return _unparse(statement)


def _collection(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    if isinstance(node, ast.Call) and not _is_operator(node):
        return node.args
    return node.targets if isinstance(node, ast.Delete) else []


def _unparse(statement: ast.stmt) -> str:
    """Return the statement on one line. Tuples of targets have parentheses in every version of Python."""
    if isinstance(statement, ast.Assign):
        return " = ".join(map(ast.unparse, [*statement.targets, statement.value]))
    return ast.unparse(statement)


def _pieces(code: str, widths: Sequence[int]) -> list[str]:
    """Return the parts of a statement between which a line may break.

    A line may break after "del", the equals sign, and arguments of the outermost call. Arguments that are longer than
    any line may break between items. The arguments of a method stay together.
    """
    breaks = [(len("del "), 1)] if code.startswith("del ") else []  # position, depth
    methods: list[bool] = []  # for each open parenthesis: True if a method opened it
    for token in TOKENS.finditer(code):
        kind = token.lastgroup
        if kind == "opens":
            methods.append(METHOD.search(code, 0, token.end()) is not None)
        elif kind == "closes":
            methods.pop()
        is_call = kind == "opens" and re.match(r"\w", code[token.start() - 1])
        if (is_call or kind == "comma" or (kind == "equals" and not methods)) and not any(methods):
            breaks.append((token.end(), len(methods) or 1))

    def split(start: int, stop: int, depth: int) -> list[str]:
        part, limit = code[start:stop], (min(widths) if depth < 2 else max(widths)) - len(INDENT)
        if len(part.rstrip()) <= limit or all(deep < depth for _, deep in breaks):
            return [part]
        ends = [start, *(position for position, deep in breaks if deep == depth and start < position < stop), stop]
        return [piece for span in pairwise(ends) for piece in split(*span, depth + 1)]

    return split(0, len(code), 0)
