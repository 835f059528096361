"""With ``tz.compile(fuse="inductor")``, inductor compiles the regions between lines of the schedule."""

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
from tests.harness.tiers import deep
from thunder_zero.compat.inductor import HoldsForSomeSizes, kernel

from thunder.core.proxies import IntegerProxy

pytestmark = pytest.mark.usefixtures("group")
WORDS = 16
KERNEL = "thunder_zero.traces.kernels.kernel"


class Part(nn.Module):
    """A residual block. Its dropout is in no region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)
        return y


class Parts(nn.Module):
    """A language model of three equal blocks, which returns its loss and its logits."""

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


def take_step(model: Any, tokens: Tensor) -> list[Tensor]:
    """Take a step with a fixed seed; return the loss and the gradients."""
    model.zero_grad()
    torch.manual_seed(0)
    loss, _ = model(tokens)
    loss.backward()
    return [loss.detach(), *(param.grad.to_local() for param in model.parameters())]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=2e-5, atol=2e-6)


def compile_both(**options: Any) -> tuple[Any, Any]:
    """Compile equal models, with regions and without."""
    module = fresh(Parts)
    return tz.compile(deepcopy(module), 3, fuse="inductor", **options), tz.compile(module, 3, **options)


def regions_of(trace: Any) -> list[Any]:
    return [line for line in trace.bound_symbols if line.sym.is_fusion]


@pytest.mark.slow
def test_equal_blocks_are_compiled_once_and_any_length_runs_in_the_second_program() -> None:
    """Length 5 has its own program; 9, 7 and 12 share a dynamic one. The logits get no gradient."""
    fused, plain = compile_both()
    with mock.patch(KERNEL, wraps=kernel) as compiled, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for length in (5, 9):
            assert_same(take_step(fused, tokens_of(length)), take_step(plain, tokens_of(length)))
        kernels = compiled.call_count
        for length in (7, 12):
            assert_same(take_step(fused, tokens_of(length)), take_step(plain, tokens_of(length)))
        assert compiled.call_count == kernels
    traces = tz.traces_of(fused)
    assert traces.backward is not None
    all_regions = [*regions_of(traces.forward), *regions_of(traces.backward)]
    assert kernels < 2 * len(all_regions)
    assert len(tz.tools.programs(fused)) == 2
    torch._dynamo.reset()
    hits, misses = (counters["inductor"][f"fxgraph_cache_{outcome}"] for outcome in ("hit", "miss"))
    recompiled, _ = compile_both()
    for length in (5, 9):  # from inductor's cache files, as in the next process
        take_step(recompiled, tokens_of(length))
    assert counters["inductor"]["fxgraph_cache_miss"] == misses
    assert counters["inductor"]["fxgraph_cache_hit"] > hits


class EqualRegions(nn.Module):
    """A module with equal regions that a third one reads, and a region that stays in float32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # two regions, each followed by a random line
        pairs = [((item * 2).tanh() * 3, torch.rand_like(item)) for item in (x, y)]
        results = (pairs[0][0] - pairs[1][0], pairs[0][1] * pairs[1][1])
        hidden = [F.dropout(self.one(item), 0.5) for item in results]
        scaled = [self.two(item).tanh() * weight for weight, item in enumerate(hidden, 1)]
        with torch.autocast("cpu", enabled=False):
            exact = (hidden[0].float() @ hidden[1].float().T).exp()
        return (torch.stack(scaled) * hidden[0] / hidden[1].cosh()).sum() * self.scale + exact.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "autocast"), [(0, True), (3, False), *deep((0, False), (3, True))])
def test_regions_that_look_the_same_have_their_own_values(stage: int, autocast: bool) -> None:
    """In stage 0 a replicated parameter is cast; under autocast one region stays in float32."""
    module, x = fresh(EqualRegions), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).unbind()
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
                inferred = model.eval()(*x)
        grads = (full(param.grad) for param in model.parameters() if param.grad is not None)
        results.append([y.detach(), inferred.clone(), *grads])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert (actual - expected).norm() <= (3e-2 if autocast else 2e-5) * expected.norm()


def test_a_trace_shows_regions_between_lines_of_the_schedule() -> None:
    traces = tz.trace(fresh(Parts), tokens_of(5), world_size=2, fuse="inductor", dynamic=True)
    assert traces.backward is not None
    first, *_ = regions_of(traces.forward)
    assert first.sym.name == "inductor_0"
    names = [line.sym.name for region in regions_of(traces.forward) for line in region.subsymbols]
    assert {"native_layer_norm", "gelu", "native_dropout"}.intersection(names) == {"native_layer_norm", "gelu"}
    symbols = {proxy.name for proxy in traces.forward.args if isinstance(proxy, IntegerProxy)}
    assert len(symbols) == 2  # the batch and the length
    for region in (*regions_of(traces.forward), *regions_of(traces.backward)):
        assert symbols <= {proxy.name for proxy in region.flat_proxy_args}  # even if no line reads them
    for launch in (line for line in traces.backward.bound_symbols if line.sym.name.startswith("zero_")):
        assert not launch.subsymbols


@pytest.mark.slow
def test_code_that_holds_for_some_sizes_runs_line_by_line() -> None:
    fused, plain = compile_both()
    with (
        mock.patch(KERNEL, side_effect=HoldsForSomeSizes("s0 <= 64")),
        pytest.warns(UserWarning, match=r"Parts: inductor's code of a region, .* would hold for some sizes only"),
    ):
        assert_same(take_step(fused, tokens_of(5)), take_step(plain, tokens_of(5)))


def test_other_fusers_are_refused_and_failures_of_inductor_are_explained() -> None:
    with pytest.raises(ValueError, match=r"fuse is 'nvfuser'; choose 'inductor'"):
        tz.compile(fresh(Parts), 3, fuse="nvfuser")  # type: ignore[arg-type]
    fused, _ = compile_both()
    with (
        mock.patch(KERNEL, side_effect=RuntimeError("InvalidCxxCompiler: no compiler")),
        pytest.raises(RuntimeError, match=r"Parts: inductor cannot compile a region, .*: InvalidCxx.*leave out"),
    ):
        fused(tokens_of(5))
