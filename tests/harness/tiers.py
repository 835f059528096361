"""Three tiers of tests, told apart by marks alone. Each tier includes the one before it.

======================  =====================================  ==============================================
command                 runs                                   for
======================  =====================================  ==============================================
``./dev test``          tests without a mark                   each change: what matters most, once
``./dev test --slow``   also tests marked ``slow``             CI: more stages, worlds and models
``./dev test --deep``   also tests marked ``deep``             by hand: all worlds, all moments, 1,000 examples
======================  =====================================  ==============================================

Mark a whole test with ``@pytest.mark.slow``; mark some of its cases with ``slow`` and ``deep``::

    @pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
    @pytest.mark.parametrize(("world_size", "source"), [(3, 2), *slow((1, 0), (2, 0)), *deep((4, 1))])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("slow", "deep")  # the marks that an option adds; tests of the fast tier have no mark


def slow(*cases: Any) -> list[Any]:
    """Mark cases of ``pytest.mark.parametrize`` that run with ``--slow``; a tuple has a value for each argument."""
    return [_marked(case, pytest.mark.slow) for case in cases]


def deep(*cases: Any) -> list[Any]:
    """Mark cases of ``pytest.mark.parametrize`` that run only with ``--deep``."""
    return [_marked(case, pytest.mark.deep) for case in cases]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)


def is_left_out(marks: Iterable[str], option: str) -> bool:
    """Return whether ``option`` ("" for the fast tier, "slow" or "deep") leaves out a test with these marks."""
    runs = TIERS[: TIERS.index(option) + 1] if option else ()
    return not set(TIERS).intersection(marks) <= set(runs)
