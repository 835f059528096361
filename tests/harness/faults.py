"""``./dev faults [NAME ...]``: plants the faults of ``tests/faults.toml``, each alone, and says which no test catches.

Each is planted in a copy of the checkout, where the tests named for it run. A row is an error if its text is not in its
file exactly once, as after a change of the code, or if its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/faults.toml"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "runs")
AT_ONCE = 2
SECONDS = 900  # that the tests of a fault may take
PASSED, FAILED = 0, 1  # exit codes of pytest; all others mean that it could not run the tests
TIMED_OUT = -1
LINES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table.

    Attributes:
        name: of the fault, as in the command.
        promise: what it breaks.
        file: that has the fault, relative to the checkout.
        text: of the file, which occurs in it once.
        faulty: what replaces it.
        tests: ids of tests, at least one of which must fail.
    """

    name: str
    promise: str
    file: str
    text: str
    faulty: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Put the fault into the file of a checkout."""
        path = root / self.file
        path.write_text(path.read_text().replace(self.text, self.faulty))


def read_faults(table: Path = TABLE) -> list[Fault]:
    """The rows of the table.

    Raises:
        ValueError: rows lack a field, have another, or share a name.
    """
    rows: list[dict[str, Any]] = tomllib.loads(table.read_text())["fault"]
    names = [field.name for field in fields(Fault)]
    for row in rows:
        if sorted(row) != sorted(names):
            raise ValueError(f"fault {row.get('name')!r} has {', '.join(row)}; give {', '.join(names)}")
    faults = [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    if twice := sorted({fault.name for fault in faults if [other.name for other in faults].count(fault.name) > 1}):
        raise ValueError(f"two faults are named {twice[0]!r}")
    return faults


def outdated(faults: Iterable[Fault], root: Path = ROOT) -> list[str]:
    """A sentence for each row that does not fit the files of a checkout."""
    found = []
    for fault in faults:
        path = root / fault.file
        times = path.read_text().count(fault.text) if path.is_file() else 0
        if times != 1:
            found.append(f"{fault.name}: its text occurs {times} times in {fault.file}; write the row anew")
        if fault.text == fault.faulty or not fault.tests:
            found.append(f"{fault.name}: it changes nothing, or names no test")
        found += [f"{fault.name}: there is no {test}" for test in fault.tests if not _has_test(root, test)]
    return found


def _has_test(root: Path, test: str) -> bool:
    file, _, id_ = test.partition("::")
    name, path = id_.partition("[")[0], root / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text())


def run_tests(tests: Iterable[str], fault: Fault | None = None) -> tuple[int, str]:
    """Run tests in a copy of the checkout that has a fault; pytest's exit code, and the end of what it wrote."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        if fault is not None:
            fault.plant(copy)
        command = [sys.executable, "-m", "pytest", "--slow", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=env, text=True, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"the tests still run after {SECONDS} seconds"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-LINES_SHOWN:])


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """The faults of these names, or all.

    Raises:
        ValueError: there is none of a name.
    """
    if unknown := sorted({*names} - {fault.name for fault in faults}):
        raise ValueError(f"there is no fault {unknown[0]!r}; there are {', '.join(fault.name for fault in faults)}")
    return [fault for fault in faults if not names or fault.name in names]


def main(*names: str) -> int:
    """Plant the faults; returns 0 if the tests catch all of them, 1 if not, 2 if a row is wrong."""
    try:
        faults = chosen(read_faults(), names)
    except ValueError as error:
        sys.exit(f"tests/faults.toml: {error}")
    if wrong := outdated(faults):
        print(*wrong, sep="\n")
        return 2
    code, text = run_tests(dict.fromkeys(test for fault in faults for test in fault.tests))
    if code != PASSED:
        print(text, "these tests do not pass without a fault", sep="\n")
        return 2
    verdicts = {PASSED: "NOT CAUGHT", FAILED: "caught"}
    codes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for fault, (code, text) in zip(faults, pool.map(lambda one: run_tests(one.tests, one), faults), strict=True):
            codes.append(code)
            print(f"{verdicts.get(code, 'ERROR'):10}  {fault.name}: {fault.promise}", flush=True)
            if code not in verdicts:
                print(text)
    print(f"{codes.count(FAILED)} of {len(faults)} faults are caught")
    return 0 if codes.count(FAILED) == len(faults) else 2 if set(codes) - verdicts.keys() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
