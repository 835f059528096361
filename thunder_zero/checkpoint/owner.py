"""Records which process writes a folder, and later decides whether that process is dead.

This works only on the machine and in the container of that process. On Linux, the boot ID, the PID namespace, the
process ID and the start time identify a process. In all other cases it is unknown whether the process is alive.
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
    """Record this process as the owner of a folder, if the system can identify processes."""
    if (place := _place()) is not None:
        record = {"place": place, "pid": os.getpid(), "start": _stat(os.getpid())[START]}
        (folder / NAME).write_text(json.dumps(record))


def is_alive(folder: Path) -> bool | None:
    """Return whether the owner of a folder is alive; None if the owner is unknown or on another machine."""
    if (record := _record(folder)) is None:
        return None
    place, pid, start = record
    if place != _place() or pid < 1:
        return None
    try:
        with suppress(PermissionError):
            os.kill(pid, 0)  # sends no signal; /proc may hide the processes of other users
        stat = _stat(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return stat[START] == start and stat[STATE] not in ENDED


def other(folder: Path) -> str | None:
    """Return the process and machine that own a folder; None if this process does, or the owner is unknown."""
    if (record := _record(folder)) is None:
        return None
    place, pid, start = record
    is_own = (place, pid) == (_place(), os.getpid()) and start == _stat(pid)[START]
    return None if is_own else f"process {pid} on {place.partition(' ')[0]}"


def _record(folder: Path) -> tuple[str, int, str] | None:
    """Return the place, pid and start of the owner of a folder; None if they are unknown."""
    try:
        record = json.loads((folder / NAME).read_text())
        return record["place"], int(record["pid"]), str(record["start"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _place() -> str | None:
    """Return a text that identifies the running kernel and the PID namespace; None if the system lacks one of these."""
    try:
        return f"{socket.gethostname()} {BOOT.read_text().strip()} {NAMESPACE.stat().st_ino}"
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` after the command's name, which may have spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
