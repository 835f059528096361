"""Notes which process writes a folder, and proves later that it is dead.

The proof holds on the same machine and in the same container: on Linux a process ID and a start time mean one process
while the kernel runs (its boot ID), in one namespace. Without a proof the process may be alive.
"""

from __future__ import annotations

import json
import os
import socket
from enum import Enum, auto
from pathlib import Path

NAME = "owner.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")
STATE, START = 0, 19  # fields of /proc/<pid>/stat after the command's name
ENDED = ("Z", "X")  # states of a process that is dead, but still listed


class Life(Enum):
    """What is known of the process that writes a folder."""

    ALIVE = auto()
    DEAD = auto()
    UNKNOWN = auto()


def write(folder: Path) -> None:
    """Note this process as the owner of a folder, where the system can tell processes apart.

    Raises:
        OSError: the file cannot be written.
    """
    if (place := _place()) is not None:
        note = {"place": place, "pid": os.getpid(), "start": _stat(os.getpid())[START]}
        (folder / NAME).write_text(json.dumps(note))


def erase(folder: Path) -> None:
    """Take back the note.

    Raises:
        OSError: the file cannot be deleted.
    """
    (folder / NAME).unlink(missing_ok=True)


def life(folder: Path) -> Life:
    """Whether the owner of a folder lives; unknown if nobody is noted, or a process of another machine."""
    try:
        note = json.loads((folder / NAME).read_text())
        place, pid, start = note["place"], int(note["pid"]), str(note["start"])
    except (OSError, ValueError, LookupError, TypeError):
        return Life.UNKNOWN
    if place != _place() or pid < 1:
        return Life.UNKNOWN
    try:
        os.kill(pid, 0)  # sends nothing; /proc may hide the processes of other users
    except ProcessLookupError:
        return Life.DEAD
    except OSError:
        pass
    try:
        stat = _stat(pid)
    except OSError:
        return Life.ALIVE
    return Life.DEAD if stat[START] != start or stat[STATE] in ENDED else Life.ALIVE


def _place() -> str | None:
    """The running kernel and the namespace of this process's ID; None where the system does not tell."""
    try:
        return f"{socket.gethostname()} {BOOT.read_text().strip()} {NAMESPACE.stat().st_ino}"
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` after the command's name, which may have spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
