"""The site: links lead to its pages, pages fetch nothing, and the tables name what exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from runpy import run_path

import pytest

from thunder_zero.plan.policy import Policy

ROOT = Path(__file__).parents[2]
PAGES = run_path(str(ROOT / "docs/pages.py"))
COMING_FROM = sorted((ROOT / "docs").glob("from-*.md"))
ARGUMENTS = (ROOT / "thunder_zero/capture/arguments.py").read_text()


@pytest.mark.parametrize(
    ("page", "text", "turned"),
    [
        ("index.md", "see [it](docs/errors.md#forward)", "see [it](errors.md#forward)"),
        ("index.md", "[docs/errors.md](docs/errors.md)", "[Errors and what to do](errors.md)"),
        ("errors.md", "see [it](../README.md#train)", "see [it](index.md#train)"),
        ("errors.md", "[memory](memory.md)", "[memory](memory.md)"),
        ("errors.md", "[a script](../examples/train_gpt.py)", "[a script](source/examples/train_gpt.py.md)"),
        ("example-scripts.md", "[p](../docs/images/bench.png)", "[p](images/bench.png)"),
        ("changelog.md", "[a](https://b.org/c) [d](#e) `f[0](x)`", "[a](https://b.org/c) [d](#e) `f[0](x)`"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, text: str, turned: str) -> None:
    assert PAGES["shown"](page, text) == turned


def test_every_file_outside_of_docs_has_a_page_that_leads_back() -> None:
    for file in ("README.md", "CHANGELOG.md", "examples/README.md", "docs/memory.md", "examples/gpt.py", "LICENSE"):
        assert PAGES["file_of"](PAGES["page_of"](file)) == file
    assert all((ROOT / file).is_file() for file in PAGES["PAGES"])


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://cdn.org/a.js"></script>',
        '<link rel="stylesheet" href=//fonts.org/css>',
        "<img alt='' src='http://a.org/b.png'>",
        "@import 'https://a.org/b.css'",
        "src: url(https://a.org/font.woff2)",
        'fetch("https://a.org/data.json")',
        '<pre class="mermaid">',
    ],
)
def test_a_page_that_fetches_something_is_found(text: str) -> None:
    assert PAGES["fetched"](f"<p>before</p>{text}<p>after</p>")


def test_links_and_the_sites_own_files_are_no_fetches() -> None:
    html = '<a href="https://a.org">a</a><link rel=canonical href=https://a.org/><script src="step.js"></script>'
    assert PAGES["fetched"](html) == []


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda path: path.stem)
def test_the_tables_of_migration_pages_name_existing_arguments_and_names(page: Path) -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", page.read_text(), re.MULTILINE)
    code = " ".join(part for row in rows[1:] for part in re.findall(r"`([^`]+)`", row))
    assert len(rows) > 10
    arguments = set(re.findall(r"(?<![\w.])([a-z]\w+)=", code))
    known = {field.name for field in fields(Policy)} | set(re.findall(r"^    (\w+): ", ARGUMENTS, re.MULTILINE))
    of_calls = {"param_dtype", "reduce_dtype", "buffer_dtype", "writeback", "dtype", "full_state_dict"}
    of_calls |= {"plugins", "overrides", "fuse"}
    assert arguments - known - of_calls == set()
    exported = (ROOT / "thunder_zero/__init__.py").read_text()
    names = set(re.findall(r"\btz\.(\w+)", code))
    assert names - set(re.findall(r" as (\w+)$", exported, re.MULTILINE)) == set()
    assert names


def test_the_navigation_has_all_pages() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages | set(PAGES["PAGES"].values()) == set(re.findall(r": ([\w/.-]+\.md)$", navigation, re.MULTILINE))
    packages = {"thunder_zero", "tools", "schedule", "lightning", "hugging_face"}
    assert {path.stem for path in (ROOT / "docs/api").iterdir()} == packages
