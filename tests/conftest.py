"""Rules for the rooms of the tests: pure (nothing), one (one process), ranks (1 to 4 gloo ranks), gpu (CUDA).

Two tiers: what is slow shows something that a fast test shows, too, in more combinations, and runs with ``--slow``
only (``tests/harness/tiers.py``).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.harness.ranks import RanksPool
from tests.harness.tiers import VARIABLE, is_slow

TESTS = Path(__file__).parent
RANKS_SECONDS = 120
ROOMS = ("ranks", "gpu", "one", "pure")  # the longest files first, so that no worker waits for the other at the end

# No test may fail because a machine is busy; on CI Hypothesis also repeats its examples from run to run.
settings.register_profile("fast", settings(), deadline=None, max_examples=30)
settings.register_profile("slow", settings(), deadline=None)


def room_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run all tests, and each rank in a fresh interpreter")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        os.environ[VARIABLE] = "1"
    settings.load_profile("slow" if is_slow() else "fast")
    gc.set_threshold(100_000, 20, 100)  # compiling makes much and frees little


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _spare(items)
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow and not is_slow():
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        if room_of(item) == "ranks" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RANKS_SECONDS))
    if "PYTEST_XDIST_WORKER" in os.environ:  # xdist gives whole files to its workers in this order
        items.sort(key=lambda item: ROOMS.index(room_of(item)))
    gpu = [item for item in items if room_of(item) == "gpu"]
    if gpu and not _has_cuda():
        for item in gpu:
            if item.get_closest_marker("rehearsal") is None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _world_size(item: pytest.Item) -> int:
    """Of a test that runs under dynamo, with several numbers of ranks; 0 of all others."""
    params = item.callspec.params if isinstance(item, pytest.Function) and item.originalname != item.name else {}
    size = params.get("world_size") if params.get("ranks_pool") == "dynamo" else 0
    return size if isinstance(size, int) else 0


def _spare(items: list[pytest.Item]) -> None:
    """Under dynamo leave each test one number of ranks, up to 3: they do not change what the front end does."""
    largest: dict[str, int] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        largest[test] = max(largest.get(test, 0), _world_size(item) if _world_size(item) <= 3 else 0)
    items[:] = [item for item in items if _world_size(item) in (0, largest[item.nodeid.partition("[")[0]])]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With ``--slow``, run the fast tests of a module with ``BOTH_FRONT_ENDS = True`` under dynamo, too."""
    is_fast = not any(mark.name == "slow" for mark in metafunc.definition.iter_markers())
    if is_fast and "ranks_pool" in metafunc.fixturenames and getattr(metafunc.module, "BOTH_FRONT_ENDS", False):
        both = ["jit", pytest.param("dynamo", marks=pytest.mark.slow)]
        metafunc.parametrize("ranks_pool", both, indirect=True, scope="session")


@pytest.fixture(scope="session")
def processes() -> Iterator[RanksPool]:
    with RanksPool(fresh=is_slow()) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks_pool(request: pytest.FixtureRequest, processes: RanksPool) -> RanksPool:
    """Processes that run functions on 1 to 4 ranks: ``ranks_pool.run(world_size, fn, *args, timeout=60.0)``."""
    processes.front_end = getattr(request, "param", os.environ.get("TZ_FRONT", "jit"))
    return processes
