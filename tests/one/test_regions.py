"""What lies between two lines of the schedule, compiled by inductor: ``tz.compile(fuse="inductor")``."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness.models import fresh, full
from thunder_zero.compat.inductor import HoldsForSomeSizes, kernel

from thunder.core.proxies import IntegerProxy

pytestmark = pytest.mark.usefixtures("group")
WORDS = 16
KERNEL = "thunder_zero.frontends.dynamo.kernels.kernel"


class Part(nn.Module):
    """A residual block, whose dropout no region contains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)
        return y


class Parts(nn.Module):
    """Three equal blocks; returns logits beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.parts, self.head = (
            nn.Embedding(WORDS, 8),
            nn.ModuleList(Part() for _ in range(3)),
            nn.Linear(8, WORDS),
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


def tokens_of(length: int) -> Tensor:
    return torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(length))


def step(model: Any, tokens: Tensor) -> list[Tensor]:
    """The loss and the gradients of a step, whose dropout is that of one seed."""
    model.zero_grad()
    torch.manual_seed(0)
    loss, _ = model(tokens)
    loss.backward()
    return [loss.detach(), *(param.grad.to_local() for param in model.parameters())]


def assert_same(mine: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def both(**options: Any) -> tuple[Any, Any]:
    """A model with regions, and the same one without."""
    module = fresh(Parts)
    return tz.compile(deepcopy(module), 3, fuse="inductor", **options), tz.compile(module, 3, **options)


def regions(trace: Any) -> list[Any]:
    return [line for line in trace.bound_symbols if line.sym.is_fusion]


@pytest.mark.slow
def test_equal_blocks_are_compiled_once_and_any_length_runs_in_the_second_program() -> None:
    """Lengths 5, 9, 7, 12: the first has a program, the others share one with symbols, the logits without a tangent."""
    fused, plain = both()
    with mock.patch(KERNEL, wraps=kernel) as compiled, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for length in (5, 9):
            assert_same(step(fused, tokens_of(length)), step(plain, tokens_of(length)))
        made = compiled.call_count
        for length in (7, 12):
            assert_same(step(fused, tokens_of(length)), step(plain, tokens_of(length)))
        assert compiled.call_count == made
    traces = tz.traces_of(fused)
    assert traces.backward is not None
    there = [*regions(traces.forward), *regions(traces.backward)]
    assert made < 2 * len(there)
    assert len(tz.tools.programs(fused)) == 2
    torch._dynamo.reset()
    hits, misses = (counters["inductor"][f"fxgraph_cache_{each}"] for each in ("hit", "miss"))
    again, _ = both()
    for length in (5, 9):  # as in the next process: from inductor's files
        step(again, tokens_of(length))
    assert counters["inductor"]["fxgraph_cache_miss"] == misses
    assert counters["inductor"]["fxgraph_cache_hit"] > hits


class Twice(nn.Module):
    """Equal regions, whose results one region reads; a region in float32 inside of autocast; a product of one part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = [
            ((each * 2).tanh() * 3, torch.rand_like(each)) for each in (x, y)
        ]  # two regions, a random line behind each
        both = [F.dropout(self.one(each), 0.5) for each in (made[0][0] - made[1][0], made[0][1] * made[1][1])]
        alike = [self.two(each).tanh() * weight for weight, each in enumerate(both, 1)]
        with torch.autocast("cpu", enabled=False):
            exact = (both[0].float() @ both[1].float().T).exp()
        return (torch.stack(alike) * both[0] / both[1].cosh()).sum() * self.scale + exact.sum()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_regions_that_look_the_same_have_values_of_their_own(stage: int, autocast: bool) -> None:
    """In stage 0 a parameter is cast where it is replicated; under autocast an island stays in float32."""
    module, x = fresh(Twice), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).unbind()
    policy = tz.Policy(stage, mixed_precision=tz.MixedPrecision(torch.bfloat16 if autocast else torch.float32))
    fused, plain = (tz.compile(deepcopy(module), policy, fuse=fuse) for fuse in ("inductor", None))
    results = []
    for model in (fused, plain):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with model.no_sync():
                model(*x).backward()
            y = model(*x)
            y.backward()
            with torch.inference_mode():
                alone = model.eval()(*x)
        grads = (full(param.grad) for param in model.parameters() if param.grad is not None)
        results.append([y.detach(), alone.clone(), *grads])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= (3e-2 if autocast else 2e-5) * other.norm()


def test_a_trace_shows_regions_between_lines_of_the_schedule() -> None:
    traces = tz.trace(fresh(Parts), tokens_of(5), world_size=2, fuse="inductor", dynamic=True)
    assert traces.backward is not None
    first, *_ = regions(traces.forward)
    assert first.sym.name == "inductor_0"
    names = [line.sym.name for region in regions(traces.forward) for line in region.subsymbols]
    assert {"native_layer_norm", "gelu", "native_dropout"}.intersection(names) == {"native_layer_norm", "gelu"}
    symbols = {proxy.name for proxy in traces.forward.args if isinstance(proxy, IntegerProxy)}
    assert len(symbols) == 2  # the batch and the length
    for region in (*regions(traces.forward), *regions(traces.backward)):
        assert symbols <= {proxy.name for proxy in region.flat_proxy_args}  # whether a line reads them or not
    for sent in (line for line in traces.backward.bound_symbols if line.sym.name.startswith("zero_")):
        assert not sent.subsymbols


def test_code_that_holds_for_some_sizes_runs_line_by_line() -> None:
    fused, plain = both()
    with (
        mock.patch(KERNEL, side_effect=HoldsForSomeSizes("s0 <= 64")),
        pytest.warns(UserWarning, match=r"Parts: inductor's code of a region, .* would hold for some sizes only"),
    ):
        assert_same(step(fused, tokens_of(5)), step(plain, tokens_of(5)))


def test_it_refuses_another_fuser_and_says_what_failed() -> None:
    with pytest.raises(ValueError, match=r"fuse is 'nvfuser'; choose 'inductor'"):
        tz.compile(fresh(Parts), 3, fuse="nvfuser")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"executors are those of thunder.jit; pass frontend='thunder', or fuse="):
        tz.trace(fresh(Parts), tokens_of(5), executors=["any"])
    with pytest.raises(ValueError, match=r"fuse is 'inductor', and frontend is 'thunder'; pass executors="):
        tz.trace(fresh(Parts), tokens_of(5), fuse="inductor", frontend="thunder")
    fused, _ = both()
    with (
        mock.patch(KERNEL, side_effect=RuntimeError("InvalidCxxCompiler: no compiler")),
        pytest.raises(RuntimeError, match=r"Parts: inductor cannot compile a region, .*: InvalidCxx.*leave out"),
    ):
        fused(tokens_of(5))
