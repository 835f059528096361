"""Notes which process writes a folder, and proves later that this process is dead.

The proof works on one machine and in one container. On Linux a process ID and a start time identify a process in a
namespace while the kernel runs (its boot ID). Without a proof the process may be alive.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

NAME = "owner.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")
STATE, START = 0, 19  # fields of /proc/<pid>/stat after the command's name
ENDED = ("Z", "X")  # states of a process that is dead, but still has an entry in /proc


def write(folder: Path) -> None:
    """Note this process as the owner of a folder; a no-op where the system cannot identify processes."""
    if (place := _place()) is not None:
        note = {"place": place, "pid": os.getpid(), "start": _stat(os.getpid())[START]}
        (folder / NAME).write_text(json.dumps(note))


def is_alive(folder: Path) -> bool | None:
    """Return whether the owner of a folder is alive; None if there is no note, or it is of another machine."""
    try:
        note = json.loads((folder / NAME).read_text())
        place, pid, start = note["place"], int(note["pid"]), str(note["start"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if place != _place() or pid < 1:
        return None
    try:
        with suppress(PermissionError):
            os.kill(pid, 0)  # sends nothing; /proc may hide the processes of other users
        stat = _stat(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return stat[START] == start and stat[STATE] not in ENDED


def _place() -> str | None:
    """Return the running kernel and the namespace of this process's ID; None where the system does not tell."""
    try:
        return f"{socket.gethostname()} {BOOT.read_text().strip()} {NAMESPACE.stat().st_ino}"
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` after the command's name, which may have spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
