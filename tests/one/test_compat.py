"""Untested versions of torch and Thunder raise a warning, and a failed import of Thunder an error."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.harness.errors import refused
from thunder_zero.compat import imports

VERSIONS = {  # tested and untested versions
    "torch": (("2.13", "2.13.0+cpu", "2.15.1"), ("2.12.1", "2.16.0", "3.0")),
    "lightning-thunder": (("0.2.6", "0.2.6.post1"), ("0.2.5", "0.3.0")),
}


@pytest.mark.parametrize("package", VERSIONS)
def test_untested_versions_are_named(package: str) -> None:
    tested, untested = VERSIONS[package]
    assert [imports.untested(package, version) for version in tested] == [None] * len(tested)
    for version in untested:
        sentence = imports.untested(package, version) or ""
        for word in (package, version, *imports.TESTED[package], "install a tested version"):
            assert word in sentence, (version, sentence)


def test_an_untested_version_is_a_warning(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    imports.let_thunder_import(lambda: None)
    assert not [warning for warning in recwarn if "thunder_zero" in str(warning.message)], "these versions were tested"
    monkeypatch.setattr(imports, "version", {"torch": "9.9", "lightning-thunder": "0.2.6"}.__getitem__)
    with pytest.warns(UserWarning, match="9.9") as caught:
        imports.let_thunder_import(lambda: None)
    assert [str(warning.message) for warning in caught] == [imports.untested("torch", "9.9")]


def test_a_half_imported_thunder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not imports.half_imported({"thunder": None, "thunder.core": None})
    assert not imports.half_imported({"thunder_zero": None, "thunderstorm.core": None})
    monkeypatch.setattr(imports, "sys", SimpleNamespace(modules={"thunder.core": None}))
    with refused(
        ImportError, "an earlier `import thunder` failed", "restart Python and", "`import thunder_zero` before"
    ):
        imports.let_thunder_import(lambda: None)


THUNDER_FIRST = r"""
for name in ("thunder", "thunder_zero", "thunder_zero"):
    try:
        __import__(name)
    except Exception as error:
        print(type(error).__name__, str(error).partition("\n")[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    all(hasattr(torch.Tensor, name) for name in imports.DROPPED_METHODS), reason="this torch lets Thunder import"
)
def test_each_import_after_a_failed_import_of_thunder_is_refused() -> None:
    command = [sys.executable, "-W", "ignore", "-c", THUNDER_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, *rest = done.stdout.strip().splitlines()
    assert first.startswith(("AttributeError", "RuntimeError")), first
    assert len(rest) == 2, rest
    for line in rest:
        assert line.startswith("ImportError an earlier `import thunder` failed"), rest
