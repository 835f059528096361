"""Wrong arguments are refused before a module is sharded. The error names the value and the action; nothing changes.

Refusals of a sharded model are in ``test_misuse.py``; refusals on several ranks in ``tests/ranks/test_bad_input.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal import two_tensor

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.models import Mlp, is_plain, trains
from tests.harness.ranks import everyone
from thunder_zero.comm.backends import transport_for

import thunder
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from thunder.dynamo import thunderfx
from thunder.transforms.cudagraph import CUDAGraphTransform

X = torch.ones(3, 4)
OWNED = tz.Policy(2, owned=("layers",))
BUILTIN: Any = torch.tanh


def net() -> nn.Module:
    return Mlp(width=4, layers=2)


def shard(module: nn.Module, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(**arguments)])


def compiled(module: nn.Module, plugins: Any) -> Any:
    return thunder.compile(module, plugins=plugins, recipe=tz.Recipe())


def with_torchs(module: Any) -> Any:
    return torch.compile(module)


def with_compiled_forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward)
    return module


ENTRIES: tuple[Callable[..., Any], ...] = (tz.ZeroTransform, tz.Zero, lambda **k: tz.zero(thunder.jit(net()), **k))

# field of the policy -> wrong values, and the action that the error names
FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "stage": ((5, -1, "3", None, True, 2.0), "choose 0"),
    "bucket_bytes": ((-1, "1"), "bytes, 0 or more"),
    "replicate_below_bytes": ((-1, None), "bytes, 0 or more"),
    "in_flight_bytes": ((-2,), "bytes, 0 or more"),
    "prefetch": ((-3, 1.5), "0 or more"),
    "broadcast_from": ((-1, "0"), "a rank of the process group, or None"),
    "ignored": (("router", (1,)), "a tuple of paths"),
    "replicated": (("*.bias",), "give a tuple of patterns"),
    "owned": (("*.weight",), "give a tuple of patterns"),
    "recompute": ((True,), "'none', 'cheap', 'units'"),
    "reshard_after_backward": ((1,), "True or False"),
    "gather_per_unit": (("no",), "True or False"),
    "reshard_after_forward": ((1,), "give True or None"),
    "check_gradients": ((None,), "True or False"),
    "materialize_grads": ((None,), "True or False"),
    "times": ((0.5,), "thunder_zero.schedule.Times, as measure_times makes them, or None"),
    "unit_of": (("blocks",), "a function"),
    "passes": ((len, ("bucket",)), "a tuple of functions"),
    "transport": (("gloo",), "a function that makes a Transport"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_fields_of_a_policy_are_refused(field: str) -> None:
    values, action = FIELDS[field]
    for value in values:
        for make in ENTRIES:
            with refused(ValueError, f"{field} is {value!r}", action):
                make(**{field: value})


ARGUMENTS: dict[type[Exception], list[tuple[Any, ...]]] = {
    ValueError: [
        ({"policy": 7}, "stage is 7", "choose 0"),
        ({"policy": tz.ZERO2, "stage": 1}, "stage is 1", "policy's stage is 2", "give one of the two"),
        ({"policy": tz.ZERO1, "stage": 3}, "stage is 3", "policy's stage is 1"),
        ({"policy": 1, "stage": 3}, "stage is 3", "policy's stage is 1"),
    ],
    TypeError: [
        ({"policy": "zero3"}, "policy is 'zero3'", "thunder_zero.Policy", "stage 0 to 3"),
        ({"policy": True}, "policy is True", "thunder_zero.Policy"),
        ({"policy": 2.0}, "policy is 2.0", "thunder_zero.Policy"),
        ({"policy": tz.Policy}, "policy is <class", "thunder_zero.ZERO3"),
        ({"foo": 1}, "foo=1", "is not a field of Policy; thunder_zero.Policy lists its fields"),
        ({"policy": tz.ZERO1, "Stage": 1}, "Stage=1", "did you mean stage?"),
        ({"init": 3}, "init is 3", "a function of a module"),
        ({"init": nn.Linear(2, 2)}, "init is Linear", "a function of a module"),
        ({"weights": [X]}, "weights is a list", "a mapping of names to tensors", "mmap=True"),
        ({"weights": 3}, "weights is a int", "a folder of safetensors files"),
    ],
}


@pytest.mark.parametrize("error_type", ARGUMENTS)
def test_contradicting_and_wrong_arguments_are_refused(error_type: type[Exception]) -> None:
    for arguments, *words in ARGUMENTS[error_type]:
        for make in ENTRIES:
            with refused(error_type, *words):
                make(**arguments)


# Calls with a plain module, which keeps its weights


class Quantised(Tensor):
    """A tensor subclass with ``__torch_function__``."""


def two_of(data: Tensor) -> Tensor:
    """Return a tensor of a subclass with ``__torch_dispatch__``."""
    return vars(two_tensor)["TwoTensor"](data, data)


def holds(data: Tensor) -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(data)
    return module


def dtensors() -> Any:
    return fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))


def ddp() -> DDPTransform:
    return DDPTransform(process_group=dist.group.WORLD, bucket_size_in_mb=25.0, broadcast_from=None)


def fsdp() -> FSDPTransform:
    return FSDPTransform(device=torch.device("cpu"), process_group=dist.group.WORLD)


def jitted(module: nn.Module, transform: Any) -> nn.Module:
    thunder.jit(module, transforms=[transform])
    return module


CUDA_GRAPHS = ("Mlp is", "as well", "by CUDAGraphTransform (the plugin 'reduce-overhead')")
FUNCTION = ("thunder.jit was given a function", "jit the module")
# Calls with a plain module, and words of their errors.
CALLS: dict[type[Exception], list[tuple[Any, ...]]] = {
    ValueError: [
        (lambda m: shard(m, device="gpu"), "device is 'gpu'", "'cuda:0'"),
        (lambda m: shard(m, device="cuda:99"), "device is 'cuda:99'", "cannot be used here"),
        (lambda m: shard(m, device="meta"), "meta tensors", "backend"),
        (lambda m: shard(m, broadcast_from=1), "broadcast_from is 1", "ranks 0 to 0"),
        (lambda m: tz.Recipe("thunder.fx"), "interpreter='thunder.fx'", "dynamo captures"),
        (lambda m: tz.trace(m, X, world_size=0), "world_size is 0", "at least 1"),
        (lambda m: tz.trace(m, X, world_size=-4), "world_size is -4", "at least 1"),
        (lambda m: tz.trace(m, X, rank=8), "rank is 8", "world_size=8", "0 to 7"),
        (lambda m: tz.trace(m, X, rank=-1), "rank is -1", "0 to 7"),
        (lambda m: tz.trace(m, X, world_size=1, rank=1), "rank is 1", "world_size=1", "0 to 0"),
        (lambda m: tz.trace(m, X, policy=7), "stage is 7", "choose 0"),
        (lambda m: shard(m, unit_of=lambda module: ("c",)), "unit_of names 'c'", "submodule of Mlp"),
        (lambda m: shard(m, ignored=("lin",)), "ignored names 'lin'", "no parameter and no submodule of Mlp"),
        (lambda m: shard(m, replicated=("*.gain",)), "replicated names '*.gain'", "no parameter and no submodule of"),
        (lambda m: shard(m, owned=("*.gain",)), "owned names '*.gain'", "no parameter and no submodule of"),
        (lambda m: shard(m, owned=("*.bias",)), "owned is ('*.bias',)", "name matrices"),
        (lambda m: shard(m, owned=("layers",), stage=0), "owned is ('layers',), in stage 0", "stage 1, 2 or 3"),
        (lambda m: tz.trace(m, X, policy=OWNED, replicas=2), "with 2 replicas", "give it in stage 1, 2 or 3"),
        (lambda m: shard(m, ignored=("layers",)), "Mlp has no parameters that are not ignored"),
        (lambda m: shard(nn.ReLU()), "ReLU has no parameters", "nothing to shard"),
        (lambda m: tz.zero(thunder.jit(nn.ReLU())), "ReLU has no parameters", "nothing to shard"),
        (lambda m: compiled(nn.ReLU(), [tz.Zero()]), "ReLU has no parameters", "nothing to shard"),
        (lambda m: tz.trace(nn.ReLU(), X), "ReLU has no parameters", "nothing to shard"),
        (lambda m: shard(dtensors()), "'weight'", "DTensor", "plain tensors"),
        (lambda m: shard(holds(torch.ones(4, 4).as_subclass(Quantised))), "parameter 'weight' is a", "Quantised"),
        (lambda m: shard(holds(two_of(torch.ones(4, 4)))), "TwoTensor", "plain rows", "plain tensors"),
    ],
    TypeError: [
        (lambda m: shard(m, process_group="gloo"), "process_group is 'gloo'", "ProcessGroup", "None"),
        (lambda m: tz.zero(m), "zero takes a jitted module", "got Mlp", "thunder.jit(module)"),
        (lambda m: tz.zero(thunder.jit(torch.tanh)), "zero takes a jitted module", "thunder.jit(module)"),
        (lambda m: tz.full_state_dict(m), "expected a sharded model", "got Mlp", "pass the model itself"),
        (lambda m: tz.full_state_dict(thunder.jit(m)), "expected a sharded model", "pass the model itself"),
        (lambda m: tz.traces_of(m), "expected a sharded model", "got Mlp"),
        (lambda m: tz.traces_of(thunder.jit(m)), "expected a sharded model", "got ThunderModule"),
        (lambda m: tz.print_trace(m), "expected a sharded model", "got Mlp"),
        (lambda m: tz.tools.measure_times(m, net), "expected a sharded model", "got Mlp"),
        (lambda m: tz.tools.measure_times(thunder.jit(m), net), "expected a sharded model", "got ThunderModule"),
        (lambda m: tz.trace(thunder.jit(m), X), "plain torch module", "got ThunderModule", "before thunder.jit"),
        (lambda m: tz.trace(BUILTIN, X), "plain torch module", "builtin"),
        (lambda m: thunder.jit(lambda x: x * 2, transforms=[tz.ZeroTransform()])(X), *FUNCTION),
        (lambda m: thunder.jit(m.forward, transforms=[tz.ZeroTransform()])(X), *FUNCTION),
        (lambda m: tz.trace(m, X, stage=3), "Mlp.forward does not take stage=3", "field of Policy", "pass policy=3"),
        (lambda m: tz.trace(m, X, worldsize=3), "Mlp.forward does not take worldsize=3", "did you mean world_size?"),
        (lambda m: tz.trace(m, X, replicate_below_byte=3), "replicate_below_byte=3", "mean replicate_below_bytes"),
        (lambda m: tz.trace(m, X, foo=1), "does not take foo=1", "neither trace nor Policy knows it; it takes x"),
        (lambda m: tz.trace(m, X, prefetch=1), "prefetch=1", "dataclasses.replace(thunder_zero.ZERO3, prefetch=1)"),
    ],
    RuntimeError: [
        (lambda m: tz.traces_of(shard(net())), "not called yet", "thunder_zero.trace"),
        (lambda m: tz.compile(with_torchs(m)), "OptimizedModule is under torch.compile", "fuse='inductor'"),
        (lambda m: shard(with_torchs(m)), "OptimizedModule is under torch.compile", "from before torch.compile"),
        (lambda m: tz.trace(with_torchs(m), X), "OptimizedModule is under torch.compile"),
        (lambda m: tz.compile(with_compiled_forward(m)), "Mlp is under torch.compile", "from before torch.compile"),
        (lambda m: shard(nn.parallel.DistributedDataParallel(m)), "DistributedDataParallel", "the module inside it"),
        (lambda m: thunder.jit(m, transforms=[tz.ZeroTransform(1), tz.ZeroTransform()]), "Mlp is", "as well"),
        (lambda m: thunder.jit(m, transforms=[tz.ZeroTransform()] * 2), "Mlp is", "as well"),
        (lambda m: thunder.jit(m, transforms=[tz.ZeroTransform(), ddp()]), "Mlp is", "as well"),
        (lambda m: compiled(m, [tz.Zero(stage=1), tz.Zero()]), "Mlp is", "as well"),
        (lambda m: compiled(m, ["zero2", "zero2"]), "Mlp is", "as well"),
        (lambda m: compiled(m, ["zero2", "ddp"]), "Mlp is", "as well"),
        (lambda m: thunder.jit(m, transforms=[CUDAGraphTransform(), tz.ZeroTransform()]), *CUDA_GRAPHS),
        (lambda m: thunder.jit(m, transforms=[tz.ZeroTransform(), CUDAGraphTransform()]), *CUDA_GRAPHS),
        (lambda m: tz.zero(thunder.jit(m, transforms=[CUDAGraphTransform()])), *CUDA_GRAPHS),
        (lambda m: compiled(m, ["reduce-overhead", "zero2"]), *CUDA_GRAPHS),
        (lambda m: compiled(m, ["zero2", "reduce-overhead"]), *CUDA_GRAPHS),
        (lambda m: shard(thunder.jit(m)), "Mlp is already jitted"),
        (lambda m: compiled(thunder.jit(m), "zero2"), "Mlp is already jitted"),
        (lambda m: tz.zero(thunder.jit(m, transforms=[ddp()])), "Mlp is transformed by DDPTransform"),
        (lambda m: tz.zero(thunder.jit(m, transforms=[fsdp()])), "Mlp is transformed by FSDPTransform"),
        (lambda m: shard(jitted(m, ddp())), "already sharded by thunder.distributed", "build a new module"),
        (lambda m: shard(jitted(m, fsdp())), "already sharded by thunder.distributed", "build a new module"),
    ],
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("error_type", CALLS)
def test_a_refused_call_leaves_the_module_plain(error_type: type[Exception]) -> None:
    for call, *words in CALLS[error_type]:
        module = net()
        with refused(error_type, *words):
            call(module)
        assert is_plain(module), words


@pytest.mark.usefixtures("group")
def test_a_module_that_was_refused_can_still_be_sharded() -> None:
    module = net()
    for call, *words in CALLS[ValueError]:
        with refused(ValueError, *words):
            call(module)
    assert trains(shard(module), X)


@pytest.mark.usefixtures("group")
def test_thunderfx_raises_and_names_compile() -> None:
    model = thunderfx(nn.Linear(X.shape[-1], 7), transforms=[tz.ZeroTransform()])
    with pytest.raises(Exception, match=r"ThunderFX \(thunder\.dynamo\).*thunder_zero\.compile\(module"):
        model(X)


class Named(nn.Parameter):
    """A subclass of parameters that changes nothing."""


class Staged(nn.Linear):
    """A module whose forward has an argument named like a field of Policy."""

    def forward(self, x: Tensor, stage: int = 0) -> Tensor:
        return super().forward(x) * stage


@pytest.mark.usefixtures("group")
def test_unusual_but_correct_input_is_accepted() -> None:
    module = net()
    module.layers[0].weight = Named(torch.ones(4, 4))
    assert not any(param.isnan().any() for param in shard(module).parameters())
    traces = tz.trace(Staged(4, 4), X, stage=2, policy=1)
    assert traces.plan.policy == tz.ZERO1
    assert traces.backward is not None


# Process groups


def test_a_missing_process_group_is_refused() -> None:
    module = net()
    assert not dist.is_initialized()
    with refused(RuntimeError, "no process group", "init_process_group", "process_group"):
        shard(module)
    assert is_plain(module)


@pytest.mark.usefixtures("group")
def test_restarts_on_one_store_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = {"RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for changed, count in (({}, 1), ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, 0), ({"RANK": "1"}, 0)):
        for name, value in (restarts | changed).items():
            monkeypatch.setenv(name, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tz.compile(net())
        messages = [str(warning.message) for warning in caught]
        assert sum("3 times" in text and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text for text in messages) == count


@contextmanager
def group_for_cuda() -> Iterator[None]:
    """Make a gloo group for CUDA tensors only, which stands in for NCCL on a machine without a GPU."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_cpu_tensors_are_refused_if_the_group_carries_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    with group_for_cuda():
        with refused(ValueError, "'cuda:gloo'", "no cpu tensors", "gloo for CPU", "move the module"):
            shard(module)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")  # as of NCCL's group
        with refused(ValueError, "'cuda:nccl'", "no cpu tensors", "gloo for CPU"):
            transport_for(everyone(), torch.device("cpu"))
    assert is_plain(module)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_meta_parameters_go_to_the_device_of_the_groups_backend() -> None:
    with group_for_cuda(), refused(ValueError, "device is 'cuda', which cannot be used here"):
        shard(Scaled.on_meta())


# Modules on the meta device


class Scaled(nn.Module):
    """A layer, and a parameter and a buffer that only the constructor initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    @classmethod
    def on_meta(cls) -> Scaled:
        with torch.device("meta"):
            return cls()

    def forward(self, x: Tensor) -> Tensor:
        return self.a.forward(x) * self.scale + self.shift


def init_scaled(module: nn.Module) -> None:
    if isinstance(module, Scaled):
        nn.init.constant_(module.scale, 2.0)
        module.shift.data.copy_(torch.arange(4.0))


def init_others(module: nn.Module) -> None:
    init_scaled(module)
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
    ({"init": init_others}, ("init wrote 'a.weight'", "called for Scaled", "does not own it", "called for its owner")),
    ({"init": reshape}, ("init of Linear left 'a.bias' with shape (5,)", "the module has shape (4,)", "; build")),
    ({"weights": {**SCALED, "b": X}, "init": init_scaled}, ("weights has 'b'", "Scaled does not have", "leave it out")),
    ({"weights": {"scale": X}, "init": init_scaled}, ("weights has no 'a.weight'", "the state dict of a Scaled")),
    ({"weights": {**SCALED, "scale": X}, "init": init_scaled}, ("'scale' with shape (3, 4)", "has shape (4,)")),
    ({"weights": {**SCALED, "scale": 2.0}, "init": init_scaled}, ("'scale' as a float", "a tensor of shape (4,)")),
]


@pytest.mark.usefixtures("group")
def test_a_module_on_the_meta_device_needs_values_for_all_tensors() -> None:
    module = Scaled.on_meta()
    for arguments, words in LACKING:
        with refused(ValueError, *words):
            shard(module, **arguments)
        assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())), words
    model = shard(module, weights=SCALED, init=init_scaled)
    assert torch.equal(model(X), X @ SCALED["a.weight"].t() * 2 + SCALED["a.bias"] * 2 + torch.arange(4.0))
