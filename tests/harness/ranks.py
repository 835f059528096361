"""Runs a function on several ranks: real processes, a real process group, a hard time-out.

A test calls one of two things; both return what ``fn(rank, world_size, *args)`` returned on each rank::

    run_ranks(2, fn, *args)             fresh interpreters, made and ended for this call (some seconds)
    ranks_pool.run(2, fn, *args)        the fixture: processes that stay, a fresh group for each call (some 10 ms)

The pool's processes are forked from a server that has imported Thunder (``tests/harness/preloaded.py``), and so hash
strings alike. Fresh interpreters each hash them in their own way, as the ranks of a user's job do: with ``--slow`` the
pool's are fresh, too.

``fn`` stands at the top of a module, since it reaches the ranks by its name; what goes in and comes out is
pickled (tensors too). The ranks do not rewrite asserts as pytest does: return values and assert on them in the
test, or write the message yourself. Each call starts with ``torch.manual_seed(0)``, one thread a rank, and
``thunder_zero`` imported. Gloo stays on the loopback interface.

When a call fails, its processes are killed by their ids and the pool makes new ones for the next call, so
that no test meets a broken group. A test that expects an error on every rank therefore catches it inside
``fn`` and returns its text.

A rank, seen from its pipe::

    parent -> rank    job    (rank, world_size, backend, store, pickled (fn, args))
    rank -> parent    reply  ("result", value) | ("error", exception, traceback)
    parent -> rank    over   all ranks have replied: leave the group, nobody is reading from it any more
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
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
STACK_SIGNAL = signal.SIGUSR1  # a rank writes down where it stands
STACK_SECONDS = 0.2
GRACE_SECONDS = 2.0  # after the first failure: the others may still say why they failed


LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
ONE_RANK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}  # one thread, and gloo on the loopback interface
ROOT = str(Path(__file__).parents[2])
PRELOADED = "tests.harness.preloaded"
CAN_FORK = Path("/proc/self/task").exists()  # where the server's threads can be counted


def example_environment() -> dict[str, str]:
    """What an example is run in: as a rank here, without a GPU, with this checkout of the package."""
    return {**os.environ, **ONE_RANK, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}


class RanksTimeout(TimeoutError):
    """Some ranks had not finished in time; their processes are gone."""


class RankDied(RuntimeError):
    """The process of a rank ended without a word."""


class RanksPool:
    """Worker processes that stay from call to call, started when a call first needs them.

    Args:
        imports: modules that a worker imports when it starts.
        fresh: each worker is a fresh interpreter, which takes some seconds to import ``thunder_zero``; else it is
            forked from the server that has.

    Attributes:
        pids: process ids of the workers that are there now, by rank.
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
        timeout: float = 60.0,
        backend: str = "gloo",
    ) -> list[Any]:
        """What ``fn(rank, world_size, *args)`` returned on each rank, in the order of the ranks.

        Args:
            timeout: seconds that the call may take, the start of new workers not counted.
            backend: of the process group, as ``init_process_group`` takes it.

        Raises:
            TypeError: ``fn`` is not a module's top-level function.
            RanksTimeout: a rank had not finished in time; the message says which, notes where each of them stood.
            RankDied: a process ended by itself; the message has its rank and exit code.
            Exception: what a rank raised, of its own type; notes hold rank and traceback of all that failed.
        """
        if "<" in fn.__qualname__ or "." in fn.__qualname__:
            raise TypeError(f"fn is {fn.__qualname__}; the ranks import it by its name, so define it at a module's top")
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
            self.kill()
            raise
        return [replies[rank] for rank in range(world_size)]

    def kill(self) -> None:
        """End the workers, by their process ids, and wait until they are gone."""
        for process, conn in self._workers:
            process.kill()
            process.join()
            conn.close()
        self._workers.clear()

    def close(self) -> None:
        """End the workers and remove what was left on disk."""
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
            args = (theirs, self._stack_file(rank), self._imports, self._forks)
            process = context.Process(target=_worker, args=args, name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._gather(set(fresh), START_SECONDS, "started")

    def _gather(self, waiting: set[int], seconds: float, what: str) -> dict[int, Any]:
        """One reply of each rank in ``waiting``, which is emptied; raises what the first failing rank raised,
        or that a rank died: the others' broken connections are what came of it, and may be heard of before."""
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
            error.add_note(f"rank {rank} stood at:\n{self._stack_file(rank).read_text()}")
        return error

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{rank}"

    def _ready(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """The ranks that have replied or died; none when ``seconds`` have passed."""
        of = {thing: rank for rank in ranks for thing in (self._workers[rank][1], self._workers[rank][0].sentinel)}
        return sorted({of[thing] for thing in connection.wait(of, max(seconds, 0.0))})

    def _reply(self, rank: int) -> Any:
        process, conn = self._workers[rank]
        try:
            reply = conn.recv_bytes()
        except (EOFError, ConnectionError):
            process.join()
            died = RankDied(f"the process of rank {rank} ended with exit code {process.exitcode}")
            died.add_note(f"on rank {rank}: {died}")
            raise died from None
        return _value_of(reply, f"on rank {rank}")


def everyone() -> ProcessGroup:
    """The process group of a call, on a rank."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    return group


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """As :meth:`RanksPool.run`, in fresh interpreters that are made for this call and gone after it."""
    with RanksPool(fresh=True) as pool:
        return pool.run(world_size, fn, *args, timeout=timeout, backend=backend)


def call_alone(fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
    """What ``fn(*args)`` returns in a process of its own, without threads or a group, so that it may fork.

    Raises:
        RanksTimeout: it had not finished in time.
        RankDied: the process ended without a word.
        Exception: what ``fn`` raised, with its traceback as a note.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_alone, args=(theirs, fn, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise RanksTimeout(f"{fn.__name__} had not finished after {timeout:g} s; its process was killed")
        return _value_of(ours.recv_bytes(), "in the process of its own")
    except EOFError:
        raise RankDied(f"the process of {fn.__name__} ended without a word") from None
    finally:
        process.kill()
        process.join()


def start_server() -> None:
    """Start the process that workers are forked from, if it is not running; it ends with this one."""
    multiprocessing.forkserver.set_forkserver_preload([PRELOADED])
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, ONE_RANK, PYTHONPATH=path):
        multiprocessing.forkserver.ensure_running()


def check_server() -> None:
    """In a process that was forked from the server.

    Raises:
        RuntimeError: the server failed to import what it should, or has threads.
    """
    preloaded = sys.modules.get(PRELOADED)
    if preloaded is None:
        raise RuntimeError(f"the fork server has not imported {PRELOADED}; import it in a fresh Python to see why")
    if preloaded.THREADS != 1:
        raise RuntimeError(f"the fork server has {preloaded.THREADS} threads; {PRELOADED} may import nothing with one")


def _worker(conn: Connection, stack_file: Path, imports: Sequence[str], is_forked: bool) -> None:
    """Body of a worker process: serves one call after the other until its parent is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stack = stack_file.open("w")
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to pytest, which ends the workers
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
    torch.set_num_threads(1)
    for name in imports:
        importlib.import_module(name)
    gc.set_threshold(100_000, 20, 100)  # compiling makes much and frees little
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
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.freeze()  # what a call leaves, caches mostly, would make each later collection longer


def _alone(conn: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(ONE_RANK)
    check_server()
    conn.send_bytes(_reply_of(fn, *args))


def _value_of(reply: bytes, where: str) -> Any:
    """What a reply says; raises if it is an error."""
    kind, value, *text = pickle.loads(reply)
    if kind == "error":
        value.add_note(f"{where}:\n{text[0]}")
        raise value
    return value


def _reply_of(fn: Callable[..., Any], *args: Any) -> bytes:
    """The pickled reply; whatever goes wrong on the way, pickling included, becomes an error reply."""
    try:
        return pickle.dumps(("result", fn(*args)))
    except BaseException as error:
        return pickle.dumps(("error", _portable(error), traceback.format_exc()))


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling, else a RuntimeError that names its type."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
