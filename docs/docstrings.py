"""Makes the package's docstrings Markdown for the API reference.

Roles become links, ``>>>`` lines become code, arguments that share a sentence get one each, and the comment of a field
is its docstring.
mkdocs.yml names this module as an extension of griffe, which reads the package for mkdocstrings without importing it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`(~?)([\w.]+)`")
SHARED = re.compile(r"^([ ]+)(\w+(?:, \w+)+)(: .*\n(?:\1[ ]+.*\n)*)", re.MULTILINE)
PROMPTS = re.compile(r"((?:^[ ]*(?:>>>|\.\.\.)(?: .*)?\n?)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Take the names that a package imports for others as its public ones, then rewrite all docstrings."""
        public = set()
        for module in (pkg, *(inner for inner in pkg.modules.values() if not inner.is_alias and inner.is_subpackage)):
            names = [name for name, member in module.members.items() if is_export(name, member)]
            if names:  # of a package with lazy names; others are read by their __all__
                module.exports = names
            public |= {f"{module.path}.{name}" for name in names}
            for constant in (module[name] for name in names):
                if constant.is_attribute and not constant.docstring:  # it would not be shown
                    constant.final_target.docstring = griffe.Docstring("A ready-made value.")
        rewrite(pkg, public)


def is_export(name: str, member: griffe.Object | griffe.Alias) -> bool:
    """Whether a package has a member by ``from thunder_zero.module import name as name`` under TYPE_CHECKING."""
    return isinstance(member, griffe.Alias) and not member.runtime and member.target_path.endswith(f".{name}")


def rewrite(owner: griffe.Object, public: set[str]) -> None:
    for member in owner.members.values():
        if isinstance(member, griffe.Alias):
            continue
        rewrite(member, public)
        if member.is_attribute and owner.is_class and not member.docstring:
            comment = member.source.partition("  # ")[2]
            member.docstring = griffe.Docstring(comment[:1].upper() + comment[1:]) if comment else None
    if owner.docstring:
        owner.docstring.value = as_markdown(owner.docstring.value, public)


def as_markdown(text: str, public: set[str]) -> str:
    """A docstring with links to public names, and fenced examples.

    >>> as_markdown("see :func:`~thunder_zero.trace`", {"thunder_zero.trace"})
    'see [`trace`][thunder_zero.trace]'
    """

    def role(match: re.Match[str]) -> str:
        tilde, path = match.groups()
        shown = f"`{path.rpartition('.')[2] if tilde else path}`"
        return f"[{shown}][{path}]" if path in public else shown

    def fence(match: re.Match[str]) -> str:
        lines = match[1].rstrip("\n").split("\n")
        indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
        return "\n".join([f"\n{indent}```pycon", *lines, f"{indent}```\n\n"])

    def divide(match: re.Match[str]) -> str:
        indent, names, sentence = match.groups()
        return "".join(f"{indent}{name}{sentence}" for name in names.split(", "))

    return PROMPTS.sub(fence, ROLE.sub(role, SHARED.sub(divide, text + "\n"))).rstrip("\n")
