"""``./dev`` installs torch from the right index, reinstalls when needed, and refuses bad input. Pip is a mock here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DEV = Path(__file__).parents[2] / "dev"


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module, in an empty repository with a .venv, on a machine without a GPU."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # otherwise a cache would lie beside the script
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


def record_pip(dev: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: int = 0) -> list[str]:
    """Record the package and the index, if any, of each call of pip. Let the first ``fails`` calls fail."""
    requests: list[str] = []

    def pip_install(*args: str) -> int:
        (*_, index) = ["", *(option.removeprefix("--index-url=") for option in args if "index-url" in option)]
        requests.append(f"{args[-1]} {index}".strip())
        return int(len(requests) <= fails)

    monkeypatch.setattr(dev, "pip_install", pip_install)
    return requests


def test_torch_comes_from_the_first_index_that_has_it_and_changes_are_reinstalled(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # First the CPU build from pip's index, then from PyTorch's, then pip's choice. With a GPU only pip's choice.
    sources = [dev.CPU_TORCH, f"{dev.CPU_TORCH} {dev.CPU_INDEX}"]
    for fails, tries in ((0, 1), (1, 2), (2, 2)):
        requests = record_pip(dev, monkeypatch, fails)
        dev.install("test,plot")
        dev.install("test,plot")
        assert requests == [*sources[:tries], ".[test,plot]"]
        (dev.ROOT / "pyproject.toml").write_text(f"changed {fails}")
    requests = record_pip(dev, monkeypatch)
    monkeypatch.setattr(dev, "has_gpu", lambda: True)
    dev.install("test,plot")
    monkeypatch.setattr(dev, "has_gpu", lambda: False)
    torch = dev.VENV / "lib/python3.12/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").touch()
    dev.install("lint")
    assert requests == [".[test,plot]", ".[lint]"]
    requests = record_pip(dev, monkeypatch, fails=1)
    with pytest.raises(SystemExit, match="the installation failed"):
        dev.install("docs")
    dev.install("docs")
    dev.install("lint")
    assert requests == [".[docs]"] * 2


def test_litgpt_is_installed_alone_beside_transformers(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their requirements exclude each other.
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(dev, "install_torch", lambda: None)
    monkeypatch.setattr(dev, "pip_install", lambda *args: calls.append(args) or int("--no-deps" in args))
    dev.install(dev.EXTRAS["test"])
    assert calls == [("--editable", f".[{dev.EXTRAS['test']}]"), ("--no-deps", *dev.LITGPT)]
    assert "litgpt" not in dev.EXTRAS["test"]


def test_bad_input_gets_one_sentence_and_bad_checks_a_code(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([0, 2, 1, 1])
    monkeypatch.setattr(dev, "call", lambda *command, **env: next(codes))
    assert dev.lint([]) == 2, "the code of the worst check"
    assert list(codes) == [], "the site is built as well"
    monkeypatch.setattr(dev, "install", lambda extras: pytest.fail("nothing is installed"))
    assert dev.main("train") == 2
    with pytest.raises(SystemExit, match=r"this machine has no NVIDIA GPU, which \./dev gpu needs"):
        dev.main("gpu")
    monkeypatch.setattr("sys.version_info", (3, 10, 1))
    with pytest.raises(SystemExit, match=r"use 3\.11 to 3\.13"):
        dev.main("test")


def test_gpu_runs_the_tests_and_then_the_bench(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # The bench runs even if a test fails. It gets the tests' results and the options.
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(dev, "has_gpu", lambda: True)
    monkeypatch.setattr(dev, "install", lambda extras: None)
    monkeypatch.setattr(dev, "call", lambda *command: calls.append(command) or int("pytest" in command))
    assert dev.main("gpu", "--rounds", "5") == 1
    tests, bench = map(set, calls)
    assert tests >= {"tests/gpu", "--junitxml=runs/gpu/tests.xml"}
    assert bench >= {"examples/bench/gpu.py", "--tests=runs/gpu/tests.xml", "--rounds", "5"}


def test_docs_builds_the_site_or_serves_it(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both are strict: a broken link is an error.
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(dev, "install", lambda extras: None)
    monkeypatch.setattr(dev, "call", lambda *command, **env: calls.append(command[3:]) or 0)
    assert dev.main("docs") == dev.main("docs", "--serve", "--open") == 0
    assert calls == [("build", "--clean", "--strict"), ("serve", "--strict", "--open")]
