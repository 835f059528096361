"""The wheel and the sdist: built, installed into a clean environment, used and type-checked from outside."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from sysconfig import get_path

import pytest

import thunder_zero as tz

ROOT = Path(__file__).parents[2]
USE = """
import torch, torch.distributed as dist
import thunder_zero as tz
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = tz.compile(torch.nn.Linear(3, 2), stage=3)
model(torch.ones(1, 3)).sum().backward()
print(tz.__version__, tz.__file__, model.get_parameter("weight").grad.full_tensor().sum().item())
"""
TYPED = """
import thunder_zero as tz
policy: tz.Policy = tz.Policy(stage=3, gather_format=tz.Int8())
stage: int = policy.stage
wrong: str = policy.stage
tz.Policy(stage="3")
tz.compile(None, stages=3)
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, whose dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    done = run(*pip, "install", "--quiet", "--no-index", "--no-deps", built[0], cwd=folder)
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(get_path("purelib"))  # whose own .pth files are not read
    return python


def test_the_version_is_said_once(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    assert wheel.name == f"thunder_zero-{tz.__version__}-py3-none-any.whl"
    assert sdist.name == f"thunder_zero-{tz.__version__}.tar.gz"
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE).group(1) == tz.__version__
    assert f"\n## [{tz.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_what_is_shipped(built: tuple[Path, Path]) -> None:
    """All files of the package in both, data files among them; tests and documents in the sdist alone."""
    tracked = run("git", "ls-files", "thunder_zero", cwd=ROOT).stdout.split()
    wheel = set(zipfile.ZipFile(built[0]).namelist())
    assert set(tracked) <= wheel
    assert {name.split("/")[0] for name in wheel} == {"thunder_zero", f"thunder_zero-{tz.__version__}.dist-info"}
    with tarfile.open(built[1]) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert {*tracked, "README.md", "LICENSE", "CITATION.cff", "tests/one/test_release.py"} <= shipped


def test_the_claims_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    pythons = re.findall(r"3\.\d+", workflow.partition("python: [")[2].partition("]")[0])
    assert [line.rpartition(" ")[2] for line in project["classifiers"] if ":: 3." in line] == pythons
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    assert pythons == [f"3.{minor}" for minor in range(int(low), int(high))]


def test_each_public_name_has_one_tier() -> None:
    page = (ROOT / "docs/stable.md").read_text()
    named = re.findall(r"`tz\.((?:tools\.)?\w+)`", page.partition("\nWhat else")[0])
    public = {*tz.__all__, *(f"tools.{name}" for name in tz.tools.__all__)} - {"tools", "schedule"}
    assert sorted(name for name in named if name != "schedule") == sorted(public)
    (row,) = re.findall(r"all of `tz\.schedule`: (.*) \|", page)
    assert re.findall(r"`(\w+)`", row) == tz.schedule.__all__


def test_each_extension_point_has_a_tier() -> None:
    extending, page = ((ROOT / f"docs/{name}.md").read_text() for name in ("extending", "stable"))
    imports = re.findall(r"^from (thunder_zero\.\w+\.\w+) import (\w+)$", extending, re.MULTILINE)
    assert imports
    assert [name for name in map(".".join, imports) if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_the_wheel_trains_in_a_clean_environment(python: Path) -> None:
    done = run(python, "-I", "-c", USE, cwd=python.parent)  # without PYTHONPATH
    assert done.returncode == 0, done.stderr
    version, file, total = done.stdout.split()[-3:]
    assert (version, float(total)) == (tz.__version__, 6.0)
    assert Path(file).is_relative_to(python.parents[1]), "not the checkout"
    assert run(python.parent / "thunder-zero", "--help", cwd=python.parent).returncode == 0


@pytest.mark.slow
def test_a_type_checker_reads_the_types_of_the_wheel(python: Path, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n[mypy-thunder.*]\nfollow_imports = skip\n"
    )
    done = run(sys.executable, "-m", "mypy", "--python-executable", python, "typed.py", cwd=tmp_path)
    assert re.findall(r"typed\.py:(\d+): error: .*\[(.*)\]", done.stdout) == [
        ("5", "assignment"),
        ("6", "arg-type"),
        ("7", "call-arg"),
    ], done.stdout + done.stderr
