"""Training steps on a mesh for ``check_step``: right steps, and steps that are wrong in one place.

Each is a function of a mesh that returns its model. The name of a wrong step says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn import functional as dist_nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN = 8, 16
Function: Any = torch.autograd.Function


class Block(nn.Module):
    """A norm, a wide layer and a narrow layer on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def batch(mesh: DeviceMesh, *axes: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of this rank: ranks that differ on the axes have batches of their own."""
    seed = sum(mesh.get_local_rank(axis) * 10**index for index, axis in enumerate(axes))
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, WIDTH, generator=dice), torch.randn(4, 6, WIDTH, generator=dice)


def backward(net: nn.Module, mesh: DeviceMesh, axis: str = "dp") -> None:
    x, y = batch(mesh, *([axis] if axis in (mesh.mesh_dim_names or ()) else []))
    F.mse_loss(net(x), y).backward()


def average(net: nn.Module, mesh: DeviceMesh, divide: float | None = None) -> None:
    for param in net.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=mesh.get_group("dp"))
            param.grad.div_(mesh["dp"].size() if divide is None else divide)


# right steps


def ddp(mesh: DeviceMesh) -> nn.Module:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    backward(net, mesh)
    average(net, mesh)
    optimizer.step()
    optimizer.zero_grad()
    return net


def fsdp(mesh: DeviceMesh, **options: Any) -> nn.Module:
    net = model()
    for block in net:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def fsdp_with_clip_and_accumulation(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = batch(mesh, "dp")
    for index, (inputs, targets) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        net.set_requires_gradient_sync(index == 1)
        (F.mse_loss(net(inputs), targets) / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return net


def fsdp_in_bf16(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    backward(net, mesh)
    return net


def fsdp_under_autocast(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    with torch.autocast("cpu", torch.bfloat16):
        backward(net, mesh)
    return net


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def fsdp_with_checkpoints(mesh: DeviceMesh) -> nn.Module:
    net = nn.Sequential(Checkpointed(), Checkpointed())
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    backward(net, mesh)
    return net


def wrapped_by_ddp(mesh: DeviceMesh) -> nn.Module:
    net = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters())
    with net.no_sync():
        backward(net, mesh)
    backward(net, mesh)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return net


def ddp_that_sends_float16(mesh: DeviceMesh) -> nn.Module:
    net = nn.parallel.DistributedDataParallel(model())
    net.register_comm_hook(None, fp16_compress_hook)
    backward(net, mesh)
    return net


def average_after_ddp(mesh: DeviceMesh) -> nn.Module:
    net = nn.parallel.DistributedDataParallel(model())
    backward(net, mesh)
    average(net, mesh, 1.0)
    return net


def hsdp(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    x, y = batch(mesh, "replicate", "shard")
    F.mse_loss(net(x), y).backward()
    return net


def fsdp_compiled(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    net.compile(backend="aot_eager")
    backward(net, mesh)
    return net


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    net = model()
    for block in net:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "dp" in (mesh.mesh_dim_names or ()):
        for block in net:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    backward(net, mesh)
    return net


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    return _sequence_parallel(mesh, norm=True)


def _sequence_parallel(mesh: DeviceMesh, *, norm: bool) -> nn.Module:
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    )
    plan: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "2": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(),
    }
    plan |= {"1": SequenceParallel(use_local_output=True)} if norm else {}
    parallelize_module(net, mesh["tp"], plan)
    backward(net, mesh)
    return net


class CopyToSlices(Function):
    """Megatron's f: nothing in forward, a sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOfSlices(Function):
    """Megatron's g: a sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumOfSlicesTwice(SumOfSlices):
    """A sum in forward whose backward sums again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return SumOfSlices.forward(ctx, x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return CopyToSlices.backward(ctx, grad)


class Sliced(nn.Module):
    """A block of which each rank has a slice, written by hand. The arguments leave out or change one thing."""

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        copies: bool = True,
        bias_on_each: bool = False,
        add: type[SumOfSlices] = SumOfSlices,
        norm_of_heads: bool = False,
        softmax: bool = False,
        dropout: torch.Generator | None = None,
        positions: bool = False,
    ) -> None:
        super().__init__()
        self.group, hidden = mesh.get_group("tp"), HIDDEN // mesh["tp"].size()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, hidden),
            nn.Linear(hidden, WIDTH, bias=False),
        )
        self.heads = nn.LayerNorm(4) if norm_of_heads else None
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.table = nn.Parameter(torch.randn(hidden)) if positions else None
        self.copies, self.bias_on_each, self.add, self.softmax = copies, bias_on_each, add, softmax
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.gelu(self.up(CopyToSlices.apply(y, self.group) if self.copies else y))
        if self.heads is not None:
            y = self.heads(y.unflatten(-1, (-1, 4))).flatten(-2)
        if self.softmax:
            y = y.softmax(-1)
        if self.dropout is not None:
            y = y * (torch.rand(y.shape, generator=self.dropout) < 0.5)
        y = self.down(y)
        if self.bias_on_each:
            return self.add.apply(y + self.bias, self.group)
        return self.add.apply(y, self.group) + self.bias


def _sliced(mesh: DeviceMesh, **options: Any) -> nn.Module:
    net = Sliced(mesh, **options)
    backward(net, mesh)
    if "dp" in (mesh.mesh_dim_names or ()):
        average(net, mesh)
    return net


def megatron(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh)


def dropout_with_a_generator_for_each_slice(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh, dropout=torch.Generator().manual_seed(mesh.get_local_rank("tp")))


class Vocabulary(nn.Module):
    """A table of which each rank has some rows, and logits over all of it."""

    def __init__(self, mesh: DeviceMesh, *, masked: bool = True) -> None:
        super().__init__()
        self.group, size = mesh.get_group("tp"), 32 // mesh["tp"].size()
        self.start, self.masked = mesh.get_local_rank("tp") * size, masked
        self.table = nn.Parameter(torch.randn(size, WIDTH))
        self.out = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        index = tokens - self.start
        foreign = (index < 0) | (index >= len(self.table))
        rows = F.embedding(index.masked_fill(foreign, 0), self.table)
        rows = rows.masked_fill(foreign[..., None], 0.0)
        return self.out(SumOfSlices.apply(rows, self.group))


def vocabulary_in_slices(mesh: DeviceMesh) -> nn.Module:
    net = Vocabulary(mesh)
    tokens = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(3))
    F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
    return net


def logits_less_the_largest_of_a_slice(mesh: DeviceMesh) -> nn.Module:
    net, group = nn.Linear(WIDTH, 16 // mesh.size()), mesh.get_group("tp")
    logits = net(batch(mesh)[0])
    logits = logits - logits.detach().max(-1, keepdim=True).values
    SumOfSlices.apply(logits.exp().sum(-1), group).log().mean().backward()
    return net


def losses_by_tokens(mesh: DeviceMesh, *, is_total: bool = True) -> nn.Module:
    """Divide the sum of losses by the number of tokens on all ranks."""
    net = model()
    x, y = batch(mesh, "dp")
    mask = (torch.arange(24).reshape(4, 6) % 5 > 0).float()  # equal on all ranks
    count = mask.sum()
    if is_total:
        dist.all_reduce(count)
    ((net(x) - y).square().mean(-1) * mask).sum().div(count).backward()
    average(net, mesh, 1.0)
    return net


def hsdp_with_clip_and_micro_batches(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    x, y = batch(mesh, "replicate", "shard")
    for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.mse_loss(net(inputs), targets) / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return net


def fsdp_with_scaler_that_gathers_again_on_2_ranks(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh, reshard_after_forward=2)
    optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cpu")
    x, y = batch(mesh, "dp")
    scaler.scale(F.mse_loss(net(x), y)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return net


def fsdp_on_a_flattened_mesh(mesh: DeviceMesh) -> nn.Module:
    net = Positions(mesh, shifted=True)
    fully_shard(net, mesh=mesh["dp", "sp"]._flatten())
    x = torch.cat(batch(mesh, "dp"), 1).chunk(mesh["sp"].size(), 1)[mesh.get_local_rank("sp")].clone()
    net(x).square().mean().backward()
    return net


def shards_of_an_optimizer_by_hand(mesh: DeviceMesh) -> nn.Module:
    net = model()
    backward(net, mesh)
    flat = torch.cat([param.grad.flatten() for param in net.parameters()])
    flat = F.pad(flat, (0, -len(flat) % mesh.size()))
    mine = flat.new_empty(len(flat) // mesh.size())
    dist.reduce_scatter_tensor(mine, flat)
    with torch.no_grad():
        dist.all_gather_into_tensor(flat, 0.1 * mine / mesh.size())
        for param in net.parameters():
            param.sub_(flat[: param.numel()].view_as(param))
            flat = flat[param.numel() :]
    return net


class Packed(nn.Module):
    """Attention whose queries, keys and values are one product. Each rank has the heads of a slice."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, width = mesh.get_group("tp"), WIDTH * 2 // mesh["tp"].size()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * width), nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(CopyToSlices.apply(x, self.group)).chunk(3, -1)
        heads = (item.unflatten(-1, (-1, 4)).transpose(1, 2) for item in parts)
        return SumOfSlices.apply(
            self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)), self.group
        )


def packed_heads_in_slices(mesh: DeviceMesh) -> nn.Module:
    net = Packed(mesh)
    backward(net, mesh)
    return net


# wrong steps


class Deal(Function):
    """Give each rank its heads of all positions (b, s, h, d), or its positions of all heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads, ranks = group, to_heads, group.size()
        cut, joined = (2, 1) if to_heads else (1, 2)
        parts = torch.stack(x.chunk(ranks, cut)).contiguous()
        dealt = torch.empty_like(parts)
        dist.all_to_all_single(dealt, parts, group=group)
        return torch.cat(dealt.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Deal.apply(grad, ctx.group, not ctx.to_heads), None, None


class Ulysses(nn.Module):
    """Attention over a sequence of which each rank has a part."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (Deal.apply(part.unflatten(-1, (2, -1)), self.group, True) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(Deal.apply(y, self.group, False).flatten(2))


def ulysses(mesh: DeviceMesh, without: str = "nothing") -> nn.Module:
    group = mesh.get_group()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Ulysses(group), nn.LayerNorm(WIDTH))
    x, y = (item.chunk(group.size(), 1)[group.rank()] for item in batch(mesh))
    F.mse_loss(net(x), y).backward()
    for name, param in net.named_parameters():
        if without not in name and param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()
    return net


class SlicedExperts(nn.Module):
    """Each rank has its slice of the experts. They get all tokens, or those that the gate chooses."""

    def __init__(self, group: Any, chosen: int) -> None:
        super().__init__()
        self.group, self.chosen, self.count = group, chosen, 6 // group.size()
        self.gate, self.out = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(self.count, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        best = weights.topk(self.chosen, -1)
        weights = torch.zeros_like(weights).scatter(1, best.indices, best.values)
        sent = torch.einsum("ne,nd->end", (weights > 0).to(x.dtype), x)
        dealt = dist_nn.all_to_all_single(torch.empty_like(sent), sent, group=self.group)
        tokens = dealt.unflatten(0, (-1, self.count)).transpose(0, 1)
        y = F.gelu(torch.bmm(tokens.flatten(1, 2), self.experts)).view(tokens.shape).transpose(0, 1).flatten(0, 1)
        back = dist_nn.all_to_all_single(torch.empty_like(y), y.contiguous(), group=self.group)
        return self.out(x + torch.einsum("end,ne->nd", back, weights))


def experts_in_slices(mesh: DeviceMesh, chosen: int = 6, without: str = "nothing") -> nn.Module:
    group = mesh.get_group("ep")
    net = SlicedExperts(group, chosen)
    x, y = (item[0] for item in batch(mesh, "ep"))
    F.mse_loss(net(x), y).backward()
    for name, param in net.named_parameters():
        if name != "experts" and without not in name:
            dist.all_reduce(param.grad, group=group)
        if name != without:
            param.grad.div_(group.size())
    return net


def experts_that_the_gate_chooses(mesh: DeviceMesh) -> nn.Module:
    return experts_in_slices(mesh, chosen=2)


def gate_not_summed(mesh: DeviceMesh) -> nn.Module:
    return experts_in_slices(mesh, without="gate.weight")


def experts_not_divided(mesh: DeviceMesh) -> nn.Module:
    return experts_in_slices(mesh, without="experts")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.rnn(x)[0]
        return hidden


def recurrent_with_a_penalty_and_a_seed_for_each_rank(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(mesh.get_local_rank("dp"))
    net = nn.parallel.DistributedDataParallel(Recurrent())
    x, y = batch(mesh, "dp")
    penalty = torch.stack([param.square().sum() for param in net.parameters()]).sum()
    (F.binary_cross_entropy_with_logits(net(x), (y > 0).float()) + 0.01 * penalty).backward()
    return net


def metrics_and_a_norm_that_python_reads(mesh: DeviceMesh) -> nn.Module:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = batch(mesh, "dp")
    output = net(x)
    loss = F.mse_loss(output, y)
    loss.backward()
    average(net, mesh)
    losses = [torch.zeros(()) for _ in range(mesh.size())]
    dist.all_gather(losses, loss.detach())
    print(torch.exp(loss).item(), torch.stack(losses).mean(), output[output > 0].mean())
    norm = torch.stack([param.grad.norm() for param in net.parameters()]).norm()
    for param in net.parameters():
        param.grad.mul_(min(1.0, 0.1 / norm.item()))
    dist.all_reduce(norm)
    optimizer.step()
    return net


def fsdp_for_several_steps_and_a_mean_by_hand(mesh: DeviceMesh) -> Any:
    """A shard has 3 rows: halves of its elements are no rows."""
    net: Any = fully_shard(nn.Linear(WIDTH, 3 * mesh["shard"].size()), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    dice = torch.Generator().manual_seed(mesh.get_rank())
    for _ in range(2):
        net(torch.randn(4, WIDTH, generator=dice)).square().mean().backward()
        for param in net.parameters():
            dist.all_reduce(param.grad.to_local(), dist.ReduceOp.AVG, mesh.get_group("replicate"))
        optimizer.step()
        optimizer.zero_grad()
    return net


def contrast_with_all_ranks(mesh: DeviceMesh, *, with_gradient: bool = True) -> nn.Module:
    net = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    x, y = (item[:, 0] for item in batch(mesh, "dp"))
    mine, theirs = net(x), net(y)
    gathered = [torch.zeros_like(theirs) for _ in range(mesh.size())]
    if with_gradient:
        gathered = dist_nn.all_gather(theirs)
    else:
        dist.all_gather(gathered, theirs)
    labels = torch.arange(len(x)) + len(x) * mesh.get_local_rank("dp")
    F.cross_entropy(mine @ torch.cat([*gathered]).t(), labels).backward()
    return net


def attention_to_gathered_slices(mesh: DeviceMesh) -> nn.Module:
    net, size, (x, y) = nn.Linear(WIDTH, WIDTH), mesh.size(), batch(mesh)
    x, y = (item.chunk(size, 1)[mesh.get_local_rank()] for item in (x, y))
    whole = torch.cat([*dist_nn.all_gather(net(x))], 1)
    F.mse_loss((net(x) @ whole.mT).softmax(-1) @ whole, y).div(size).backward()
    for param in net.parameters():
        dist.all_reduce(param.grad)
    return net


def dropout_of_a_sequence_in_slices(mesh: DeviceMesh) -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(use_local_output=True),
        "2": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(),
    }
    parallelize_module(net, mesh, plan)
    backward(net, mesh)
    return net


def local_steps(mesh: DeviceMesh, *, divide: bool = True, only: str = "") -> nn.Module:
    """Each rank trains for two steps by itself. Then the models are averaged."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for inputs, targets in zip(*(item.chunk(2) for item in batch(mesh, "dp")), strict=True):
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    for name, param in net.named_parameters():
        if only in name:
            dist.all_reduce(param.data)
            param.data /= mesh.size() if divide else 1
    return net


def local_steps_whose_change_is_averaged(mesh: DeviceMesh) -> nn.Module:
    """As DiLoCo: an outer optimizer steps by the mean of what the ranks changed."""
    net = model()
    optimizer, outer = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(net.parameters(), 0.7, momentum=0.9)
    before = [param.detach().clone() for param in net.parameters()]
    backward(net, mesh)
    optimizer.step()
    with torch.no_grad():
        change = torch.cat([(old - param).flatten() for old, param in zip(before, net.parameters(), strict=True)])
        dist.all_reduce(change, dist.ReduceOp.AVG)
        for old, param in zip(before, net.parameters(), strict=True):
            param.grad = change[: param.numel()].view_as(param)
            param.copy_(old)
            change = change[param.numel() :]
    outer.step()
    return net


def gradients_that_are_gathered(mesh: DeviceMesh, *, divide: bool = True, parts: int = 7) -> nn.Module:
    """Sum gradients after gathers, each in another way; the loss that is logged is summed in place."""
    net = model()
    x, y = batch(mesh, "dp")
    loss = F.mse_loss(net(x), y)
    dist.all_reduce(loss.detach())
    loss.backward()
    for index, param in enumerate(net.parameters()):
        assert param.grad is not None
        gathered = torch.zeros(mesh.size(), *param.shape)
        if index % 2:
            dist.all_gather_into_tensor(gathered, param.grad)
        else:
            rows = [torch.zeros_like(param) for _ in range(mesh.size())]
            dist.all_gather(rows, param.grad)
            gathered = torch.stack(rows[:parts])
        param.grad = gathered.mean(0) if divide else gathered.sum(0)
    return net


def items_of_a_batch_that_are_mixed(mesh: DeviceMesh, divide: float | None = None) -> nn.Module:
    """A random order, sequences with lengths of this rank, and a loss that compares all items of the batch."""
    net, rank = model(), mesh.get_local_rank("dp")
    torch.manual_seed(rank)
    x, y = (item.flatten(0, 1) for item in batch(mesh, "dp"))
    order, labels, share = torch.randperm(24), torch.randint(5, (24,)), float(torch.rand(()))
    short = 9 + rank % 3
    z = torch.cat([net(part[None])[0] for part in (share * x + (1 - share) * x[order]).split([short, 24 - short])])
    loss = F.cross_entropy(z @ y.t(), torch.arange(24)) + F.cross_entropy(z, labels[order])
    loss.backward()
    average(net, mesh, divide)
    return net


def means_of_as_many_items_on_each_rank(mesh: DeviceMesh, *, alike: bool = True) -> nn.Module:
    """A mean over a mask with as many ones on each rank, and decay and noise of gradients by hand."""
    net, (x, y), rank = model(), batch(mesh, "dp"), mesh.get_local_rank("dp")
    masters = [param.detach().clone().requires_grad_() for param in net.parameters()]
    optimizer = torch.optim.SGD(masters)
    mask = torch.ones(4, 6)
    mask[rank % 4, : 4 if alike else 1 + rank % 3] = 0
    ((net(x) - y).square().mean(-1) * mask).sum().div(mask.sum()).backward()
    for param in net.parameters():
        param.grad.add_(param.detach(), alpha=0.01)
    average(net, mesh)
    torch.manual_seed(0)
    for param, master in zip(net.parameters(), masters, strict=True):
        master.grad = param.grad + torch.randn_like(param)
    optimizer.step()
    with torch.no_grad():
        for param, master in zip(net.parameters(), masters, strict=True):
            param.copy_(master)
    return net


def statistics_that_are_fixed_or_averaged(mesh: DeviceMesh) -> nn.Module:
    """A BatchNorm in evaluation, and a loss that follows from a mean over all ranks."""
    net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(6).eval(), nn.Linear(HIDDEN, WIDTH))
    x, y = batch(mesh, "dp")
    errors = (net(x) - y).square().mean(-1)
    total = errors.mean().detach()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    torch.sigmoid(errors - total).mean().backward()
    average(net, mesh)
    return net


def local_steps_without_a_divisor(mesh: DeviceMesh) -> nn.Module:
    return local_steps(mesh, divide=False)


def local_steps_of_which_biases_are_left(mesh: DeviceMesh) -> nn.Module:
    return local_steps(mesh, only="weight")


def gathered_gradients_without_a_divisor(mesh: DeviceMesh) -> nn.Module:
    return gradients_that_are_gathered(mesh, divide=False)


def gathered_gradients_of_some_ranks(mesh: DeviceMesh) -> nn.Module:
    return gradients_that_are_gathered(mesh, parts=3)


def mixed_items_without_a_divisor(mesh: DeviceMesh) -> nn.Module:
    return items_of_a_batch_that_are_mixed(mesh, divide=1.0)


def means_of_other_numbers_of_items(mesh: DeviceMesh) -> nn.Module:
    return means_of_as_many_items_on_each_rank(mesh, alike=False)


def noise_of_each_rank(mesh: DeviceMesh) -> nn.Module:
    net = model()
    backward(net, mesh)
    average(net, mesh)
    torch.manual_seed(mesh.get_local_rank("dp"))
    for param in net.parameters():
        param.grad += torch.randn_like(param)
    return net


def ascent_by_a_rank_s_own_gradient(mesh: DeviceMesh, *, undo: bool = True, puts_copies: bool = False) -> nn.Module:
    """As SAM: each rank moves its parameters before the gradient is computed, and moves them back."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    backward(net, mesh)
    norm = torch.stack([param.grad.norm() for param in net.parameters() if param.grad is not None]).norm()
    old, moves = [param.data.clone() for param in net.parameters()], []
    with torch.no_grad():
        for param in net.parameters():
            moves.append(param.grad * (0.05 / norm))
            param.add_(moves[-1])
    optimizer.zero_grad()
    backward(net, mesh)
    average(net, mesh)
    with torch.no_grad():
        for param, move, copy in zip(net.parameters(), moves, old, strict=True):
            if puts_copies:
                param.data = copy
            elif undo:
                param.sub_(move)
    optimizer.step()
    return net


def targets_that_python_reads(mesh: DeviceMesh) -> nn.Module:
    """The layers are square: a transposed view has the parameter's shape, and other numbers."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer, (x, _) = torch.optim.Adam(net.parameters(), 0.001), batch(mesh, "dp")
    for _ in range(2):
        with torch.no_grad():
            targets = net(x).clamp(-5, 2).exp()
            assert targets.isfinite().all()
        optimizer.zero_grad()
        F.mse_loss(net(x), targets).backward()
        average(net, mesh)
        optimizer.step()
    return net


def ascent_that_old_copies_undo(mesh: DeviceMesh) -> nn.Module:
    return ascent_by_a_rank_s_own_gradient(mesh, puts_copies=True)


def ascent_that_is_not_undone(mesh: DeviceMesh) -> nn.Module:
    return ascent_by_a_rank_s_own_gradient(mesh, undo=False)


def contrast_of_all_pairs(mesh: DeviceMesh, scale: float = 1.0) -> nn.Module:
    """Each rank computes the loss of all ranks' items, which it gathers with their gradients."""
    net: Any = nn.Module()
    net.left, net.right, net.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(2.0))
    net.forward = lambda x, y: (F.normalize(net.left(x)), F.normalize(net.right(y)) * net.scale)
    ddp = nn.parallel.DistributedDataParallel(net)
    left, right = (torch.cat(dist_nn.all_gather(item)) for item in ddp(*(item[0] for item in batch(mesh, "dp"))))
    (scale * F.cross_entropy(left @ right.T, torch.arange(len(left)))).backward()
    return net


def contrast_of_all_pairs_times_the_ranks(mesh: DeviceMesh) -> nn.Module:
    return contrast_of_all_pairs(mesh, scale=mesh.size())


def gradients_of_single_items(mesh: DeviceMesh, divide: float | None = None) -> nn.Module:
    net = nn.Linear(WIDTH, WIDTH)
    params = {name: param.detach() for name, param in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(net, params, (x,)), y)

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, *batch(mesh, "dp"))
    for name, param in net.named_parameters():
        param.grad = grads[name].mean(0)
    average(net, mesh, divide)
    return net


def gradients_of_single_items_never_divided(mesh: DeviceMesh) -> nn.Module:
    return gradients_of_single_items(mesh, divide=1.0)


def losses_of_hard_items(mesh: DeviceMesh) -> nn.Module:
    net = model()
    x, y = batch(mesh, "dp")
    (net(x) - y).square().mean(-1).flatten().topk(8).values.mean().backward()
    average(net, mesh)
    return net


def sequences_of_other_lengths(mesh: DeviceMesh) -> nn.Module:
    """Each rank divides its sum by the number of all ranks' tokens."""
    net = model()
    x, y = (item[:, : 4 + mesh.get_local_rank() % 3] for item in batch(mesh, "dp"))
    count = torch.tensor(float(x.numel()))
    dist.all_reduce(count)
    (F.mse_loss(net(x), y, reduction="sum") / count).backward()
    average(net, mesh, divide=1.0)
    return net


def loss_divided_by_the_slices(mesh: DeviceMesh) -> nn.Module:
    net = _sliced(mesh)
    x, y = batch(mesh)
    (F.mse_loss(net(x), y) / mesh["tp"].size()).backward()
    return net


def steps_of_a_part_that_are_not_gathered(mesh: DeviceMesh) -> nn.Module:
    net, rank = ddp(mesh), mesh.get_local_rank()
    backward(net, mesh)
    average(net, mesh)
    with torch.no_grad():
        for param in net.parameters():
            part = slice(rank * len(param) // 7, (rank + 1) * len(param) // 7 + 1)
            param[part].sub_(0.1 * param.grad[part])
    return net


def steps_of_owners(mesh: DeviceMesh, *, send: bool = True) -> nn.Module:
    """Each rank steps some of the parameters, and sends them to the others."""
    net = model()
    backward(net, mesh)
    average(net, mesh)
    owners = {param: index % mesh.size() for index, param in enumerate(net.parameters())}
    mine = [param for param, owner in owners.items() if owner == mesh.get_local_rank()]
    torch.optim.SGD(mine, 0.1).step()
    for param, owner in owners.items() if send else ():
        dist.broadcast(param.data, owner)
    return net


def steps_of_owners_that_are_not_sent(mesh: DeviceMesh) -> nn.Module:
    return steps_of_owners(mesh, send=False)


def gradients_clipped_by_hooks(mesh: DeviceMesh) -> nn.Module:
    net = model()
    for param in net.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    backward(net, mesh)
    average(net, mesh)
    return net


def rate_by_a_rank_s_own_loss(mesh: DeviceMesh) -> nn.Module:
    net = model()
    x, y = batch(mesh, "dp")
    loss = F.mse_loss(net(x), y)
    loss.backward()
    average(net, mesh)
    torch.optim.AdamW(net.parameters(), lr=0.1 * loss.item()).step()
    return net


def queries_not_summed(mesh: DeviceMesh) -> nn.Module:
    return ulysses(mesh, without="qkv")


def means_that_are_summed(mesh: DeviceMesh) -> nn.Module:
    return losses_by_tokens(mesh, is_total=False)


def gradients_left_unsynchronised(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net.set_requires_gradient_sync(False)
    backward(net, mesh)
    optimizer.step()
    return net


def clip_by_the_norm_of_a_shard(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    backward(net, mesh)
    grads = [param.grad.to_local() for param in net.parameters()]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    torch._foreach_mul_(grads, 1 / (norm + 1e-6))
    return net


def norm_not_summed_under_sequence_parallelism(mesh: DeviceMesh) -> nn.Module:
    return _sequence_parallel(mesh, norm=False)


def norm_of_heads_not_summed(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh, norm_of_heads=True)


def bias_on_every_slice(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh, bias_on_each=True)


def softmax_over_a_slice(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh, softmax=True)


def equal_masks_on_slices(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh, dropout=torch.Generator().manual_seed(0))


def no_f_before_a_column(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh, copies=False)


def backward_that_sums_again(mesh: DeviceMesh) -> nn.Module:
    return _sliced(mesh, add=SumOfSlicesTwice)


class Router(nn.Module):
    """Experts of which each rank has some, weighted by a gate that each rank has whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, count = mesh.get_group("tp"), 4 // mesh["tp"].size()
        self.first = mesh.get_local_rank("tp") * count
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(count, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)[..., self.first : self.first + len(self.experts)]
        mixed = torch.einsum("bse,eij,bsj->bsi", weights, self.experts, CopyToSlices.apply(x, self.group))
        return SumOfSlices.apply(mixed, self.group)


def router_not_summed(mesh: DeviceMesh) -> nn.Module:
    net = Router(mesh)
    backward(net, mesh)
    return net


class Positions(nn.Module):
    """A learned position for each token. The sequence is in slices."""

    def __init__(self, mesh: DeviceMesh, *, shifted: bool) -> None:
        super().__init__()
        self.start = mesh.get_local_rank("sp") * (12 // mesh["sp"].size()) if shifted else 0
        self.table, self.out = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.start, self.start + x.shape[1])
        return self.out(F.gelu(x + self.table(places)))


def _positions(mesh: DeviceMesh, *, shifted: bool) -> nn.Module:
    net = Positions(mesh, shifted=shifted)
    dice = torch.Generator().manual_seed(0)
    rank, size = mesh.get_local_rank("sp"), mesh["sp"].size()
    x, y = (torch.randn(4, 12, WIDTH, generator=dice).chunk(size, 1)[rank].clone() for _ in range(2))
    F.mse_loss(net(x), y).backward()
    for param in net.parameters():
        dist.all_reduce(param.grad, group=mesh.get_group("sp"))
        param.grad.div_(mesh["sp"].size())
    return net


def positions_of_slices(mesh: DeviceMesh) -> nn.Module:
    return _positions(mesh, shifted=True)


def positions_from_0_on_each_slice(mesh: DeviceMesh) -> nn.Module:
    return _positions(mesh, shifted=False)


def sum_in_a_hook_and_in_a_loop(mesh: DeviceMesh) -> nn.Module:
    net = model()
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=mesh.get_group("dp")))
    backward(net, mesh)
    average(net, mesh)
    return net


def sum_after_fsdp(mesh: DeviceMesh) -> nn.Module:
    net = fsdp(mesh)
    backward(net, mesh)
    for param in net.parameters():
        dist.all_reduce(param.grad.to_local(), group=mesh.get_group("dp"))
    return net


def never_divided(mesh: DeviceMesh) -> nn.Module:
    net = model()
    backward(net, mesh)
    average(net, mesh, divide=1)
    return net


def divided_twice(mesh: DeviceMesh) -> nn.Module:
    net = model()
    x, y = batch(mesh, "dp")
    (F.mse_loss(net(x), y) / mesh.size()).backward()
    average(net, mesh)
    return net


def divided_by_the_local_count(mesh: DeviceMesh) -> nn.Module:
    net = nn.Linear(WIDTH, 32)
    x, _ = batch(mesh, "dp")
    tokens = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    tokens[:, 4 + mesh.get_local_rank("dp") % 2 :] = -100
    F.cross_entropy(net(x).flatten(0, 1), tokens.flatten()).backward()
    average(net, mesh)
    return net


def clip_that_counts_replicated_parameters_n_times(mesh: DeviceMesh) -> nn.Module:
    net = Sliced(mesh)
    optimizer = torch.optim.SGD(net.parameters())
    backward(net, mesh)
    total = torch.stack([param.grad.square().sum() for param in net.parameters()]).sum()
    dist.all_reduce(total, group=mesh.get_group("tp"))
    for param in net.parameters():
        param.grad.mul_((1.0 / total.sqrt()).clamp(max=1.0))
    optimizer.step()
    return net


def contrast_without_gradient(mesh: DeviceMesh) -> nn.Module:
    return contrast_with_all_ranks(mesh, with_gradient=False)


def gradients_of_one_rank(mesh: DeviceMesh) -> Any:
    net: Any = model()
    backward(net, mesh)
    for param in net.parameters():
        dist.broadcast(param.grad, 0)
    return net


def largest_gradients(mesh: DeviceMesh) -> Any:
    net: Any = model()
    backward(net, mesh)
    for param in net.parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.MAX)
    return net


def norm_of_a_shard_that_python_reads(mesh: DeviceMesh) -> Any:
    net: Any = fully_shard(model(), mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters())
    backward(net, mesh)
    norm = torch.stack([param.grad.to_local().norm() for param in net.parameters()]).norm()
    for param in net.parameters():
        param.grad.to_local().mul_(min(1.0, 0.1 / norm.item()))
    optimizer.step()
    return net


def wrong_group(mesh: DeviceMesh) -> nn.Module:
    net = Sliced(mesh)
    net.group = mesh.get_group("dp")
    backward(net, mesh)
    average(net, mesh)
    return net


def two_precisions(mesh: DeviceMesh) -> nn.Module:
    net = model()
    x, y = batch(mesh, "replicate", "shard")
    F.mse_loss(net(x), y).backward()
    for param in net.parameters():
        half = param.grad.bfloat16()
        dist.all_reduce(half, group=mesh.get_group("shard"))
        param.grad.copy_(half)
        dist.all_reduce(param.grad, group=mesh.get_group("replicate"))
        param.grad.div_(mesh.size())
    return net


def optimizer_before_fully_shard(mesh: DeviceMesh) -> nn.Module:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    backward(net, mesh)
    optimizer.step()
    return net


def equal_batches(mesh: DeviceMesh) -> nn.Module:
    net = model()
    x, y = batch(mesh)
    F.mse_loss(net(x), y).backward()
    average(net, mesh)
    return net


# steps that are no error


def batch_norm(mesh: DeviceMesh) -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(6), nn.Linear(HIDDEN, WIDTH))
    backward(net, mesh)
    average(net, mesh)
    return net


def root_of_a_mean(mesh: DeviceMesh) -> nn.Module:
    net = model()
    x, y = batch(mesh, "dp")
    F.mse_loss(net(x), y).sqrt().backward()
    average(net, mesh)
    return net


class Positive(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[..., 0] > 0]).mean()


def shape_of_data(mesh: DeviceMesh) -> nn.Module:
    net = Positive(WIDTH, WIDTH)
    net(batch(mesh, "dp")[0]).backward()
    average(net, mesh)
    return net


def ring(mesh: DeviceMesh) -> nn.Module:
    """Read the output of the previous rank."""
    net, rank, size = nn.Linear(WIDTH, WIDTH), mesh.get_local_rank(), mesh.size()
    mine = net(batch(mesh, "dp")[0])
    theirs = torch.zeros_like(mine)
    send, receive = (mine.detach(), (rank + 1) % size), (theirs, (rank - 1) % size)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, *send), dist.P2POp(dist.irecv, *receive)]):
        work.wait()
    F.mse_loss(mine, theirs).backward()
    average(net, mesh)
    return net


class Experts(nn.Module):
    """Each rank has an expert, which takes the tokens that fit it best from all ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.gate = group, nn.Linear(WIDTH, group.size(), bias=False)
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).t().topk(4, -1)
        y = F.gelu(self.expert(Deal.apply(x[chosen].unsqueeze(0), self.group, False)))
        back = Deal.apply(y, self.group, True)[0] * weights[..., None]
        return x + torch.zeros_like(x).index_add(0, chosen.reshape(-1), back.reshape(-1, WIDTH))


def experts_that_choose(mesh: DeviceMesh) -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(mesh.get_group()), nn.Linear(WIDTH, WIDTH))
    x, y = (item.flatten(0, 1) for item in batch(mesh, "ep"))
    F.mse_loss(net(x), y).backward()
    for param in net.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad, group=mesh.get_group())
        param.grad /= mesh.size()
    return net


DP, TP, BOTH, HYBRID, SP = {"dp": 7}, {"tp": 2}, {"dp": 7, "tp": 2}, {"replicate": 3, "shard": 5}, {"sp": 2}
Case = tuple[Callable[[DeviceMesh], nn.Module], dict[str, int]]
RIGHT: list[Case] = [
    (ddp, DP),
    (wrapped_by_ddp, DP),
    (ddp_that_sends_float16, DP),
    (fsdp_with_clip_and_accumulation, DP),
    (hsdp, HYBRID),
    (tensor_parallel, BOTH),
    (sequence_parallel, TP),
    (megatron, BOTH),
    (dropout_with_a_generator_for_each_slice, TP),
    (vocabulary_in_slices, TP),
    (positions_of_slices, SP),
    (fsdp_in_bf16, DP),
    (fsdp_under_autocast, DP),
    (fsdp_with_checkpoints, DP),
    (fsdp_compiled, DP),
    (losses_by_tokens, DP),
    (hsdp_with_clip_and_micro_batches, {"replicate": 2, "shard": 2}),
    (fsdp_with_scaler_that_gathers_again_on_2_ranks, {"dp": 6}),
    (fsdp_on_a_flattened_mesh, {"dp": 7, "sp": 2}),
    (shards_of_an_optimizer_by_hand, DP),
    (packed_heads_in_slices, TP),
    (ulysses, SP),
    (recurrent_with_a_penalty_and_a_seed_for_each_rank, DP),
    (metrics_and_a_norm_that_python_reads, DP),
    (fsdp_for_several_steps_and_a_mean_by_hand, HYBRID),
    (contrast_with_all_ranks, DP),
    (attention_to_gathered_slices, SP),
    (dropout_of_a_sequence_in_slices, TP),
    (local_steps, DP),
    (local_steps_whose_change_is_averaged, DP),
    (gradients_that_are_gathered, DP),
    (items_of_a_batch_that_are_mixed, DP),
    (means_of_as_many_items_on_each_rank, DP),
    (statistics_that_are_fixed_or_averaged, DP),
    (ascent_by_a_rank_s_own_gradient, DP),
    (ascent_that_old_copies_undo, DP),
    (targets_that_python_reads, DP),
    (contrast_of_all_pairs, DP),
    (gradients_of_single_items, DP),
    (losses_of_hard_items, DP),
    (sequences_of_other_lengths, DP),
    (steps_of_owners, DP),
]
WRONG: list[tuple[Callable[[DeviceMesh], nn.Module], dict[str, int], str]] = [
    (norm_not_summed_under_sequence_parallelism, TP, "1.weight"),
    (norm_of_heads_not_summed, TP, "heads.weight"),
    (router_not_summed, TP, "gate.weight"),
    (bias_on_every_slice, TP, "counted 2 times"),
    (positions_from_0_on_each_slice, SP, "add does not treat slices alike"),
    (softmax_over_a_slice, TP, "softmax does not treat slices alike"),
    (equal_masks_on_slices, TP, "does not treat slices alike"),
    (sum_in_a_hook_and_in_a_loop, DP, "already equal on all ranks multiplies it by 7"),
    (average_after_ddp, DP, "already equal on all ranks multiplies it by 7"),
    (sum_after_fsdp, DP, "adds slices of different elements"),
    (never_divided, DP, "7 x the true one"),
    (divided_twice, DP, "0.1429 x the true one"),
    (divided_by_the_local_count, DP, "own count"),
    (clip_that_counts_replicated_parameters_n_times, TP, "counted 2 times"),
    (wrong_group, BOTH, "over dp adds slices of different elements"),
    (backward_that_sums_again, TP, "already equal on all ranks multiplies it by 2"),
    (no_f_before_a_column, TP, "norm.weight"),
    (optimizer_before_fully_shard, DP, "no parameters of the model"),
    (means_that_are_summed, DP, "7 x the true one"),
    (gradients_left_unsynchronised, DP, "has a gradient"),
    (clip_by_the_norm_of_a_shard, DP, "is not linear in a share"),
    (equal_batches, DP, "get the same batch"),
    (queries_not_summed, SP, "1.qkv.weight"),
    (contrast_without_gradient, DP, "all_gather has no backward"),
    (gradients_of_one_rank, DP, "broadcast of shares of a sum"),
    (largest_gradients, DP, "all_reduce(max) over dp of shares of a sum"),
    (norm_of_a_shard_that_python_reads, DP, "gradient is different on each rank"),
    (local_steps_without_a_divisor, DP, "after the step it is 7 x the true one"),
    (local_steps_of_which_biases_are_left, DP, "0.norm.bias"),
    (gathered_gradients_without_a_divisor, DP, "7 x the true one"),
    (gathered_gradients_of_some_ranks, DP, "all_gather of shares of a sum"),
    (mixed_items_without_a_divisor, DP, "7 x the true one"),
    (means_of_other_numbers_of_items, DP, "div is not linear in a share"),
    (noise_of_each_rank, DP, "random on each rank"),
    (logits_less_the_largest_of_a_slice, TP, "max does not treat slices alike"),
    (ascent_that_is_not_undone, DP, "is not linear in a share"),
    (contrast_of_all_pairs_times_the_ranks, DP, "7 x the true one (the loss is equal on all ranks)"),
    (gradients_of_single_items_never_divided, DP, "7 x the true one"),
    (loss_divided_by_the_slices, TP, "0.5 x the true one"),
    (steps_of_a_part_that_are_not_gathered, DP, "after the step its values are different"),
    (steps_of_owners_that_are_not_sent, DP, "after the step its values are different"),
    (gradients_clipped_by_hooks, DP, "clamp is not linear in a share"),
    (rate_by_a_rank_s_own_loss, DP, "after the step its values are different"),
]
