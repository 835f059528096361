"""needed while: Thunder's tables of lookasides are global to the process.

Replaces entries of Thunder's tables, and functions of its modules, while Thunder traces a model of ours::

    with replaced(PATCHES), reporting_to(findings):    # tracing.py
        ...                                            # Thunder traces the model, and calls our functions
                                                       # the old entries are restored

A thread that traces another model meanwhile also calls our functions. So each function checks whether its own thread
traces a model of ours. Otherwise our function calls Thunder's function.
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
    """A new value for an entry of a dict, or for an attribute of a module, a class or a symbol of Thunder."""

    holder: Any
    key: Any
    value: Any

    def put(self) -> Callable[[], None]:
        """Set the new value. Return a function that restores the old value."""
        holder, key = self.holder, self.key
        entries: Mapping[Any, Any]
        write: Callable[[Any, Any, Any], None]
        remove: Callable[[Any, Any], None]
        if isinstance(holder, dict):
            entries, write, remove = holder, dict.__setitem__, dict.__delitem__
        elif isinstance(holder, type):
            entries, write, remove = vars(holder), setattr, delattr
        else:  # a symbol is a frozen dataclass with slots
            entries, write, remove = {key: getattr(holder, key)}, object.__setattr__, object.__delattr__
        undo = partial(write, holder, key, entries[key]) if key in entries else partial(remove, holder, key)
        write(holder, key, self.value)
        return undo


@dataclass
class _Inside:
    """The number of active blocks of :func:`replaced`, in all threads. The last block to end calls ``undo``."""

    blocks: int = 0
    undo: list[Callable[[], None]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)


_inside = _Inside()


@contextmanager
def replaced(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace entries inside the block. Blocks may overlap, also in threads. All blocks must have equal patches."""
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


# Reports of our functions


@dataclass
class Findings:
    """The reports of our functions while Thunder traces one model: the reads of forward, and a refusal."""

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
    """Return whether this thread traces a model of ours."""
    return _findings.get() is not None


def refuse(reason: str) -> Untraceable | None:
    """Report why a trace would be wrong. Return the error to raise, or None if the model is not ours."""
    if (findings := _findings.get()) is None:
        return None
    findings.refusal = Untraceable(reason)
    return findings.refusal


def note(holder: Any, namespace: Namespace, name: str) -> None:
    """Report a name that forward reads in the namespace of ``holder``."""
    if (findings := _findings.get()) is not None:
        findings.lookups.note(holder, namespace, name)
