"""Measures what a user waits for before the first step ends, and where that time goes.

    python -m examples.bench.first_step                    the table of docs/first-step.md
    python -m examples.bench.first_step passes             what a layer costs, by pass

CPU seconds of all processes, of the second model of a process, on one rank: a first step (forward and backward), and
what follows it for the first time: a step under ``no_sync``, a forward under ``no_grad``, one after ``eval()`` in
inference mode. Each number comes from a process of its own with nothing in torch's caches, or, "again", with the files
that a process before it has left there. A further layer is the difference between two depths.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from examples.bench.model import Size, loss_of, make_batch, make_model
from examples.llama import Llama, LlamaConfig
from thunder_zero.capture import programs
from thunder_zero.compat import aot
from thunder_zero.schedule import verify
from thunder_zero.traces import pipeline
from thunder_zero.traces.write import Writer

Step = Callable[[Any], Tensor]  # the loss of a model


def llama(layers: int) -> tuple[nn.Module, Step]:
    """Of examples/llama.py, of width 64."""
    tokens = torch.arange(64).view(2, 32)
    module = Llama(LlamaConfig(vocab_size=128, intermediate_size=176, num_hidden_layers=layers))
    return module, lambda model: model(input_ids=tokens, labels=tokens).loss


def gpt(blocks: int) -> tuple[nn.Module, Step]:
    """Of this bench, of width 64."""
    size = Size(blocks, width=64, vocabulary=128, tokens=32)
    tokens, targets = make_batch(size, rank=0)
    return make_model(size), lambda model: loss_of(model(tokens), targets)


def blocks_of(module: nn.Module) -> nn.Module:
    """The module, with each of its repeated blocks compiled alone, which torch calls regional compilation."""
    found = next(part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 1)
    for block in found:
        block.compile(dynamic=False)
    return module


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Step]], tuple[int, int]]] = {
    "Llama of 8 layers": (llama, (3, 8)),
    "GPT of 12 blocks": (gpt, (4, 12)),
}
CONTESTANTS: dict[str, Callable[[nn.Module], Any]] = {
    '`torch.compile(backend="aot_eager")`': partial(torch.compile, backend="aot_eager", dynamic=False),
    "`torch.compile` (inductor)": partial(torch.compile, dynamic=False),
    "`block.compile()` (inductor)": blocks_of,
    "`tz.compile(stage=3)`": lambda module: tz.compile(module, stage=3),
    '`tz.compile(stage=3, fuse="inductor")`': lambda module: tz.compile(module, stage=3, fuse="inductor"),
}
AGAIN = ("`torch.compile` (inductor)", '`tz.compile(stage=3, fuse="inductor")`')
PASSES: dict[str, tuple[Any, str]] = {
    "exporting (AOTAutograd)": (aot, "export"),
    "converting": (programs, "convert"),
    "inserting and lowering": (pipeline, "shard"),
    "scheduling": (pipeline, "schedule"),
    "freeing": (pipeline, "free"),
    "proving": (verify, "check"),
    "writing forward": (Writer, "forward"),
    "writing backward": (Writer, "backward"),
    "writing Python": (programs, "function_of"),
}


def cpu_seconds() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def seconds_of(call: Callable[[], Any]) -> float:
    start = cpu_seconds()
    call()
    return cpu_seconds() - start


def second_model(family: str, depth: int, contestant: str) -> tuple[Any, Step]:
    """A model of a process in which another one has trained before."""
    make, _ = MODELS[family]
    for layers in (2, depth):
        torch.manual_seed(0)
        plain, step = make(layers)
        model = CONTESTANTS[contestant](plain)
        if layers != depth:
            step(model).backward()
            torch._dynamo.reset()
    return model, step


def first_steps(family: str, depth: int, contestant: str) -> list[float]:
    """CPU seconds: of the first step, under ``no_sync``, under ``no_grad``, after ``eval()`` in inference mode."""
    model, step = second_model(family, depth, contestant)
    found = [seconds_of(lambda: step(model).backward())]
    with getattr(model, "no_sync", nullcontext)():
        found.append(seconds_of(lambda: step(model).backward()))
    with torch.no_grad():
        found.append(seconds_of(lambda: step(model)))
    model.eval()
    with torch.inference_mode():
        found.append(seconds_of(lambda: step(model)))
    return found


@contextmanager
def clocked(
    spent: dict[str, float],
    functions: Iterable[tuple[Any, str]],
) -> Iterator[None]:
    """Add the CPU seconds that each of these functions takes to ``spent``."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - start

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(patch.object(owner, name, timed(f"{owner.__name__}.{name}", getattr(owner, name))))
        yield


def passes(family: str, depth: int) -> dict[str, float]:
    """CPU seconds of the first step of ``tz.compile``, by pass; the rest of it is dynamo's."""
    model, step = second_model(family, depth, "`tz.compile(stage=3)`")
    spent: dict[str, float] = {}
    with clocked(spent, PASSES.values()):
        total = seconds_of(lambda: step(model).backward())
    named = {name: spent[f"{owner.__name__}.{function}"] for name, (owner, function) in PASSES.items()}
    return {"dynamo's tracing, running the step": total - sum(named.values()), **named, "all": total}


def apart(call: str, *arguments: Any, processes: int = 1) -> Any:
    """The result of a function of this module, called in the last of some processes that share torch's files."""
    code = f"from examples.bench import first_step; print(first_step.alone({call!r}, {arguments!r}))"
    with TemporaryDirectory() as cache:
        variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-c", code]
        for _ in range(processes):
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return eval(done.stdout.splitlines()[-1])  # of our own process: numbers


def alone(call: str, arguments: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return globals()[call](*arguments)


def main() -> None:
    if sys.argv[1:] == ["passes"]:
        for family, (_, depths) in MODELS.items():
            few, many = (apart("passes", family, depth) for depth in depths)
            print(f"\n| {family} | s | a further layer, s |\n|---|---:|---:|")
            for name, seconds in many.items():
                print(f"| {name} | {seconds:.2f} | {(seconds - few[name]) / (depths[1] - depths[0]):.3f} |", flush=True)
        return
    for family, (_, depths) in MODELS.items():
        print(f"\n| {family} | first step | `no_sync` | `no_grad` | inference | a further layer |")
        print("|---|---:|---:|---:|---:|---:|")
        for contestant, processes in [(name, 1) for name in CONTESTANTS] + [(name, 2) for name in AGAIN]:
            few, many = (apart("first_steps", family, depth, contestant, processes=processes) for depth in depths)
            row = [*many, (many[0] - few[0]) / (depths[1] - depths[0])]
            if "tz." not in contestant:
                row[1] = float("nan")
            shown = contestant if processes == 1 else f"{contestant}, again"
            print("|", shown, "|", " | ".join(f"{value:.2f}" for value in row).replace("nan", ""), "|", flush=True)


if __name__ == "__main__":
    main()
