"""Helpers that return or check the error of a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def kind_and_text(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the name of the error's type and its text, or ``("", "nothing")`` if the call raises none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing"


def error_of(call: Callable[[], Any]) -> str:
    """Return the error of a call as ``"ValueError: its sentence"``, or ``"nothing"``."""
    kind, text = kind_and_text(call)
    return f"{kind}: {text}" if kind else text


def fails(call: Callable[[], Any], *words: str) -> None:
    """Check that the call raises an error with these words in its text or in the name of its type."""
    text = error_of(call)
    assert [word for word in words if word not in text] == [], f"{words} are not all in: {text}"


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Check that the block raises one sentence with these words, which names an action after a semicolon."""
    text = ""
    try:
        yield
    except Exception as error:
        if type(error) is not kind:
            error.add_note(f"instead of {kind.__name__} with {words}")
            raise
        text = str(error)
    assert text, f"nothing was raised, instead of {kind.__name__} with {words}"
    assert [word for word in words if word not in text] == [], text
    assert "\n" not in text, text
    assert len(re.sub(r"/(?:[^\s/]+/)+", "", text)) < 320, text  # folders do not count: checkouts lie anywhere
    assert "; " in text, f"the error names no action: {text}"


def all_refused(*rows: tuple[Callable[[], object], type[Exception], tuple[str, ...]]) -> None:
    """Check that each call is refused, as :func:`refused` does."""
    for call, kind, words in rows:
        with refused(kind, *words):
            call()
