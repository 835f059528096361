"""The documents name existing files and names, and leave none out."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from runpy import run_path

import pytest

from thunder_zero.policy import Policy

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "thunder_zero"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
RENAMED = re.findall(r"^\| `(\S+)` \| `(\S+)` \|$", CHANGELOG, re.MULTILINE)
LISTING = run_path(str(ROOT / "docs/listing.py"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    names = re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|md|toml|sh))`", document.read_text())
    places = (ROOT, PACKAGE, document.parent, PACKAGE / "report", ROOT / "tests")
    assert [name for name in names if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
    assert named or document.name != "fsdp2.md"
    assert [(file, name) for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text()] == []


def test_the_listing_is_the_first_lines_of_the_modules() -> None:
    assert LISTING["listing"]() in ARCHITECTURE, "run python docs/listing.py"
    assert {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"} - {"py.typed"} == set(
        LISTING["ORDER"]
    )


def test_every_module_says_what_it_is_for() -> None:
    lines = LISTING["listing"]().splitlines()
    assert [line for line in lines if len(line.split(maxsplit=1)) < 2 or len(line) > 120] == []


def test_every_room_has_tests() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| room | tests |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = {
        room: re.findall(r"`([^`]+)`", tests) for room, tests in re.findall(r"^\| `(.+?)` \| (.+) \|$", table, re.M)
    }
    rooms = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rows.keys() == rooms - {"__pycache__/"}
    assert all(rows.values())
    assert [file for files in rows.values() for file in files if not (ROOT / "tests" / file).is_file()] == []


def test_the_changelog_names_what_is_exported() -> None:
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    named = set(re.findall(r"`(\w+)`", CHANGELOG)) - {"thunder_zero"}
    assert set(names) - named == set()
    assert named - set(names) <= {field.name for field in fields(Policy)}


@pytest.mark.parametrize(("old", "new"), RENAMED)
def test_only_the_new_name_exists(old: str, new: str) -> None:
    assert (exists(old), exists(new)) == (False, True)


def exists(name: str) -> bool:
    """Whether the package has a module ``thunder_zero.x``, a field ``Class.x`` or an argument ``function(x=)``."""
    if name.startswith("thunder_zero."):
        path = ROOT / name.replace(".", "/")
        return path.is_dir() or path.with_suffix(".py").exists()
    owner, inner = re.fullmatch(r"(\w+)[.(](\w+)=?\)?", name).groups()
    named = [node for node in definitions() if node.name == owner]
    assert named, owner
    return any(inner in members(node) for node in named)


@cache
def definitions() -> list[ast.ClassDef | ast.FunctionDef]:
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def members(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """The fields and methods of a class, or the arguments of a function."""
    if isinstance(node, ast.FunctionDef):
        return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return methods | {ast.unparse(inner.target) for inner in node.body if isinstance(inner, ast.AnnAssign)}


def test_the_architecture_is_short() -> None:
    assert len(ARCHITECTURE.replace(LISTING["listing"](), "").splitlines()) < 150
