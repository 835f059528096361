"""``tz.tools.fit``: finds the cheapest policy whose step fits into memory.

The search evaluates candidates on the lifted timeline: the passes run, and ``alive_bytes`` estimates the memory. A few
candidates are compiled, so that ``tz.tools.memory`` forecasts them exactly. The differences correct the estimates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from torch import nn

from thunder_zero.capture.arguments import Fuser
from thunder_zero.comm.agree import on_rank_0
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.slices import mesh_and_slices
from thunder_zero.plan.amounts import bytes_of
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import ZERO3, Policy
from thunder_zero.tools.dry_run import ProgramSource
from thunder_zero.tools.fitting.budget import PLAIN, RECOMPUTED
from thunder_zero.tools.fitting.candidate import USUAL_PRICES, Prices
from thunder_zero.tools.fitting.search import Search
from thunder_zero.tools.fitting.text import LeastMemory, TradeOffRow, print_trade_off, refusal
from thunder_zero.tools.forecast.figures import Memory
from thunder_zero.tools.forecast.memory import memory
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.replay import Loss
from thunder_zero.tools.printing.progress import show_status
from thunder_zero.tools.printing.words import WIDTH
from thunder_zero.traces.compiled import Traces

from thunder.core.module import ThunderModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims

COMPILATIONS = 3  # the most compilations to confirm a choice
STEPS = 7  # the most rows of the printed table

CHOSEN = ("keep_unsharded", "recompute_units", "bucket_bytes", "in_flight_bytes")

Forecast = Callable[[Policy], tuple[Traces, Memory]]


class DoesNotFit(ValueError):
    """Raised if no policy fits. The message has the missing bytes, the contents of the peak, and possible remedies.

    Attributes:
        least_bytes: the smallest exact peak among the compiled policies.
    """

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def fit(
    module: nn.Module,
    *args: Any,
    memory_bytes: int | str,
    world_size: int | None = None,
    policy: Policy | int = ZERO3,
    file: IO[str] | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    backend: str | None = None,
    fuse: Fuser | None = None,
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    reserve: int = 0,
    prices: Prices = USUAL_PRICES,
    **kwargs: Any,
) -> Policy:
    """Return the cheapest policy whose forecast peak fits into ``memory_bytes``.

    The search chooses ``Policy.keep_unsharded``, ``Policy.recompute_units``, and the bytes of buckets and in flight.
    The cost is the bytes that a rank sends, plus launches and recomputed work at ``prices``. The printed table has the
    costs for other amounts of memory. Under ``torchrun`` every rank calls this function, and rank 0 decides.

    >>> policy = tz.tools.fit(module, tokens, memory_bytes="24GiB", world_size=8, optimizer=torch.optim.AdamW)

    Args:
        module: a plain module, possibly on the meta device.
        args, kwargs: the arguments of its forward.
        memory_bytes: memory of a rank, such as ``"24GiB"``. The optimizer's step must fit as well.
        world_size: number of ranks (default: the size of the default process group).
        policy: a policy with the values of all other fields, such as the stage (default: ZeRO-3). ``recompute="units"``
            becomes ``"cheap"``.
        file: the file to print to (default: the standard output).
        loss, optimizer, backend, reserve: as for :func:`thunder_zero.tools.memory`.
        fuse, replicas, mesh, dp_mesh_dims: as for :func:`thunder_zero.trace`.
        prices: prices of recomputed work and of launches (default: ``Prices()``).

    Raises:
        DoesNotFit: no policy fits. This is a subclass of ValueError.
        TypeError: ``module`` is not a plain module.
        ValueError: ``memory_bytes``, ``world_size`` or ``prices`` is invalid, ``world_size`` or ``replicas`` is given
            beside ``mesh``, or the module is sliced over another mesh.
        RuntimeError: the module is sliced, and ``mesh`` is not given.
    """
    _require(module, prices)
    most = bytes_of("memory_bytes", memory_bytes)
    asked = policy if isinstance(policy, Policy) else Policy(policy)
    if mesh is None and dp_mesh_dims is None:
        planned, slices, partial = Mesh.of(_ranks(world_size), replicas=replicas), dict[str, int](), frozenset[str]()
    elif world_size is not None or replicas != 1:
        raise ValueError("mesh says how many ranks there are; leave out world_size and replicas")
    else:
        planned, slices, partial = mesh_and_slices(module, mesh, dp_mesh_dims)
    console = Console(file=file, width=WIDTH)

    def decide(go_on: Callable[[], None]) -> dict[str, Any]:
        with show_status("tz.tools.fit") as show:

            def tell(what: str) -> None:
                show(what)
                go_on()  # keeps the waiting ranks from timing out

            def forecast(policy: Policy) -> tuple[Traces, Memory]:
                tell("compiles a choice")
                traces = captured.under(policy)
                return traces, memory(traces, loss=loss, optimizer=optimizer, backend=backend, reserve=reserve)

            tell("captures the module")
            captured = ProgramSource(module, args, kwargs, asked, planned, fuse=fuse, slices=slices, partial=partial)
            compiled, best = _choose(forecast, asked, most, prices, tell)
            rows = list(_trade_off(compiled, best))
        print_trade_off(rows, console)
        return {name: getattr(best, name) for name in CHOSEN}  # functions in a policy cannot be sent

    return replace(_by_unit(asked), **on_rank_0("tz.tools.fit", decide))


def _by_unit(asked: Policy) -> Policy:
    """Replace ``recompute="units"`` by ``"cheap"``, since the search chooses ``recompute_units``."""
    return replace(asked, recompute="cheap") if asked.recompute == "units" else asked


def _ranks(world_size: int | None) -> int:
    if world_size is not None:
        return world_size
    if not has_groups():
        raise ValueError("world_size is None, and there is no process group; give the number of ranks")
    return process_group(None).size()


def _require(module: nn.Module, prices: Prices) -> None:
    if not isinstance(module, nn.Module) or isinstance(module, ThunderModule):
        raise TypeError(
            f"fit takes a plain torch module, got {type(module).__name__}; pass the module before thunder.jit"
        )
    if not isinstance(prices, Prices):
        raise ValueError(f"prices is {prices!r}; give thunder_zero.tools.Prices, such as Prices(flops_per_byte=1000.0)")


def _choose(
    forecast: Forecast, asked: Policy, memory_bytes: int, prices: Prices, tell: Callable[[str], None]
) -> tuple[_Compiled, Policy]:
    """Search, and compile the best choices. Return the compiled policies and the best policy."""
    traces, as_asked = forecast(asked)
    if traces.backward is None:
        raise ValueError("nothing here needs a gradient, so there is no step to fit; call it outside torch.no_grad()")
    search = Search(traces.lifted, _by_unit(asked), prices, lambda count: tell(f"evaluates schedule {count + 1}"))
    recomputed = tuple(unit for unit in traces.plan.units if unit in traces.plan.recomputed)
    requested = replace(search.sized[0], recompute_units=recomputed)
    compiled = _Compiled(forecast, search, {requested: as_asked.peak})
    best = None
    if (as_asked.optimizer_step or 0) <= memory_bytes:
        best = _confirm(compiled, memory_bytes) or _fit_least(compiled, memory_bytes)
    if best is None:
        raise _refused(compiled, as_asked, memory_bytes)
    return compiled, best


def _confirm(compiled: _Compiled, memory_bytes: int) -> Policy | None:
    """Compile the best policies of the search. Return the cheapest compiled policy that fits, if any."""
    for _ in range(COMPILATIONS):
        policy = compiled.search.best(memory_bytes, compiled.overhead)
        if policy is None or policy in compiled.exact:
            break
        compiled.add(policy)
    return compiled.cheapest(memory_bytes)


def _fit_least(compiled: _Compiled, memory_bytes: int) -> Policy | None:
    """Compile policies of low memory until a policy fits. Return the cheapest compiled policy that fits, if any.

    Policies with one choice for all units come first, since wrongly corrected estimates could rule them out. The
    requested policy with all units recomputed is also compiled, because the error names its exact peak.
    """
    search = compiled.search
    finders = [partial(search.alike, choice, search.sized[-1]) for choice in (RECOMPUTED, PLAIN)]
    finders += [partial(_all_recomputed, compiled)] * bool(search.units)
    for find in (*finders, partial(search.least_alike, compiled.overhead), partial(search.least, compiled.overhead)):
        policy = find()
        if policy not in compiled.exact and compiled.add(policy) <= memory_bytes:
            break
    return compiled.cheapest(memory_bytes)


def _all_recomputed(compiled: _Compiled) -> Policy:
    return replace(next(iter(compiled.exact)), recompute_units=compiled.search.units)


def _refused(compiled: _Compiled, as_asked: Memory, memory_bytes: int) -> DoesNotFit:
    """Return the error for a search in which no policy fits. The error has the smallest exact peak."""
    if as_asked.optimizer_step is not None and as_asked.optimizer_step > memory_bytes:
        _fit_least(compiled, memory_bytes)  # the message compares the least peak with the step
    least = _least(compiled, as_asked.optimizer_step or 0)
    return DoesNotFit(refusal(as_asked, least, memory_bytes), least.nbytes)


@dataclass(frozen=True)
class _Compiled:
    """The compiled policies and their exact peaks. The first policy is the requested policy."""

    forecast: Forecast
    search: Search
    exact: dict[Policy, int]

    def add(self, policy: Policy) -> int:
        """Compile a policy, and return its peak."""
        self.exact[policy] = self.forecast(policy)[1].peak
        return self.exact[policy]

    def overhead(self, policy: Policy) -> int:
        """Return the bytes that the estimate leaves out: memory at rest, the loss, and buffers of transports.

        Buffers depend on bucket sizes. So the bytes come from the last compiled policy with equal bucket sizes, or else
        from the first policy.
        """
        equal_sized = [compiled for compiled in self.exact if _sizes(compiled) == _sizes(policy)]
        compiled = equal_sized[-1] if equal_sized else next(iter(self.exact))
        return self.exact[compiled] - self.search.candidate(compiled).peak

    def peak(self, policy: Policy) -> int:
        """Return the exact peak of a compiled policy, or else the corrected estimate."""
        if policy in self.exact:
            return self.exact[policy]
        return self.search.candidate(policy).peak + self.overhead(policy)

    def cheapest(self, memory_bytes: int) -> Policy | None:
        """Return the cheapest compiled policy that fits, if any."""
        fitting = [policy for policy, peak in self.exact.items() if peak <= memory_bytes]
        return min(fitting, key=self.search.cost, default=None)


def _sizes(policy: Policy) -> tuple[int | None, int | None]:
    return policy.bucket_bytes, policy.in_flight_bytes


def _least(compiled: _Compiled, optimizer_step: int) -> LeastMemory:
    """Return the least memory among the compiled policies, and the bytes that ``recompute`` saves."""
    policy, peak = min(compiled.exact.items(), key=lambda item: item[1])
    search, first = compiled.search, next(iter(compiled.exact))
    as_asked, plan = search.candidate(first), search.candidate(policy).timeline.plan
    cheap = replace(as_asked, policy=replace(first, recompute="cheap"))
    return LeastMemory(
        nbytes=max(peak, optimizer_step),
        recomputed=len(plan.recomputed) if search.units else None,
        saved_by_units=compiled.peak(first) - compiled.peak(_all_recomputed(compiled)),
        saved_by_cheap=as_asked.peak - cheap.peak if first.recompute == "none" else 0,
        in_flight_bytes=plan.sizes.in_flight_bytes,
    )


def _trade_off(compiled: _Compiled, best: Policy) -> Iterator[TradeOffRow]:
    """Yield rows for policies from the least memory to the least cost, including the chosen policy."""
    search, overhead, peak_of = compiled.search, compiled.overhead, compiled.peak
    cheapest_of_all = search.about(sys.maxsize, overhead) or best
    least_bytes, most_bytes = peak_of(search.least_alike(overhead)), peak_of(cheapest_of_all)
    targets = [least_bytes + (most_bytes - least_bytes) * step // (STEPS - 1) for step in range(STEPS)]
    policies = {policy for target in targets if (policy := search.about(target, overhead)) is not None}
    cost = float("inf")
    for policy in sorted({*policies, best}, key=lambda policy: (peak_of(policy), search.cost(policy))):
        if search.cost(policy) < cost or policy == best:
            cost = min(cost, search.cost(policy))
            yield peak_of(policy), search.candidate(policy), policy == best
