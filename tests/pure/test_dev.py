"""``./dev``: where torch comes from, what is installed when, what bad input gets. Nothing is installed here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DEV = Path(__file__).parents[2] / "dev"


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, in an empty repository with a .venv, on a machine without a GPU."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # it would lie beside the script
    loader = importlib.machinery.SourceFileLoader("dev", str(DEV))
    spec = importlib.util.spec_from_loader("dev", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("one")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    for name, value in {"ROOT": tmp_path, "VENV": tmp_path / ".venv", "PYTHON": tmp_path / ".venv/bin/python"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


def record_pip(dev: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: int = 0) -> list[tuple[str, ...]]:
    """What pip is asked for; the first ``fails`` times it fails."""
    asked: list[tuple[str, ...]] = []

    def pip_install(*what: str) -> int:
        asked.append(what)
        return int(len(asked) <= fails)

    monkeypatch.setattr(dev, "pip_install", pip_install)
    return asked


PROBE = ("torch==2.13.0+cpu",)
INDEX = ("--retries=1", "--timeout=20", "--index-url=https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu")
PACKAGE = ("--editable", ".[test,plot]")


@pytest.mark.parametrize(
    ("fails", "asked"), [(0, [PROBE, PACKAGE]), (1, [PROBE, INDEX, PACKAGE]), (2, [PROBE, INDEX, PACKAGE])]
)
def test_the_cpu_build_is_sought_in_turn(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: int, asked: list[tuple[str, ...]]
) -> None:
    record = record_pip(dev, monkeypatch, fails)
    dev.install("test,plot")
    assert record == asked


def test_with_a_gpu_or_an_installed_torch_pip_decides(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_pip(dev, monkeypatch)
    monkeypatch.setattr(dev, "has_gpu", lambda: True)
    dev.install("test,plot")
    monkeypatch.setattr(dev, "has_gpu", lambda: False)
    torch = dev.VENV / "lib/python3.12/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").touch()
    dev.install("lint")
    assert record == [PACKAGE, ("--editable", ".[lint]")]


def test_it_installs_again_only_after_a_change(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "install_torch", lambda: None)
    record = record_pip(dev, monkeypatch)
    for _ in range(2):
        dev.install("test,plot")
        dev.install("lint")
    assert len(record) == 2
    (dev.ROOT / "pyproject.toml").write_text("two")
    dev.install("lint")
    assert len(record) == 3


def test_a_failed_installation_leaves_no_stamp(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "install_torch", lambda: None)
    record = record_pip(dev, monkeypatch, fails=1)
    with pytest.raises(SystemExit, match="the installation failed"):
        dev.install("lint")
    dev.install("lint")
    assert len(record) == 2


def test_the_exit_code_is_that_of_the_worst_check(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([0, 2, 1])
    monkeypatch.setattr(dev, "call", lambda *command, **env: next(codes))
    assert dev.lint([]) == 2


def test_bad_input_gets_one_sentence(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dev.main("train") == 2
    monkeypatch.setattr("sys.version_info", (3, 10, 1))
    with pytest.raises(SystemExit, match=r"use 3\.11 to 3\.13"):
        dev.main("test")


def test_gpu_on_a_machine_without_one(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "install", lambda extras: pytest.fail("nothing is installed"))
    with pytest.raises(SystemExit, match=r"this machine has no NVIDIA GPU, which \./dev gpu needs"):
        dev.main("gpu")


def test_gpu_runs_the_tests_and_then_the_bench(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, even if a test fails, and the exit status says so."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(dev, "has_gpu", lambda: True)
    monkeypatch.setattr(dev, "install", lambda extras: None)
    monkeypatch.setattr(dev, "call", lambda *command: calls.append(command) or int("pytest" in command))
    assert dev.main("gpu", "--rounds", "5") == 1
    assert [("pytest" in command, "examples/bench/gpu.py" in command) for command in calls] == [
        (True, False),
        (False, True),
    ]
    assert calls[1][-4:] == ("--tests=runs/gpu/tests.xml", "--report=runs/gpu/report.md", "--rounds", "5")
