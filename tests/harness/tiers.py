"""The two tiers of the tests: ``pytest`` runs the fast one, ``pytest --slow`` everything.

The mark ``slow`` moves a whole test to the slow tier. ``of_tier`` chooses between a test's cases; it also works on
ranks, which inherit the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

VARIABLE = "THUNDER_ZERO_SLOW_TESTS"  # set by --slow

T = TypeVar("T")


def is_slow() -> bool:
    return VARIABLE in os.environ


def of_tier(fast: T, everything: T) -> T:
    return everything if is_slow() else fast


def only(fast: tuple[str, ...], cases: Mapping[str, Any]) -> dict[str, Any]:
    """The cases of this tier: all of them, or in the fast tier those named in ``fast``."""
    return {name: cases[name] for name in of_tier(fast, tuple(cases))}
