"""Ranks send the fewest bytes that a step needs, and each line of a trace sends what the plan says.

Bytes are counted on interfaces of network namespaces, in messages, and on each rank's sockets.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from examples.bench.lines import COPIED, POLICIES, lines_of
from examples.bench.model import Size
from examples.bench.network import Seat, can_limit, seats
from examples.bench.ranks import PORT, environment
from tests.harness.models import fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from tests.harness.wire_worker import NOT_AGAIN, ROWS, RUNS, WHOLE, Net

ROOT = Path(__file__).parents[2]
SECONDS = 500.0  # time limit for all runs of one world
LEAST, MOST = 0.999, 1.01

Reply = dict[str, dict[str, Any]]

# Bytes on sockets beside messages: three headers of gloo for each message, and a tag to each rank for each phase.
HEADERS, TAG = 144, 144 + 256
MOST_AT_ONCE = "stage 3, bfloat16, int8"


@pytest.fixture(scope="module", params=[*slow(3), *deep(2, 4)])
def replies(request: pytest.FixtureRequest) -> Iterator[list[Reply]]:
    """Return what each rank of a world counted. Each rank is a process in its own network namespace."""
    assert all(rows % request.param for rows in ROWS)
    if not can_limit():
        pytest.skip("network namespaces need root, ip and tc (iproute2)")
    with ExitStack() as stack:
        try:
            world_seats = stack.enter_context(seats(request.param, "10gbit"))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"root may make no network namespaces here: {error}")
        yield run_workers(world_seats)


def run_workers(world_seats: list[Seat]) -> list[Reply]:
    """Run a worker on each seat, and kill the workers at the end."""
    workers = []
    try:
        for rank, seat in enumerate(world_seats):
            command = (*seat.prefix, sys.executable, "-W", "ignore", "-m", "tests.harness.wire_worker")
            env, pipe = environment(rank, world_seats, PORT), subprocess.PIPE
            workers.append(subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=pipe, stderr=pipe))
        written = [worker.communicate(timeout=SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert not any(worker.returncode for worker in workers), "\n".join(errors[-10_000:] for _, errors in written)
    return [json.loads(reply) for reply, _ in written]


def model_bytes(*, but: set[str] | frozenset[str] = frozenset()) -> int:
    return sum(4 * param.numel() for name, param in fresh(Net).named_parameters() if name not in but)


def test_a_step_sends_as_many_bytes_as_its_timeline(replies: list[Reply]) -> None:
    ratios = {
        (name, rank): reply[name]["sent"] / reply[name]["foreseen"]
        for rank, reply in enumerate(replies)
        for name in RUNS
    }
    assert all(LEAST <= ratio <= MOST for ratio in ratios.values()), ratios


@pytest.mark.parametrize("name", RUNS)
def test_a_step_sends_the_fewest_bytes(replies: list[Reply], name: str) -> None:
    """All ranks together send 2 (W - 1) times the model. Stage 3 adds what backward gathers again.

    Ranks with fewer rows send less, so the lower bound is for all ranks together.
    """
    world_size = len(replies)
    least = 2 * (world_size - 1) * model_bytes()  # bytes of all ranks to gather and to reduce
    if RUNS[name].stage == 3:
        kept = set(replies[0][name]["kept"])
        assert bool(kept) != bool(RUNS[name].reshard_after_forward)
        least += (world_size - 1) * model_bytes(but=NOT_AGAIN | kept)
    sent = [reply[name]["sent"] for reply in replies]
    assert LEAST <= sum(sent) / least <= MOST, sum(sent) / least
    assert max(sent) <= MOST * least / world_size, max(sent) / (least / world_size)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_parameters_add_a_part_of_a_gather_in_each_direction(replies: list[Reply], name: str) -> None:
    """Each time that rows travel to their owners or back, all ranks together send (W - 1) / W of the model."""
    more = [reply[name]["whole"] - reply[name]["foreseen"] for reply in replies]
    part = (len(replies) - 1) / len(replies) * model_bytes()  # bytes of all ranks
    assert 0.97 <= sum(more) / part / WHOLE[name] <= 1.03, [nbytes / part for nbytes in more]


def compare_lines_with_plan(rank: int, world_size: int, name: str, copies: int) -> None:
    """Check that a launch's messages have the plan's bytes, and that sockets add only headers and tags."""
    policy = POLICIES[name]
    timeline, lines = lines_of(fresh(Net), policy, copies, Size(vocabulary=ROWS[-1], tokens=8))
    assert [line.params for line in lines] == [op.params for op in timeline.launches.values()]
    for op, line in zip(timeline.launches.values(), lines, strict=True):
        foreseen, param = timeline.traffic(op).sent, timeline.params_of(op)[0]
        # In an all-reduce the last rank's part may have up to ranks - 1 elements fewer than the plan counts.
        ranks = copies if param.sharded else world_size
        rounding = len(op.params) * (ranks - 1) * (ranks - 2) * param.reduce_dtype.itemsize
        assert abs(line.nbytes - foreseen) <= rounding, (line, foreseen)
        overhead = line.on_sockets - line.nbytes
        # An owner sends nothing, and announces each message that it receives.
        received = (world_size - 1) * sum(param.owner == rank for param in timeline.params_of(op))
        assert line.messages <= overhead <= (line.messages + received) * HEADERS + (world_size - 1) * TAG, line


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what was written to a socket")
@pytest.mark.parametrize(
    ("world_size", "copies", "name"),
    [
        (2, 1, MOST_AT_ONCE),
        *slow(*((2, 1, name) for name in POLICIES if name != MOST_AT_ONCE)),
        *slow((3, 1, "stage 0"), (3, 1, "stage 2, owned"), (3, 1, "stage 2, int8"), (3, 1, "stage 3")),
        *slow(*((4, 2, name) for name in COPIED), (4, 4, "stage 2, int8")),
    ],
)
def test_each_line_sends_what_the_plan_says(ranks_pool: RanksPool, world_size: int, copies: int, name: str) -> None:
    ranks_pool.run(world_size, compare_lines_with_plan, name, copies)
