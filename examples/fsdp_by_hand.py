"""ZeRO-3 (FSDP) by hand: does the work of ZeroTransform step by step.

    python examples/fsdp_by_hand.py             # steps 1 to 12, in one process
    python examples/fsdp_by_hand.py --ranks 2   # steps 13 to 16, on 2 real processes, which it starts

Steps 1 to 12 shard two linear layers for rank 0 of 2. Each step calls one function of this package and prints the
result. The last steps compare the traces with those of ZeroTransform, and run them. One process is enough: a
trace only names tensors and parameters, and at run time a small class plays the other rank.

Steps 13 to 16 need no such class. Each process captures, shards, synchronises and lowers (steps 1 to 5) its own
module. Then it runs the result on its own part of a batch, with collectives of torch.distributed (gloo, on CPUs). These
steps are in fsdp_by_hand_ranks.py.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.capture.convert import convert
from thunder_zero.schedule import Plan, passes, verify, verify_recompute
from thunder_zero.schedule.free import free
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.tools.dry_run import ProgramSource
from thunder_zero.tools.views.print_rows import format_timeline
from thunder_zero.traces.insert import insert_reductions, insert_synchronize
from thunder_zero.traces.lift import lift
from thunder_zero.traces.lower import lower
from thunder_zero.traces.pipeline import thunder_context
from thunder_zero.traces.symbols import JointTrace, Runtime, ZeroExecutor
from thunder_zero.traces.write import Writer

from thunder.core.trace import TraceCtx


class TwoLayers(nn.Module):
    """Two linear layers of 5 and 3 rows. Neither divides by 2, so the second rank's shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.down = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.up(x)))
        return y


WORLD_SIZE = 2
# Each layer's parameters travel together. As in the textbook, forward frees them all; step 12 shows our default.
POLICY = tz.Policy(stage=3, unit_of=lambda module: ("up", "down"), reshard_after_forward=True)


# 1. PyTorch captures the module once: dynamo (torch.compile) records the operators of forward, and AOTAutograd adds
#    those of backward. Written as a trace of Thunder, each operator is a line, and parameters are arguments.


def plain_trace(module: nn.Module, x: Tensor, executor: ZeroExecutor) -> JointTrace:
    captured = ProgramSource(module, [x], {}, POLICY, executor.plan.mesh)
    with thunder_context():
        return convert(captured.joint, captured.paths, backward=True).traced(executor, synced=True)


# 2. The plan describes each parameter. A shard is this rank's rows of it. All ranks' shards have the same shape, so
#    the last ones are padded with zeros, which cannot turn the result of an optimizer or a norm into NaN.


def local_rows(full: Tensor, param: tz.schedule.Param, plan: Plan) -> Tensor:
    shard, rows = torch.zeros(plan.shard_shape(param)), full[plan.geometry(param).rows]
    shard[: len(rows)] = rows
    return shard


def shard(plan: Plan, module: nn.Module) -> dict[str, Tensor]:
    values = {param.path: module.get_parameter(param.path).detach() for param in plan.params}
    return {param.path: local_rows(values[param.path], param, plan).requires_grad_() for param in plan.params}


def show_shards(plan: Plan) -> None:
    lines = []
    for param in plan.params:
        rows = [plan.geometry(param).rows_of(rank) for rank in range(WORLD_SIZE)]
        places = ", ".join(f"{part.start}:{part.stop} on rank {rank}" for rank, part in enumerate(rows))
        shapes = f"{param.shape!s:<6} -> {plan.shard_shape(param)!s:<6}"
        lines.append(f"{param.path:<11}  unit {param.unit:<4}  {shapes}  rows {places}")
    show("2. The plan: each parameter and its shard", "\n".join(lines))


# 3 to 5. Three transforms, each from trace to trace. insert_synchronize makes the arguments shards, and inserts a
#    synchronise before the first line that reads a parameter; it returns the full parameter. insert_reductions inserts
#    a reduction after each gradient; it returns the mean over ranks. lower writes what both stand for: a gather and its
#    wait, a reduce-scatter and its wait.


def transformed(plain: JointTrace) -> JointTrace:
    synchronised = insert_synchronize(plain)
    show("3. A synchronise before the first use of each parameter", code(synchronised.trace))
    reduced = insert_reductions(synchronised)
    show("4. A reduction after each gradient", code(reduced.trace))
    lowered = lower(reduced)
    show("5. Lowered: every line is a call that Python can make", code(lowered.trace))
    return lowered


# 6. This trace is correct, but it is slow and not yet ZeRO-3: each wait follows its launch directly, and backward
#    reads the parameters that forward gathered. To change that, lift the trace into a timeline. Its operations are
#    small frozen dataclasses, such as Gather, Wait, Compute and Reduce. A Compute has its line.
# 7. Each pass takes a timeline, makes one decision and returns a new timeline. verify.check_pass checks the result of
#    each pass, and verify.check_schedule the final one.


def scheduled(lowered: JointTrace) -> tz.schedule.Timeline:
    timeline = reference = lift(lowered)
    show("6. Lifted: the trace as a timeline", format_timeline(timeline))
    for step in passes.PASSES:
        before, timeline = timeline, step(timeline)
        verify.check_pass(timeline, reference)
        if step is passes.recompute:
            verify_recompute.check_recompute(timeline, before)
        summary = (step.__doc__ or "").partition("\n")[0].replace("``", "")
        show(f"7. Pass {step.__name__}: {summary}", changes(before, timeline))
    verify.check_schedule(timeline, reference)
    return timeline


# 8. free inserts a Free after the last use of values; shown are those that free parameters. Forward's return also reads
#    what it saves for backward: the shard of down.weight, and no full parameter. verify.check proves what will run.


def freed(timeline: tz.schedule.Timeline) -> tz.schedule.Timeline:
    before, timeline = timeline, free(timeline)
    verify.check(timeline, trained=[path for path, _ in timeline.gradients])
    show("8. Freed: each value is dropped after its last use", changes(before, timeline))
    return timeline


# 9. A Writer writes one operation after another: a Compute is its line, a Free is a del, and a bucket is one call.
#    zero_enter, before the first launch, names the phase and the digest of its launches, which ranks compare.


def written(lowered: JointTrace, timeline: tz.schedule.Timeline) -> tuple[TraceCtx, TraceCtx]:
    writer = Writer(lowered)
    return writer.forward(timeline).trace, writer.backward(timeline).trace


# 10. ZeroTransform does the same. Both must gather, wait, reduce and free the same parameters in the same order.


def communication(timeline: tz.schedule.Timeline) -> list[str]:
    return [
        f"{'backward' if op.backward else 'forward':<8}  {op.kind:<6}  {', '.join(op.params)}"
        for op in timeline.ops
        if op.params
    ]


def compare(by_hand: tz.schedule.Timeline, by_itself: tz.schedule.Timeline) -> None:
    mine, theirs = communication(by_hand), communication(by_itself)
    assert mine == theirs, "\n".join(difflib.unified_diff(mine, theirs, "by hand", "the transform", lineterm=""))
    show(f"10. The same {len(mine)} lines as in the traces of ZeroTransform", "\n".join(mine))


# 11. To run, a trace needs a runtime that carries out the collectives. ZeroTransform's runtime calls
#     torch.distributed. This one knows rank 1's shards and pretends that both ranks have the same batch, so both have
#     the same gradients, and the mean equals them.


@dataclass
class Done:
    """The handle of a collective that has already finished."""

    results: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.results


Launch = Callable[[Sequence[Tensor], Sequence[str]], Any]  # of tensors and paths; it returns a handle


def functions_of(all_gather: Launch, reduce: Launch) -> dict[str, Callable[..., Any]]:
    """Return the functions that lines call, by their names. A line launches for one tensor, or for a bucket."""
    return {
        "zero_enter": lambda phase, schedule: None,  # all ranks have written the same lines
        "zero_all_gather": lambda shard, path: all_gather([shard], [path]),
        "zero_all_gather_coalesced": all_gather,
        "zero_reduce_scatter": lambda grad, path: reduce([grad], [path]),
        "zero_reduce_scatter_coalesced": reduce,
        "zero_wait": lambda handle: handle.wait()[0],
        "zero_wait_coalesced": lambda handle: handle.wait(),
    }


class BothRanks(Runtime):
    def __init__(self, plan: Plan, others: Mapping[str, Tensor]) -> None:
        self.plan, self.others = plan, others

    def function(self, name: str) -> Callable[..., Any]:
        return functions_of(self.all_gather, self.reduce).get(name, super().function(name))

    def all_gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> Done:
        rows = [self.plan.by_name[path].shape[0] for path in paths]
        padded = [torch.cat([local, self.others[path]]) for local, path in zip(shards, paths, strict=True)]
        return Done(tuple(full[:count] for full, count in zip(padded, rows, strict=True)))

    def reduce(self, grads: Sequence[Tensor], paths: Sequence[str]) -> Done:
        means = [(grad + grad) / 2 for grad in grads]
        chunks = [self.plan.shard_shape(self.plan.by_name[path])[0] for path in paths]
        return Done(tuple(mean[:chunk] for mean, chunk in zip(means, chunks, strict=True)))


def run(
    forward: TraceCtx, backward: TraceCtx, arguments: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, list[Tensor], str]:
    """Run both traces; return the output, the parameters' gradients, and the shapes of what forward saves for
    backward."""
    result, (saved, other) = forward.python_callable()(*arguments)
    shapes = f"shapes {[tuple(tensor.shape) for tensor in saved]}"
    grads = backward.python_callable()([list(saved), list(other)], [grad])
    return result["flat_output"][0], [grad for grad in grads if grad is not None], shapes  # x needs no gradient


def check_numbers(module: nn.Module, x: Tensor, plan: Plan, output: Tensor, grads: Mapping[str, Tensor]) -> None:
    expected = module(x)
    expected.sum().backward()
    torch.testing.assert_close(output, expected)
    for param in plan.params:
        grad = module.get_parameter(param.path).grad
        assert grad is not None
        torch.testing.assert_close(grads[param.path], grad[plan.geometry(param).rows])
    show(
        "11. The numbers are right",
        "the output equals the plain module's, and each gradient equals this rank's rows of its gradient",
    )


# 12. So far this was the textbook. By default reshard_after_forward is None: the last units of forward
#     stay gathered until backward, which starts with them, as long as that does not raise the peak of gathered bytes.
#     Here down is gathered while up computes, so both are in memory at the peak anyway.


def gather_last_unit_once(textbook: tz.schedule.Timeline, module: nn.Module, x: Tensor) -> None:
    policy = replace(POLICY, reshard_after_forward=None)
    fewer = tz.trace(module, x, policy=policy, world_size=WORLD_SIZE).timeline
    peaks = [max(gathered_bytes(timeline)) for timeline in (textbook, fewer)]
    diff = list(difflib.unified_diff(communication(textbook), communication(fewer), n=0, lineterm=""))[2:]
    lines = [line for line in diff if not line.startswith("@@")]
    lines.append("peak of gathered bytes: {} without it, {} with it".format(*peaks))
    show("12. What reshard_after_forward=None changes", "\n".join(lines))


# Helpers that print.


def show(heading: str, body: str) -> None:
    print(f"\n{heading}\n{'-' * len(heading)}")
    for line in body.splitlines():
        print(textwrap.fill(line, 100, subsequent_indent=" " * 8, break_long_words=False))


def code(trace: TraceCtx) -> str:
    """Return the lines of a trace without comments and blank lines, each with its result's shape."""
    lines = trace.python(print_depth=1).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("def "))
    wanted = [line for line in lines[start:] if line.strip() and not line.lstrip().startswith("# /")]
    return "\n".join(line.partition("  # ")[0] if '"FUTURE ' in line else line for line in wanted)


def changes(before: tz.schedule.Timeline, after: tz.schedule.Timeline) -> str:
    """Return the removed (-) and added (+) lines, each with one line of context."""
    old, new = format_timeline(before).splitlines(), format_timeline(after).splitlines()
    diff = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
    return "\n".join("  ..." if line.startswith("@@") else line for line in diff) or "changes nothing here"


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "1: steps 1 to 12, in this process (default); 2 or more: also steps 13 to 16, on so many processes"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=words)
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error(f"--ranks is {options.ranks}; give 1, 2 or more")
    return options


def one_process() -> None:
    torch.manual_seed(0)
    module, x = TwoLayers(), torch.randn(6, 4)
    plan, other = (
        tz.schedule.make_plan(module, POLICY, tz.schedule.Mesh.of(WORLD_SIZE, rank)) for rank in range(WORLD_SIZE)
    )
    shards = shard(plan, module)
    executor = ZeroExecutor(plan, BothRanks(plan, shard(other, module)))
    plain = plain_trace(module, x, executor)
    show("1. The trace of the plain module: parameters are arguments", code(plain.trace))
    show_shards(plan)
    lowered = transformed(plain)
    timeline = freed(scheduled(lowered))
    forward, backward = written(lowered, timeline)
    show("9. The forward that runs", code(forward))
    show("9. The backward that runs", code(backward))

    by_itself = tz.trace(module, x, policy=POLICY, world_size=WORLD_SIZE)
    compare(timeline, by_itself.timeline)
    inputs = lowered.facts.inputs  # the parameter of each argument, except x
    arguments = [shards[inputs[arg.name]] if arg.name in inputs else x for arg in forward.args]
    output, grads, saved = run(forward, backward, arguments, torch.ones(6, 3))
    show("11. It runs: the tensors that forward saves for backward", saved)
    check_numbers(module, x, plan, output, dict(zip(inputs.values(), grads, strict=True)))
    gather_last_unit_once(by_itself.timeline, module, x)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    one_process()
    if options.ranks == 1:
        print("\nSteps 13 to 16 do the same on 2 real processes: python examples/fsdp_by_hand.py --ranks 2")
    else:
        from fsdp_by_hand_ranks import start_ranks  # it takes its steps from this file

        start_ranks(options.ranks)


if __name__ == "__main__":
    main()
