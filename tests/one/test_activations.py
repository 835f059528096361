"""GELU, SiLU, softmax and layer norm: one line of a trace each way, with the bits of eager torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import fresh, sharded
from tests.harness.tiers import only
from thunder_zero.trace.operators.activations import activations_ex

import thunder
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.torch_compile import torch_compile_ex

ROWS, WIDTH = 3, 8
X = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
W, B = torch.linspace(0.5, 2, WIDTH), torch.linspace(-1, 1, WIDTH)
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "gelu": (F.gelu, ["gelu", "gelu_backward"]),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), ["gelu", "gelu_backward"]),
    "silu": (F.silu, ["silu", "silu_backward"]),
    "softmax": (lambda x: F.softmax(x, -1), ["softmax", "softmax_backward"]),
    "softmax, first dimension": (lambda x: F.softmax(x, 0), ["softmax", "softmax_backward"]),
    "softmax, its own dtype": (lambda x: torch.softmax(x, 1, dtype=x.dtype), ["softmax", "softmax_backward"]),
    "layer norm": (lambda x: F.layer_norm(x, (WIDTH,)), ["native_layer_norm", "layer_norm_backward"]),
    "layer norm, two dimensions": (
        lambda x: F.layer_norm(x, (ROWS, WIDTH), eps=0.1),
        ["native_layer_norm", "layer_norm_backward"],
    ),
    "layer norm of another view": (
        lambda x: F.layer_norm(x.transpose(0, 1), (WIDTH,)),
        ["native_layer_norm", "layer_norm_backward"],
    ),
    # What Thunder decomposes, as before.
    "silu in place": (lambda x: F.silu(x * 1, inplace=True), []),
    "softmax in another dtype": (lambda x: F.softmax(x, -1, dtype=torch.float16), []),
    "layer norm with a bias alone": (lambda x: F.layer_norm(x, (WIDTH,), None, B.to(x.dtype)), []),
}


def lines(*traces: TraceCtx | None) -> list[str]:
    return [line.sym.name for trace in traces if trace for line in trace.bound_symbols if is_ours(line)]


def is_ours(line: BoundSymbol) -> bool:
    return bool(line.sym.executor == activations_ex)


def run(call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """The output, and the gradients of what is given."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    output = call(*leaves)
    draw = torch.Generator().manual_seed(0)
    grad = torch.randn(output.shape, generator=draw).to(output.dtype)
    return [output, *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("call", "names"), CALLS.values(), ids=CALLS)
def test_outputs_and_gradients_have_eagers_bits(
    call: Callable[[Tensor], Tensor], names: list[str], dtype: torch.dtype
) -> None:
    jitted = thunder.jit(call, executors=[activations_ex, *thunder.get_default_executors()])
    for found, right in zip(run(jitted, X.to(dtype)), run(call, X.to(dtype)), strict=True):
        if names:
            assert torch.equal(found, right)
        assert (found.dtype, found.shape) == (right.dtype, right.shape)
    assert lines(thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]) == names


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_norm_has_the_gradients_of_its_parameters(dtype: torch.dtype, has_bias: bool) -> None:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weight, bias)

    given = [tensor.to(dtype) for tensor in (X, W, B)[: 2 + has_bias]]
    jitted = thunder.jit(call, executors=[activations_ex, *thunder.get_default_executors()])
    for found, right in zip(run(jitted, *given), run(call, *given), strict=True):
        assert torch.equal(found, right)


def like(arg: object, device: str) -> object:
    """Zeros for a proxy; what is no proxy as it is."""
    if not isinstance(arg, thunder.TensorProxy):
        return arg
    return torch.zeros(tuple(arg.shape), dtype=thunder.core.dtypes.to_torch_dtype(arg.dtype), device=device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, (_, names) in CALLS.items() if names])
def test_traces_say_the_shapes_and_dtypes_of_the_lines(name: str, dtype: torch.dtype) -> None:
    jitted = thunder.jit(CALLS[name][0], executors=[activations_ex, *thunder.get_default_executors()])
    run(jitted, X.to(dtype))
    for trace in (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]):
        for line in filter(is_ours, trace.bound_symbols):
            real = tree_iter(line._call_ctx[line.sym.name](*(like(arg, "cpu") for arg in line.args)))
            for output, result in zip(line.flat_outs, real, strict=True):
                seen = tuple(output.shape), thunder.core.dtypes.to_torch_dtype(output.dtype)
                assert seen == (tuple(result.shape), result.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.softmax(self.down.forward(F.gelu(self.up.forward(self.norm.forward(x)))), -1)
        return y


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", only(("3",), {"0": 0, "1": 1, "2": 2, "3": 3}).values())
def test_a_sharded_module_has_eagers_bits(stage: int) -> None:
    plain = fresh(Net)
    model = sharded(plain, stage)
    for module in (model, plain):
        module(X).square().sum().backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-6, atol=1e-7)
    traces = tz.traces_of(model)
    assert lines(traces.forward) == ["native_layer_norm", "gelu", "softmax"]
    # GELU is computed again, and a layer norm where its bias, which backward does not read, is there anyway.
    norm = ["native_layer_norm"] if stage < 2 else []
    assert lines(traces.backward) == ["softmax_backward", "gelu", "gelu_backward", *norm, "layer_norm_backward"]


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_a_fuser_gets_the_parts() -> None:
    model = sharded(Net(), 3, executors=[torch_compile_ex])
    model(X)
    traces = tz.traces_of(model)
    assert lines(traces.forward, traces.backward) == []
    assert any(line.sym.is_fusion for line in traces.forward.bound_symbols)
