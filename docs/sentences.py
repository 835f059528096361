"""Counts the words of README and docs, and draws sentences and local names for a reader to judge.

python docs/sentences.py words                  words outside fenced blocks, by page
python docs/sentences.py package [N] [SEED] [ROOM ...]  N sentences of the package's docstrings
python docs/sentences.py docs [N] [SEED]        N sentences of README and docs
python docs/sentences.py names [N] [SEED] [ROOM ...]   N local names; then how often each occurs
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*])|\n\s*\n|\n *(?:[-*|#]|\d+\.) ?|\n(?=>>>)")


def pages() -> dict[str, str]:
    """Return the prose of README and of each page of docs/, without fenced blocks, by path."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): FENCED.sub("", path.read_text()) for path in files}


def modules(rooms: list[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the tree of each module of the package, or of the given rooms of it."""
    for path in sorted((ROOT / "thunder_zero").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not rooms or any(name.startswith(f"thunder_zero/{room}") for room in rooms):
            yield name, ast.parse(path.read_text())


def sentences_of(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in SENTENCE.split(text))
    return [part for part in parts if len(part.split()) >= 5 and not part.startswith((">>>", "...", "|--"))]


def package_sentences(rooms: list[str]) -> list[tuple[str, str]]:
    drawn = []
    for name, tree in modules(rooms):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                where = name if isinstance(node, ast.Module) else f"{name}:{node.lineno} {node.name}"
                drawn += [(where, sentence) for sentence in sentences_of(ast.get_docstring(node) or "")]
    return drawn


def local_names(rooms: list[str]) -> list[tuple[str, str]]:
    """Return each local name of each function once, arguments included, beside its function."""
    drawn = []
    for name, tree in modules(rooms):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes = list(ast.walk(node))
                stored = {part.id for part in nodes if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
                stored |= {part.arg for part in nodes if isinstance(part, ast.arg)} - {"self"}
                drawn += [(f"{name}:{node.lineno} {node.name}", local) for local in sorted(stored)]
    return drawn


def main(what: str = "", number: str = "60", seed: str = "45", *rooms: str) -> None:
    if what == "words":
        words = {name: len(prose.split()) for name, prose in pages().items()}
        print(*(f"{count:7,} {name}" for name, count in words.items()), f"{sum(words.values()):7,} in all", sep="\n")
        return
    everything = {
        "package": lambda: package_sentences(list(rooms)),
        "docs": lambda: [(name, part) for name, prose in pages().items() for part in sentences_of(prose)],
        "names": lambda: local_names(list(rooms)),
    }
    if what not in everything:
        sys.exit(__doc__)
    drawn = everything[what]()
    for where, text in Random(int(seed)).sample(drawn, min(int(number), len(drawn))):
        print(f"{where}\n    {text}")
    if what == "names":
        print(*(f"{count} {name}" for name, count in Counter(text for _, text in drawn).most_common(60)), sep=", ")


if __name__ == "__main__":
    main(*sys.argv[1:])
