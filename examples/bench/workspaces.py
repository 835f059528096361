"""Measures what operators of torch allocate inside and show nobody: workspaces, as far as the forecast misses them.

    python -m examples.bench.workspaces             # prints them; examples/bench/memory.py writes them into the page

Each line of a case's traces that computes runs on random values, once to warm up and once with the allocator's record
on, on one thread. Hidden is the most that it adds at one time, less what the forecast has for the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

import thunder_zero as tz  # before thunder
from examples.bench.cases import BFLOAT16, Case
from examples.bench.memory_table import HIDING, Workspace, workspace_cells
from examples.bench.step_memory import forecast_of, traces_of
from examples.tensor_memory import added_in_parts
from thunder_zero.schedule import Compute

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

CPU = torch.device("cpu")
CASES = (
    Case("ResNet", tz.ZERO3),
    Case("GPT", tz.ZERO3),
    Case("GPT", tz.Policy(stage=3, mixed_precision=BFLOAT16)),
)
LEAST = 1 << 16  # bytes; smaller workspaces are left out
MOST = 4  # of each operator and dtype are listed


def measured_workspaces() -> tuple[Workspace, ...]:
    """Those of the cases, the largest of each operator and dtype."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {key: one for case in CASES for key, one in workspaces_of(case).items()}
    finally:
        torch.set_num_threads(threads)
    return largest(found.values())


def largest(found: Iterable[Workspace]) -> tuple[Workspace, ...]:
    """The ``MOST`` largest of each operator, largest first."""
    kept: dict[str, list[Workspace]] = {}
    for one in sorted(found, key=lambda one: -one.hidden):
        alike = kept.setdefault(one.operator, [])
        if len(alike) < MOST:
            alike.append(one)
    return tuple(one for alike in kept.values() for one in alike)


def workspaces_of(case: Case) -> dict[tuple[str, str], Workspace]:
    """Those of a case's lines that hide something, by operator and shapes."""
    traces = traces_of(case)
    memory = forecast_of(case, traces)
    shown: dict[tuple[str, int], int] = {}
    before = 0
    for line in memory.lines:
        shown[line.phase, line.position] = (line.highest or 0) - before
        before = line.alive or 0
    lines = {}
    for phase, trace in (("forward", traces.forward), ("backward", traces.backward)):
        context = trace.python_ctx()
        for position, line in computing(traces, phase, trace):
            key = (operator(line), shapes(line))
            if key not in lines:
                lines[key] = (shown[phase, position], runner(line, context))
    parts = {str(number): run for number, (_, run) in enumerate(lines.values())}
    with torch.no_grad():
        for run in parts.values():
            run()
        added = added_in_parts(parts, CPU)
    now, found = 0, {}
    for (key, (visible, _)), one in zip(lines.items(), added.values(), strict=True):
        hidden = one.highest - now - visible
        now = one.at_end
        if hidden >= LEAST:
            found[key] = Workspace(*key, visible, hidden)
    return found


def computing(traces: tz.tools.Traces, phase: str, trace: TraceCtx) -> Iterator[tuple[int, BoundSymbol]]:
    """The lines of a trace that compute, and are no fused region, with their positions."""
    pairs = zip(traces.lines, traces.timeline.ops, strict=True)
    ops = {lines[0]: op for lines, op in pairs if op.backward is (phase == "backward")}
    for position, line in enumerate(trace.bound_symbols[:-1]):
        if position in ops and isinstance(ops[position], Compute) and line.flat_outs and not line.sym.is_fusion:
            yield position, line


def runner(line: BoundSymbol, context: Mapping[str, Any]) -> Callable[[], None]:
    """Runs a line of a trace with this context on random values, and drops its results."""
    code = compile("\n".join(line.python(indent=0, print_depth=1)), line.sym.name, "exec")
    names = {**context, **line.object_ctx()}
    values = {proxy.name: random_like(proxy) for proxy in line.flat_proxy_args if isinstance(proxy, TensorProxy)}

    def run() -> None:
        exec(code, names, dict(values))

    return run


def random_like(proxy: TensorProxy) -> Tensor:
    """Random values; zeros for whole numbers, which may be indices."""
    dtype: Any = dtypes.to_torch_dtype(proxy.dtype)
    return torch.randn(proxy.shape).to(dtype) if dtype.is_floating_point else torch.zeros(proxy.shape, dtype=dtype)


def operator(line: BoundSymbol) -> str:
    """Its name, with the floating-point dtype if it is not float32: "linear, bfloat16"."""
    kinds = {dtypes.to_torch_dtype(proxy.dtype) for proxy in line.flat_proxy_args if isinstance(proxy, TensorProxy)}
    names = sorted(str(kind).removeprefix("torch.") for kind in kinds if kind.is_floating_point)
    return ", ".join((line.sym.name, *(name for name in names if name != "float32")))


def shapes(line: BoundSymbol) -> str:
    """Such as "[4, 3, 64, 64], [64, 3, 3, 3] → [4, 64, 64, 64]"."""
    given, made = (
        ", ".join(alike([str(list(proxy.shape)) for proxy in proxies if isinstance(proxy, TensorProxy)]))
        for proxies in (line.flat_proxy_args, line.flat_proxy_outs)
    )
    return f"{given} → {made}"


def alike(words: Iterable[str]) -> Iterator[str]:
    """Equal neighbours as one: "3 x [2, 8]"."""
    for word, group in groupby(words):
        count = len(list(group))
        yield word if count == 1 else f"{count} x {word}"


def main() -> None:
    print("  ".join(HIDING))
    for one in measured_workspaces():
        print("  ".join(workspace_cells(one)))


if __name__ == "__main__":
    main()
