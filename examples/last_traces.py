"""The traces of a model of ``thunder.jit``, from the plain module's trace to the two that run.

    torchrun --standalone --nproc-per-node 2 examples/last_traces.py

Each transform makes a new trace, and Thunder's functions return them all. After the first trace, this script shows the
lines that the next transform removes (-) and adds (+). fsdp_by_hand.py takes the same steps without ``thunder.jit``.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch
from ranks import options_parser, ranks_of_torchrun
from torch import nn

import thunder_zero as tz  # before thunder

import thunder
from thunder.core.trace import TraceCtx

STEPS = {
    "plain": "forward and backward of the plain module: full parameter in, full gradient out",
    "synchronised": "the input is a shard; zero_synchronize makes the full parameter for its first reader",
    "reduced": "zero_reduce averages the gradient over the ranks",
    "lowered": "a gather and its wait, a reduce-scatter and its wait, in place of both",
}


def code(trace: TraceCtx) -> list[str]:
    """Return the lines of a trace from the signature on."""
    lines = trace.python(print_depth=1).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("def "))
    return [line for line in lines[start:] if line.strip()]


def main(argv: Sequence[str] | None = None) -> None:
    options_parser(__doc__, stage=None, trains=False).parse_args(argv)
    with ranks_of_torchrun(on_cpus=True) as ranks:
        torch.manual_seed(0)  # equal weights on all ranks
        model = thunder.jit(nn.Linear(4, 4, bias=False), transforms=[tz.ZeroTransform(stage=3)])
        model(torch.ones(2, 4)).sum().backward()
        *joint, forward = thunder.last_traces(model)
        (backward,) = thunder.last_backward_traces(model)
        if ranks.rank == 0:
            before: list[str] = []
            for (name, meaning), trace in zip(STEPS.items(), joint, strict=True):
                after = code(trace)
                changes = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:] if before else after
                print(f"# {name}: {meaning}", *(line for line in changes if line[:2] != "@@"), "", sep="\n")
                before = after
            print("# forward", *code(forward), "", "# backward", *code(backward), "", sep="\n")
            print(f"{thunder.cache_misses(model)} program compiled, {thunder.compile_stats(model).calls} call")


if __name__ == "__main__":
    main()
