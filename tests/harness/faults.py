"""``./dev faults [NAME ...]``: plants each fault of ``tests/faults.toml``, and prints which faults no test catches.

It plants a fault in a copy of the checkout and runs the fault's tests there. A row is wrong if its text does not occur
exactly once in its file, or if its tests fail without the fault.
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
SECONDS = 900  # limit for the tests of a fault
PASSED, FAILED = 0, 1  # exit codes of pytest; with any other it could not run the tests
TIMED_OUT = -1
LINES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table.

    Attributes:
        name: name of the fault, as in the command.
        promise: the promise that the fault breaks.
        file: the file to change, relative to the checkout.
        text: the text to replace, which occurs once in the file.
        faulty: the replacement.
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
    """Read the rows of the table.

    Raises:
        ValueError: a row lacks a field or has an unknown one, or two rows share a name.
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
    """Return a sentence for each row that does not fit the files of a checkout."""
    sentences = []
    for fault in faults:
        path = root / fault.file
        count = path.read_text().count(fault.text) if path.is_file() else 0
        if count != 1:
            sentences.append(f"{fault.name}: its text occurs {count} times in {fault.file}; write the row anew")
        if fault.text == fault.faulty or not fault.tests:
            sentences.append(f"{fault.name}: it changes nothing, or names no test")
        sentences += [f"{fault.name}: there is no {test}" for test in fault.tests if not _has_test(root, test)]
    return sentences


def _has_test(root: Path, test: str) -> bool:
    file, _, id_ = test.partition("::")
    name, path = id_.partition("[")[0], root / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text())


def run_tests(tests: Iterable[str], fault: Fault | None = None) -> tuple[int, str]:
    """Run tests in a faulty copy of the checkout. Return pytest's exit code and its last lines."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        if fault is not None:
            fault.plant(copy)
        command = [sys.executable, "-m", "pytest", "--slow", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            limit = SECONDS if fault else None  # only a fault makes tests hang
            run = subprocess.run(command, cwd=copy, env=env, text=True, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"the tests still run after {SECONDS} seconds"
    return run.returncode, "\n".join((run.stdout + run.stderr).splitlines()[-LINES_SHOWN:])


def select(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults with these names, or all faults if there are no names.

    Raises:
        ValueError: no fault has one of the names.
    """
    if unknown := sorted({*names} - {fault.name for fault in faults}):
        raise ValueError(f"there is no fault {unknown[0]!r}; there are {', '.join(fault.name for fault in faults)}")
    return [fault for fault in faults if not names or fault.name in names]


def main(*names: str) -> int:
    """Plant the faults. Return 0 if tests catch all of them, 1 if not, 2 if a row is wrong."""
    try:
        faults = select(read_faults(), names)
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
        for fault, (code, text) in zip(
            faults, pool.map(lambda fault: run_tests(fault.tests, fault), faults), strict=True
        ):
            codes.append(code)
            print(f"{verdicts.get(code, 'ERROR'):10}  {fault.name}: {fault.promise}", flush=True)
            if code not in verdicts:
                print(text)
    print(f"{codes.count(FAILED)} of {len(faults)} faults are caught")
    return 0 if codes.count(FAILED) == len(faults) else 2 if set(codes) - verdicts.keys() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
