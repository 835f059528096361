"""Bad input in one process: the error is one sentence that names the thing, the value and the action.

Several ranks: ``tests/ranks/test_bad_input.py``.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal import two_tensor

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.ranks import everyone
from tests.harness.tiers import of_tier, only
from thunder_zero import _compat
from thunder_zero.comm.backends import transport_for
from thunder_zero.runtime.placeholders import Placeholder

import thunder
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from thunder.dynamo import thunderfx
from thunder.transforms.cudagraph import CUDAGraphTransform

X = torch.ones(3, 4)
BUILTIN: Any = torch.tanh


class Net(nn.Module):
    """Two layers, tied on request; returns ``give`` of its output and its first weight."""

    def __init__(self, give: Callable[[Tensor, Tensor], Any] = lambda y, w: y, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.give = give
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        y = self.b(torch.tanh(self.a(x)))
        return self.give(y, self.b.weight)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield everyone()
    dist.destroy_process_group()


def shard(module: nn.Module | None = None, **arguments: Any) -> Any:
    return thunder.jit(module or Net(), transforms=[tz.ZeroTransform(**arguments)])


def plain(module: nn.Module) -> bool:
    """Whether the module still has its own weights."""
    return not any(isinstance(param, Placeholder) for param in module.parameters())


def trains(model: Any) -> bool:
    """Whether a step changes every parameter."""
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return len(before) == 4 and all(not torch.equal(b, a) for b, a in zip(before, model.parameters(), strict=True))


# The arguments.


@pytest.mark.parametrize("make", [tz.ZeroTransform, tz.Zero, lambda **k: tz.zero(thunder.jit(Net()), **k)])
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"stage": 5}, ValueError, ["stage is 5", "choose 0"]),
        ({"stage": -1}, ValueError, ["stage is -1", "choose 0"]),
        ({"stage": "3"}, ValueError, ["stage is '3'", "choose 0"]),
        ({"stage": None}, ValueError, ["stage is None", "choose 0"]),
        ({"policy": 7}, ValueError, ["stage is 7", "choose 0"]),
        ({"policy": "zero3"}, TypeError, ["policy is 'zero3'", "thunder_zero.Policy", "stage 0 to 3"]),
        ({"policy": True}, TypeError, ["policy is True", "thunder_zero.Policy"]),
        ({"policy": 2.0}, TypeError, ["policy is 2.0", "thunder_zero.Policy"]),
        ({"policy": tz.Policy}, TypeError, ["policy is <class", "thunder_zero.ZERO3"]),
        ({"policy": tz.ZERO2, "stage": 1}, ValueError, ["stage is 1", "policy's stage is 2"]),
        ({"policy": tz.ZERO1, "stage": 3}, ValueError, ["stage is 3", "policy's stage is 1"]),
        ({"policy": 1, "stage": 3}, ValueError, ["stage is 3", "policy's stage is 1"]),
        (
            {"foo": 1},
            TypeError,
            ["foo=1", "is not a field of Policy; thunder_zero.Policy lists its fields"],
        ),
        ({"policy": tz.ZERO1, "Stage": 1}, TypeError, ["Stage=1", "did you mean stage?"]),
        ({"bucket_bytes": -1}, ValueError, ["bucket_bytes is -1", "0 or more"]),
        ({"replicate_below_bytes": -1}, ValueError, ["replicate_below_bytes is -1", "bytes, 0 or more"]),
        ({"ignored": "router"}, ValueError, ["ignored is 'router'", "a tuple of paths"]),
        ({"ignored": (1,)}, ValueError, ["ignored is (1,)", "a tuple of paths"]),
        ({"replicated": "*.bias"}, ValueError, ["replicated is '*.bias'", "a tuple of patterns", "('*.bias',)"]),
        ({"gather_once_per_accumulation": 1}, ValueError, ["gather_once_per_accumulation is 1", "True or False"]),
        ({"recompute": True}, ValueError, ["recompute is True", "'none', 'cheap', 'units'"]),
        ({"in_flight_bytes": -2}, ValueError, ["in_flight_bytes is -2", "0 or more"]),
        ({"prefetch": -3}, ValueError, ["prefetch is -3", "0 or more"]),
        ({"broadcast_from": -1}, ValueError, ["broadcast_from is -1", "rank of the process group"]),
        ({"stage": True}, ValueError, ["stage is True", "choose 0"]),
        ({"stage": 2.0}, ValueError, ["stage is 2.0", "choose 0"]),
        ({"bucket_bytes": "1"}, ValueError, ["bucket_bytes is '1'", "0 or more"]),
        ({"replicate_below_bytes": None}, ValueError, ["replicate_below_bytes is None", "0 or more"]),
        ({"prefetch": 1.5}, ValueError, ["prefetch is 1.5", "0 or more"]),
        ({"times": 0.5}, ValueError, ["times is 0.5", "thunder_zero.Times", "measure_times", "or None"]),
        ({"gather_per_unit": "no"}, ValueError, ["gather_per_unit is 'no'", "True or False"]),
        ({"gather_last_units_once": 1}, ValueError, ["gather_last_units_once is 1", "True or False"]),
        ({"check_gradients": None}, ValueError, ["check_gradients is None", "True or False"]),
        ({"trust_optimizer": "Muon"}, ValueError, ["trust_optimizer is 'Muon'", "True or False"]),
        ({"broadcast_from": "0"}, ValueError, ["broadcast_from is '0'", "or None"]),
        ({"unit_of": "blocks"}, ValueError, ["unit_of is 'blocks'", "a function"]),
    ],
)
def test_a_policy_that_does_not_exist(
    make: Callable[..., Any], arguments: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with refused(kind, *words):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"device": "gpu"}, ValueError, ["device is 'gpu'", "'cuda:0'"]),
        ({"device": "cuda:99"}, ValueError, ["device is 'cuda:99'", "cannot be used here"]),
        ({"device": "meta"}, ValueError, ["meta tensors", "backend"]),
        ({"process_group": "gloo"}, TypeError, ["process_group is 'gloo'", "ProcessGroup", "None"]),
        ({"broadcast_from": 1}, ValueError, ["broadcast_from is 1", "ranks 0 to 0"]),
        ({"unit_of": lambda module: ("c",)}, ValueError, ["unit_of names 'c'", "submodule of Net"]),
    ],
)
@pytest.mark.usefixtures("group")
def test_arguments_that_fit_no_machine(arguments: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    module = Net()
    with pytest.raises(kind) as caught:
        shard(module, **arguments)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert plain(module)
    assert trains(shard(module)), "the module can still be sharded"


def test_no_process_group() -> None:
    module = Net()
    assert not dist.is_initialized()
    with refused(RuntimeError, "no process group", "init_process_group", "process_group"):
        shard(module)
    assert plain(module)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 0}, ["world_size is 0", "at least 1"]),
        ({"world_size": -4}, ["world_size is -4", "at least 1"]),
        ({"rank": 8}, ["rank is 8", "world_size=8", "0 to 7"]),
        ({"rank": -1}, ["rank is -1", "0 to 7"]),
        ({"world_size": 1, "rank": 1}, ["rank is 1", "world_size=1", "0 to 0"]),
    ],
)
def test_a_rank_that_no_world_has(arguments: dict[str, int], words: list[str]) -> None:
    with refused(ValueError, *words):
        tz.trace(Net(), X, **arguments)  # type: ignore[arg-type]


def test_cpu_tensors_and_a_group_that_carries_none(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL's group says of itself; a build without CUDA cannot make one."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with refused(ValueError, "'cuda:nccl'", "no cpu tensors", "gloo for CPU"):
        transport_for(group, torch.device("cpu"))
    module = Net()
    with refused(ValueError, "'cuda:nccl'", "no cpu tensors", "move the module"):
        shard(module)
    assert plain(module)


def test_cpu_tensors_and_a_real_group_for_cuda() -> None:
    """gloo, asked for as a backend of CUDA tensors only: what NCCL would be, on a machine without a GPU."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with refused(ValueError, "'cuda:gloo'", "no cpu tensors", "gloo for CPU"):
            shard()
    finally:
        dist.destroy_process_group()


# The module.


@pytest.mark.usefixtures("group")
def test_ignored_names_must_exist_and_leave_a_parameter() -> None:
    with refused(ValueError, "ignored names 'lin', which is no parameter and no submodule of Sequential"):
        shard(nn.Sequential(nn.Linear(2, 2)), ignored=("lin",))
    with refused(ValueError, "replicated names '*.gain', which fits no parameter and no submodule of Sequential"):
        shard(nn.Sequential(nn.Linear(2, 2)), replicated=("*.gain",))
    with refused(ValueError, "Sequential has no parameters that are not ignored"):
        shard(nn.Sequential(nn.Linear(2, 2)), ignored=("0",))


@pytest.mark.usefixtures("group")
def test_thunderfx_raises_and_names_compile() -> None:
    compiled = thunderfx(nn.Linear(X.shape[-1], 7), transforms=[tz.ZeroTransform()])
    with pytest.raises(Exception, match=r"ThunderFX \(thunder\.dynamo\).*thunder_zero\.compile\(module"):
        compiled(X)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "make",
    [
        lambda module: shard(module),
        lambda module: tz.zero(thunder.jit(module)),
        lambda module: thunder.compile(module, plugins=[tz.Zero()], recipe=tz.Recipe()),
        lambda module: tz.trace(module, X),
    ],
    ids=["jit", "zero", "compile", "trace"],
)
def test_a_module_without_parameters(make: Callable[[nn.Module], Any]) -> None:
    with refused(ValueError, "ReLU has no parameters", "nothing to shard"):
        make(nn.ReLU())


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Scaled(nn.Module):
    """A layer, and a parameter and a buffer that only the constructor gives values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.scale + self.shift


def of_scaled(module: nn.Module) -> None:
    if isinstance(module, Scaled):
        nn.init.constant_(module.scale, 2.0)
        module.shift.data.copy_(torch.arange(4.0))


def of_others(module: nn.Module) -> None:
    of_scaled(module)
    if isinstance(module, Scaled):
        module.a.weight.data.zero_()


def reshape(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.bias = nn.Parameter(torch.zeros(5))


SCALED = {name: value.clone() for name, value in Scaled().state_dict().items()}
LACKING: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("parameter 'scale' is on the meta device", "reset_parameters of Scaled", "give init", "weights")),
    ({"weights": SCALED}, ("buffer 'shift' is on the meta device", "give init", "a real device")),
    ({"init": nn.Identity.extra_repr}, ("parameter 'scale' is on the meta device",)),
    ({"init": of_others}, ("init wrote 'a.weight'", "called for Scaled", "does not own it", "called for its owner")),
    ({"init": reshape}, ("init of Linear left 'a.bias' with shape (5,)", "the module has shape (4,)", "; build")),
    (
        {"weights": {**SCALED, "b": X}, "init": of_scaled},
        ("weights has 'b', which Scaled does not have", "leave it out"),
    ),
    ({"weights": {"scale": X}, "init": of_scaled}, ("weights has no 'a.weight'", "the state dict of a Scaled")),
    (
        {"weights": {**SCALED, "scale": X}, "init": of_scaled},
        ("weights has 'scale' with shape (3, 4)", "has shape (4,)"),
    ),
    (
        {"weights": {**SCALED, "scale": 2.0}, "init": of_scaled},
        ("weights has 'scale' as a float", "a tensor of shape (4,)"),
    ),
]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("arguments", "words"), LACKING, ids=range(len(LACKING)))
def test_a_module_on_the_meta_device_without_values(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    """Refused without a change; with values for all tensors the same module is sharded."""
    module = meta(Scaled)
    with refused(ValueError, *words):
        shard(module, **arguments)
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())), "the module is as it was"
    model = shard(module, weights=SCALED, init=of_scaled)
    assert torch.equal(model(X), X @ SCALED["a.weight"].t() * 2 + SCALED["a.bias"] * 2 + torch.arange(4.0))


@pytest.mark.parametrize("make", [tz.ZeroTransform, tz.Zero, lambda **k: tz.zero(thunder.jit(Net()), **k)])
def test_sources_that_are_none(make: Callable[..., Any]) -> None:
    with refused(TypeError, "init is 3", "a function of a module"):
        make(init=3)
    with refused(TypeError, "init is Linear", "a function of a module"):
        make(init=nn.Linear(2, 2))
    with refused(TypeError, "weights is a list", "a mapping of names to tensors", "mmap=True"):
        make(weights=[X])


def test_meta_parameters_where_no_cpu_tensors_travel() -> None:
    """They go to the device of the group's backend; the error names that device if it is missing."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with refused(ValueError, "device is 'cuda', which cannot be used here"):
            shard(meta(Net))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_module_that_torch_shards_already() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    with refused(ValueError, "'weight'", "DTensor", "plain tensors"):
        shard(module)  # type: ignore[arg-type]
    with refused(RuntimeError, "DistributedDataParallel", "the module inside it"):
        shard(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))


class Quantised(Tensor):
    """A tensor subclass whose behaviour is in ``__torch_function__``."""


class Named(nn.Parameter):
    """A parameter without behaviour of its own."""


@pytest.mark.usefixtures("group")
def test_a_parameter_that_is_a_tensor_subclass() -> None:
    two: Any = vars(two_tensor)["TwoTensor"]  # it dispatches
    for data in (torch.ones(4, 4).as_subclass(Quantised), two(torch.ones(4, 4), torch.ones(4, 4))):
        module = Net()
        module.b.weight = nn.Parameter(data)
        with refused(ValueError, "parameter 'b.weight' is a", type(data).__name__, "plain rows", "plain tensors"):
            shard(module)
    module.b.weight = Named(torch.ones(4, 4))
    assert not any(param.isnan().any() for param in shard(module).parameters())


@pytest.mark.usefixtures("group")
def test_a_sharded_model_inside_of_something_else() -> None:
    """DDP would send rank 0's rows to all ranks as if they were theirs."""
    model = shard()
    before = [param.detach().clone() for param in model.parameters()]
    with refused(
        RuntimeError, "DistributedDataParallel", "a Net that thunder_zero trains", "train the model without it"
    ):
        nn.parallel.DistributedDataParallel(model)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    with refused(RuntimeError, "a sharded Net cannot be copied", "full_state_dict"):
        deepcopy(model)


@pytest.mark.slow  # Dynamo takes long to load
@pytest.mark.usefixtures("group")
def test_torch_compile_leaves_a_sharded_model_to_thunder() -> None:
    model = shard()
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.equal(compiled(X), model(X))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tz.zero(Net()), ["zero takes a jitted module", "got Net", "thunder.jit(module)"]),
        (lambda: tz.zero(thunder.jit(torch.tanh)), ["zero takes a jitted module", "thunder.jit(module)"]),
        (lambda: tz.full_state_dict(Net()), ["jitted with ZeroTransform", "got Net", "thunder.jit(module"]),
        (lambda: tz.full_state_dict(thunder.jit(Net())), ["jitted with ZeroTransform", "thunder.jit(module"]),
        (lambda: tz.traces_of(Net()), ["jitted with ZeroTransform", "got Net"]),
        (lambda: tz.traces_of(thunder.jit(Net())), ["jitted with ZeroTransform", "got ThunderModule"]),
        (lambda: tz.print_trace(Net()), ["jitted with ZeroTransform", "got Net"]),
        (lambda: tz.measure_times(Net(), Net), ["jitted with ZeroTransform", "got Net"]),
        (lambda: tz.measure_times(thunder.jit(Net()), Net), ["jitted with ZeroTransform", "got ThunderModule"]),
        (lambda: tz.trace(thunder.jit(Net()), X), ["plain torch module", "got ThunderModule", "before thunder.jit"]),
        (lambda: tz.trace(BUILTIN, X), ["plain torch module", "builtin"]),
    ],
)
def test_a_module_jitted_or_not(call: Callable[[], Any], words: list[str]) -> None:
    with refused(TypeError, *words):
        call()


def test_a_policy_for_trace() -> None:
    assert tz.trace(Net(), X, policy=1).plan.policy == tz.ZERO1
    with refused(TypeError, "Net.forward does not take stage=3, which is a field of Policy", "pass policy=3"):
        tz.trace(Net(), X, stage=3)
    with refused(TypeError, "forward does not take prefetch=1", "dataclasses.replace(thunder_zero.ZERO3, prefetch=1)"):
        tz.trace(Net(), X, prefetch=1)
    with refused(ValueError, "stage is 7", "choose 0"):
        tz.trace(Net(), X, policy=7)


class Staged(nn.Linear):
    """A module whose forward takes an argument with the name of a field of Policy."""

    def forward(self, x: Tensor, stage: int = 0) -> Tensor:
        return super().forward(x) * stage


def test_an_argument_with_the_name_of_a_policy_field() -> None:
    assert tz.trace(Staged(4, 4), X, stage=2).backward is not None


@pytest.mark.usefixtures("group")
def test_a_trace_before_the_first_call() -> None:
    with refused(RuntimeError, "not called yet", "thunder_zero.trace"):
        tz.traces_of(shard())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "make",
    [
        lambda t: thunder.jit(lambda x: x * 2, transforms=[t]),
        lambda t: thunder.jit(Net().forward, transforms=[t]),
    ],
)
def test_a_function_jitted_instead_of_the_module(make: Callable[[tz.ZeroTransform], Any]) -> None:
    with refused(TypeError, "thunder.jit was given a function", "jit the module"):
        make(tz.ZeroTransform())(X)


@pytest.mark.usefixtures("group")
def test_a_function_jitted_around_the_sharded_module() -> None:
    model = shard()
    with refused(TypeError, "thunder.jit was given a function that calls Net", "not jitted"):
        thunder.jit(lambda x: model(x) * 2)(X)
    assert trains(model)


@pytest.mark.usefixtures("group")
def test_the_transform_after_the_first_call() -> None:
    module = Net()
    model = thunder.jit(module)
    expected = model(X)
    with refused(RuntimeError, "Net was called before", "right after thunder.jit"):
        tz.zero(model)
    assert torch.equal(model(X), expected), "the model is as it was"
    assert trains(tz.zero(thunder.jit(module)))


@pytest.mark.usefixtures("group")
def test_a_copy_of_a_module_that_was_sharded() -> None:
    module = Net()
    shard(module)
    with refused(RuntimeError, "parameter 'a.weight' has no values", "Net is a copy"):
        shard(deepcopy(module))


# A module that is transformed already.

TWICE_AT_ONCE: dict[str, Callable[[nn.Module], Any]] = {
    "two in one list": lambda m: thunder.jit(m, transforms=[tz.ZeroTransform(stage=1), tz.ZeroTransform()]),
    "one, named twice": lambda m: thunder.jit(m, transforms=[tz.ZeroTransform()] * 2),
    "Thunder's after ours": lambda m: thunder.jit(m, transforms=[tz.ZeroTransform(), ddp()]),
    "two plugins": lambda m: thunder.compile(m, plugins=[tz.Zero(stage=1), tz.Zero()], recipe=tz.Recipe()),
    "two names": lambda m: thunder.compile(m, plugins=["zero2", "zero2"], recipe=tz.Recipe()),
    "ours and Thunder's plugin": lambda m: thunder.compile(m, plugins=["zero2", "ddp"], recipe=tz.Recipe()),
    "CUDA graphs before ours": lambda m: thunder.jit(m, transforms=[CUDAGraphTransform(), tz.ZeroTransform()]),
    "CUDA graphs after ours": lambda m: thunder.jit(m, transforms=[tz.ZeroTransform(), CUDAGraphTransform()]),
    "CUDA graphs, then zero": lambda m: tz.zero(thunder.jit(m, transforms=[CUDAGraphTransform()])),
    "CUDA graphs' plugin before ours": lambda m: thunder.compile(
        m, plugins=["reduce-overhead", "zero2"], recipe=tz.Recipe()
    ),
    "CUDA graphs' plugin after ours": lambda m: thunder.compile(
        m, plugins=["zero2", "reduce-overhead"], recipe=tz.Recipe()
    ),
    "a jitted module, jitted": lambda m: shard(thunder.jit(m)),
    "a jitted module, compiled": lambda m: thunder.compile(thunder.jit(m), plugins="zero2", recipe=tz.Recipe()),
}


def ddp() -> DDPTransform:
    return DDPTransform(process_group=dist.group.WORLD, bucket_size_in_mb=25.0, broadcast_from=None)


def fsdp() -> FSDPTransform:
    return FSDPTransform(device=torch.device("cpu"), process_group=dist.group.WORLD)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", TWICE_AT_ONCE)
def test_two_transforms_at_once(how: str) -> None:
    """Refused before the first of them takes the weights."""
    module = Net()
    named = "by CUDAGraphTransform (the plugin 'reduce-overhead')" if "CUDA" in how else ""
    with refused(RuntimeError, "Net is", "already" if "jitted" in how else "as well", named):
        TWICE_AT_ONCE[how](module)
    assert plain(module)
    fresh = Net()
    fresh.load_state_dict(module.state_dict())
    assert trains(shard(fresh))


# Derivatives that Thunder's backward does not have.


class Returns(nn.Module):
    """Its output in several structures, views among them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.layer(x))
        return {"tensor": y, "view": y.t(), "dict": {"deep": [1, (y, x)]}, "dataclass": Boxed(y)}[self.how]


@dataclass
class Boxed:
    y: Tensor


TAKES: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda output: output,
    "view": lambda output: output,
    "dict": lambda output: output["deep"][1][0],
    "dataclass": lambda output: output.y,
}
DOUBLE: dict[str, Callable[[Any, Tensor, Callable[[Any], Tensor]], Any]] = {
    "backward": lambda model, x, take: take(model(x)).sum().backward(create_graph=True),
    "grad of x": lambda model, x, take: torch.autograd.grad(take(model(x)).sum(), x, create_graph=True),
    "grad of parameters": lambda model, x, take: torch.autograd.grad(
        take(model(x)).sum(), list(model.parameters()), create_graph=True
    ),
    "hessian": lambda model, x, take: torch.autograd.functional.hessian(lambda x: take(model(x)).sum(), x),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", only(("dict",), TAKES))
def test_a_backward_that_is_differentiated(how: str) -> None:
    """Plain Thunder returns a gradient without a graph, and a penalty on it trains nothing. The next step is right."""
    model = shard(Returns(how))
    x = torch.randn(2, 3).requires_grad_()
    for double in DOUBLE.values():
        with refused(RuntimeError, "cannot differentiate the backward of Returns", "create_graph=True"):
            double(model, x, TAKES[how])
    right = Returns(how)
    right.load_state_dict(tz.full_state_dict(model))
    for each in (model, right):
        TAKES[how](each(x)).square().sum().backward()
    for param, expected in zip(model.parameters(), right.parameters(), strict=True):
        assert expected.grad is not None
        assert torch.allclose(param.grad, expected.grad)
    jacobians = [
        torch.autograd.functional.jacobian(lambda x, each=each: TAKES[how](each(x)), x) for each in (model, right)
    ]
    assert torch.allclose(*jacobians)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("call", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())], ids=["vmap", "grad"])
def test_a_function_transform_around_the_model(call: Callable[[Any], Any]) -> None:
    model = shard(Net())
    with refused(RuntimeError, "Net was called inside of torch.func or vmap", "torch.autograd.grad"):
        call(lambda x: model(x))(torch.ones(2, 3))


# Random numbers that Thunder draws again for backward, and draws that it does not differentiate.

DRAWN_AGAIN: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "dropout1d": lambda x, on: F.dropout1d(x[0], 0.5, on),
    "dropout3d": lambda x, on: F.dropout3d(x[None], training=on),
    "torch.dropout": lambda x, on: torch.dropout(x, 0.5, train=on),
    "torch.dropout, p": lambda x, on: torch.dropout(x, 0.5 if on else 0.0, True),
    "alpha_dropout": lambda x, on: F.alpha_dropout(x, 0.5, on),
    "gumbel_softmax": lambda x, on: F.gumbel_softmax(x) if on else x,
    "fractional_max_pool2d": lambda x, on: F.fractional_max_pool2d(x, 2, output_size=(3, 3)) if on else x,
}


class Draws(nn.Module):
    def __init__(self, name: str, on: bool) -> None:
        super().__init__()
        self.w, self.name, self.on = nn.Parameter(torch.ones(2, 4, 8, 8)), name, on

    def forward(self, x: Tensor) -> Tensor:
        return DRAWN_AGAIN[self.name](self.w * x, self.on).sum()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", only(("dropout1d", "torch.dropout, p"), DRAWN_AGAIN))
def test_gradients_of_other_random_numbers(name: str) -> None:
    """Plain Thunder trains on them without a word. They pass where they draw nothing."""
    x = torch.ones(())
    model = shard(Draws(name, True))
    with refused(RuntimeError, "cannot train through torch.", name.split(",")[0], "Thunder draws its random numbers"):
        model(x)
    with torch.no_grad():
        model(x)
    shard(Draws(name, False))(x).backward()


AGAIN: dict[str, Callable[[Any, Any], Any]] = {
    "jit the plain module": lambda module, model: shard(module),
    "jit a part of it": lambda module, model: shard(module.a),
    "zero on jit of the plain module": lambda module, model: tz.zero(thunder.jit(module)),
    "jit the model": lambda module, model: shard(model),
    "zero": lambda module, model: tz.zero(model),
    "compile": lambda module, model: thunder.compile(module, plugins="zero1", recipe=tz.Recipe()),
    "thunder.distributed.ddp": lambda module, model: thunder.distributed.ddp(model),
    "thunder.distributed.fsdp": lambda module, model: thunder.distributed.fsdp(model, device=torch.device("cpu")),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", AGAIN)
def test_a_module_that_we_transformed(how: str) -> None:
    module = Net()
    expected = deepcopy(module)(X)
    model = shard(module)
    with pytest.raises(RuntimeError) as caught:
        AGAIN[how](module, model)
    text = str(caught.value)
    assert "already transformed by ZeroTransform" in text or "as well" in text or "already jitted" in text, text
    assert "; " in text
    assert torch.equal(model(X), expected), "the model still works, with its weights"
    assert trains(model)


@pytest.mark.usefixtures("group")
def test_a_module_whose_sharded_model_is_gone() -> None:
    """A notebook cell that runs twice: the weights went with the first model, NaN must not be sharded."""
    module = Net()
    shard(module)
    gc.collect()
    with refused(RuntimeError, "Net is already transformed by ZeroTransform", "build a new module"):
        shard(module)


@pytest.mark.usefixtures("group")
def test_a_transform_that_serves_another_module() -> None:
    transform, second = tz.ZeroTransform(), Net()
    first = thunder.jit(Net(), transforms=[transform])
    with refused(RuntimeError, "the ZeroTransform given for Net already shards a module", "a new ZeroTransform"):
        thunder.jit(second, transforms=[transform])
    assert plain(second)
    assert trains(first)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("theirs", [ddp, fsdp])
def test_a_module_that_thunder_distributed_transformed(theirs: Callable[[], Any]) -> None:
    module = Net()
    model = thunder.jit(module, transforms=[theirs()])
    with refused(RuntimeError, "Net is transformed by", type(theirs()).__name__):
        tz.zero(model)
    with refused(RuntimeError, "Net is already sharded by thunder.distributed", "build a new module"):
        shard(module)
    assert plain(module)


# The optimizer.


def optimizer_of(kind: str, before: list[nn.Parameter], module: nn.Module, model: Any) -> torch.optim.Optimizer:
    after = list(model.parameters())
    groups: dict[str, list[Any]] = {
        "before": before,
        "plain module": list(module.parameters()),
        "groups that mix": [{"params": after[:2]}, {"params": after[2:3] + before[3:]}],
    }
    return torch.optim.AdamW(groups[kind], lr=0.1)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", ["before", "plain module", "groups that mix"])
def test_an_optimizer_on_other_parameters(kind: str, stage: int) -> None:
    module = Net()
    before = list(module.parameters())
    model = shard(module, stage=stage)
    optimizer = optimizer_of(kind, before, module, model)
    model(X).sum().backward()
    for param in before:
        param.grad = torch.ones_like(param)
    held = [param for each in optimizer.param_groups for param in each["params"]] + list(model.parameters())
    held = [param for param in held if not isinstance(param, Placeholder)]
    values = [param.detach().clone() for param in held]
    with refused(RuntimeError, "AdamW", "b.bias" if kind == "groups that mix" else "a.weight", "model.parameters()"):
        optimizer.step()
    for param, value in zip(held, values, strict=True):
        assert torch.equal(param, value)
    assert not optimizer.state
    model.zero_grad()
    assert trains(model)


@pytest.mark.usefixtures("group")
def test_the_old_parameters_may_be_trained_when_the_model_is_gone() -> None:
    module = Net()
    before = list(module.parameters())
    model = shard(module)
    del model
    gc.collect()
    before[0].grad = torch.ones_like(before[0])
    value = before[0].detach().clone()
    torch.optim.SGD(before, lr=1.0).step()
    assert torch.equal(before[0], value - 1)


# The model, changed after the transform.


def replace_plain(module: Any, model: Any) -> Callable[[], None]:
    old = module.b.weight
    module.b.weight = nn.Parameter(torch.randn(4, 5))
    return lambda: setattr(module.b, "weight", old)


def replace_through_the_model(module: Any, model: Any) -> Callable[[], None]:
    model.b = nn.Linear(4, 4)
    return lambda: delattr(model, "b")


def replace_submodule(module: Any, model: Any) -> Callable[[], None]:
    old, module.b = module.b, nn.Linear(4, 4)
    return lambda: setattr(module, "b", old)


def replace_override(module: Any, model: Any) -> Callable[[], None]:
    old = model._overrides_parameters["b.weight"]
    model._overrides_parameters["b.weight"] = nn.Parameter(torch.randn_like(old))
    return lambda: model._overrides_parameters.update({"b.weight": old})


def assign(module: Any, model: Any) -> Callable[[], None]:
    old = dict(model._overrides_parameters)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return lambda: model._overrides_parameters.update(old)


def cast_shard(module: Any, model: Any) -> Callable[[], None]:
    shard = model.get_parameter("b.weight")
    old, shard.data = shard.data, shard.data.half()
    return lambda: setattr(shard, "data", old)


def cut_shard(module: Any, model: Any) -> Callable[[], None]:
    shard = model.get_parameter("b.weight")
    old, shard.data = shard.data, shard.data[:2]
    return lambda: setattr(shard, "data", old)


def freeze_shard(module: Any, model: Any) -> Callable[[], Any]:
    shard = model.get_parameter("b.weight").requires_grad_(False)
    return lambda: shard.requires_grad_(True)


def hook_forward(module: Any, model: Any) -> Callable[[], Any]:
    handle: Any = module.b.register_forward_hook(lambda *args: None)
    return lambda: handle.remove()


def hook_backward(module: Any, model: Any) -> Callable[[], Any]:
    handle: Any = module.b.register_full_backward_hook(lambda *args: None)
    return lambda: handle.remove()


CHANGES: dict[Callable[[Any, Any], Callable[[], Any]], tuple[str, ...]] = {
    replace_plain: ("parameter 'b.weight' was replaced", "copy new values"),
    replace_through_the_model: ("submodule 'b' was replaced", "before thunder.jit"),
    replace_submodule: ("submodule 'b' was replaced", "before thunder.jit"),
    replace_override: ("parameter 'b.weight' was replaced", "copy new values"),
    assign: ("parameter 'a.weight' was replaced", "load_original_state_dict"),
    cast_shard: ("parameter 'b.weight' was moved or cast: it is torch.float16 on cpu", "as torch.float32 on cpu"),
    cut_shard: ("parameter 'b.weight' was replaced (.data = ...)", "(2, 4)", "(4, 4)", "in place"),
    freeze_shard: ("requires_grad of parameter 'b.weight' became False", "planned it as True"),
    hook_forward: ("a hook was registered on submodule 'b'", "would not call it", "before thunder.jit"),
    hook_backward: ("a hook was registered on submodule 'b'", "would not call it", "before thunder.jit"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("called", of_tier([True], [False, True]), ids=lambda called: "between" if called else "before")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_was_changed(change: Callable[[Any, Any], Callable[[], Any]], called: bool) -> None:
    """Refused before Thunder traces, compiled already or not; with the change undone, it works as before."""
    module = Net()
    reference = deepcopy(module)
    model = shard(module)
    expected = reference(X)
    if called:
        assert torch.equal(model(X), expected)
    undo = change(module, model)
    for _ in range(2):
        with refused(RuntimeError, *CHANGES[change]):
            model(X)
    undo()
    assert torch.equal(model(X), expected)
    assert trains(model)
    assert thunder.cache_misses(model) == 1, "nothing was compiled for a changed model"


@pytest.mark.usefixtures("group")
def test_memory_that_zero1_shares() -> None:
    """Under ZeRO-1 the shard is a view; new memory behind it would be trained, and never be used again."""
    model = shard(stage=1)
    shard_of_b = model.get_parameter("b.weight")
    old, shard_of_b.data = shard_of_b.data, shard_of_b.data.clone()
    with refused(RuntimeError, "memory of parameter 'b.weight' was replaced", ".data", "in place"):
        model(X)
    shard_of_b.data = old
    assert trains(model)


@pytest.mark.usefixtures("group")
def test_a_tied_parameter_that_was_replaced_under_one_of_its_names() -> None:
    module = Net(tied=True)
    model = shard(module)
    module.b.weight = nn.Parameter(torch.randn(4, 4))
    with refused(RuntimeError, "parameter 'b.weight' was replaced"):
        model(X)


# What forward returns.

RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": lambda y, w: w,
    "tuple": lambda y, w: (y, w),
    "list": lambda y, w: [y, w],
    "dict": lambda y, w: {"y": y, "w": w},
    "nested": lambda y, w: {"y": (y, [w])},
    "a cast that is none": lambda y, w: (y, w.float()),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("tied", of_tier([False], [False, True]))
@pytest.mark.parametrize("how", RETURNS)
def test_forward_that_returns_a_parameter(how: str, tied: bool) -> None:
    path = "a.weight" if tied else "b.weight"
    with refused(ValueError, f"forward returns the parameter '{path}' itself", "full_state_dict"):
        shard(Net(RETURNS[how], tied))(X)
    with refused(ValueError, f"forward returns the parameter '{path}' itself"):
        tz.trace(Net(RETURNS[how], tied), X, policy=tz.ZERO1)


@pytest.mark.parametrize("how", [torch.clone, torch.t, torch.detach, torch.Tensor.contiguous, torch.Tensor.half])
def test_forward_may_return_what_it_computes_from_a_parameter(how: Callable[[Tensor], Tensor]) -> None:
    traces = tz.trace(Net(lambda y, w: (y, how(w))), X, world_size=4)
    assert [tuple(output.shape) for output in traces.forward.output[0]["flat_output"]] == [(3, 4), (4, 4)]


# Gradients.


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite(stage: int, value: float) -> None:
    """The bias's gradient is one; the weight's is the input."""
    model = shard(nn.Linear(4, 2), stage=stage, check_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = [param.detach().clone() for param in model.parameters()]
    with refused(RuntimeError, "gradient of parameter 'weight' is NaN or Inf", "check_gradients", "no .grad"):
        model(X * value).sum().backward()
    assert [param.grad for param in model.parameters()] == [None, None]
    optimizer.step()
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()
    weight, bias = model.parameters()
    assert torch.equal(weight, values[0] - 3)
    assert torch.equal(bias, values[1] - 3)


@pytest.mark.usefixtures("group")
def test_gradients_are_not_looked_at_unasked() -> None:
    model = shard(nn.Linear(4, 2))
    model(X * float("nan")).sum().backward()
    assert model.get_parameter("weight").grad.isnan().all()


# Versions, and a Thunder that failed to import.


@pytest.mark.parametrize(
    ("package", "found", "is_tested"),
    [
        ("torch", "2.7.1", True),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.15.1", True),
        ("torch", "2.7.0", False),
        ("torch", "2.16.0", False),
        ("torch", "3.0", False),
        ("lightning-thunder", "0.2.6", True),
        ("lightning-thunder", "0.2.6.post1", True),
        ("lightning-thunder", "0.2.5", False),
        ("lightning-thunder", "0.3.0", False),
    ],
)
def test_a_version_outside_of_what_was_tested(package: str, found: str, is_tested: bool) -> None:
    sentence = _compat.untested(package, found)
    if is_tested:
        assert sentence is None
    else:
        assert sentence is not None
        assert [
            word
            for word in (package, found, *_compat.TESTED[package], "install a tested version")
            if word not in sentence
        ] == []


def test_an_untested_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "version", {"torch": "9.9", "lightning-thunder": "0.2.6"}.__getitem__)
    with pytest.warns(UserWarning, match="9.9") as caught:
        _compat.import_thunder()
    assert [str(warning.message) for warning in caught] == [_compat.untested("torch", "9.9")]


def test_a_tested_version_is_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    _compat.import_thunder()
    assert not [warning for warning in recwarn if "thunder_zero" in str(warning.message)]


def test_half_imported_is_told_from_imported() -> None:
    assert _compat.half_imported({"thunder.core": None})
    assert not _compat.half_imported({"thunder": None, "thunder.core": None})
    assert not _compat.half_imported({"thunder_zero": None, "thunderstorm.core": None})


def run(program: str) -> str:
    """The last line that a fresh Python prints for a program."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


IMPORT_OURS = """
try:
    import thunder_zero
except ImportError as error:
    print(type(error).__name__, error)
else:
    print("imported")
"""


def test_what_a_failed_import_of_thunder_left_behind() -> None:
    left = "import sys, types; sys.modules['thunder.core'] = types.ModuleType('thunder.core')\n"
    text = run(left + IMPORT_OURS)
    assert text.startswith("ImportError an earlier `import thunder` failed"), text
    assert "; restart Python" in text
    assert "`import thunder_zero` before `import thunder`" in text


@pytest.mark.skipif(
    all(hasattr(torch.Tensor, name) for name in _compat.DROPPED_METHODS), reason="this torch lets Thunder import"
)
def test_thunder_imported_first_where_it_cannot_be() -> None:
    """Thunder raises its own error; importing thunder_zero raises ours, at each attempt."""
    program = "try:\n    import thunder\nexcept Exception as error:\n    print(type(error).__name__)\n"
    assert run(program) in ("AttributeError", "RuntimeError")
    for imports in (IMPORT_OURS, IMPORT_OURS * 2):
        text = run(program + imports)
        assert text.startswith("ImportError an earlier `import thunder` failed"), text


def test_ours_imported_first() -> None:
    assert run(IMPORT_OURS + "import thunder; print(thunder.__version__)") == thunder.__version__
