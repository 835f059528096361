"""Forecasts the peak memory of training steps, and measures it: a table of both.

    python -m examples.bench.memory                 # all cases, about 20 minutes on two cores
    python -m examples.bench.memory GPT ResNet      # these models only

The forecast (``tz.memory``) runs in this process, on the meta device. The measurement runs on as many processes as the
case has ranks, on gloo, and reads the record of torch's allocator (``tensor_memory.py``): the bytes at rest, and those
that a step adds to them at its peak. They share no code. The figures are those of rank 0, which has the most rows.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing

import thunder_zero as tz  # before thunder
from examples.bench.cases import CASES, TASKS, Case
from examples.tensor_memory import added_at_peak, bytes_held

import thunder

CPU = torch.device("cpu")
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes at rest, and at the peaks of forward and backward and of the optimizer's step (0: there is none)."""

    at_rest: int
    peak: int
    optimizer_step: int


def forecast(case: Case) -> Peaks:
    """The peaks of rank 0, without processes and without values."""
    task = TASKS[case.task]
    with torch.device("meta"):
        model = task.model()
    model.train(case.training)
    with nullcontext() if case.training else torch.no_grad():
        traces = tz.trace(
            model,
            **task.inputs(),
            policy=case.policy,
            world_size=case.world_size,
            synced=not case.deferring,
            **case.options,
        )
    memory = tz.memory(traces, loss=task.loss, optimizer=torch.optim.AdamW, accumulating=case.deferring)
    return Peaks(memory.at_rest, memory.peak, memory.optimizer_step or 0)


def measure(case: Case) -> Peaks:
    """The peaks of rank 0 in a step of real processes, after one that warms up."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (case, folder), nprocs=case.world_size)
        return Peaks(**json.loads((Path(folder) / "peaks.json").read_text()))


def train(rank: int, case: Case, folder: str) -> None:
    """One rank: take two steps, and count in the second."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), case.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size)
    torch.manual_seed(0)
    task = TASKS[case.task]
    model = thunder.jit(task.model().train(case.training), transforms=[tz.ZeroTransform(case.policy)], **case.options)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = task.inputs()

    def forward_and_backward() -> None:
        if case.training:
            task.loss(model(**inputs)).backward()
        else:
            with torch.no_grad():
                model(**inputs)

    forward_and_backward()
    optimizer.step()
    optimizer.zero_grad()
    held = [*model.parameters(), *model.buffers(), *inputs.values()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    at_rest = bytes_held(held)
    with model.no_sync() if case.deferring else nullcontext():
        if case.deferring:
            forward_and_backward()
            at_rest += sum(param.grad_bytes for param in tz.traces_of(model).plan.params)
        peak = added_at_peak(forward_and_backward, CPU)
    step = 0
    if case.training and not case.deferring:
        gradients = sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
        step = at_rest + gradients + added_at_peak(optimizer.step, CPU)
    if rank == 0:
        found = Peaks(at_rest, at_rest + peak, step)
        Path(folder, "peaks.json").write_text(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


def words(case: Case) -> str:
    """What is special about a case."""
    policy = case.policy
    special = {
        f"{case.world_size} ranks": case.world_size != 2,
        "torch_compile_ex": case.fused,
        "bfloat16": policy.mixed_precision != tz.MixedPrecision(),
        "no_sync": case.deferring,
        "forward alone": not case.training,
    }
    return ", ".join((case.task, f"stage {policy.stage}", *(word for word, is_true in special.items() if is_true)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=tuple(TASKS), help="models (all)")
    parser.add_argument("--save", type=Path, help="writes the figures into this file, as JSON")
    options = parser.parse_args()
    if unknown := [name for name in options.tasks if name not in TASKS]:
        parser.error(f"there is no model {unknown[0]!r}; choose from {', '.join(TASKS)}")
    console = Console()
    table = Table("MiB", "at rest", "forecast", "peak", "forecast", "off by", "optimizer step", "forecast")
    rows = []
    for case in [case for case in CASES if case.task in options.tasks]:
        console.print(words(case), style="dim", end=" ")
        expected, found = forecast(case), measure(case)
        off = expected.peak / found.peak - 1
        console.print(f"{off:+.2%}", style="dim")
        rows.append({"case": words(case), "forecast": asdict(expected), "measured": asdict(found)})
        figures = zip(asdict(found).values(), asdict(expected).values(), strict=True)
        (rest, peak, step) = ([f"{part / MiB:.1f}" if part else "" for part in pair] for pair in figures)
        table.add_row(words(case), *rest, *peak, f"{off:+.2%}", *step)
    console.print(table)
    if options.save:
        options.save.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
