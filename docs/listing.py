"""Writes what pages show of the package: its files, and FSDP2's names with ours.

The listing of files is made from the first line of each module.

python docs/listing.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from thunder_zero.plan.from_fsdp2 import ROWS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thunder_zero"
BEGIN, END = "<!-- listing: python docs/listing.py -->\n", "<!-- end of the listing -->"
NEEDED = "needed while: "
ORDER = (  # bottom up, as the table of imports has it
    *("lazy.py", "safetensors_files.py", "encodings", "plan", "schedule", "compat", "comm", "shares.py", "traces"),
    *("sharded", "optim", "outer", "spmd", "capture", "checkpoint", "hugging_face.py", "lightning", "tools"),
    *("__main__.py", "__init__.py"),
)
NAME = 22  # columns


def listing() -> str:
    """One line a module: its name and the first line of its docstring; a package comes before its modules."""
    rows: list[str] = []
    for name in ORDER:
        rows += _package(PACKAGE / name, 0) if (PACKAGE / name).is_dir() else [_row(name, PACKAGE / name, 0)]
    return "\n".join(["```", *rows, "```"]) + "\n"


def needs_by_name() -> dict[str, str]:
    """Return why each workaround is needed, by its file, such as ``"casts.py"``.

    A file may have several workarounds, each in a section that opens with its need. The key then has the section's
    first public function as well, such as ``"groups.py: world_of"``.
    """
    needs: dict[str, str] = {}
    for path in sorted((PACKAGE / "compat").rglob("*.py")):
        name = str(path.relative_to(PACKAGE / "compat"))
        if (line := _first_line(path)).startswith(NEEDED):
            needs[name] = line.removeprefix(NEEDED)
        sections = path.read_text().split(f"\n# {NEEDED}")[1:]
        for section in sections:
            function = re.search(r"^def ([a-z]\w*)", section, re.MULTILINE)
            needs[f"{name}: {function[1] if function else '?'}"] = section.partition("\n")[0]
    return needs


def from_fsdp2() -> str:
    """Return a table of FSDP2's names with ours."""
    return "\n".join(["| FSDP2 | thunder_zero |", "|---|---|", *(row.markdown() for row in ROWS)]) + "\n"


PAGES = {
    "docs/architecture.md": listing,
    "docs/from-fsdp2.md": from_fsdp2,
}


def _package(folder: Path, indent: int) -> list[str]:
    rows = [_row(f"{folder.name}/", folder / "__init__.py", indent)]
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").exists():
            rows += _package(path, indent + 2)
        elif path.suffix == ".py" and path.name != "__init__.py":
            rows.append(_row(path.name, path, indent + 2))
    return rows


def _row(name: str, path: Path, indent: int) -> str:
    return f"{' ' * indent}{name:<{NAME - indent}} {_first_line(path)}".rstrip()


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main() -> None:
    """Rewrite the pages."""
    for page, table in PAGES.items():
        head, begin, rest = (ROOT / page).read_text().partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"{page} has no place for the listing")
        (ROOT / page).write_text(head + begin + table() + end + tail)


if __name__ == "__main__":
    main()
