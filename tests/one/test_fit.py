"""``tz.fit``: the policy that it returns fits by the exact forecast, and what does not fit is refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import product
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised_as
from tests.harness.residual import ResidualBlock
from thunder_zero.dry_run import Interpreted
from thunder_zero.forecast.kinds import Holds
from thunder_zero.report.trace_printer import size
from thunder_zero.report.trade import Trade, print_trade
from thunder_zero.schedule.candidate import Candidate, itemsize
from thunder_zero.schedule.parts import AGAIN, KEPT, KEPT_AND_AGAIN, PLAIN
from thunder_zero.schedule.search import Choices, Search

import thunder
from thunder.executors.torch_compile import torch_compile_ex

pytestmark = pytest.mark.slow

WIDTH, ROWS, BLOCKS = 64, 64, 4
ROUNDING = 1e-12  # costs are sums of floats
UNITS = tuple(f"blocks.{number}" for number in range(BLOCKS))


class OneSize(Search):
    """A search with the asked bytes of buckets alone."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        sizes = self.lifted.plan.sizes
        return ((sizes.bucket_bytes, sizes.in_flight_bytes),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(WIDTH) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x))
        return logits


def net() -> Net:
    with torch.device("meta"):
        return Net()


X = torch.empty(ROWS, WIDTH)
LONG = torch.empty(8 * ROWS, WIDTH)  # activations weigh more than parameters


def forecast(policy: tz.Policy, x: Tensor = X) -> tz.Memory:
    return tz.memory(tz.trace(net(), x, policy=policy, world_size=2), optimizer=torch.optim.SGD)


@cache
def fitted(memory_bytes: int) -> tuple[tz.Policy, str]:
    out = StringIO()
    policy = tz.fit(net(), (X,), memory_bytes=memory_bytes, world_size=2, optimizer=sgd, file=out)
    return policy, out.getvalue()


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)  # type: ignore[arg-type]


def test_it_fits_and_costs_less_with_more_memory() -> None:
    plenty, text = fitted(1 << 30)
    assert plenty.keep_units == tuple(f"blocks.{number}" for number in range(BLOCKS))  # no gather again
    assert plenty.recompute_units == ()
    assert "<- chosen" in text
    most = forecast(plenty).peak
    small = int(0.85 * most)
    tight, _ = fitted(small)
    assert forecast(tight).peak <= small
    assert tight != plenty
    assert fitted(int(1.02 * most))[0] == plenty


def test_what_fits_is_not_refused() -> None:
    """Small buckets need smaller buffers of transports, which the estimate leaves out: a compilation corrects it."""
    budget = int(1.05 * forecast(tz.Policy(bucket_bytes=0, in_flight_bytes=0)).peak)
    policy, _ = fitted(budget)
    assert forecast(policy).peak <= budget


def test_it_fits_the_program_of_other_executors() -> None:
    out = StringIO()
    policy = tz.fit(net(), X, memory_bytes=1 << 30, world_size=2, executors=[torch_compile_ex], file=out)
    assert policy.keep_units == tuple(f"blocks.{number}" for number in range(BLOCKS))


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    kind, text = raised_as(lambda: tz.fit(net(), (X,), memory_bytes=1000, world_size=2, optimizer=sgd))
    assert kind == "DoesNotFit"
    assert text.startswith("no policy fits into 0.98 KiB: the least that was found takes ")
    for word in (" more, with ", " of ", "twice the ranks (about ", "cpu_offload on GPUs (about "):
        assert word in text


def test_a_refusal_has_the_least_and_what_computing_units_again_is_good_for() -> None:
    def fit(memory_bytes: int) -> tz.Policy:
        return tz.fit(net(), (LONG,), memory_bytes=memory_bytes, world_size=2, optimizer=sgd, file=StringIO())

    with pytest.raises(tz.DoesNotFit) as refused:
        fit(1000)
    plain, units = (forecast(tz.Policy(recompute=recompute), LONG).peak for recompute in ("cheap", "units"))
    least = refused.value.least_bytes
    assert least <= forecast(tz.Policy(bucket_bytes=0, in_flight_bytes=0, recompute_units=UNITS), LONG).peak
    words = f'(recompute="units" takes {size(plain - units)} less than the policy as asked for) and 0 B in flight'
    assert words in str(refused.value)
    assert forecast(fit(least), LONG).peak <= least


def test_a_refusal_speaks_of_what_there_is() -> None:
    """Of no units where there are none; of ``recompute="cheap"`` if not asked for. Inputs belong to the batch."""
    with torch.device("meta"):
        plain = nn.Sequential(*(Block(2 * WIDTH) for _ in range(3)))
    asked = tz.Policy(recompute="none", unit_of=lambda module: ())
    kind, text = raised_as(lambda: tz.fit(plain, LONG, memory_bytes=1000, world_size=2, policy=asked))
    assert kind == "DoesNotFit"
    assert "unit" not in text
    found = tz.memory(tz.trace(plain, LONG, policy=asked, world_size=2))
    at = found.by_kind
    batch = sum(at.get(kind, 0) for kind in (Holds.INPUT, Holds.SAVED, Holds.TEMPORARY, Holds.WORKSPACE, Holds.LOSS))
    assert at[Holds.INPUT] == LONG.nbytes
    assert f"half the batch (about {size(batch // 2)} less)" in text
    cheap = tz.memory(tz.trace(plain, LONG, policy=replace(asked, recompute="cheap"), world_size=2)).peak
    assert cheap < found.peak
    assert f'recompute="cheap" (about {size(found.peak - cheap)} less)' in text


def test_units_that_were_asked_for_again_are_saved_where_memory_allows() -> None:
    out = StringIO()
    asked = tz.Policy(recompute="units")
    policy = tz.fit(net(), LONG, memory_bytes=1 << 30, world_size=2, policy=asked, file=out)
    assert (policy.recompute, policy.recompute_units) == ("cheap", ())
    rows = out.getvalue().splitlines()
    assert len(rows) == len({row.split("█")[0] for row in rows})
    kept, again = next(row for row in rows if "<- chosen" in row).split("in flight")[0].split()[4:6]
    assert (kept, again) == (str(BLOCKS), "0")


def test_the_trade_counts_units_that_the_schedule_chose() -> None:
    lifted = tz.trace(net(), X, policy=tz.ZERO3, world_size=2).lifted
    assert lifted is not None
    assert Candidate(lifted, tz.ZERO3).kept == set(UNITS[2:])  # none is named
    assert Candidate(lifted, tz.Policy(keep_units=UNITS[:1])).kept >= {UNITS[0], *UNITS[2:]}
    out = StringIO()
    one = Trade(peak=1000, sent=10, flops=0.0, cost=10.0, kept=1, again=0, in_flight_bytes=0)
    print_trade([one, replace(one, peak=1001, chosen=True), replace(one, kept=2)], Console(file=out, width=100))
    rows = out.getvalue().splitlines()[1:]
    assert ["<- chosen" in row for row in rows] == [True, False]


def test_itemsizes_are_torchs() -> None:
    dtypes = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert {name: itemsize(name.removeprefix("torch.")) for name in dtypes} == {
        name: dtype.itemsize for name, dtype in dtypes.items()
    }


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def test_the_least_is_compiled_before_a_refusal() -> None:
    """What the search finds best takes too much three times; the least, which its estimate ranks below, fits."""
    with torch.device("meta"):
        blocks = nn.Sequential(*map(Block, (64, 512, 128, 256)))

    def peak(policy: tz.Policy) -> int:
        return tz.memory(tz.trace(blocks, LONG, policy=policy, world_size=2), loss=mean_square).peak

    most = peak(tz.Policy(bucket_bytes=0, in_flight_bytes=0, recompute_units=("0", "1", "2", "3")))
    policy = tz.fit(blocks, LONG, memory_bytes=most, world_size=2, loss=mean_square, file=StringIO())
    assert peak(policy) <= most


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize("executors", [None, (torch_compile_ex,)])
def test_one_interpretation_gives_the_traces_of_each_policy(executors: tuple[Any, ...] | None) -> None:
    policies = [
        tz.ZERO3,
        tz.Policy(keep_units=UNITS[1:], recompute_units=UNITS[:2]),
        tz.Policy(bucket_bytes=0, in_flight_bytes=0),
        tz.ZERO3,
    ]
    interpreted = Interpreted(net(), (X,), {}, tz.ZERO3, (2, 0, 1), executors=executors)
    for policy in policies:
        found = interpreted.under(policy)
        expected = tz.trace(net(), X, policy=policy, world_size=2, executors=executors)
        assert found.timeline == expected.timeline
        for half in ("forward", "backward", "epilogue"):
            assert str(getattr(found, half)) == str(getattr(expected, half))


def test_the_search_is_no_worse_than_all_choices() -> None:
    """Of four units, with buckets as asked for, and without any in flight."""
    lifted = tz.trace(net(), X, policy=tz.ZERO3, world_size=2).lifted
    assert lifted is not None
    for asked in (tz.ZERO3, tz.Policy(bucket_bytes=0, in_flight_bytes=0)):
        search = OneSize(replace(lifted, plan=replace(lifted.plan, policy=asked)), asked)
        (sizes,) = search.sizes
        options = product((PLAIN, AGAIN, KEPT, KEPT_AND_AGAIN), repeat=BLOCKS)
        every = [
            Candidate(lifted, Choices.of(dict(zip(UNITS, chosen, strict=True)), sizes).policy(asked))
            for chosen in options
        ]
        least, most = min(one.peak for one in every), max(one.peak for one in every)
        for step in range(11):
            budget = least + (most - least) * step // 10
            best = search.best(budget, lambda sizes: 0)
            assert best is not None
            assert search.candidate(best).peak <= budget
            assert search.candidate(best).cost <= (1 + ROUNDING) * min(one.cost for one in every if one.peak <= budget)
        assert search.best(least - 1, lambda sizes: 0) is None
        assert len(search.evaluated) < len(every)


def test_prices_decide() -> None:
    """Where work costs next to nothing, units are computed again; where it is dear, they are gathered again instead."""
    budget = int(0.95 * forecast(tz.Policy(keep_units=UNITS), LONG).peak)
    cheap, dear = (
        tz.fit(net(), (LONG,), memory_bytes=budget, world_size=2, optimizer=sgd, file=StringIO(), prices=prices)
        for prices in (tz.Prices(flops_per_byte=1e9), tz.Prices(flops_per_byte=0.01, launch_bytes=0))
    )
    assert cheap.recompute_units
    assert not dear.recompute_units


def test_prices_are_checked() -> None:
    with pytest.raises(ValueError, match="flops_per_byte is 0; give a number above 0"):
        tz.Prices(flops_per_byte=0)
    with pytest.raises(ValueError, match="flops_per_byte is 'x'; give a number above 0"):
        tz.Prices(flops_per_byte="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prices is 3; give thunder_zero"):
        tz.fit(net(), (X,), memory_bytes=1 << 30, world_size=2, prices=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="launch_bytes is -1; give a number of bytes, 0 or more"):
        tz.Prices(launch_bytes=-1)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="memory_bytes is 0; give a number of bytes"):
        tz.fit(net(), (X,), memory_bytes=0, world_size=2)
    with pytest.raises(ValueError, match="inputs is 'abc'; give the arguments of forward: a tuple"):
        tz.fit(net(), inputs="abc", memory_bytes=1 << 30, world_size=2)
    with pytest.raises(TypeError, match="fit takes a plain torch module, got ThunderModule; pass the module before"):
        tz.fit(thunder.jit(nn.Linear(2, 2)), (X,), memory_bytes=1 << 30, world_size=2)
    with pytest.raises(ValueError, match="world_size is None, and there is no process group"):
        tz.fit(net(), (X,), memory_bytes=1 << 30)
    with pytest.raises(
        ValueError, match=r"keep_units names 'blocks.9', which is no unit of Net; its units are 'blocks.0'"
    ):
        tz.trace(net(), X, policy=tz.Policy(keep_units=("blocks.9",)))


def test_inputs_by_name() -> None:
    policy = tz.fit(net(), {"x": X}, memory_bytes=1 << 30, world_size=2, policy=2, file=StringIO())
    assert (policy.stage, policy.keep_units, policy.recompute_units) == (2, (), ())
