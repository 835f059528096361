"""Runs examples: their ``main`` on the ranks of the pool, or the whole program under torchrun, as a user does."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.harness.ranks import RanksPool, example_environment

ROOT = Path(__file__).parents[2]
SECONDS = 500


def run_main(pool: RanksPool, name: str, *options: object, ranks: int = 2) -> str:
    """Call ``main(options)`` of ``examples/{name}.py`` on each rank, as torchrun does. Return what rank 0 prints."""
    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False
    )  # under torchrun its agent serves the store
    return pool.run(ranks, _call_main, store.port, name, list(map(str, options)), timeout=SECONDS)[0]


def _call_main(rank: int, world_size: int, port: int, name: str, options: list[str]) -> str:
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    variables = {name: str(value) for name, value in (sizes | store | {"TORCHELASTIC_RUN_ID": "tests"}).items()}
    leave_group()
    with mock.patch.dict(os.environ, variables, CUDA_VISIBLE_DEVICES=""):
        return printed_by(example_module(name).main, options)


def leave_group() -> None:
    """Destroy the group of the pool, so that the example can make another one."""
    dist.barrier()  # other ranks may still be connecting
    dist.destroy_process_group()


def example_module(name: str) -> Any:
    """Import an example. The examples import each other by their bare names."""
    with _examples_on_path():
        return importlib.import_module(name)


def printed_by(main: Callable[..., object], *args: object) -> str:
    """Call an example's function in this process. Return what it prints."""
    printed = io.StringIO()
    with _examples_on_path(), redirect_stdout(printed):
        main(*args)
    return printed.getvalue()


@contextmanager
def _examples_on_path() -> Iterator[None]:
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        yield


def torchrun(*options: object) -> tuple[str, ...]:
    """Return the torchrun command that starts ranks; by default two ranks on this machine."""
    options = options or ("--standalone", "--nproc-per-node", 2)
    return (sys.executable, "-m", "torch.distributed.run", *map(str, options))


RESTARTING = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")  # in front of torchrun


def start(*command: object) -> subprocess.Popen[str]:
    """Start a command in the repository. Its stderr goes to its stdout."""
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=example_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that its whole process group can be ended
    )


def kill_a_rank(run: subprocess.Popen[str], reached: Callable[[], object]) -> None:
    """Kill the last rank that a torchrun started, once ``reached()`` is true. Needs ``/proc``."""
    until = time.monotonic() + SECONDS / 2
    while not reached() and run.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    *_, last = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(last), signal.SIGKILL)


def output_of(run: subprocess.Popen[str]) -> str:
    """Wait for a command and return its output. End it if it takes too long.

    Raises:
        AssertionError: the command failed or was ended; the message is its output.
    """
    try:
        output, _ = run.communicate(timeout=SECONDS)
    except BaseException as failure:
        os.killpg(run.pid, signal.SIGTERM)  # torchrun then ends its ranks
        output, _ = run.communicate()
        if not isinstance(failure, subprocess.TimeoutExpired):
            raise
    assert run.returncode == 0, output
    return output


def table_of(printed: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of all printed tables: first cell -> other cells."""
    rows = re.findall(r"^│ (.+?) │$", printed, re.MULTILINE)
    return {name.strip(): tuple(cell.strip() for cell in cells) for name, *cells in (row.split("│") for row in rows)}


def program_of(page: str, section: str) -> str:
    """Return the first Python block of a section of a page."""
    block = re.search(r"```python\n(.*?)```", page.partition(f"\n## {section}\n")[2], flags=re.DOTALL)
    assert block is not None, f"the section {section!r} has no program"
    return block[1]
