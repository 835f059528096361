"""Every rank sends the least that is possible, and no less: counted on the interfaces of network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest
import torch

import thunder_zero as tz
from examples.bench.network import Seat, can_limit, seats
from examples.bench.ranks import PORT, environment
from tests.harness.models import fresh
from tests.harness.tiers import of_tier
from tests.harness.wire_worker import NOT_AGAIN, ROWS, RUNS, SKIPPED, WHOLE, Net

ROOT = Path(__file__).parents[2]
SECONDS = 100.0  # for all runs of one world
LEAST, MOST = 0.999, 1.01
RIGHT = [name for name in RUNS if name != "a reduction is missing"]

Reply = dict[str, dict[str, int]]

pytestmark = pytest.mark.slow  # the fast tier counts bytes where they are sent: test_stages_at_rest_and_sent.py


@pytest.fixture(scope="module", params=of_tier([2], [2, 4]))
def replies(request: pytest.FixtureRequest) -> Iterator[list[Reply]]:
    """What each rank of a world counted, one process and one namespace a rank."""
    if not can_limit():
        pytest.skip("network namespaces need root, ip and tc (iproute2)")
    with ExitStack() as stack:
        try:
            places = stack.enter_context(seats(request.param, "10gbit"))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"root may make no network namespaces here: {error}")
        yield count(places)


def count(places: list[Seat]) -> list[Reply]:
    """Runs a worker on each seat; they are killed, by their ids, when one fails or time is over."""
    end = time.monotonic() + SECONDS
    workers: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in places]
        answers = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in places]
        try:
            for rank, seat in enumerate(places):
                command = (*seat.prefix, sys.executable, "-W", "ignore", "-m", "tests.harness.wire_worker")
                env, files = environment(rank, places, PORT), (answers[rank], logs[rank])
                workers.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=files[0], stderr=files[1])
                )
            while any(worker.poll() is None for worker in workers):
                failed = [rank for rank, worker in enumerate(workers) if worker.returncode]
                if failed or time.monotonic() > end:
                    break
                time.sleep(0.05)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        ended = {rank: worker.returncode for rank, worker in enumerate(workers)}
        assert not any(ended.values()), f"exit codes {ended}:\n" + "\n".join(
            f"rank {rank}: {tail(log)}" for rank, log in enumerate(logs)
        )
        return [json.loads(tail(answer)) for answer in answers]


def tail(file: TextIO) -> str:
    """The last 30,000 characters of what was written."""
    file.seek(0)
    return file.read()[-30_000:]


def model_bytes(*, but: set[str] | frozenset[str] = frozenset()) -> int:
    return sum(4 * param.numel() for name, param in fresh(Net).named_parameters() if name not in but)


def test_the_model_is_uneven_and_large() -> None:
    assert 9e6 < model_bytes() < 11e6
    assert all(rows % 2 and rows % 4 for rows in ROWS)


@pytest.mark.parametrize("name", RIGHT)
def test_a_step_sends_what_its_timeline_foresees(replies: list[Reply], name: str) -> None:
    for rank, reply in enumerate(replies):
        ratio = reply[name]["sent"] / reply[name]["foreseen"]
        assert LEAST <= ratio <= MOST, (rank, ratio)


@pytest.mark.parametrize("name", RIGHT)
def test_a_step_sends_the_least_possible(replies: list[Reply], name: str) -> None:
    """2u, and for stage 3 3u less what backward does not need again or has kept. u is (W - 1) / W of the model, a rank;
    ranks with fewer rows send less, so that the lower bound is of all together."""
    world_size = len(replies)
    policy = RUNS[name]
    once = (world_size - 1) * model_bytes()  # W u: what all ranks send together to gather, or to reduce
    least = 2 * once
    if policy.stage == 3:
        kept = set(tz.trace(fresh(Net), torch.arange(8), policy=policy, world_size=world_size).plan.gathered_once)
        assert bool(kept) == policy.gather_last_units_once
        least += (world_size - 1) * model_bytes(but=NOT_AGAIN | kept)
    sent = [reply[name]["sent"] for reply in replies]
    assert LEAST <= sum(sent) / least <= MOST, sum(sent) / least
    assert max(sent) <= MOST * least / world_size, max(sent) / (least / world_size)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_parameters_cost_a_part_of_a_gather_for_each_way(replies: list[Reply], name: str) -> None:
    """u / W a rank, on average, for each time that rows travel to their owners or back."""
    _, ways = WHOLE[name]
    more = [reply[name]["sent"] - reply[name]["foreseen"] for reply in replies]
    part = (len(replies) - 1) / len(replies) * model_bytes()  # W u / W, what all ranks send together
    assert 0.97 * ways <= sum(more) / part <= 1.03 * ways, [count / part for count in more]


def test_a_reduction_that_is_missing_is_found(replies: list[Reply]) -> None:
    """Every rank leaves one out, and the bytes fall below what the timeline foresees, by those of the parameter."""
    (missing,) = (
        param for param in tz.make_plan(fresh(Net), tz.ZERO2, len(replies), 0).params if param.path == SKIPPED
    )
    for rank, reply in enumerate(replies):
        ran = reply["a reduction is missing"]
        share = tz.make_plan(fresh(Net), tz.ZERO2, len(replies), rank).reduce_bytes(missing)
        assert share > 0.05 * ran["foreseen"]
        assert ran["sent"] < LEAST * ran["foreseen"]
        assert LEAST <= ran["sent"] / (ran["foreseen"] - share) <= MOST
