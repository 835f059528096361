"""Small models, and functions that compare tensors, count bytes and read traces."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import thunder_zero as tz
from thunder_zero.comm import pairwise

import thunder
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

VOCABULARY = 29
WIDTH = 8
LENGTH = 5
Tensors = dict[str, Tensor]


class Block(nn.Module):
    """A transformer block. In exact arithmetic the gradient of its key bias is zero, as softmax ignores a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm.forward(x)
        x = x + F.softmax(y @ self.key.forward(y).transpose(-2, -1) / WIDTH**0.5, -1) @ y
        return x + self.down.forward(F.gelu(self.up.forward(x)))


class GptShape(nn.Module):
    """Two transformer blocks, a tied embedding, and parameters of all awkward shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.few = nn.Parameter(torch.randn(2, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed.forward(tokens) + self.few.sum(0) * self.frozen
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.norm.forward(x) * self.scale)


class Patterns(nn.Module):
    """Computes typical values from parameters alone, which are saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.w = nn.Parameter(torch.randn(WIDTH + 3, WIDTH) / 3)
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH + 3))
        self.g = nn.Parameter(torch.randn(WIDTH))
        self.bias = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed.forward(tokens) + self.positions.weight
        for layer in self.layers:
            x = torch.tanh(layer.forward(x))
        x = torch.tanh(x @ self.w.t())
        norm = self.v.square().sum(dim=1, keepdim=True).sqrt()
        x = F.linear(x, self.v / norm * self.g[:, None])  # weight norm
        return x @ self.embed.weight.t() + self.bias


# The parameters that backward of Patterns reads: the factors of products, but no bias and no untied embedding.
PATTERNS_AGAIN = {"embed.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "w", "v", "g"}


class Zoo(nn.Module):
    """Parameters of every kind: 0-dim, or 9, 2, 1 or 0 rows, which few worlds divide; dtypes, strides, ties."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight  # tied across units
        self.norm = nn.BatchNorm1d(9)
        self.lower = nn.Linear(9, 9).bfloat16()
        self.turned = nn.Parameter(torch.randn(7, 9).t())  # (9, 7), not contiguous
        self.two_rows = nn.Parameter(torch.randn(2, 9))
        self.one_row = nn.Parameter(torch.randn(1, 9))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 9))
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("offset", torch.randn(9))
        self.register_buffer("not_saved", torch.arange(9) / 9, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(inputs)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x * self.scalar + torch.cat((self.two_rows, self.empty)).sum(0) * self.frozen + self.one_row + self.offset
        x = x + self.lower(inputs.bfloat16()).float() + self.not_saved
        return x @ self.turned


ZOO_WITHOUT_GRAD = {"frozen", "unused"}


class Mlp(nn.Module):
    """A chain of layers. Each is a unit with 7 rows, which 2, 3 and 4 ranks do not divide."""

    def __init__(self, width: int = 7, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer.forward(x))
        return x


class Small(nn.Module):
    """Compiles quickly. Has a tied embedding and scalar, one-row, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight
        self.row = nn.Parameter(torch.randn(1, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed.forward(tokens) * self.frozen + self.row
        for layer in self.layers:
            x = torch.tanh(layer.forward(x))
        return self.head.forward(x * self.scale)


class Halves(nn.Module):
    """Two linear layers with a graph break between them."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        y: Tensor = self.b(x)
        return y


def fresh(factory: Any, *args: Any) -> Any:
    """Build a module with equal values on every rank and in every call."""
    torch.manual_seed(0)
    return factory(*args)


def sharded(module: nn.Module, policy: tz.Policy | int, **options: Any) -> Any:
    """Return a jitted and sharded copy of the module, with a policy or a stage."""
    return thunder.jit(deepcopy(module), transforms=[tz.ZeroTransform(policy, **options)])


def is_plain(module: nn.Module) -> bool:
    """Return whether no parameter of the module is sharded."""
    return not any(isinstance(param, DTensor) for param in module.parameters())


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor. A collective if it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trains(model: Any, *inputs: Any) -> bool:
    """Take a training step and return whether it changed every parameter."""
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return bool(before) and not any(
        torch.equal(full(old), full(new)) for old, new in zip(before, model.parameters(), strict=True)
    )


def join_rows(parts: Sequence[Tensor], shape: Sequence[int], *, sharded: bool) -> Tensor:
    """Return the full tensor, from all ranks' rows or replicas.

    Raises:
        AssertionError: replicas differ in some bit, or rows are missing.
    """
    if not sharded:
        assert all(torch.equal(part, parts[0]) for part in parts), "replicas differ"
        return parts[0]
    rows = torch.cat(list(parts))
    assert rows.shape == torch.Size(shape), (rows.shape, shape)
    return rows


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of ``expected``. A collective if either is a DTensor.

    Raises:
        AssertionError: shapes or dtypes differ.
    """
    result, expected = full(result), full(expected)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype), (result.shape, result.dtype)
    return float((result.double() - expected.double()).norm() / max(float(expected.double().norm()), 1e-30))


def storages() -> dict[int, torch.UntypedStorage]:
    """Return every tensor's storage in this process, by address, except for compilers' fake tensors.

    A storage inside the memory of another one does not count. No new storage gets an address while the result lives.
    """
    gc.collect()
    largest: dict[int, torch.UntypedStorage] = {}
    for item in gc.get_objects():
        is_real = type(item) in (Tensor, nn.Parameter)  # a placeholder has no memory
        if is_real and item.device.type == "cpu" and item.layout is torch.strided:
            with torch._C.DisableTorchFunctionSubclass():
                storage = item.untyped_storage()
            address = storage.data_ptr()
            if address and (address not in largest or storage.nbytes() > largest[address].nbytes()):
                largest[address] = storage
    outer, end = {}, 0
    for address, storage in sorted(largest.items()):
        if address + storage.nbytes() > end:
            outer[address] = storage
            end = address + storage.nbytes()
    return outer


def bytes_of(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


@contextmanager
def count_sends() -> Iterator[list[int]]:
    """Collect the bytes of each message that this rank sends inside the block.

    A background thread sends the messages of a bucket before the bucket's wait ends.
    """
    sent: list[int] = []
    send = pairwise.send

    def counted(message: Tensor, rank: int, group: Any, tag: int) -> Any:
        sent.append(message.nbytes)
        return send(message, rank, group, tag)

    with mock.patch.object(pairwise, "send", counted):
        yield sent


# Functions that read Thunder's own traces


def names(proxies: Iterable[Any]) -> set[str]:
    return {proxy.name for proxy in proxies if isinstance(proxy, Proxy)}


def lines(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield the lines of a trace, including lines inside fused regions."""
    for bsym in bsyms:
        if bsym.sym.is_fusion:
            yield from lines(bsym.subsymbols)
        else:
            yield bsym


def parameter_inputs(result: tz.tools.Traces) -> set[str]:
    paths = [path.replace(".", "_") for param in result.plan.params for path in param.names]
    spelled = {f"{prefix}{path}" for path in paths for prefix in ("t_", "")}  # Thunder's prefix, or none
    return names(result.forward.args) & spelled


def saved(forward: TraceCtx) -> set[str]:
    """Return the names of the tensors that forward saves for backward."""
    return names(proxy for proxy in tree_iter(forward.bound_symbols[-1].args[1]) if isinstance(proxy, TensorProxy))


def from_parameters_alone(forward: TraceCtx, parameters: set[str]) -> set[str]:
    """Return the values computed from parameters alone, except for the parameters' shards."""
    sources: dict[str, frozenset[str]] = {
        name: frozenset({"parameter" if name in parameters else "data"}) for name in names(forward.args)
    }
    for bsym in lines(forward.bound_symbols):
        read = frozenset[str]().union(*(sources[name] for name in names(bsym.flat_proxy_args)))
        for name in names(bsym.flat_proxy_outs):
            sources.setdefault(name, read)
    return {name for name, kinds in sources.items() if kinds == {"parameter"}} - parameters
