"""``tz.fit``: the cheapest policy whose step fits into memory.

Candidates are evaluated on the lifted timeline: the passes run with each candidate's policy, and ``alive.py`` estimates
the bytes. The difference from the exact forecast (``tz.memory``) of one compilation corrects the estimate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from torch import Tensor, nn

from thunder_zero.comm.decide import on_rank_0, ranks_of_default_group
from thunder_zero.compiled import Traces
from thunder_zero.dry_run import trace
from thunder_zero.forecast.figures import Memory
from thunder_zero.forecast.kinds import Holds
from thunder_zero.forecast.memory import memory
from thunder_zero.policy import ZERO3, Policy, is_count
from thunder_zero.report.trace_printer import size
from thunder_zero.report.trade import Trade, print_trade
from thunder_zero.schedule.search import Choices, Search

COMPILATIONS = 3  # that confirm a choice
STEPS = 7  # of the printed trade

Forecast = Callable[[Policy], tuple[Traces, Memory]]


class DoesNotFit(ValueError):
    """No policy fits. The message says by how many bytes, what makes the peak, and what would help."""


def fit(
    module: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    memory_bytes: int,
    world_size: int | None = None,
    policy: Policy | int = ZERO3,
    file: IO[str] | None = None,
    reserve: int = 0,
    **figures: Any,
) -> Policy:
    """The policy whose forecast peak fits into ``memory_bytes`` and whose step costs least.

    Decides for each unit whether it stays gathered from forward to backward (``Policy.keep_units``) and whether it is
    computed again whole (``Policy.recompute_units``), and for all the bytes of buckets and in flight. The cost is the
    bytes that a rank sends, with a thousand FLOPs of work done again as much as a byte. Prints what further memory
    would save. Under ``torchrun`` every rank calls it, and rank 0 decides.

    >>> policy = tz.fit(model, (tokens,), memory_bytes=40 << 30, world_size=8, optimizer=torch.optim.AdamW)
    >>> model = thunder.jit(model, transforms=[tz.ZeroTransform(policy)])

    Args:
        module: a plain module; it may be on the meta device.
        inputs: the arguments of its forward: a sequence, one tensor, or a mapping of keyword arguments.
        memory_bytes: what the peak of a step, the optimizer's included, may take on a rank.
        world_size: number of ranks; None: those of the default process group.
        policy: what else to ask for, such as the stage (default: ZeRO-3).
        file: where to print; the standard output if None.
        reserve: bytes that the forecast cannot see.
        figures: ``loss``, ``optimizer`` and ``backend`` of :func:`thunder_zero.memory`.

    Raises:
        DoesNotFit: no policy fits; a ValueError.
        ValueError: ``memory_bytes`` or ``world_size`` is not a number of bytes, or of ranks.
    """
    if not is_count(memory_bytes) or not memory_bytes:
        raise ValueError(f"memory_bytes is {memory_bytes!r}; give a number of bytes, such as 40 << 30")
    asked = policy if isinstance(policy, Policy) else Policy(policy)
    args = () if isinstance(inputs, Mapping) else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    ranks = ranks_of_default_group() if world_size is None else world_size
    if ranks is None:
        raise ValueError("world_size is None, and there is no process group; give the number of ranks")

    def forecast(candidate: Policy) -> tuple[Traces, Memory]:
        traces = trace(module, *args, policy=candidate, world_size=ranks, **kwargs)
        return traces, memory(traces, reserve=reserve, **figures)

    console = Console(file=file, width=100)
    return on_rank_0("tz.fit", lambda: _decided(forecast, asked, memory_bytes, console)).policy(asked)


def _decided(forecast: Forecast, asked: Policy, memory_bytes: int, console: Console) -> Choices:
    """Search, and confirm by compilations; print the trade."""
    traces, exact = forecast(asked)
    if traces.lifted is None or traces.backward is None:
        raise ValueError("nothing here needs a gradient, so there is no step to fit; call it outside torch.no_grad()")
    search = Search(traces.lifted, asked)
    asked_for = Choices(asked.keep_units, asked.recompute_units, asked.bucket_bytes, asked.in_flight_bytes)
    beside = exact.peak - search.candidate(asked_for).peak  # what the estimate leaves out
    stepping = exact.optimizer_step or 0
    target = memory_bytes - beside
    best: Choices | None = None
    for _ in range(COMPILATIONS):
        best = search.best(target) if stepping <= memory_bytes else None
        if best is None:
            raise DoesNotFit(_refusal(search, exact, beside, memory_bytes))
        peak = forecast(best.policy(asked))[1].peak
        if peak <= memory_bytes:
            break
        target -= peak - memory_bytes
    else:
        raise DoesNotFit(_refusal(search, exact, beside, memory_bytes))
    print_trade(list(_trade(search, beside, best)), console)
    return best


def _trade(search: Search, beside: int, best: Choices) -> Iterator[Trade]:
    """Choices from the least memory to the least cost, with the one that was made."""
    cheapest_of_all = search.best(sys.maxsize)
    assert cheapest_of_all is not None
    least, most = search.least, search.candidate(cheapest_of_all).peak
    targets = [least + (most - least) * step // (STEPS - 1) for step in range(STEPS)]
    found = dict.fromkeys(choices for target in targets if (choices := search.best(target)) is not None)
    cost = float("inf")
    for choices in sorted({*found, best}, key=lambda choices: search.candidate(choices).peak):
        one = search.candidate(choices)
        if one.cost >= cost and choices != best:
            continue
        cost = one.cost
        yield Trade(
            peak=one.peak + beside,
            sent=one.sent,
            flops=one.flops,
            cost=one.cost,
            kept=len(choices.keep_units),
            again=len(choices.recompute_units),
            in_flight_bytes=choices.in_flight_bytes,
            chosen=choices == best,
        )


def _refusal(search: Search, exact: Memory, beside: int, memory_bytes: int) -> str:
    """What is missing, what makes the peak, and what would help."""
    step = exact.optimizer_step or 0
    least = max(search.least + beside, step)
    kinds = ", ".join(f"{size(nbytes)} of {kind}" for kind, nbytes in list(exact.by_kind.items())[:3])
    at = exact.by_kind
    sharded = sum(at.get(kind, 0) for kind in (Holds.PARAMETER, Holds.OPTIMIZER, Holds.REDUCED_GRADIENT))
    batch = sum(at.get(kind, 0) for kind in (Holds.SAVED, Holds.TEMPORARY, Holds.LOSS))
    helps = [f"twice the ranks (about {size(sharded // 2)} less)", f"half the batch (up to {size(batch // 2)} less)"]
    if not search.asked.cpu_offload:
        helps.append(f"cpu_offload on GPUs ({size(sharded)} less)")
    return (
        f"no policy fits into {size(memory_bytes)}: the least that a step takes is {size(least)}, "
        f"{size(max(least - memory_bytes, 0))} more, with all units computed again and none kept"
        f"{'' if step < least else ' (its peak is in the optimizer)'}; the peak as asked for, {size(exact.peak)}, has "
        f"{kinds}; what would help: {', '.join(helps)}"
    )
