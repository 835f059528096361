"""Examines this machine: versions, a step on one rank, backends, devices."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from textwrap import wrap

import torch
import torch.distributed as dist
from looseversion import LooseVersion
from torch import nn

from thunder_zero.capture.transform import ZeroTransform
from thunder_zero.compat.imports import TESTED
from thunder_zero.plan.policy import STAGES
from thunder_zero.sharded.dtensors import local
from thunder_zero.tools.printing.words import WIDTH

import thunder

PYTHON = (3, 11)  # the oldest supported version, as in pyproject.toml
BACKENDS: dict[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
}
SECONDS = 60  # timeout of the single-rank process group


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about one component, such as "python"."""

    what: str  # the component
    found: str  # the state of the component
    fault: str = ""  # the reason why the package cannot run; "" if the package can run


def examine() -> tuple[Finding, ...]:
    """Examine all components. Run a step of a small model in each stage, on one rank in this process."""
    if dist.is_initialized():
        raise RuntimeError("doctor needs a process without a process group; run thunder-zero doctor by itself")
    return (
        Finding("python", platform.python_version(), _python_fault(sys.version_info[:2])),
        *(_package(name, version(name)) for name in TESTED),
        *(_step(stage) for stage in range(len(STAGES))),
        Finding("backends", _available({name: is_available() for name, is_available in BACKENDS.items()})),
        *_devices(),
    )


def text_of(findings: Iterable[Finding]) -> str:
    """Return a line for each finding, folded to 100 columns. Faults are marked."""
    return "\n".join(line for finding in findings for line in _lines(finding))


def _lines(finding: Finding) -> list[str]:
    head = f"{'FAULT' if finding.fault else 'ok':7}{finding.what:20}"
    text = f"{finding.found}: {finding.fault}" if finding.fault else finding.found
    return wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _python_fault(version: tuple[int, ...]) -> str:
    return "" if version >= PYTHON else f"thunder_zero needs Python {'.'.join(map(str, PYTHON))} or later"


def _package(name: str, installed: str) -> Finding:
    """Compare the installed version of a package with the tested versions."""
    first_tested, first_untested = TESTED[name]
    base_version = LooseVersion(installed.partition("+")[0])
    if base_version < LooseVersion(first_tested):
        return Finding(name, installed, f"thunder_zero needs {name} >= {first_tested}; install it")
    is_newer = base_version >= LooseVersion(first_untested)
    return Finding(name, f"{installed} (newer than tested: below {first_untested})" if is_newer else installed)


def _step(stage: int) -> Finding:
    """Run a step on one rank, and compare the gradients with the gradients of eager torch."""
    component, name = f"a step of {STAGES[stage].name}", "one rank of gloo"
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    module(x).square().mean().backward()
    expected = {path: param.grad for path, param in module.named_parameters()}
    module.zero_grad()
    try:
        with _group_of_one():
            model = thunder.jit(module, transforms=[ZeroTransform(stage)])
            model(x).square().mean().backward()
            grads = {path: local(param.grad) for path, param in model.named_parameters()}
        for path, grad in expected.items():
            torch.testing.assert_close(grads[path], grad)
    except Exception as error:  # any error means that the package does not work here
        return Finding(component, name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return Finding(component, f"{name}, gradients as in eager")


@contextmanager
def _group_of_one() -> Iterator[None]:
    """Temporarily make a process group with this process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=SECONDS))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _available(backends: dict[str, bool]) -> str:
    missing = [name for name, is_available in backends.items() if not is_available]
    available = ", ".join(name for name, is_available in backends.items() if is_available) or "none"
    return available + (f"; not {', '.join(missing)}" if missing else "")


def _devices() -> Iterator[Finding]:
    yield Finding("device", f"cpu, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}")
    if not torch.cuda.is_available():
        yield Finding("device", "no cuda")
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield Finding("device", f"cuda:{number}, {properties.name}, {properties.total_memory / (1 << 30):.0f} GiB")


def show_health(*, as_json: bool) -> None:
    """Print all findings. Raise ValueError if the package cannot run here."""
    findings = examine()
    faults = [finding.what for finding in findings if finding.fault]
    if as_json:
        print(json.dumps({"works": not faults, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print(text_of(findings))
    if faults:
        raise ValueError(f"thunder_zero cannot run here: {', '.join(faults)}")
