"""The wheel and the sdist contain the package; in a clean environment the wheel trains and is type-checked."""

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
from types import ModuleType

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
    """Build the wheel and the sdist; return their paths."""
    folder = tmp_path_factory.mktemp("dist")
    process = run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment with this environment's dependencies; return its interpreter."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    process = run(*pip, "install", "--quiet", "--no-index", "--no-deps", built[0], cwd=folder)
    assert process.returncode == 0, process.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(get_path("purelib"))  # .pth files in that folder are not read
    return python


def test_all_files_have_the_same_version(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    assert wheel.name == f"thunder_zero-{tz.__version__}-py3-none-any.whl"
    assert sdist.name == f"thunder_zero-{tz.__version__}.tar.gz"
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE).group(1) == tz.__version__
    assert f"\n## [{tz.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_wheel_and_sdist_have_the_files_of_the_package(built: tuple[Path, Path]) -> None:
    """Both have all files of the package, data files as well. Only the sdist has tests and documents."""
    tracked = run("git", "ls-files", "thunder_zero", cwd=ROOT).stdout.split()
    wheel = set(zipfile.ZipFile(built[0]).namelist())
    assert set(tracked) <= wheel
    assert {name.split("/")[0] for name in wheel} == {"thunder_zero", f"thunder_zero-{tz.__version__}.dist-info"}
    with tarfile.open(built[1]) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert {*tracked, "README.md", "LICENSE", "CITATION.cff", "tests/one/test_release.py"} <= shipped


def test_the_supported_pythons_are_those_that_ci_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    pythons = re.findall(r"3\.\d+", workflow.partition("python: [")[2].partition("]")[0])
    assert [line.rpartition(" ")[2] for line in project["classifiers"] if ":: 3." in line] == pythons
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    assert pythons == [f"3.{minor}" for minor in range(int(low), int(high))]


def test_each_public_name_has_one_tier() -> None:
    page = (ROOT / "docs/stable.md").read_text()
    named = re.findall(r"`tz\.((?:tools\.)?\w+)`", page.partition("\nThe files of")[0])
    public = {*tz.__all__, *(f"tools.{name}" for name in tz.tools.__all__)} - {"tools", "schedule"}
    assert sorted(name for name in named if name != "schedule") == sorted(public)
    names = (name for name in dir(tz.schedule) if not name.startswith("_"))
    exported = [name for name in names if not isinstance(getattr(tz.schedule, name), ModuleType)]
    (row,) = re.findall(r"all of `tz\.schedule`: (.*) \|", page)
    assert re.findall(r"`(\w+)`", row) == sorted(exported, key=lambda name: (name.islower(), name))


def test_each_extension_point_has_a_tier() -> None:
    extending, page = ((ROOT / f"docs/{name}.md").read_text() for name in ("extending", "stable"))
    imports = re.findall(r"^from (thunder_zero\.\w+\.\w+) import (\w+)$", extending, re.MULTILINE)
    assert imports
    assert [name for name in map(".".join, imports) if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_the_wheel_trains_in_a_clean_environment(python: Path) -> None:
    process = run(python, "-I", "-c", USE, cwd=python.parent)  # without PYTHONPATH
    assert process.returncode == 0, process.stderr
    version, file, total = process.stdout.split()[-3:]
    assert (version, float(total)) == (tz.__version__, 6.0)
    assert Path(file).is_relative_to(python.parents[1]), "not the checkout"
    assert run(python.parent / "thunder-zero", "--help", cwd=python.parent).returncode == 0


@pytest.mark.slow
def test_a_type_checker_reads_the_types_of_the_wheel(python: Path, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n[mypy-thunder.*]\nfollow_imports = skip\n"
    )
    process = run(sys.executable, "-m", "mypy", "--python-executable", python, "typed.py", cwd=tmp_path)
    assert re.findall(r"typed\.py:(\d+): error: .*\[(.*)\]", process.stdout) == [
        ("5", "assignment"),
        ("6", "arg-type"),
        ("7", "call-arg"),
    ], process.stdout + process.stderr
