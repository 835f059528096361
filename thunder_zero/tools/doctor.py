"""Examines this machine: versions, a step of each stage on one rank, backends, devices."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from textwrap import wrap

import torch
import torch.distributed as dist
from torch import nn

from thunder_zero.capture.transform import ZeroTransform
from thunder_zero.plan.policy import STAGES
from thunder_zero.sharded.dtensors import local
from thunder_zero.tools.printing.words import WIDTH

import thunder

BACKENDS = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
SECONDS = 60  # timeout of the single-rank process group

Finding = tuple[str, str, str]  # a component, its state, and why the package cannot run; "" if it can


def _examine() -> Iterator[Finding]:
    if dist.is_initialized():
        raise RuntimeError("doctor needs a process without a process group; run thunder-zero doctor by itself")
    yield "python", platform.python_version(), ""
    for package in ("torch", "lightning-thunder"):
        yield package, version(package), ""
    for stage in range(len(STAGES)):
        yield f"a step of {STAGES[stage].name}", "one rank of gloo, gradients as in eager", _fault_of_step(stage)
    yield "backends", ", ".join(name for name, is_available in BACKENDS.items() if is_available()) or "none", ""
    yield "device", f"cpu, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}", ""
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield "device", f"cuda:{number}, {properties.name}, {properties.total_memory / (1 << 30):.0f} GiB", ""


def _fault_of_step(stage: int) -> str:
    """Run a step on one rank, and compare the gradients with the gradients of eager torch."""
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
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


@contextmanager
def _group_of_one() -> Iterator[None]:
    """Temporarily make a process group with this process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=SECONDS))
    try:
        yield
    finally:
        dist.destroy_process_group()


def show_health(*, as_json: bool) -> None:
    """Print all findings. Raise ValueError if the package cannot run here."""
    findings = list(_examine())
    faults = [what for what, _, fault in findings if fault]
    if as_json:
        items = [dict(zip(("what", "found", "fault"), finding, strict=True)) for finding in findings]
        print(json.dumps({"works": not faults, "findings": items}, indent=1))
    else:
        for what, found, fault in findings:
            head = f"{'FAULT' if fault else 'ok':7}{what:20}"
            print("\n".join(wrap(fault or found, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))))
    if faults:
        raise ValueError(f"thunder_zero cannot run here: {', '.join(faults)}")
