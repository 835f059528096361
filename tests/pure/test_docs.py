"""The documents name only existing files, tests and names, and leave none out."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from runpy import run_path

import pytest

from thunder_zero.plan.policy import Policy

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "thunder_zero"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
LISTING = run_path(str(ROOT / "docs/listing.py"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_files_and_tests_of_a_document_exist(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    files = re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|md|toml|sh))`", text)
    places = (ROOT, PACKAGE, document.parent, ROOT / "tests")
    assert [file for file in files if not any((place / file).exists() for place in places)] == []
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert tests or document.name != "from-fsdp2.md"
    assert [(file, name) for file, name in tests if f"\ndef {name}(" not in (ROOT / file).read_text()] == []


def test_the_architecture_lists_the_first_lines_of_all_modules() -> None:
    listing = LISTING["listing"]()
    for page, table in LISTING["PAGES"].items():
        assert table() in (ROOT / page).read_text(), "run python docs/listing.py"
    modules = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "py.typed"}
    assert modules == set(LISTING["ORDER"])
    assert [line for line in listing.splitlines()[1:-1] if len(line.split(maxsplit=1)) < 2 or len(line) > 120] == []
    assert len(ARCHITECTURE.replace(listing, "").splitlines()) < 190, "the page is long"


def test_the_package_has_the_messages_of_the_errors_page() -> None:
    # tests/one/test_errors_page.py raises the messages of torch and Thunder.
    page = (ROOT / "docs/errors.md").read_text()
    messages = re.findall(r"\*\*`([^`]+)`\*\*(?! \((?:torch|Thunder)\))", page)
    assert len(messages) > 25
    texts = [text for path in PACKAGE.rglob("*.py") for text in strings_of(path)]
    assert [message for message in messages if not any(fits(" ".join(message.split()), text) for text in texts)] == []


def strings_of(path: Path) -> list[str]:
    """Return the strings of a module, with … for the values of an f-string."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    constants = [
        n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in parts
    ]
    formats = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    filled = ["".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in values) for values in formats]
    return [*constants, *filled]


def fits(message: str, text: str) -> bool:
    """Return whether a text has the fixed parts of a message in their order."""
    return (
        re.search(".*".join(re.escape(part.strip()) for part in message.split("…")), text.replace("`", "")) is not None
    )


def test_the_changelog_names_every_exported_name() -> None:
    names = {name for package in ("", "tools") for name in exported_by(PACKAGE / package / "__init__.py")}
    names |= {*run_path(str(PACKAGE / "schedule/__init__.py"))["__all__"]}
    named = set(re.findall(r"`(\w+)`", CHANGELOG)) - {"thunder_zero"}
    assert names - named == set()
    assert named - names <= {field.name for field in fields(Policy)}


def homes(init: Path) -> set[tuple[str, str]]:
    """Return the names that a package exports from its modules, with the modules."""
    imports = (node for node in ast.walk(ast.parse(init.read_text())) if isinstance(node, ast.ImportFrom))
    return {(node.module or "", alias.name) for node in imports for alias in node.names if alias.asname == alias.name}


def exported_by(init: Path) -> set[str]:
    return {name for _, name in homes(init)}


def test_class_names_are_unique() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    names = Counter(name for tree in trees for name in names_in(tree))
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert [name for name in sorted(classes) if names[name] > 1] == []


def names_in(tree: ast.Module) -> list[str]:
    """Return the classes and the assigned names at the top of a module."""
    targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    assigned = [target.id for target in targets if isinstance(target, ast.Name)]
    return assigned + [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
