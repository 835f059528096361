"""A rank dies or hangs in the middle of a collective or a save: the others end in time, and name it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from tests.harness.death_worker import CASES, TIMEOUT_SECONDS
from tests.harness.errors import raised_as
from tests.harness.ranks import RanksPool, everyone
from thunder_zero.comm.lost_ranks import LostRank, naming_lost_ranks

ROOT = Path(__file__).parents[2]
TIMED_OUT = f"Timed out waiting {TIMEOUT_SECONDS * 1000:.0f}ms"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What the ranks that live said in each case. The worker fails if one of them has not ended, process and all,
    within the group's time-out and ten seconds after the death."""
    command = [sys.executable, "-m", "tests.harness.death_worker", str(tmp_path_factory.mktemp("deaths"))]
    worker = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert worker.returncode == 0, worker.stderr
    errors: dict[str, dict[str, str]] = json.loads(worker.stdout.splitlines()[-1])
    return errors


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", CASES)
def test_the_others_end_and_name_the_rank_or_the_timeout(name: str, said: dict[str, dict[str, str]]) -> None:
    """A rank that notices later may have lost another one as well, which ended because of it. The error says where the
    rank was, but not in a save's thread."""
    assert set(said[name]) == {"0", "2"}
    for rank, sentence in said[name].items():
        other = 2 - int(rank)
        silent = sentence.removeprefix(f"rank {rank} got no answer from ").partition(": it died")[0]
        who, _, place = silent.partition(" in ")
        assert place or name == "hangs in an asynchronous save", sentence
        assert " (Mlp)" in place or not place, sentence
        later = f"one of ranks {sorted((1, other))}", *([f"rank {other}"] if name.startswith("hangs") else [])
        assert who == "rank 1" or who in later, sentence
    first = TIMED_OUT if name.startswith("hangs") else "from rank 1 in "
    assert any(first in sentence for sentence in said[name].values()), said[name]


# What backends say, or said in a run that somebody reported. The first ones are due to a lost rank.
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, "
LOST = (
    DistNetworkError("failed to recv, got 0 bytes"),
    DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cuda//0"),
    DistBackendError(
        NCCL + "remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A"
    ),
    DistBackendError(
        NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details)\nncclSystemError: System call"
    ),
    DistBackendError("NCCL communicator was aborted on rank 0."),
    RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"),
    RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:63674"),
    RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:40865: Connection reset by peer"),
    RuntimeError("[gloo/transport/tcp/pair.cc:534] Read timeout [127.0.0.1]:40865"),
    RuntimeError("writev [127.0.0.1]:40865: Broken pipe"),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"),
)
OTHERS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
    DistBackendError(NCCL + "unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed."),
    DistBackendError(NCCL + "invalid usage\nncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
    torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("op.preamble.length <= op.nbytes. 60 vs 56. Received data size doesn't match expected size."),
    RuntimeError("Invalid scalar type"),
)


def said_of(rank: int, world_size: int, number: int) -> list[tuple[str, str]]:
    def fail(error: RuntimeError) -> None:
        with naming_lost_ranks(everyone()):
            raise error

    return [raised_as(lambda error=error: fail(error)) for error in (LOST, OTHERS)[number]]  # type: ignore[misc]


def test_only_words_of_a_lost_rank_read_as_one(ranks_pool: RanksPool) -> None:
    lost, others = (ranks_pool.run(2, said_of, number)[0] for number in range(2))
    for (kind, said), error in zip(lost, LOST, strict=True):
        assert kind == LostRank.__name__, error
        assert said.startswith("rank 0 got no answer from rank 1: it died"), said
        assert str(error) in said
    assert others == [(type(error).__name__, str(error)) for error in OTHERS]
