"""The table of planted faults fits the code, and a row that no longer fits is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.faults import Fault, outdated, read_faults, select

ROW = Fault("doubled", "one is one", "code.py", "ONE = 1", "ONE = 2", ("test_code.py::test_one",))


def test_the_table_fits_the_code() -> None:
    assert outdated(read_faults()) == []


def test_a_row_that_no_longer_fits_is_reported(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("ONE = 1\nTWO = 2\nTWO = 2\n")
    (tmp_path / "test_code.py").write_text("def test_one():\n    pass\n")
    assert outdated([ROW], tmp_path) == []
    for row, words in (
        (replace(ROW, text="THREE"), "occurs 0 times"),
        (replace(ROW, text="TWO = 2"), "occurs 2 times"),
        (replace(ROW, file="gone.py"), "occurs 0 times in gone.py"),
        (replace(ROW, faulty=ROW.text), "changes nothing"),
        (replace(ROW, tests=()), "names no test"),
        (replace(ROW, tests=("test_code.py::test_two",)), "there is no test_code.py::test_two"),
    ):
        (text,) = outdated([row], tmp_path)
        assert words in text, text
    ROW.plant(tmp_path)
    assert (tmp_path / "code.py").read_text().startswith("ONE = 2")


def test_a_wrong_table_or_name_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "faults.toml"
    table.write_text('[[fault]]\nname = "a"\n')
    with pytest.raises(ValueError, match=r"'a' has name; give name, promise"):
        read_faults(table)
    with pytest.raises(ValueError, match=r"no fault 'tripled'; there are doubled"):
        select([ROW], ["tripled"])
