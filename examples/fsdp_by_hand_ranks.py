"""Steps 13 to 16 of fsdp_by_hand.py, on real ranks, each a process of its own.

    python examples/fsdp_by_hand.py --ranks 2

Every rank takes the steps from a module to a lowered trace: it captures (step 1), shards (2), inserts synchronises (3)
and reductions (4), and lowers (5). Then it runs its trace on its own part of a batch. It compares the output and the
gradients with those of the plain module on the whole batch. Rank 0 prints for all ranks.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp_by_hand import POLICY, TwoLayers, code, functions_of, local_rows, plain_trace, run, shard, show, written
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.schedule import passes
from thunder_zero.schedule.free import free
from thunder_zero.traces.lift import lift
from thunder_zero.traces.pipeline import shard as sharding
from thunder_zero.traces.symbols import Runtime, ZeroExecutor

from thunder.core.trace import TraceCtx

BATCH_ROWS = 6  # on each rank

# 13. All ranks build the same module and the same batch, from one seed. A rank has its own plan, its own rows of each
#     parameter, and its own part of the batch. 5 and 3 rows do not divide by 2: rank 1 has fewer, and rows of zeros.


def own_part(batch: Tensor, plan: tz.schedule.Plan) -> Tensor:
    return batch.chunk(plan.mesh.shard.size)[plan.mesh.shard.place]


def rows_in_words(param: tz.schedule.Param, plan: tz.schedule.Plan) -> str:
    """Return words such as "rows 3:5 and 1 of zeros"."""
    rows, zeros = plan.geometry(param).rows, plan.geometry(param).padding
    return (f"rows {rows.start}:{rows.stop}" if rows.start < rows.stop else "no rows") + (
        f" and {zeros} of zeros" if zeros else ""
    )


def holdings(plan: tz.schedule.Plan, shards: Mapping[str, Tensor]) -> str:
    rank = plan.mesh.shard.place
    first = rank * BATCH_ROWS
    lines = [f"rank {rank}", f"  {'the batch':<11}  {(BATCH_ROWS, 4)!s:<6}  rows {first}:{first + BATCH_ROWS}"]
    for param in plan.params:
        lines.append(f"  {param.path:<11}  {tuple(shards[param.path].shape)!s:<6}  {rows_in_words(param, plan)}")
    return "\n".join(lines)


# 14. The steps, with the functions of the tutorial. Thanks to the zeros a shard has the same shape on every rank,
#     and so every rank gets the same trace, to the letter. It has to: all ranks must launch the same collectives in the
#     same order, or they would wait for each other forever. Only the rows that travel differ, noted at each launch.


@dataclass(frozen=True)
class Traces:
    """The traces of one rank.

    Attributes:
        names: the arguments of forward: x and paths of parameters.
        lowered: the trace after step 5.
        phases: forward and backward of the lowered trace (step 15).
        phases_of_zero3: forward and backward in ZeRO-3's order (step 16).
    """

    names: list[str]
    lowered: TraceCtx
    phases: tuple[TraceCtx, TraceCtx]
    phases_of_zero3: tuple[TraceCtx, TraceCtx]


def traces_of(module: nn.Module, x: Tensor, executor: ZeroExecutor) -> Traces:
    *_, lowered = sharding(plain_trace(module, x, executor))  # steps 3 to 5
    names = [lowered.facts.inputs.get(arg.name, "x") for arg in lowered.trace.args]
    timeline = lift(lowered)
    phases, phases_of_zero3 = (written(lowered, free(each)) for each in (timeline, passes.run(timeline)))
    return Traces(names, lowered.trace, phases, phases_of_zero3)


def with_notes(trace: TraceCtx, executor: ZeroExecutor) -> list[str]:
    """Return the lines of a lowered trace; each launch notes which rows this rank sends, or keeps of the mean."""
    notes, verbs = {}, {executor.all_gather.name: "sends", executor.reduce_scatter.name: "keeps"}
    for line in trace.bound_symbols:
        if verb := verbs.get(line.sym.name):
            notes[line.output.name] = f"  # {verb} {rows_in_words(executor.plan.by_name[line.args[1]], executor.plan)}"
    return [line + notes.get(line.split()[0], "") for line in code(trace).splitlines()]


# 15. To run it, one class is exchanged: BothRanks, which knew all shards, for collectives between processes. A launch
#     returns at once; its wait ends when the other ranks' rows have arrived.


@dataclass
class UnderWay:
    """The handle of collectives that have been launched."""

    works: Sequence[dist.Work | None]
    result: Callable[[], tuple[Tensor, ...]]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            assert work is not None  # this rank is in the group
            work.wait()
        return self.result()


class RealRanks(Runtime):
    """Textbook collectives on the default process group; ``launched`` counts them.

    The collectives of this package send fewer bytes: no padding, and one message for a bucket.
    """

    def __init__(self, plan: tz.schedule.Plan) -> None:
        self.plan = plan
        self.launched = Counter[str]()

    def function(self, name: str) -> Callable[..., Any]:
        return functions_of(self.all_gather, self.reduce).get(name, super().function(name))

    def all_gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> UnderWay:
        self.launched["gathers"] += 1
        rows = [self.plan.by_name[path].shape[0] for path in paths]  # without the padding
        parts = [[torch.empty_like(own) for _ in range(self.plan.mesh.shard.size)] for own in shards]
        works = [dist.all_gather(into, own.detach(), async_op=True) for into, own in zip(parts, shards, strict=True)]
        return UnderWay(works, lambda: tuple(torch.cat(all_)[:n] for all_, n in zip(parts, rows, strict=True)))

    def reduce(self, grads: Sequence[Tensor], paths: Sequence[str]) -> UnderWay:
        """Start the reductions of gradients. A reduce-scatter is one sum for each rank, of its rows; only that rank
        gets it."""
        self.launched["reductions"] += 1
        params, world_size = [self.plan.by_name[path] for path in paths], self.plan.mesh.shard.size
        plans = [replace(self.plan, mesh=tz.schedule.Mesh.of(world_size, rank)) for rank in range(world_size)]
        parts = [[local_rows(grad, param, plan) for plan in plans] for grad, param in zip(grads, params, strict=True)]
        works = [dist.reduce(part, dst=rank, async_op=True) for each in parts for rank, part in enumerate(each)]
        return UnderWay(works, lambda: tuple(each[self.plan.mesh.shard.place] / world_size for each in parts))


# The loss is the mean over the batch. All ranks have as many rows of it, so the mean over ranks of their gradients is
# the gradient of the whole batch's loss.


def of_the_plain_module(module: nn.Module, batch: Tensor, plan: tz.schedule.Plan) -> dict[str, Tensor]:
    """Return the plain module's output and gradients on the whole batch; of each, the rows that belong to this rank."""
    output = module(batch)
    grads = torch.autograd.grad(output.mean(), [module.get_parameter(param.path) for param in plan.params])
    rows = {param.path: local_rows(grad, param, plan) for param, grad in zip(plan.params, grads, strict=True)}
    return {"output": own_part(output, plan).detach(), **rows}


@dataclass(frozen=True)
class Outcome:
    """The outcome of forward and backward on one rank.

    Attributes:
        launched: such as "3 gathers, 2 reductions".
        saved: the shapes of the tensors that forward saves for backward.
        output_off: the largest difference from the plain module's output.
        gradients_off: the largest difference from the plain module's gradients.
    """

    launched: str
    saved: str
    output_off: float
    gradients_off: float


def train_once(
    phases: tuple[TraceCtx, TraceCtx],
    runtime: RealRanks,
    arguments: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> Outcome:
    runtime.launched.clear()
    into_output = torch.full_like(expected["output"], 1 / expected["output"].numel())  # the gradient of a mean
    output, grads, saved = run(*phases, list(arguments.values()), into_output)
    paths = [name for name in arguments if name != "x"]
    found = {"output": output.detach(), **dict(zip(paths, grads, strict=True))}
    torch.testing.assert_close(found, dict(expected))
    off = {name: (found[name] - expected[name]).abs().max().item() for name in expected}
    launched = ", ".join(f"{number} {kind}" for kind, number in runtime.launched.items())
    return Outcome(launched, saved, off.pop("output"), max(off.values()))


# 16. The lowered trace lets backward read the full down.weight that forward gathered, as ZeRO-2 does. The passes of
#     step 7 make it ZeRO-3 on every rank: forward saves the shard, backward gathers it again; and a layer's parameters
#     travel together. The numbers stay the same.
#
# Each rank sends a report to rank 0, which prints for all: lines of two processes would mix.


@dataclass(frozen=True)
class Report:
    """What one rank holds, its lowered trace without and with notes, and how steps 15 and 16 went."""

    holds: str
    code: str
    noted: list[str]
    lowered: Outcome
    zero3: Outcome


def report_of(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    module, batch = TwoLayers(), torch.randn(BATCH_ROWS * world_size, 4)
    plan = tz.schedule.make_plan(module, POLICY, tz.schedule.Mesh.of(world_size, rank))
    shards, x, runtime = shard(plan, module), own_part(batch, plan), RealRanks(plan)
    executor = ZeroExecutor(plan, runtime)
    traces = traces_of(module, x, executor)
    arguments = {name: shards.get(name, x) for name in traces.names}
    expected = of_the_plain_module(module, batch, plan)
    outcomes = [train_once(each, runtime, arguments, expected) for each in (traces.phases, traces.phases_of_zero3)]
    return Report(holdings(plan, shards), code(traces.lowered), with_notes(traces.lowered, executor), *outcomes)


def show_holdings(reports: Sequence[Report]) -> None:
    words = "All ranks store shards of the same shape: where rows run out, zeros follow."
    show("13. Each rank's part of the batch, and its shards", "\n".join([words, "", *(each.holds for each in reports)]))


def show_traces(reports: Sequence[Report]) -> None:
    first, *others = reports
    words = "As in step 5. The notes say which rows this rank sends to all others, or keeps of the mean gradient."
    show("14. The lowered trace of rank 0", "\n".join([words, "", *first.noted]))
    for rank, other in enumerate(others, 1):
        diff = difflib.unified_diff(first.code.splitlines(), other.code.splitlines(), "rank 0", f"rank {rank}")
        assert first.code == other.code, "\n".join(diff)
        differ = [mine for mine, of_first in zip(other.noted, first.noted, strict=True) if mine != of_first]
        words = f"The same {len(other.noted)} lines, to the letter. Only the notes of these {len(differ)} differ:"
        show(f"14. The lowered trace of rank {rank}", "\n".join([words, "", *differ]))


def show_outcomes(heading: str, words: str, outcomes: Sequence[Outcome]) -> None:
    lines = [words, ""]
    for rank, each in enumerate(outcomes):
        lines += [f"rank {rank}  launches {each.launched}", f"        forward saves {each.saved}"]
        lines += [f"        output off by {each.output_off:.1e}, gradients by {each.gradients_off:.1e}"]
    show(heading, "\n".join(lines))


def show_reports(reports: Sequence[Report]) -> None:
    show_holdings(reports)
    show_traces(reports)
    words = (
        "The numbers are right: output and gradients are this rank's rows of what the plain module\n"
        "computes from the whole batch, off by rounding at most. Forward saves the full down.weight."
    )
    show_outcomes("15. The lowered traces run", words, [each.lowered for each in reports])
    words = "The same numbers from fewer launches. Forward saves a shard of down.weight in its place."
    show_outcomes("16. The traces run in the order of ZeRO-3 (steps 6 to 9)", words, [each.zero3 for each in reports])


def on_rank(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    reports: list[Report | None] = [None] * world_size
    dist.all_gather_object(reports, report_of(rank, world_size))
    if rank == 0:
        show_reports([report for report in reports if report is not None])
    dist.destroy_process_group()


def start_ranks(world_size: int) -> None:
    """Start the ranks and wait for them. If one fails, the others are ended, and its error is raised here."""
    print(
        f"Starting {world_size} processes. Each takes the steps for itself: it captures its module (step 1),\n"
        "shards it (2), inserts synchronises (3) and reductions (4), and lowers (5).",
        flush=True,
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # 0: any free port
    mp.spawn(on_rank, (world_size, store.port), world_size)
