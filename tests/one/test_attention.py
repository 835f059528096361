"""Attention on the CPU: one line of a trace each way, with the bits of eager torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from examples.bench.attention import measured
from examples.bench.model import Size, make_model
from tests.harness.models import error, fresh, saved, sharded
from tests.harness.tiers import only
from thunder_zero.schedule.timeline import Work
from thunder_zero.trace.operators.attention import attention_ex, is_flash
from thunder_zero.trace.work_classes import work_of

import thunder
from thunder.core.devices import Device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.torch_compile import torch_compile_ex
from thunder.extend import Executor

BATCH, HEADS, QUERIES, WIDTH = 2, 3, 9, 8
FORWARD, BACKWARD, OF_MASK = (f"cpu_flash_attention{end}" for end in ("", "_backward", "_mask_backward"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASKS = ((QUERIES, 13), (BATCH, HEADS, QUERIES, 13), (1, 1, QUERIES, 13), (BATCH, 1, 1, 13), (QUERIES, 1))
CONTEXT, BLOCKS = 16, 2
X = torch.randn(2, CONTEXT, WIDTH, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True)
class Case:
    """Attention of random inputs whose memory is (batch, length, heads, width), as that of a GPT's."""

    dtype: torch.dtype = torch.float32
    keys: int = 13
    is_causal: bool = False
    scale: float | None = None
    mask: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.is_causal, scale=self.scale
        )

    def run(self, call: Callable[..., Tensor]) -> list[Tensor]:
        """The output, and the gradients of query, key, value and a learned mask."""
        draw = torch.Generator().manual_seed(0)
        lengths = QUERIES, self.keys, self.keys
        given = [torch.randn(BATCH, length, HEADS, WIDTH, generator=draw).to(self.dtype) for length in lengths]
        leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in given]
        learned = [] if self.mask is None or not self.mask.requires_grad else [self.mask]
        output = call(*leaves, self.mask)
        grad = torch.randn(output.shape, generator=draw).to(self.dtype)
        return [output, *torch.autograd.grad(output, [*leaves, *learned], grad)]

    def jitted(self) -> Any:
        return thunder.jit(self, executors=tz.Recipe().setup_executors())


def attention_lines(*traces: TraceCtx | None) -> list[list[str]]:
    """The names of the lines of each trace that belong to attention."""
    return [
        [line.sym.name for line in trace.bound_symbols if "attention" in line.sym.name]
        for trace in traces
        if trace is not None
    ]


def traced_lines(jitted: Any) -> list[list[str]]:
    return attention_lines(thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1])


def added(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def seen(*shape: int) -> Tensor:
    return added(*shape) > -0.5


def blind(mask: Tensor, nothing: float) -> Tensor:
    """The mask, which now hides all keys from one query."""
    mask[4] = nothing
    return mask


SAME_BITS = {
    **{
        f"{str(dtype).removeprefix('torch.')}, causal {is_causal}, {keys} keys": Case(dtype, keys, is_causal)
        for dtype in DTYPES
        for is_causal in (False, True)
        for keys in (5, QUERIES, 13)
    },
    **{f"bool mask {shape}": Case(mask=seen(*shape)) for shape in MASKS},
    **{f"float mask {shape}": Case(mask=added(*shape)) for shape in MASKS},
    "a row sees nothing": Case(mask=blind(seen(QUERIES, 13), False)),
    "bool mask in bfloat16": Case(torch.bfloat16, mask=seen(QUERIES, 13)),
    "float32 mask in float64": Case(torch.float64, mask=added(QUERIES, 13)),
    "transposed mask": Case(mask=added(13, QUERIES).t()),
    "scale": Case(scale=0.3),
}


SAME_BITS = only(("float32, causal True, 9 keys", "bool mask (9, 13)"), SAME_BITS)


@pytest.mark.parametrize("case", SAME_BITS.values(), ids=SAME_BITS)
def test_outputs_and_gradients_have_eagers_bits_and_strides(case: Case) -> None:
    jitted = case.jitted()
    for found, right in zip(case.run(jitted), case.run(case), strict=True):
        assert torch.equal(found, right)
        assert found.stride() == right.stride()
    assert traced_lines(jitted) == [[FORWARD], [BACKWARD]]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MASKS[:-1])  # softmax ignores a mask of one column
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learned_mask_gets_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Eager decomposes here; ours is as near to float64 as that."""
    mask = blind(added(*shape), float("-inf")) if shape == (QUERIES, 13) else added(*shape)
    case, exact = (Case(kind, mask=mask.to(kind).requires_grad_()) for kind in (dtype, torch.float64))
    jitted = case.jitted()
    for found, right in zip(case.run(jitted), exact.run(exact), strict=True):
        assert error(found.detach().double(), right.detach()) < (1e-6 if dtype is torch.float32 else 1e-2)
    assert traced_lines(jitted) == [[FORWARD], [BACKWARD, OF_MASK]]


@pytest.mark.slow
def test_a_mask_that_depends_on_a_parameter_counts_as_learned() -> None:
    """Before autodiff Thunder does not know that it does."""
    weight = added(1, 1, QUERIES, 13).requires_grad_()
    case = Case(mask=weight)

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return case(query, key, value, torch.zeros(QUERIES, 13) + 2 * mask.expand(BATCH, 1, -1, -1))

    found, right = (case.run(run) for run in (thunder.jit(call, executors=tz.Recipe().setup_executors()), call))
    assert max(error(mine.detach(), its.detach()) for mine, its in zip(found, right, strict=True)) < 1e-6


@pytest.mark.slow
def test_rows_that_are_not_contiguous_are_read_right() -> None:
    """There eager decomposes, since torch's kernel misreads them."""
    query, key, value = (torch.randn(BATCH, HEADS, WIDTH, QUERIES).transpose(2, 3).requires_grad_() for _ in range(3))
    case = Case()
    jitted = case.jitted()
    outputs = [call(query, key, value, None) for call in (jitted, case)]
    grads = [torch.autograd.grad(output, (query, key, value), torch.ones_like(output)) for output in outputs]
    assert error(outputs[0].detach(), outputs[1].detach()) < 1e-6
    assert max(map(error, *grads)) < 1e-6
    assert traced_lines(jitted) == [[FORWARD], [BACKWARD]]


@pytest.mark.slow
def test_an_empty_batch_runs_the_same_lines() -> None:
    """Ranks with other batches run the same programs: where a mask is a parameter, backward gathers it again."""
    query = torch.randn(0, HEADS, QUERIES, WIDTH, requires_grad=True)
    mask = added(1, HEADS, QUERIES, QUERIES).requires_grad_()
    case = Case(mask=mask)
    jitted = case.jitted()
    output = jitted(query, query, query, mask)
    grad, its_grad = torch.autograd.grad(output, (query, mask), torch.ones_like(output))
    assert output.shape == grad.shape == query.shape
    assert torch.equal(its_grad, torch.zeros_like(mask))
    assert traced_lines(jitted) == [[FORWARD], [BACKWARD, OF_MASK]]


def proxy(*shape: int, device: str = "cpu") -> TensorProxy:
    return TensorProxy(shape=shape, device=Device(device), dtype=thunder.float32, requires_grad=False)


FULL = (BATCH, HEADS, QUERIES, WIDTH)


OTHER = {
    "dropout": ((FULL, FULL, FULL), None, 0.1),
    "three dimensions": ((FULL[1:], FULL[1:], FULL[1:]), None, 0.0),
    "heads are broadcast": ((FULL, (BATCH, 1, QUERIES, WIDTH), (BATCH, 1, QUERIES, WIDTH)), None, 0.0),
    "wider queries": ((FULL, FULL, (BATCH, HEADS, QUERIES, 6)), None, 0.0),
    "mask of three dimensions": ((FULL, FULL, FULL), (HEADS, QUERIES, QUERIES), 0.0),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")  # torch says why
@pytest.mark.parametrize(("shapes", "mask", "dropout_p"), OTHER.values(), ids=OTHER)
def test_what_torchs_kernel_refuses_stays_as_it_is(
    shapes: tuple[tuple[int, ...], ...], mask: tuple[int, ...] | None, dropout_p: float
) -> None:
    with tracectx(TraceCtx()):
        query, key, value = (proxy(*shape) for shape in shapes)
        assert not is_flash(query, key, value, None if mask is None else proxy(*mask), dropout_p)
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(q, k, v, None if mask is None else torch.zeros(mask), dropout_p)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "keys", "claimed"), [("cpu", 5, True), ("meta", 5, True), ("cuda:0", 5, False), ("cpu", 0, False)]
)
def test_attention_on_cuda_or_to_nothing_stays_as_it_is(device: str, keys: int, claimed: bool) -> None:
    with tracectx(TraceCtx()):
        query, key = proxy(*FULL, device=device), proxy(BATCH, HEADS, keys, WIDTH, device=device)
        assert is_flash(query, key, key) is claimed


@pytest.mark.slow
def test_who_disables_flash_attention_gets_thunders_decomposition() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        jitted = Case().jitted()
        Case().run(jitted)
    assert traced_lines(jitted) == [[], []]


def like(arg: Any, device: str) -> Any:
    """A tensor for a proxy; what is no proxy as it is."""
    if not isinstance(arg, TensorProxy):
        return arg
    return torch.zeros(tuple(arg.shape), dtype=to_torch_dtype(arg.dtype), device=device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_lines_run_on_meta_and_say_the_truth(dtype: torch.dtype) -> None:
    """Shape, dtype and strides on meta are those on the CPU; the trace has the same shapes and dtypes."""
    case = Case(dtype, mask=added(QUERIES, 13).to(dtype).requires_grad_())
    jitted = case.jitted()
    case.run(jitted)
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    found = [line for trace in traces for line in trace.bound_symbols if "attention" in line.sym.name]
    assert [line.sym.name for line in found] == [FORWARD, BACKWARD, OF_MASK]
    for line in found:
        call = line._call_ctx[line.sym.name]
        on_cpu, on_meta = (tree_iter(call(*(like(arg, device) for arg in line.args))) for device in ("cpu", "meta"))
        for output, real, meta in zip(line.flat_outs, on_cpu, on_meta, strict=True):
            assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())
            assert (tuple(output.shape), to_torch_dtype(output.dtype)) == (tuple(real.shape), real.dtype)


# In models.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, CONTEXT, WIDTH) -> the same
        split = (len(x), CONTEXT, 2, WIDTH // 2)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv.forward(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out.forward(y.transpose(1, 2).reshape(len(x), CONTEXT, WIDTH))


class Net(nn.Module):
    def __init__(self, is_checked: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(BLOCKS))
        self.is_checked = is_checked

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block.forward, x, use_reentrant=False) if self.is_checked else block.forward(x)
        return x


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def squares(trace: TraceCtx) -> set[str]:
    """The tensors of a trace whose last two dimensions are both the length of the sequence."""
    outputs = (leaf for line in trace.bound_symbols for leaf in line.flat_proxy_outs)
    return {leaf.name for leaf in outputs if isinstance(leaf, TensorProxy) and tuple(leaf.shape[-2:]) == (CONTEXT,) * 2}


def dry(policy: tz.Policy | int, is_checked: bool = False) -> tz.Traces:
    return tz.trace(Net(is_checked).to("meta"), X.to("meta"), policy=policy, world_size=2)


EACH_BLOCK = [[FORWARD] * BLOCKS, [BACKWARD] * BLOCKS]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [0, 2, 3, tz.Policy(3, mixed_precision=tz.MixedPrecision(torch.bfloat16))])
def test_no_tensor_has_the_squared_length(policy: tz.Policy | int) -> None:
    traces = dry(policy)
    assert attention_lines(traces.forward, traces.backward) == EACH_BLOCK
    assert traces.backward is not None
    assert not squares(traces.forward) | squares(traces.backward)
    found = [line for trace in (traces.forward, traces.backward) for line in trace.bound_symbols]
    assert [work_of(line) for line in found].count(Work.ATTENTION) == 2 * BLOCKS
    with sdpa_kernel(SDPBackend.MATH):
        decomposed = dry(policy).forward
    assert squares(decomposed) & saved(decomposed)


@pytest.mark.slow
def test_a_checkpointed_block_computes_its_attention_again() -> None:
    traces = dry(3, is_checked=True)
    again = [name for _ in range(BLOCKS) for name in (FORWARD, BACKWARD)]
    assert attention_lines(traces.forward, traces.backward) == [[FORWARD] * BLOCKS, again]


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("executors", [(), (torch_compile_ex,)])
def test_a_sharded_module_gets_eagers_gradients(is_checked: bool, executors: tuple[Executor, ...]) -> None:
    plain = fresh(Net, is_checked)
    model = sharded(plain, 3, executors=executors or None)
    for module in (model, plain):
        module(X).square().sum().backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert error(mine.grad, its.grad) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_forward_alone_and_deferred_gradients_use_the_same_lines() -> None:
    model = sharded(Net(), 3)
    with torch.no_grad():
        model(X)
    alone = tz.traces_of(model)
    assert attention_lines(alone.forward, alone.backward) == EACH_BLOCK[:1]
    with model.no_sync():
        model(X).sum().backward()
    deferring = tz.traces_of(model)
    assert attention_lines(deferring.forward, deferring.backward) == EACH_BLOCK


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_no_fuser_takes_attention_into_its_regions() -> None:
    model = sharded(Net(), 3, executors=[torch_compile_ex])
    model(X)
    traces = tz.traces_of(model)
    assert attention_lines(traces.forward, traces.backward) == EACH_BLOCK
    assert any(line.sym.is_fusion for line in traces.forward.bound_symbols)


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_recipe_and_transform_bring_the_executor_once() -> None:
    model = thunder.compile(Net(), plugins=[tz.Zero(stage=2)], recipe=tz.Recipe())
    model(X)
    assert list(thunder.compile_data(model).executors_list).count(attention_ex) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_the_bench_counts_what_attention_saves() -> None:
    """Decomposed, it saves a tensor of 2 * 2 * 128 * 128 floats, which are 0.25 MiB."""
    size = Size(blocks=1, width=16, heads=2, vocabulary=16, tokens=128)
    saved = {
        kernel: float(measured(sharded(make_model(size), 0), size, kernel).partition(",")[0])
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    }
    assert saved[SDPBackend.MATH] - saved[SDPBackend.FLASH_ATTENTION] == pytest.approx(0.25, abs=0.1)
