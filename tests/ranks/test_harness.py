"""The harness itself: results by rank, errors with their rank, time-outs that leave nothing behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import CAN_FORK, PRELOADED, RankDied, RanksPool, RanksTimeout, check_server, run_ranks


@pytest.fixture(scope="module")
def ranks_pool() -> Iterator[RanksPool]:
    """A pool for these tests alone, which often kill it."""
    with RanksPool() as pool:
        yield pool


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


Described = tuple[int, int, str, int, bool, int, int]


def describe(rank: int, world_size: int, text: str) -> Described:
    imported = "thunder_zero" in sys.modules
    return rank, dist.get_world_size(), text, torch.get_num_threads(), imported, os.getpid(), hash(text)


def total(rank: int, world_size: int) -> torch.Tensor:
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return tensor


def random_and_pid(rank: int, world_size: int) -> tuple[float, int]:
    return torch.rand(()).item(), os.getpid()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("no such parameter")
    dist.barrier()


def hang_on_one(rank: int, world_size: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(600)


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


class Unpicklable(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


def raise_unpicklable(rank: int, world_size: int) -> None:
    raise Unpicklable("it failed", "it was told to")


def return_unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def leave_group(rank: int, world_size: int) -> None:
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()


@pytest.mark.slow
def test_results_come_by_rank_from_fresh_interpreters() -> None:
    results = run_ranks(2, describe, "hello")
    check_described(results)
    assert not any(is_alive(result[5]) for result in results)
    assert "PYTHONHASHSEED" in os.environ or len({result[6] for result in results}) == 2


def check_described(results: list[Described]) -> None:
    world_size = len(results)
    assert [result[:5] for result in results] == [(rank, world_size, "hello", 1, True) for rank in range(world_size)]
    assert len({os.getpid(), *(result[5] for result in results)}) == world_size + 1


@pytest.mark.skipif(not CAN_FORK, reason="counts the server's threads in /proc")
def test_the_pool_forks_from_a_server_without_threads(ranks_pool: RanksPool) -> None:
    results = ranks_pool.run(3, describe, "hello")
    check_described(results)
    assert len({result[6] for result in results}) == 1, "they hash alike"
    assert ranks_pool.run(1, threads_of_the_server) == [1]


def threads_of_the_server(rank: int, world_size: int) -> int:
    check_server()
    return len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def check_twice_as_many(rank: int, world_size: int) -> None:
    """A server that has a thread more, or that could not import what it should."""
    with mock.patch.object(sys.modules[PRELOADED], "THREADS", 2):
        check_server()


def check_without(rank: int, world_size: int) -> None:
    with mock.patch.dict(sys.modules):
        del sys.modules[PRELOADED]
        check_server()


@pytest.mark.skipif(not CAN_FORK, reason="counts the server's threads in /proc")
@pytest.mark.parametrize(
    ("check", "sentence"),
    [(check_twice_as_many, "the fork server has 2 threads"), (check_without, "the fork server failed to import")],
)
def test_a_server_that_must_not_fork_is_an_error(
    ranks_pool: RanksPool, check: Callable[[int, int], None], sentence: str
) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        ranks_pool.run(1, check)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_a_group(ranks_pool: RanksPool, world_size: int) -> None:
    sums = ranks_pool.run(world_size, total)
    assert torch.equal(torch.cat(sums), torch.full((world_size,), world_size * (world_size + 1) / 2))


def test_the_pool_keeps_its_processes_and_seeds_each_call(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, random_and_pid), ranks_pool.run(2, random_and_pid)
    assert first == second
    assert [pid for _, pid in first] == ranks_pool.pids[:2]
    torch.manual_seed(0)
    assert first[0][0] == torch.rand(()).item()


def test_an_exception_names_rank_and_line_and_the_pool_recovers(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, total)
    old = ranks_pool.pids
    with pytest.raises(KeyError, match="no such parameter") as caught:
        ranks_pool.run(2, fail_on_one)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1:" in notes
    assert "in fail_on_one" in notes
    assert not any(map(is_alive, old))
    assert torch.equal(ranks_pool.run(2, total)[0], torch.tensor([3.0]))
    assert not set(old) & set(ranks_pool.pids)


def test_a_time_out_kills_and_names_the_hanging_ranks(ranks_pool: RanksPool, tmp_path: Path) -> None:
    with pytest.raises(RanksTimeout, match=r"ranks \[1\] had not finished after 2 s") as caught:
        ranks_pool.run(2, hang_on_one, str(tmp_path), timeout=2.0)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert not any(map(is_alive, pids))
    assert "in hang_on_one" in "\n".join(caught.value.__notes__)
    assert torch.equal(ranks_pool.run(2, total)[1], torch.tensor([3.0]))


def test_a_dead_process_is_reported_with_its_exit_code(ranks_pool: RanksPool) -> None:
    with pytest.raises(RankDied, match="rank 1 ended with exit code 7") as caught:
        ranks_pool.run(2, die_on_one)
    assert "in die_on_one" in "\n".join(caught.value.__notes__)  # rank 0, whose barrier broke


def test_what_cannot_be_pickled_becomes_an_error(ranks_pool: RanksPool) -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: it failed because it was told to"):
        ranks_pool.run(1, raise_unpicklable)
    with pytest.raises(Exception, match="return_unpicklable"):
        ranks_pool.run(1, return_unpicklable)


def test_a_function_may_leave_the_group_itself(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, leave_group) == [None, None]
    assert torch.equal(ranks_pool.run(2, total)[0], torch.tensor([3.0]))


def test_a_function_without_a_name_is_refused(ranks_pool: RanksPool) -> None:
    with pytest.raises(TypeError, match="define it at a module's top"):
        ranks_pool.run(2, lambda rank, world_size: None)
