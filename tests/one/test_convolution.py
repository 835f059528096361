"""Gradients of convolutions as torch's own operator: eager's bits. And what convolutions allocate inside, forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz
from examples.tensor_memory import added_at_peak, bytes_held
from tests.harness.models import fresh, sharded
from thunder_zero import Holds
from thunder_zero.forecast import workspaces
from thunder_zero.forecast.workspaces import BLOCKS, Convolution, hidden_bytes
from thunder_zero.schedule.timeline import Kind, Work
from thunder_zero.trace.operators.convolution import convolution_ex
from thunder_zero.trace.work_classes import work_of

import thunder
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.trace import TraceCtx

pytestmark = pytest.mark.slow

aten = torch.ops.aten
CPU = torch.device("cpu")
OF_INPUT, OF_WEIGHT = "convolution_input_gradient", "convolution_weight_gradient"
IMAGE, WEIGHT = (2, 4, 9, 9), (6, 4, 3, 3)


@dataclass(frozen=True)
class Case:
    """A convolution of random numbers.

    Attributes:
        call: the function of torch.
        image: the shape of its input.
        weight: the shape.
        options: keyword arguments of the function.
        dtype: of all tensors.
        frozen: which of input, weight and bias have no gradient: "x", "w", "b".
        last: which of input and weight have channels last in memory: "x", "w".
    """

    call: Callable[..., Tensor] = F.conv2d
    image: tuple[int, ...] = IMAGE
    weight: tuple[int, ...] = WEIGHT
    options: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    frozen: str = ""
    last: str = ""
    channels: int = 6  # of the result; 0: no bias

    def run(self, call: Callable[..., Tensor]) -> list[Tensor]:
        """The output, and the gradients of what is not frozen."""
        draw = torch.Generator().manual_seed(0)
        shapes = {"x": self.image, "w": self.weight} | ({"b": (self.channels,)} if self.channels else {})
        given = {name: torch.randn(shape, generator=draw).to(self.dtype) for name, shape in shapes.items()}
        for name in self.last:
            given[name] = given[name].contiguous(memory_format=torch.channels_last)
        trained = [tensor.requires_grad_() for name, tensor in given.items() if name not in self.frozen]
        output = call(*given.values())
        grad = torch.empty_like(output).copy_(torch.randn(output.shape, generator=draw))  # with the output's strides
        return [output, *torch.autograd.grad(output, trained, grad)]

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.call(*tensors, **dict(self.options))

    def jitted(self) -> Any:
        return thunder.jit(self, executors=tz.Recipe().setup_executors())


def case(
    call: Callable[..., Tensor] = F.conv2d,
    image: tuple[int, ...] = IMAGE,
    weight: tuple[int, ...] = WEIGHT,
    **fields: Any,
) -> Case:
    """A case; keyword arguments that are no fields are the function's."""
    options = {name: fields.pop(name) for name in tuple(fields) if name not in Case.__dataclass_fields__}
    return Case(call, image, weight, tuple(options.items()), **fields)


SAME_BITS = {
    "padding": case(padding=1),
    "no bias": case(channels=0),
    "stride": case(stride=2),
    "a stride for each": case(stride=(1, 2), padding=(0, 1)),
    "dilation, groups": case(F.conv2d, IMAGE, (6, 2, 3, 3), dilation=2, groups=2),
    "each channel alone": case(F.conv2d, IMAGE, (4, 1, 3, 3), groups=4, channels=4),
    "1x1": case(F.conv2d, IMAGE, (6, 4, 1, 1)),
    "same": case(F.conv2d, IMAGE, (6, 4, 3, 3), padding="same"),
    "no batch": case(F.conv2d, IMAGE[1:], WEIGHT),
    "an empty batch": case(F.conv2d, (0, *IMAGE[1:]), WEIGHT),
    "1d": case(F.conv1d, (2, 4, 9), (6, 4, 3), stride=2),
    "3d": case(F.conv3d, (2, 4, 5, 5, 5), (6, 4, 3, 3, 3)),
    "bfloat16": case(padding=1, dtype=torch.bfloat16),
    "float16": case(padding=1, dtype=torch.float16),
    "float64": case(padding=1, dtype=torch.float64),
    "channels last": case(last="xw"),
    "an image with channels last": case(last="x"),
    "a weight with channels last": case(F.conv2d, (8, 64, 32, 32), (64, 64, 3, 3), last="w", frozen="x", channels=64),
    "transposed": case(F.conv_transpose2d, IMAGE, (4, 6, 3, 3), stride=2),
    "transposed, all options": case(
        F.conv_transpose2d,
        IMAGE,
        (4, 3, 3, 3),
        stride=(2, 3),
        padding=1,
        output_padding=1,
        groups=2,
        dilation=(2, 2),
    ),
    "transposed, 1d": case(F.conv_transpose1d, (2, 4, 9), (4, 6, 3), stride=2),
    "transposed, 3d": case(F.conv_transpose3d, (2, 4, 5, 5, 5), (4, 6, 3, 3, 3), padding=1),
    "transposed, bfloat16": case(F.conv_transpose2d, IMAGE, (4, 6, 3, 3), dtype=torch.bfloat16),
}


def names_of(*traces: TraceCtx | None) -> list[list[str]]:
    """The names of each trace's lines that have to do with convolutions."""
    return [[line.sym.name for line in trace.bound_symbols if "conv" in line.sym.name] for trace in traces if trace]


def backward_names(jitted: Any) -> list[str]:
    (names,) = names_of(thunder.last_backward_traces(jitted)[-1])
    return names


def require_same(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for mine, its in zip(found, right, strict=True):
        assert torch.equal(mine, its)
        assert mine.stride() == its.stride()


@pytest.mark.parametrize("case", SAME_BITS.values(), ids=SAME_BITS)
def test_gradients_have_eagers_bits_and_strides(case: Case) -> None:
    jitted = case.jitted()
    require_same(case.run(jitted), case.run(case))
    assert backward_names(jitted) == [
        name for name in (OF_INPUT, OF_WEIGHT) if "x" not in case.frozen or name != OF_INPUT
    ]


@pytest.mark.parametrize(
    ("frozen", "lines"),
    [
        ("x", [OF_WEIGHT]),
        ("w", [OF_INPUT, OF_WEIGHT]),  # the bias
        ("b", [OF_INPUT, OF_WEIGHT]),
        ("wb", [OF_INPUT]),
        ("xb", [OF_WEIGHT]),
    ],
)
def test_only_gradients_that_are_needed_are_computed(frozen: str, lines: list[str]) -> None:
    frozen_case = case(frozen=frozen)
    jitted = frozen_case.jitted()
    require_same(frozen_case.run(jitted), frozen_case.run(frozen_case))
    assert backward_names(jitted) == lines


def test_a_transposed_convolution_without_a_batch_stays_with_thunder() -> None:
    single = case(F.conv_transpose2d, IMAGE[1:], (4, 6, 3, 3))
    jitted = single.jitted()
    require_same(single.run(jitted), single.run(single))
    assert backward_names(jitted) == ["conv_transpose2d_vjp"]


def like(arg: Any, device: str) -> Any:
    """A tensor for a proxy; what is no proxy as it is."""
    if not isinstance(arg, TensorProxy):
        return arg
    return torch.zeros(tuple(arg.shape), dtype=to_torch_dtype(arg.dtype), device=device)


@pytest.mark.parametrize("name", ["padding", "1d", "3d", "bfloat16", "transposed, all options"])
def test_lines_run_on_meta_and_say_the_truth(name: str) -> None:
    """Shapes and dtypes on meta and in the trace are those on the CPU."""
    jitted = SAME_BITS[name].jitted()
    SAME_BITS[name].run(jitted)
    found = [line for line in thunder.last_backward_traces(jitted)[-1].bound_symbols if "conv" in line.sym.name]
    for line in found:
        call = line._call_ctx[line.sym.name]
        on_cpu, on_meta = (tree_iter(call(*(like(arg, device) for arg in line.args))) for device in ("cpu", "meta"))
        for output, real, meta in zip(line.flat_outs, on_cpu, on_meta, strict=True):
            assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
            assert (tuple(output.shape), to_torch_dtype(output.dtype)) == (tuple(real.shape), real.dtype)


# In models.


class Net(nn.Module):
    """A convolution, a strided one, a transposed one, and one by one around them."""

    def __init__(self, channels: int = 4, *, has_norm: bool = True, is_frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels) if has_norm else nn.Identity()
        self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.third = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.around = nn.Conv2d(channels, channels, 1)
        if is_frozen:
            self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = F.relu(self.third(self.second(F.relu(self.norm(x)))) + self.around(x))
        return y


def without_norm(*, is_frozen: bool = False) -> Net:
    """Of a batch norm Thunder's bits are not eager's, and it takes no bfloat16."""
    return Net(has_norm=False, is_frozen=is_frozen)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
BFLOAT16 = tz.MixedPrecision(torch.bfloat16)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_sharded_model_gets_eagers_gradients_bit_for_bit(stage: int, is_frozen: bool) -> None:
    plain = fresh(lambda: without_norm(is_frozen=is_frozen))
    model = sharded(plain, stage)
    for module in (model, plain):
        module(X).square().sum().backward()
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    assert len(trained) == 7 - is_frozen
    for name in trained:
        mine, its = (module.get_parameter(name).grad for module in (model, plain))
        assert mine is not None
        assert torch.equal(mine, its), name


@pytest.mark.parametrize("policy", [tz.DDP, tz.ZERO3, replace(tz.ZERO3, mixed_precision=BFLOAT16)])
def test_backward_has_a_line_for_each_gradient_and_computes_none_again(policy: tz.Policy) -> None:
    traces = tz.trace(without_norm().to("meta"), X.to("meta"), policy=policy, world_size=2)
    forward, backward = names_of(traces.forward, traces.backward)
    assert forward == ["convolution", "convolution", "conv_transpose2d", "convolution"]
    assert sorted(backward) == [OF_INPUT] * 3 + [OF_WEIGHT] * 4  # images have no gradient
    lines = [line for trace in (traces.forward, traces.backward) if trace for line in trace.bound_symbols]
    assert [work_of(line) for line in lines].count(Work.CONVOLUTION) == 4 + 7


def test_zero_3_gathers_the_first_weight_once() -> None:
    """Its gradient reads its shape alone."""
    policy = replace(tz.ZERO3, gather_last_units_once=False)
    timeline = tz.trace(Net().to("meta"), X.to("meta"), policy=policy, world_size=2).timeline
    again = {path for op in timeline.ops if op.kind is Kind.GATHER and op.backward for path in op.params}
    assert {"second.weight", "third.weight", "around.weight"} <= again
    assert "first.weight" not in again


@pytest.mark.usefixtures("group")
def test_recipe_and_transform_bring_the_executor_once() -> None:
    model = thunder.compile(Net(), plugins=[tz.Zero(stage=2)], recipe=tz.Recipe())
    model(X)
    assert list(thunder.compile_data(model).executors_list).count(convolution_ex) == 1


# Workspaces.


ON_ONEDNN = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in BLOCKS, reason="no rules for this CPU's convolutions"
)
# Input, weight, stride, padding, transposed; large enough for the bytes of the layouts to be more than scratch memory.
ALLOCATES = {
    "3x3": ((4, 64, 32, 32), (64, 64, 3, 3), 1, 1, False),
    "channels that fill no block": ((4, 20, 32, 32), (36, 20, 3, 3), 1, 1, False),
    "images": ((4, 3, 32, 32), (64, 3, 3, 3), 1, 1, False),
    "strided": ((4, 64, 32, 32), (128, 64, 3, 3), 2, 1, False),
    "strided 1x1": ((4, 64, 32, 32), (128, 64, 1, 1), 2, 0, False),
    "1x1": ((4, 64, 32, 32), (64, 64, 1, 1), 1, 0, False),
    "patches": ((4, 3, 64, 64), (192, 3, 8, 8), 8, 0, False),
    "transposed": ((4, 64, 16, 16), (64, 32, 2, 2), 2, 0, True),
    "float64": ((4, 64, 16, 16), (64, 64, 3, 3), 1, 1, False),
}


@ON_ONEDNN
@pytest.mark.parametrize("name", ALLOCATES)
def test_the_workspaces_of_a_convolution_beside_the_allocators_record(name: str) -> None:
    image, weight, stride, padding, is_transposed = ALLOCATES[name]
    dtype = torch.float64 if name == "float64" else torch.float32
    x, w = torch.randn(image, dtype=dtype), torch.randn(weight, dtype=dtype)
    how = [stride] * 2, [padding] * 2, [1, 1], is_transposed, [0, 0], 1
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        y = torch.convolution(x, w, None, *how)
        calls: list[tuple[Any, tuple[Any, ...]]] = [(aten.convolution.default, (x, w, None, *how))]
        for mask in ([True, False, False], [False, True, False], [True, True, False]):
            calls.append((aten.convolution_backward.default, (torch.ones_like(y), x, w, None, *how, mask)))
        for operator, args in calls:
            out = operator(*args)
            results = bytes_held(each for each in tree_iter(out) if isinstance(each, Tensor))
            found = added_at_peak(partial(operator, *args), CPU)
            assert results + hidden_bytes(operator, args, out) == pytest.approx(found, rel=0.03)
    finally:
        torch.set_num_threads(before)


def test_the_workspaces_by_arithmetic() -> None:
    """Blocks of 16 channels: 20 fill 32, 36 fill 48; a float32 has 4 bytes."""
    one = Convolution((4, 20, 8, 8), (4, 36, 8, 8), (36, 20, 3, 3), 4, 1, is_strided=False, block=16, threads=1)
    image, features, weight = 4 * 32 * 64 * 4, 4 * 48 * 64 * 4, 48 * 32 * 9 * 4
    assert one.to_features() == one.to_image() == image + weight + features
    assert one.to_weight() == image + features + weight
    strided = replace(one, features=(4, 36, 4, 4), is_strided=True)
    assert strided.to_image() == 36 * 16 * 4 + 4 * 36 * 16 * 4 + weight + 4 * 20 * 64 * 4
    assert replace(strided, weight=(36, 20, 1, 1)).to_image() == 3 * (4 * 20 * 64 * 4)  # one from the other
    assert replace(one, block=8).to_weight() == 4 * 24 * 64 * 4 + 4 * 40 * 64 * 4 + 40 * 24 * 9 * 4
    assert replace(one, threads=2).to_weight() == one.to_weight() + weight


def test_other_operators_and_cpus_without_rules_hide_nothing() -> None:
    x, w = torch.empty(4, 64, 32, 32, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(*args)
    assert hidden_bytes(aten.mm.default, (x, w), out) == 0
    with mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value="DEFAULT"):
        assert hidden_bytes(aten.convolution.default, args, out) == 0


def wide() -> Net:
    return Net(64)


IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def forecast(**options: Any) -> tz.Memory:
    with torch.device("meta"):
        net = wide()
    traces = tz.trace(net, IMAGES, policy=tz.DDP, world_size=1)
    return tz.memory(traces, loss=lambda y: y.square().mean(), **options)


@ON_ONEDNN
@pytest.mark.usefixtures("group")
def test_the_peak_of_a_model_with_convolutions_beside_the_allocators_record() -> None:
    model = sharded(fresh(wide), tz.DDP)

    def step() -> None:
        model(IMAGES).square().mean().backward()

    step()
    model.zero_grad()
    held = bytes_held([*model.parameters(), *model.buffers(), IMAGES])
    measured = held + added_at_peak(step, CPU)
    memory = forecast()
    assert memory.peak == pytest.approx(measured, rel=0.01)
    assert sum(memory.by_kind.values()) == memory.peak
    with mock.patch.dict(BLOCKS, clear=True):
        assert forecast().peak < 0.9 * measured


@ON_ONEDNN
def test_workspaces_live_for_a_line_and_are_those_of_cpus() -> None:
    memory = forecast()
    found = [one for one in memory.storages if one.kind is Holds.WORKSPACE]
    assert {one.name for one in found} == {"of convolution", "of convolution_backward"}
    assert all(one.freed == one.line for one in found)
    assert all(Holds.WORKSPACE not in line.alive for line in memory.lines)
    assert not [one for one in forecast(backend="nccl").storages if one.kind is Holds.WORKSPACE]


def test_torch_still_names_the_backends() -> None:
    x, w = torch.empty(4, 64, 32, 32), torch.empty(64, 64, 3, 3)
    how = [1, 1], [1, 1], [1, 1]
    assert workspaces._backend(x, w, (*how, False, [0, 0], 1)) == "Mkldnn"
    assert workspaces._backend(x, w, (*how, True, [0, 0], 1)) == "???"
    assert workspaces._backend(x.double(), w.double(), (*how, False, [0, 0], 1)) == workspaces.COLUMNS
