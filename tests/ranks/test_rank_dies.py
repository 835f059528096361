"""If a rank dies or hangs in a collective or a save, the other ranks end in time and name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from tests.harness.death_worker import CASES, TIMEOUT_SECONDS
from tests.harness.ranks import RanksPool, everyone
from thunder_zero.comm.lost_ranks import LostRank, naming_lost_ranks

ROOT = Path(__file__).parents[2]
TIMED_OUT = f"Timed out waiting {TIMEOUT_SECONDS * 1000:.0f}ms"


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the selected cases at the same time in one worker; return the folder of the survivors' errors.

    The worker fails if a process of a case does not end.
    """
    folder = tmp_path_factory.mktemp("deaths")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    names = [str(test.callspec.params["name"]) for test in tests if "folder" in test.fixturenames]
    command = [sys.executable, "-m", "tests.harness.death_worker", str(folder), *names]
    worker = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert worker.returncode == 0, worker.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_survivors_end_and_name_the_lost_rank_or_the_timeout(folder: Path, name: str) -> None:
    errors = {rank: (folder / name / f"said{rank}").read_text() for rank in (0, 2)}
    for rank, error in errors.items():
        assert_names(rank, error, name)
    expected = TIMED_OUT if name.startswith("hangs") else "from rank 1 in "
    assert any(expected in error for error in errors.values()), errors


def assert_names(rank: int, error: str, name: str) -> None:
    """Check that the error names the lost rank and, except in a save's thread, where this rank was.

    A rank that notices late may name another survivor, which has ended because of the death.
    """
    other = 2 - rank
    lost = error.removeprefix(f"rank {rank} got no answer from ").partition(": it died")[0]
    lost_name, _, place = lost.partition(" in ")
    assert place or name == "hangs in an asynchronous save", error
    assert " (Mlp)" in place or not place, error
    assert lost_name in ("rank 1", f"rank {other}", f"one of ranks {sorted((1, other))}"), error


# Errors of backends, measured or reported by users. Those in LOST are caused by a lost rank.
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


def classify_errors(rank: int, world_size: int) -> None:
    for error in LOST:
        with pytest.raises(LostRank) as lost, naming_lost_ranks(everyone()):
            raise error
        message = str(lost.value)
        assert message.startswith(f"rank {rank} got no answer from rank {1 - rank}: it died"), message
        assert str(error) in message
    for error in OTHERS:
        with pytest.raises(type(error)) as other, naming_lost_ranks(everyone()):
            raise error
        assert other.value is error


def test_only_errors_caused_by_a_lost_rank_become_lost_rank(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, classify_errors)
