"""Rules for the rooms of the tests: pure (nothing), one (one process), ranks (1 to 4 gloo ranks), gpu (CUDA).

What runs when: ``tests/harness/tiers.py``.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.cpu import CpuSeconds
from tests.harness.ranks import RanksPool
from tests.harness.tiers import is_left_out

TESTS = Path(__file__).parent
ROOMS = ("ranks", "gpu", "one", "pure")  # the longest files first, so that no worker waits for the other at the end

# No test may fail because a machine is busy. Where CI is set, Hypothesis draws the same examples in each run.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("usual", UNHURRIED, max_examples=30)
settings.register_profile("deep", UNHURRIED, max_examples=1000)


def room_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow, too, as CI does")
    parser.addoption("--deep", action="store_true", help="run all tests, and 1,000 examples of each property")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


def tier_of(config: pytest.Config) -> str:
    return "deep" if config.getoption("--deep") else "slow" if config.getoption("--slow") else ""


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("deep" if tier_of(config) == "deep" else "usual")
    gc.set_threshold(100_000, 20, 100)  # compiling allocates much and frees little
    config.pluginmanager.register(CpuSeconds(), "cpu-seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = tier_of(config)
    later = [item for item in items if is_left_out((mark.name for mark in item.iter_markers()), tier)]
    if later:
        items[:] = [item for item in items if item not in set(later)]
        config.hook.pytest_deselected(items=later)
    if (seed := config.getoption("--shuffle")) is not None:
        shuffle(items, random.Random(seed))
    elif "PYTEST_XDIST_WORKER" in os.environ:  # xdist gives whole files to its workers in this order
        items.sort(key=lambda item: ROOMS.index(room_of(item)))
    gpu = [item for item in items if room_of(item) == "gpu"]
    if gpu and not _has_cuda():
        for item in gpu:
            if item.get_closest_marker("rehearsal") is None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def shuffle(items: list[pytest.Item], dice: random.Random) -> None:
    """Shuffle files, and the tests of each file. A file's tests stay together, as they share fixtures."""
    files = {path: dice.random() for path in dict.fromkeys(item.path for item in items)}
    places = {item: dice.random() for item in items}
    items.sort(key=lambda item: (files[item.path], places[item]))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish() -> None:
    gc.freeze()  # imported modules stay, so collections need not visit them


@pytest.fixture(scope="session")
def ranks_pool() -> Iterator[RanksPool]:
    """Yield processes that run functions on 1 to 4 ranks: ``ranks_pool.run(world_size, fn, *args)``."""
    with RanksPool() as pool:
        yield pool
