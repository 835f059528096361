"""Writes the listing of the package into docs/architecture.md, from the first line of each module.

python docs/listing.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thunder_zero"
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- listing: python docs/listing.py -->\n```\n", "```\n<!-- end of the listing -->"
ORDER = (  # bottom up, as the table of imports has it
    *("lazy.py", "layout.py", "times.py", "precision.py", "policy.py", "sizes.py", "plan.py", "rows.py", "marks.py"),
    *("schedule", "compat", "comm", "traces", "runtime", "whole_step", "state_dict", "checkpoint", "hugging_face"),
    *("arguments.py", "refusals.py", "placement.py", "compiled.py", "zero_module.py", "program_transform.py"),
    *("transform.py", "dynamo", "plugin.py", "lightning.py", "tools", "__init__.py"),
)
NAME = 22  # columns


def listing() -> str:
    """One line a module: its name and the first line of its docstring; a package comes before its modules."""
    rows: list[str] = []
    for name in ORDER:
        rows += _package(PACKAGE / name, 0) if (PACKAGE / name).is_dir() else [_row(name, PACKAGE / name, 0)]
    return "\n".join(rows) + "\n"


def _package(folder: Path, indent: int) -> list[str]:
    rows = [_row(f"{folder.name}/", folder / "__init__.py", indent)]
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").exists():
            rows += _package(path, indent + 2)
        elif path.suffix == ".py" and path.name != "__init__.py":
            rows.append(_row(path.name, path, indent + 2))
    return rows


def _row(name: str, path: Path, indent: int) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return f"{' ' * indent}{name:<{NAME - indent}} {doc.partition(chr(10))[0]}".rstrip()


def main() -> None:
    """Rewrite the page."""
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} has no place for the listing")
    PAGE.write_text(head + begin + listing() + end + tail)


if __name__ == "__main__":
    main()
