"""Runs a function on several ranks: real processes, a real process group, a hard time-out.

Both calls return the results of ``fn(rank, world_size, *args)`` by rank::

    run_ranks(2, fn, *args)             fresh interpreters for this call only (takes seconds)
    ranks_pool.run(2, fn, *args)        the fixture: processes that live on, a fresh group for each call (about 10 ms)

A server that has imported Thunder (``tests/harness/preloaded.py``) forks the pool's processes, so they share a hash
seed. Each fresh interpreter has another hash seed, like the ranks of a user's job.

``fn`` must be at the top level of a module, because ranks import it by name. Arguments and results are pickled (tensors
too). Assert in ``fn``: the pool returns its traceback and rank. Pytest does not rewrite asserts on ranks, so write the
message yourself, or use ``torch.testing.assert_close``. Each call starts with ``torch.manual_seed(0)``, dynamo
without the sizes of earlier calls, one thread per rank, and ``thunder_zero`` imported. Gloo uses the loopback
interface.

When a call fails, the pool kills its processes by their ids, so that the next call starts new ones with an intact
group. A test that expects an error on every rank therefore catches it inside ``fn`` and returns its text.

A rank writes stderr to a file. After each call the parent prints it, so that pytest shows it with the test that failed.
If a rank died, its file has what it printed, and the stacks of C++ and of Python at a fatal signal.

The messages on a rank's pipe::

    parent -> rank    job    (rank, world_size, backend, store, pickled (fn, args))
    rank -> parent    reply  ("result", value) | ("error", exception, traceback)
    parent -> rank    over   all ranks have replied: leave the group, as nobody reads from it any more
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

START_SECONDS = 120.0  # to start Python and import torch and Thunder, on a busy machine
STACK_SIGNAL = signal.SIGUSR1  # on this signal a rank writes its stack to stderr
LONG = 580.0  # the seconds of a call that trains for minutes; pytest ends a test after 600
SECONDS = 240.0  # a call's time: several times what it takes, for machines slower than ours
STACK_SECONDS = 0.2
GRACE_SECONDS = 2.0  # after the first failure, for the errors of the other ranks
LAST_LINES = 40  # shown of stderr, and of each stack, of a rank that died
STACKS = re.compile(
    r"^(?=SIG\w+\(\d+\), PID|Fatal Python error)", re.MULTILINE
)  # written by torch for each thread; by Python


LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
ONE_RANK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}  # one thread, and gloo on the loopback interface
ROOT = str(Path(__file__).parents[2])
PRELOADED = "tests.harness.preloaded"
CAN_FORK = Path("/proc/self/task").exists()  # only here can the server count its threads


def example_environment() -> dict[str, str]:
    """Return environment variables for an example: those of a rank, no GPU, and this checkout on the path."""
    return {**os.environ, **ONE_RANK, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}


class RanksTimeout(TimeoutError):
    """Some ranks did not finish in time. Their processes have been killed."""


class RankDied(RuntimeError):
    """The process of a rank ended without a reply."""


class RanksPool:
    """Worker processes that serve many calls. A call starts the missing ones.

    Args:
        imports: modules that a worker imports when it starts.
        fresh: each worker is a fresh interpreter, which takes seconds to import ``thunder_zero``; otherwise a server
            that has imported it forks the worker.

    Attributes:
        pids: process ids of the existing workers, by rank.
    """

    def __init__(self, imports: Sequence[str] = ("thunder_zero",), *, fresh: bool = False) -> None:
        self._imports = imports
        self._forks = CAN_FORK and not fresh
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers if process.pid is not None]

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = SECONDS,
        backend: str = "gloo",
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on each rank; return the results by rank.

        Args:
            timeout: seconds that the call may take; the start of new workers does not count.
            backend: the process group's, as for ``init_process_group``.

        Raises:
            TypeError: ``fn`` is not a module's top-level function.
            RanksTimeout: ranks did not finish in time. The message names them; notes have their stacks.
            RankDied: a process ended by itself. The message has its rank and exit code or signal; notes have the end of
                its stderr.
            Exception: a rank's error, with its type. Notes have the rank and traceback of each error.
        """
        if "<" in fn.__qualname__ or "." in fn.__qualname__:
            raise TypeError(f"fn is {fn.__qualname__}; ranks import it by name, so define it at a module's top level")
        payload = pickle.dumps((fn, args))
        self._calls += 1
        store = str(Path(self._folder.name) / f"store{self._calls}")
        try:
            self._start(world_size)
            conns = [conn for _, conn in self._workers[:world_size]]
            for rank, conn in enumerate(conns):
                conn.send((rank, world_size, backend, store, payload))
            replies = self._gather(set(range(world_size)), timeout, "finished")
            for conn in conns:
                conn.send("over")
        except BaseException:
            self._print_stderr()
            self.kill()
            raise
        self._print_stderr()
        return [replies[rank] for rank in range(world_size)]

    def kill(self) -> None:
        """Kill the workers by their process ids, and wait until they have ended."""
        for process, conn in self._workers:
            process.kill()
            process.join()
            conn.close()
        self._workers.clear()

    def close(self) -> None:
        """Kill the workers and remove the pool's files."""
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> RanksPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, world_size: int) -> None:
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
        if self._forks:
            start_server()
            context = multiprocessing.get_context("forkserver")
        fresh = range(len(self._workers), world_size)
        for rank in fresh:
            ours, theirs = context.Pipe()
            args = (theirs, self._stderr_file(rank), self._imports, self._forks)
            process = context.Process(target=_worker, args=args, name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._gather(set(fresh), START_SECONDS, "started")

    def _gather(self, waiting: set[int], seconds: float, what: str) -> dict[int, Any]:
        """Receive one reply from each rank in ``waiting``, and remove the rank from it; raise the first error."""
        end = time.monotonic() + seconds
        results: dict[int, Any] = {}
        failures: list[BaseException] = []
        while waiting:
            ready = self._ready(waiting, end - time.monotonic())
            if not ready:
                break
            for rank in ready:
                waiting.discard(rank)
                try:
                    results[rank] = self._reply(rank)
                except BaseException as error:
                    failures.append(error)
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        # A death comes first: it breaks the connections of other ranks, whose errors may arrive earlier.
        failures.sort(key=lambda failure: not isinstance(failure, RankDied))
        if failures:
            for other in failures[1:]:
                for note in other.__notes__:
                    failures[0].add_note(note)
            raise failures[0]
        if waiting:
            raise self._timeout(waiting, f"{what} after {seconds:g} s")
        return results

    def _timeout(self, hanging: set[int], what: str) -> RanksTimeout:
        error = RanksTimeout(f"ranks {sorted(hanging)} had not {what}; all processes of the call were killed")
        for rank in hanging:
            os.kill(self._workers[rank][0].pid or 0, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        for rank in sorted(hanging):
            error.add_note(f"stack of rank {rank}:\n{self._last_words(rank)}")
        return error

    def _stderr_file(self, rank: int) -> Path:
        """Return the file to which a rank writes stderr. It has only what the parent has not printed yet."""
        return Path(self._folder.name) / f"stderr{rank}"

    def _print_stderr(self) -> None:
        for rank in range(len(self._workers)):
            sys.stderr.write(self._stderr_file(rank).read_text(errors="replace"))
            os.truncate(self._stderr_file(rank), 0)

    def _last_words(self, rank: int) -> str:
        """Return the last lines that a rank wrote to stderr.

        After a fatal signal they include the Python stacks, and the C++ stack of the thread that got the signal.
        """
        printed, *stacks = STACKS.split(self._stderr_file(rank).read_text(errors="replace"))
        shown = [stack for stack in stacks if not stack.startswith("SIG") or "fatalSignalHandler" in stack]
        lines = [printed.splitlines()[-LAST_LINES:], *(stack.splitlines()[:LAST_LINES] for stack in shown)]
        return "\n".join(chain.from_iterable(lines))

    def _ready(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """Return the ranks that have replied or died; none if nothing happens for ``seconds``."""
        by_source = {
            source: rank for rank in ranks for source in (self._workers[rank][1], self._workers[rank][0].sentinel)
        }
        return sorted({by_source[source] for source in connection.wait(by_source, max(seconds, 0.0))})

    def _reply(self, rank: int) -> Any:
        process, conn = self._workers[rank]
        try:
            reply = conn.recv_bytes()
        except (EOFError, ConnectionError):
            process.join()
            died = RankDied(f"the process of rank {rank} {ended(process.exitcode)}")
            died.add_note(f"on rank {rank}: {died}; its last words:\n{self._last_words(rank)}")
            raise died from None
        return _value_of(reply, f"on rank {rank}")


def ended(code: int | None) -> str:
    """Describe how a process ended."""
    return f"ended with exit code {code}" if code is None or code >= 0 else f"was ended by {signal.Signals(-code).name}"


def everyone() -> ProcessGroup:
    """Return the default process group of this rank."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    return group


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = SECONDS,
    backend: str = "gloo",
) -> list[Any]:
    """Call :meth:`RanksPool.run` of a pool of fresh interpreters, which end with this call."""
    with RanksPool(fresh=True) as pool:
        return pool.run(world_size, fn, *args, timeout=timeout, backend=backend)


def call_alone(fn: Callable[..., Any], *args: Any, timeout: float = SECONDS) -> Any:
    """Call ``fn(*args)`` in its own process, without threads or a group, so that it may fork; return the result.

    Raises:
        RanksTimeout: ``fn`` did not finish in time.
        RankDied: the process ended without a reply.
        Exception: the error of ``fn``, with its traceback as a note.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_alone, args=(theirs, fn, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise RanksTimeout(f"{fn.__name__} did not finish within {timeout:g} s; its process was killed")
        return _value_of(ours.recv_bytes(), "in its own process")
    except EOFError:
        raise RankDied(f"the process of {fn.__name__} ended without a reply") from None
    finally:
        process.kill()
        process.join()


def start_server() -> None:
    """Start the server that forks workers, unless it is running. It ends with this process."""
    multiprocessing.forkserver.set_forkserver_preload([PRELOADED])
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, ONE_RANK, PYTHONPATH=path):
        multiprocessing.forkserver.ensure_running()


def check_server() -> None:
    """Check the server, from a process that it forked.

    Raises:
        RuntimeError: the server failed to import its modules, or has threads.
    """
    preloaded = sys.modules.get(PRELOADED)
    if preloaded is None:
        raise RuntimeError(f"the fork server failed to import {PRELOADED}; import it in a fresh Python to see why")
    if preloaded.THREADS != 1:
        raise RuntimeError(
            f"the fork server has {preloaded.THREADS} threads; remove the import in {PRELOADED} that starts them"
        )


def _worker(conn: Connection, stderr: Path, imports: Sequence[str], is_forked: bool) -> None:
    """Serve calls in a worker process until its parent ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), 2)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to pytest, which kills the workers
    os.environ.update(ONE_RANK, TORCHINDUCTOR_COMPILE_THREADS="1")
    conn.send_bytes(_reply_of(_warm_up, imports, is_forked))
    while True:
        try:
            job = conn.recv()
        except EOFError:
            os._exit(0)
        conn.send_bytes(_reply_of(_serve, job))
        if conn.recv() == "over":
            _leave_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _warm_up(imports: Sequence[str], is_forked: bool) -> None:
    import torch

    if is_forked:
        check_server()
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # C++ stacks, too
    torch.set_num_threads(1)
    for name in imports:
        importlib.import_module(name)
    gc.set_threshold(100_000, 20, 100)  # compiling allocates much and frees little
    gc.freeze()  # so that the collection after each call is short


def _serve(job: tuple[int, int, str, str, bytes]) -> Any:
    import torch
    import torch.distributed as dist

    rank, world_size, backend, store, payload = job
    fn, args = pickle.loads(payload)
    torch.manual_seed(0)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    return fn(rank, world_size, *args)


def _leave_group() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # A group that stays has three threads, which wake up all the time. DTensor's caches and dynamo's guards hold
    # meshes, and a mesh holds its groups. Dynamo also remembers sizes, and counts programs of equal code.
    torch._dynamo.reset()
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    for mesh in [item for item in gc.get_objects() if type(item) is DeviceMesh]:
        vars(mesh).pop("_pg_registry", None)
    gc.freeze()  # so that what a call leaves, mostly caches, makes no later collection longer


def _alone(conn: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(ONE_RANK)
    check_server()
    conn.send_bytes(_reply_of(fn, *args))


def _value_of(reply: bytes, where: str) -> Any:
    """Return the value of a reply, or raise its error."""
    kind, value, *text = pickle.loads(reply)
    if kind == "error":
        value.add_note(f"{where}:\n{text[0]}")
        raise value
    return value


def _reply_of(fn: Callable[..., Any], *args: Any) -> bytes:
    """Call ``fn`` and return the pickled reply. An error in ``fn`` or in pickling becomes an error reply."""
    try:
        return pickle.dumps(("result", fn(*args)))
    except BaseException as error:
        return pickle.dumps(("error", _portable(error), traceback.format_exc()))


def _portable(error: BaseException) -> BaseException:
    """Return the error if it can be pickled, else a RuntimeError that names its type."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
