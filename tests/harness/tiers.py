"""Three tiers of tests, told apart by marks alone, so that each is a part of the next by construction.

======================  =====================================  ==============================================
command                 runs                                   for
======================  =====================================  ==============================================
``./dev test``          tests without a mark                   each change: what matters most, once
``./dev test --slow``   those, and tests marked ``slow``       CI: the same in more stages, worlds and models
``./dev test --deep``   those, and tests marked ``deep``       by hand: all worlds, all moments, 1,000 examples
======================  =====================================  ==============================================

A whole test carries ``@pytest.mark.slow``; of several cases, ``slow`` and ``deep`` mark some::

    @pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
    @pytest.mark.parametrize(("world_size", "source"), [(3, 2), *slow((1, 0), (2, 0)), *deep((4, 1))])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("slow", "deep")  # what a tier's option adds; the fast tier has no mark


def slow(*cases: Any) -> list[Any]:
    """Cases of ``pytest.mark.parametrize`` that run with ``--slow``; a tuple has a value for each argument."""
    return [_marked(case, pytest.mark.slow) for case in cases]


def deep(*cases: Any) -> list[Any]:
    """Cases that run with ``--deep`` only."""
    return [_marked(case, pytest.mark.deep) for case in cases]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)


def is_left_out(marks: Iterable[str], option: str) -> bool:
    """Whether a test with these marks does not run under ``option``: "" (fast), "slow" or "deep"."""
    runs = TIERS[: TIERS.index(option) + 1] if option else ()
    return not set(TIERS).intersection(marks) <= set(runs)
