"""The harness returns results by rank, names an error's rank, ends ranks that hang; a tier runs the tiers before it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness.ranks import (
    CAN_FORK,
    PRELOADED,
    ROOT,
    RankDied,
    RanksPool,
    RanksTimeout,
    call_alone,
    check_server,
    run_ranks,
)
from tests.harness.tiers import is_left_out


@pytest.fixture(scope="module")
def ranks_pool() -> Iterator[RanksPool]:
    """Yield a pool for these tests alone, which often kill it."""
    with RanksPool() as pool:
        yield pool


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Results


Described = tuple[tuple[object, ...], int, int]


def describe(rank: int, world_size: int, text: str) -> Described:
    """Return what each rank should have, its process, and its hash of a text."""
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    imported = "thunder_zero" in sys.modules
    facts = rank, dist.get_world_size(), text, torch.get_num_threads(), imported, total.item(), torch.rand(()).item()
    return facts, os.getpid(), hash(text)


def check_described(results: list[Described]) -> None:
    """Check that ranks share a new group, and that each call has equal random numbers."""
    torch.manual_seed(0)
    world_size = len(results)
    expected = world_size, "hello", 1, True, world_size * (world_size + 1) / 2, torch.rand(()).item()
    assert [facts for facts, *_ in results] == [(rank, *expected) for rank in range(world_size)]
    assert len({os.getpid(), *(pid for _, pid, _ in results)}) == world_size + 1


@pytest.mark.slow
def test_results_come_by_rank_from_fresh_interpreters() -> None:
    results = run_ranks(2, describe, "hello")
    check_described(results)
    assert not any(is_alive(pid) for _, pid, _ in results)
    assert "PYTHONHASHSEED" in os.environ or len({hashed for *_, hashed in results}) == 2


def count_server_threads(rank: int, world_size: int) -> int:
    return len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def count_captured_inputs(rank: int, world_size: int, size: int) -> int:
    """Return how many inputs dynamo captures of a vector: a size that it takes for a symbol is one."""
    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        counts.append(len(inputs))
        return graph.forward

    torch.compile(doubled, backend=backend)(torch.empty(size))
    return sum(counts)


def leave_group(rank: int, world_size: int) -> None:
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()


def check_pool(pool: RanksPool, world_size: int) -> None:
    results = pool.run(world_size, describe, "hello")
    check_described(results)
    assert [pid for _, pid, _ in results] == pool.pids[:world_size]
    if CAN_FORK:
        assert len({hashed for *_, hashed in results}) == 1, "they hash alike"
        assert pool.run(1, count_server_threads) == [1]


def test_the_pool_keeps_its_processes_and_gives_each_call_a_group_and_a_seed(ranks_pool: RanksPool) -> None:
    check_pool(ranks_pool, 2)
    counts = [ranks_pool.run(1, count_captured_inputs, size) for size in (3, 4)]
    assert counts == [[1], [1]], "dynamo remembers no sizes of earlier calls"
    pids = ranks_pool.pids
    assert ranks_pool.run(2, leave_group) == [None, None]
    for world_size in (4, 1, 3):
        check_pool(ranks_pool, world_size)
    assert ranks_pool.pids[: len(pids)] == pids
    with pytest.raises(TypeError, match="define it at a module's top"):
        ranks_pool.run(2, lambda rank, world_size: None)


def count_threads_after(rank: int, world_size: int, rows: int) -> int:
    """Return how many threads this rank has, after a collective of a DTensor of a new shape."""
    mesh = init_device_mesh("cpu", (world_size,))
    distribute_tensor(torch.ones(rows), mesh, [Shard(0)]).full_tensor()
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_a_group_ends_with_its_call(ranks_pool: RanksPool) -> None:
    first, *later = (ranks_pool.run(2, count_threads_after, rows) for rows in (4, 6, 8))
    assert later == [first, first]


# Errors


def find_second_thread(rank: int, world_size: int) -> None:
    """Check a server that has one thread too many."""
    with mock.patch.object(sys.modules[PRELOADED], "THREADS", 2):
        check_server()


def miss_imports(rank: int, world_size: int) -> None:
    with mock.patch.dict(sys.modules):
        del sys.modules[PRELOADED]
        check_server()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("no such parameter")
    dist.barrier()


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def abort_on_one(rank: int, world_size: int) -> None:
    """Abort rank 1 with the words of gloo. An abort in gloo's own thread may hang in torch's signal handler."""
    if rank == 1:
        os.write(2, b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
        os.abort()
    dist.barrier()


class Unpicklable(Exception):
    def __init__(self, event: str, reason: str) -> None:
        super().__init__(f"{event} because {reason}")


def raise_unpicklable(rank: int, world_size: int) -> None:
    raise Unpicklable("it failed", "it was told to")


def return_unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


# A call -> the error's type, its sentence, and a note. Rank 0 adds notes, too, if its barrier breaks.
ERRORS: dict[Callable[[int, int], object], tuple[type[Exception], str, str]] = {
    fail_on_one: (KeyError, "no such parameter", "on rank 1:"),
    die_on_one: (RankDied, "rank 1 ended with exit code 7", "in die_on_one"),
    abort_on_one: (RankDied, "rank 1 was ended by SIGABRT", r"EnforceNotMet(.|\n)*fatalSignal(.|\n)*in abort_on_one"),
    hang_on_one: (RanksTimeout, r"ranks \[1\] had not finished after 2 s", "in hang_on_one"),
    raise_unpicklable: (RuntimeError, "Unpicklable: it failed because it was told to", "in raise_unpicklable"),
    return_unpicklable: (Exception, "return_unpicklable", "on rank 0:"),
}
if CAN_FORK:  # errors about a server that must not fork
    ERRORS[find_second_thread] = (RuntimeError, "the fork server has 2 threads", "in check_server")
    ERRORS[miss_imports] = (RuntimeError, "the fork server failed to import", "in check_server")


@pytest.mark.parametrize("call", ERRORS, ids=lambda call: call.__name__)
def test_an_error_has_its_rank_and_line_and_the_pool_recovers(
    ranks_pool: RanksPool, call: Callable[[int, int], object]
) -> None:
    kind, sentence, note = ERRORS[call]
    check_pool(ranks_pool, 2)
    old = ranks_pool.pids
    with pytest.raises(kind, match=sentence) as caught:
        ranks_pool.run(2, call, timeout=2.0 if call is hang_on_one else 60.0)
    assert re.search(note, "\n".join(caught.value.__notes__))
    assert not any(map(is_alive, old))
    check_pool(ranks_pool, 2)
    assert not set(old) & set(ranks_pool.pids)


# Tiers


def test_each_tier_runs_what_the_one_before_runs() -> None:
    marks = ("", "slow", "deep")
    runs = [[mark for mark in marks if not is_left_out([mark, "timeout"], option)] for option in marks]
    assert runs == [[""], ["", "slow"], ["", "slow", "deep"]]
    assert is_left_out(["slow", "deep"], "slow"), "a test with both marks belongs to the later tier"


def collect(*options: str) -> list[str]:
    """Return the tests that pytest would run."""
    names: list[str] = []

    class Finish:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            names.extend(item.nodeid for item in session.items)

    with contextlib.redirect_stdout(io.StringIO()):
        arguments = [f"{ROOT}/tests", "--collect-only", "-qq", "--capture=no", "-p", "no:cacheprovider", *options]
        assert pytest.main(arguments, plugins=[Finish()]) == pytest.ExitCode.OK
    return names


@pytest.mark.slow
@pytest.mark.skipif(not CAN_FORK, reason="collects in processes that have imported Thunder")
def test_the_slow_tier_has_every_fast_test() -> None:
    fast, every = call_alone(collect), call_alone(collect, "--slow")
    assert fast
    assert set(fast) < set(every)


KEPT: list[DeviceMesh] = []


def keep_a_mesh(rank: int, world_size: int) -> None:
    """Keep a mesh, as dynamo's guards of DTensors do."""
    KEPT.append(init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp")))


def count_loops(rank: int, world_size: int) -> int:
    """Return the number of gloo's threads that wake up all the time."""
    return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_of_a_mesh_that_is_kept_end_with_the_call(ranks_pool: RanksPool) -> None:
    before = ranks_pool.run(2, count_loops)
    ranks_pool.run(2, keep_a_mesh)
    assert ranks_pool.run(2, count_loops) == before
