"""Reports CPU-seconds by test file at the end of a run: of the testing process and its descendants.

A busy machine changes CPU-seconds less than wall-clock time. No test fails on them. On systems other than Linux the
seconds of children count only after the children have ended.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROC = Path("/proc")
WORKER_KEY = "cpu_seconds"


def tree_seconds(root: int) -> float:
    """Return user and system seconds of a process and its descendants, including ended ones that were waited for."""
    if not (PROC / "self/stat").exists():
        return sum(os.times()[:4])
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # after the name, which may have spaces
        except OSError:  # it has ended meanwhile
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def descends(pid: int) -> bool:
        while pid not in (root, 0):
            pid = parents.get(pid, 0)
        return pid == root

    return sum(seconds[pid] for pid in seconds if descends(pid))


class CpuSeconds:
    """A pytest plugin. Under xdist each worker counts its process tree, and the controller adds up the workers."""

    def __init__(self) -> None:
        self.by_file: defaultdict[str, float] = defaultdict(float)
        self._seen = 0.0

    def note(self, name: str) -> None:
        """Add the seconds since the last call to ``name``."""
        now = tree_seconds(os.getpid())
        self.by_file[name] += max(now - self._seen, 0.0)
        self._seen = now

    def pytest_collection_finish(self) -> None:
        self.note("(imports, collection)")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self.note(str(item.path.relative_to(item.config.rootpath)))
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[WORKER_KEY] = dict(self.by_file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, seconds in getattr(node, "workeroutput", {}).get(WORKER_KEY, {}).items():
            self.by_file[name] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.by_file.values())
        if len(self.by_file) <= 2:  # imports, and one file
            return
        terminalreporter.section(f"{total:.0f} CPU-seconds: of rooms, and of files that take a hundredth or more")
        by_room: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self.by_file.items():
            by_room[name.rpartition("/")[0] or name] += seconds
        files = {name: seconds for name, seconds in self.by_file.items() if seconds >= total / 100}
        for table in (by_room, files):
            for name, seconds in sorted(table.items(), key=lambda pair: -pair[1]):
                terminalreporter.write_line(f"{seconds:8.1f}  {name}")
