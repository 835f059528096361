"""needed while: Thunder's tables of lookasides are one for the process.

Replaces entries of Thunder's tables, and functions of its modules, while Thunder traces a model of ours::

    with replaced(PATCHES), reporting_to(findings):    # tracing.py
        ...                                         # Thunder traces the model, and calls our functions
                                                    # the tables are as they were before

A thread that traces another model meanwhile finds our functions, too: those that refuse or note something first ask
whether their own thread traces a model of ours, and else do what Thunder does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from thunder_zero.compat.thunder.guards import Lookups, Namespace
from thunder_zero.compat.thunder.untraceable import Untraceable


@dataclass(frozen=True)
class Patch:
    """A value for an entry of a table (a dict), or for an attribute of a module, a class or a symbol of Thunder."""

    holder: Any
    key: Any
    value: Any

    def put(self) -> Callable[[], None]:
        """Put the value there; return what puts back what was there."""
        of, key = self.holder, self.key
        own: Mapping[Any, Any]
        write: Callable[[Any, Any, Any], None]
        remove: Callable[[Any, Any], None]
        if isinstance(of, dict):
            own, write, remove = of, dict.__setitem__, dict.__delitem__
        elif isinstance(of, type):
            own, write, remove = vars(of), setattr, delattr
        else:  # a symbol is a frozen dataclass with slots
            own, write, remove = {key: getattr(of, key)}, object.__setattr__, object.__delattr__
        undo = partial(write, of, key, own[key]) if key in own else partial(remove, of, key)
        write(of, key, self.value)
        return undo


@dataclass
class _Inside:
    """How many blocks of all threads replace entries now, and what ends that; the last one calls it."""

    blocks: int = 0
    undo: list[Callable[[], None]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)


_inside = _Inside()


@contextmanager
def replaced(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace these entries inside the block; blocks may overlap, in threads too, and all have the same patches."""
    with _inside.lock:
        if not _inside.blocks:
            _inside.undo += [patch.put() for patch in patches]
        _inside.blocks += 1
    try:
        yield
    finally:
        with _inside.lock:
            _inside.blocks -= 1
            while _inside.undo and not _inside.blocks:
                _inside.undo.pop()()


# What our functions ask for and report to.


@dataclass
class Findings:
    """What our functions report while Thunder traces one model."""

    lookups: Lookups = field(default_factory=Lookups)
    refusal: Untraceable | None = None


_findings: ContextVar[Findings | None] = ContextVar("thunder_zero_findings", default=None)


@contextmanager
def reporting_to(findings: Findings) -> Iterator[None]:
    """Let our functions report to ``findings`` inside the block."""
    token = _findings.set(findings)
    try:
        yield
    finally:
        _findings.reset(token)


def is_ours() -> bool:
    """Return whether the model that this thread traces is ours."""
    return _findings.get() is not None


def refuse(why: str) -> Untraceable | None:
    """Report why a trace would be wrong, and return the error to raise; None where the model is not ours."""
    if (findings := _findings.get()) is None:
        return None
    findings.refusal = Untraceable(why)
    return findings.refusal


def note(holder: Any, namespace: Namespace, name: str) -> None:
    """Report a name that forward reads in the namespace of ``holder``."""
    if (findings := _findings.get()) is not None:
        findings.lookups.note(holder, namespace, name)
