"""Pages of the site from files outside docs/, such as README.md; and the check that no page fetches anything.

mkdocs.yml names this module as a hook of mkdocs. Each file is read where it is, and its links are turned: to another
page where the site has one, and otherwise to a page that shows the file. docs/step.py makes the report that a page
shows.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from runpy import run_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
PAGES = {  # by file of the repository
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "example-scripts.md",
}
FILES = {page: file for file, page in PAGES.items()}
LINK = re.compile(r"\[([^\[\]]*)\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")  # text, file, anchor
REPORT = "step-report.html"
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"  # a search should find pages, not the code that they link to
FETCHED = (  # what a browser loads by itself, or the theme's script for it
    re.compile(r"class=[\"']?mermaid"),
    re.compile(r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"),
    re.compile(r"<link\b(?![^>]*\brel=[\"']?canonical)[^>]*?\bhref=[\"']?(?:https?:)?//[^\"'\s>]+"),
    re.compile(r"@import\s+[\"'][^\"']+"),
    re.compile(r"url\([\"']?(?:https?:)?//[^)]+"),
    re.compile(r"(?:import|fetch)\([\"']\w+:[^\"']+"),
)


def file_of(page: str) -> str:
    """The file of the repository behind a page of the site.

    >>> file_of("index.md"), file_of("memory.md"), file_of("source/LICENSE.md")
    ('README.md', 'docs/memory.md', 'LICENSE')
    """
    if page.startswith("source/"):
        return page.removeprefix("source/").removesuffix(".md")
    return FILES.get(page, f"{DOCS}/{page}")


def page_of(file: str) -> str:
    """The page, or the copied file of docs/, that shows a file of the repository: the reverse of ``file_of``."""
    inside = file.removeprefix(f"{DOCS}/")
    return PAGES.get(file, inside if inside != file else f"source/{file}.md")


def linked(file: str, text: str) -> set[str]:
    """The files of the repository that a page's relative links name, and that exist."""
    named = {normpath(PurePosixPath(file).parent / target) for _, target, _ in LINK.findall(text)}
    return {name for name in named if (ROOT / name).is_file()}


def shown(page: str, text: str) -> str:
    """Return the text of a page with its relative links turned; a link that names no file stays as it is.

    A link whose text is the name of a page's file gets the page's title instead.
    """
    folder = PurePosixPath(file_of(page)).parent

    def turn(link: re.Match[str]) -> str:
        said, named, anchor = link.groups(default="")
        target = normpath(folder / named)
        if not (ROOT / target).is_file():
            return link[0]
        if target.endswith(".md") and said in (target, PurePosixPath(target).name):
            said = title_of(target)
        return f"[{said}]({relpath(page_of(target), PurePosixPath(page).parent)}{anchor})"

    return LINK.sub(turn, text)


def title_of(file: str) -> str:
    """The first heading of a file in Markdown."""
    found = re.search(r"^# (.+)$", (ROOT / file).read_text(), re.MULTILINE)
    return found[1] if found else file


def fetched(text: str) -> list[str]:
    """What a page, a style sheet or a script of ours would fetch from another machine."""
    return [match[0] for pattern in FETCHED for match in pattern.finditer(text)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and a page for each file that a page links to."""
    from mkdocs.structure.files import File

    for file, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    sources = set()
    for page in files.documentation_pages():
        sources |= linked(file_of(page.src_uri), page.content_string)
    for file in sorted(sources):
        if page_of(file).startswith("source/"):
            text = (ROOT / file).read_text()
            language = "python" if file.endswith(".py") else "text"
            content = f"{UNSEARCHED}# {file}\n\n````{language}\n{text}\n````\n"
            files.append(File.generated(config, page_of(file), content=content))
    files.append(File.generated(config, REPORT, content=report_of_a_step()))
    return files


@cache
def report_of_a_step() -> str:
    found: str = run_path(str(ROOT / DOCS / "step.py"))["report"]()
    return found


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown if page.file.src_uri.startswith("source/") else shown(page.file.src_uri, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that fetches anything when it is viewed."""
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    index = site / "search/search_index.json"  # on pages from the disk the theme asks for a script
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css"), *site.glob("*.js")]):
        if found := fetched(path.read_text()):
            raise PluginError(f"{path.relative_to(site)} would fetch {', '.join(sorted(set(found)))}; keep it in docs/")
