"""Sharded models with attention, convolutions, activations and norms use torch's operators, with eager's gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from examples.bench.attention import measured
from examples.bench.model import Size, make_model
from tests.harness.models import fresh, full, saved, sharded
from tests.harness.operators import FLASH, FLASH_BACKWARD, OF_INPUT, OF_WEIGHT, Attends, names_of_lines
from tests.harness.tiers import deep, slow
from tests.harness.traced import traced
from thunder_zero.compat.thunder.operators.choose import NEVER_FUSED
from thunder_zero.schedule.timeline import Kind, Work
from thunder_zero.traces.work import work_of

import thunder
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from thunder.executors.torch_compile import torch_compile_ex

LENGTH = 17
X = torch.randn(2, 3, LENGTH, generator=torch.Generator().manual_seed(2))


class Checkpointed(Attends):
    """A module that recomputes its attention in backward."""

    def attend(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().attend, x, use_reentrant=False)
        return y


FORWARD = [FLASH, "native_layer_norm", "gelu", "softmax"]


def assert_eagers_gradients(model: nn.Module, plain: nn.Module) -> None:
    for module in (model, plain):
        module(X).square().sum().backward()
    for (name, param), plain_param in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = None if param.grad is None else full(param.grad)
        torch.testing.assert_close(grad, plain_param.grad, rtol=1e-5, atol=1e-6, msg=name)


def attention_matrices(trace: TraceCtx | None) -> set[str]:
    """Return the tensors of a trace whose last two dimensions are both the length of the sequence."""
    outputs = (leaf for line in trace.bound_symbols for leaf in line.flat_proxy_outs) if trace else ()
    return {leaf.name for leaf in outputs if isinstance(leaf, TensorProxy) and tuple(leaf.shape[-2:]) == (LENGTH,) * 2}


@pytest.mark.parametrize("stage", [3, *slow(1)])
def test_a_sharded_model_gets_eagers_gradients(stage: int, group: ProcessGroup) -> None:
    plain = fresh(Attends)
    plain.last.weight.requires_grad_(stage == 3)
    model = sharded(plain, stage)
    assert_eagers_gradients(model, plain)
    last, expected = (module.get_parameter("last.weight").grad for module in (model, plain))
    torch.testing.assert_close(full(last), expected, rtol=0, atol=0)  # no later sum differs from eager's
    traces = tz.traces_of(model)
    assert names_of_lines(traces.forward) == FORWARD
    # Backward recomputes GELU, and the layer norm if its bias is at hand, which backward would not gather for it.
    norm = ["native_layer_norm"] if stage < 2 else []
    last_lines = [OF_INPUT, OF_WEIGHT] if stage == 3 else [OF_INPUT]
    middle = ["softmax_backward", "gelu", "gelu_backward", *norm, "layer_norm_backward", FLASH_BACKWARD]
    assert names_of_lines(traces.backward) == [*last_lines, *middle, OF_WEIGHT]  # the input requires no gradient
    assert not attention_matrices(traces.forward) | attention_matrices(traces.backward)


@pytest.mark.parametrize("fused", [*slow(False), *deep(True)])
def test_a_checkpointed_part_recomputes_its_attention(fused: bool, group: ProcessGroup) -> None:
    plain = fresh(Checkpointed)
    model = sharded(plain, 3, executors=[torch_compile_ex] if fused else None)
    assert_eagers_gradients(model, plain)
    lines = names_of_lines(tz.traces_of(model).backward)
    assert lines[lines.index(FLASH) + 1] == FLASH_BACKWARD


@pytest.mark.slow
def test_fusers_leave_attention_and_convolutions_alone() -> None:
    """Thunder's fuser gets the decomposed activations and norms."""
    traces = traced(Attends, tuple(X.shape), fused=True, frontend="thunder")
    assert any(line.sym.is_fusion for line in traces.forward.bound_symbols)
    assert names_of_lines(traces.forward) == [FLASH]
    assert names_of_lines(traces.backward) == [OF_INPUT, OF_WEIGHT, FLASH_BACKWARD, OF_WEIGHT]


@pytest.mark.slow
def test_bfloat16_uses_the_operators_and_disabling_flash_decomposes_attention() -> None:
    half = tz.MixedPrecision(torch.bfloat16)
    policy = replace(tz.ZERO3, mixed_precision=half, reshard_after_forward=True)
    for frontend, backwards in (("dynamo", 2), ("thunder", 3)):  # aten's operator computes both gradients
        traces = traced(Attends, tuple(X.shape), policy, frontend=frontend)
        assert not attention_matrices(traces.forward) | attention_matrices(traces.backward)
        lines = [line for trace in (traces.forward, traces.backward) if trace for line in trace.bound_symbols]
        works = [work_of(line) for line in lines]
        assert (works.count(Work.ATTENTION), works.count(Work.CONVOLUTION)) == (2, 2 + backwards)
        with sdpa_kernel(SDPBackend.MATH):
            decomposed = tz.trace(Attends(), X, world_size=2, frontend=frontend).forward
        assert Work.ATTENTION not in map(work_of, decomposed.bound_symbols)
        assert attention_matrices(decomposed) & saved(decomposed)
    assert names_of_lines(traces.forward) == FORWARD
    again = {path for op in traces.timeline.ops if op.kind is Kind.GATHER and op.backward for path in op.params}
    assert "last.weight" in again
    assert "first.weight" not in again  # its gradient reads only its shape
    assert FLASH not in names_of_lines(decomposed)


@pytest.mark.slow
def test_inference_and_deferred_gradients_use_the_same_lines(group: ProcessGroup) -> None:
    """Recipe and transform add each executor once."""
    model = thunder.compile(Attends(), plugins=[tz.Zero(stage=3)], recipe=tz.Recipe())
    with torch.no_grad():
        model(X)
    inference = tz.traces_of(model)
    assert (names_of_lines(inference.forward), inference.backward) == (FORWARD, None)
    with model.no_sync():
        model(X).sum().backward()
    deferring = tz.traces_of(model)
    assert names_of_lines(deferring.forward) == FORWARD
    assert {FLASH_BACKWARD, OF_INPUT, OF_WEIGHT} <= set(names_of_lines(deferring.backward))
    executors = list(thunder.compile_data(model).executors_list)
    assert [executors.count(executor) for executor in NEVER_FUSED] == [1] * len(NEVER_FUSED)


@pytest.mark.slow
def test_the_bench_counts_what_attention_saves(group: ProcessGroup) -> None:
    """Decomposed attention saves 2 * 2 * 128 * 128 floats, which are 0.25 MiB."""
    size = Size(blocks=1, width=16, heads=2, vocabulary=16, tokens=128)
    flash, decomposed = (
        float(measured(sharded(make_model(size), 0), size, kernel).partition(",")[0])
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    )
    assert decomposed - flash == pytest.approx(0.25, abs=0.1)
