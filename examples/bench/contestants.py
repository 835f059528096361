"""The contestants: each trains the same GPT data-parallel in its own way.

All of them are built on every rank in the same order, take a few warm-up steps, and then run alternately.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import thunder_zero as tz  # before thunder
from examples.bench.model import Size, is_spared, loss_of, make_model
from examples.bench.report import ALONE

import thunder
import thunder.distributed
from thunder.executors.torch_compile import torch_compile_ex

LEARNING_RATE = 0.01
CPU = torch.device("cpu")
# In elements: 16 MiB, like ours. The default allocates buffers of 2 GB for any model.
DEEPSPEED_BUCKETS = {"reduce_bucket_size": 4 << 20, "allgather_bucket_size": 4 << 20}

Step = Callable[[Tensor, Tensor], Tensor]  # tokens, targets -> loss
Build = Callable[[Size], tuple[nn.Module, Step]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the tables.

    Attributes:
        name: its name on the command line and in the tables.
        stage: the stage whose minimum of bytes it is compared with; None computes alone, without other ranks.
        group: contestants that are compared as one; the plot shows the best of each group.
        build: makes the model, and a function that takes one training step with it.
        rounds: it sends fewer bits than float32, so its losses differ.
    """

    name: str
    stage: int | None
    group: str
    build: Build
    rounds: bool = False


def trains(model: nn.Module) -> tuple[nn.Module, Step]:
    """The model, and a function that takes one step of SGD on it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def build_eager(size: Size) -> tuple[nn.Module, Step]:
    return trains(make_model(size))


def build_thunder(size: Size, compiled: bool) -> tuple[nn.Module, Step]:
    return trains(thunder.jit(make_model(size), executors=[torch_compile_ex] if compiled else None))


def build_zero(size: Size, stage: int, compiled: bool, **choices: Any) -> tuple[nn.Module, Step]:
    """The package with further fields of ``tz.Policy``."""
    fuse = "inductor" if compiled else None
    return trains(tz.compile(make_model(size), tz.Policy(stage, **choices), fuse=fuse))


def kept_unsharded_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that backward reads and ZeRO-3 gathers once for both phases; 0 for other libraries."""
    if not isinstance(model, tz.ZeroModule):
        return 0
    plan = tz.traces_of(model).plan
    once = [plan.by_name[path] for path in plan.kept_unsharded if plan.policy.stage == 3 and not is_spared(path)]
    return sum(param.full_bytes for param in once)


def build_ddp(size: Size, compiled: bool) -> tuple[nn.Module, Step]:
    return trains(DistributedDataParallel(with_compiled_blocks(make_model(size), compiled)))


def build_fsdp2(
    size: Size,
    reshard: bool,
    fair: bool = False,
    scatter: bool = False,
    compiled: bool = False,
    checkpointed: bool = False,
    half: bool = False,
) -> tuple[nn.Module, Step]:
    """FSDP2 on each block and on the root.

    Args:
        reshard: frees the blocks' parameters after forward, but not the root's, which is FSDP2's default.
        fair: gathers in the background, two blocks ahead; without it nothing overlaps on a CPU.
        scatter: with the reduce-scatter below instead of gloo's, which is an all-reduce.
        compiled: compiles each block.
        checkpointed: backward computes each block again.
        half: computes and reduces in bfloat16.
    """
    dtype = torch.bfloat16 if half else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model = with_compiled_blocks(make_model(size), compiled)
    if checkpointed:
        model.blocks = nn.Sequential(*(checkpoint_wrapper(block) for block in model.blocks))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=policy)
    if fair:
        model._set_unshard_async_op(True)
        blocks = list(model.blocks)
        model.set_modules_to_forward_prefetch(blocks[:2])
        for at, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 3])
            block.set_modules_to_backward_prefetch(blocks[max(at - 2, 0) : at][::-1])
    if scatter:
        for module in (model, *model.blocks):
            module.set_custom_reduce_scatter(LeastReduceScatter())
    return trains(model)


class LeastReduceScatter:
    """A reduce-scatter that sends the fewest bytes: every rank receives only its rows, and adds them up."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


def with_compiled_blocks(model: nn.Module, compiled: bool) -> nn.Module:
    """Compile each block separately, as torch's own recipes do, so that hooks between blocks stay."""
    for block in model.blocks if compiled else ():
        block.compile()
    return model


def build_thunder_ddp(size: Size) -> tuple[nn.Module, Step]:
    return trains(thunder.distributed.ddp(thunder.jit(make_model(size)), broadcast_from=None))


def build_thunder_fsdp(size: Size, strategy: str) -> tuple[nn.Module, Step]:
    """Its ZeRO-3 produces the same program as its ZeRO-2."""
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    chosen = thunder.distributed.FSDPType[strategy]
    return trains(thunder.distributed.fsdp(thunder.jit(make_model(size)), device=CPU, sharding_strategy=chosen))


def build_deepspeed(size: Size, stage: int) -> tuple[nn.Module, Step]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": size.sequences,
        "gradient_clipping": 0.0,  # the default clips to a norm of 1, and would train differently
        "zero_optimization": {"stage": stage, "overlap_comm": True, **DEEPSPEED_BUCKETS},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = make_model(size)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), config=config
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, step


def contestants() -> dict[str, Contestant]:
    """All contestants by name, in the order of the tables; ``+tc`` compiles with inductor, ``+rs`` uses the
    reduce-scatter above, ``-regather`` gathers everything again for backward, ``-none`` and ``-units`` name
    ``tz.Policy.recompute``, ``+ck`` checkpoints each block, ``-int8`` and ``-bf16`` send fewer bits."""
    alone = [
        Contestant("eager", None, ALONE, build_eager),
        Contestant("thunder", None, ALONE, partial(build_thunder, compiled=False)),
        Contestant("thunder+tc", None, ALONE, partial(build_thunder, compiled=True)),
    ]
    return {contestant.name: contestant for contestant in (*alone, *ours(), *peers())}


def ours() -> Iterator[Contestant]:
    """This package, with torch's operators one by one, and with inductor."""
    rows: list[tuple[str, int, str, dict[str, Any]]] = [
        *((f"zero{stage}", stage, f"thunder_zero {stage}", {}) for stage in range(4)),
        ("zero3-regather", 3, "thunder_zero 3, all gathered again", {"reshard_after_forward": True}),
        *((f"zero3-{how}", 3, f"thunder_zero 3, recompute {how}", {"recompute": how}) for how in ("none", "units")),
    ]
    for name, stage, group, choices in rows:
        zero = partial(build_zero, stage=stage, **choices)
        yield Contestant(name, stage, group, partial(zero, compiled=False))
        yield Contestant(f"{name}+tc", stage, group, partial(zero, compiled=True))
    both = {"gather_format": tz.Int8(), "reduce_format": tz.Int8()}
    for stage in (2, 3):
        int8 = partial(build_zero, stage=stage, compiled=False, **both)
        yield Contestant(f"zero{stage}-int8", stage, f"thunder_zero {stage}, int8", int8, rounds=True)


def peers() -> Iterator[Contestant]:
    """Other libraries; DeepSpeed where it is installed."""
    yield Contestant("ddp", 0, "torch DDP", partial(build_ddp, compiled=False))
    yield Contestant("ddp+tc", 0, "torch DDP", partial(build_ddp, compiled=True))
    for stage, word, reshard in ((2, "keep", False), (3, "reshard", True)):
        fsdp2 = partial(build_fsdp2, reshard=reshard)
        name, group = f"fsdp2-{word}", f"FSDP2 {word}"
        yield Contestant(name, stage, group, fsdp2)
        yield Contestant(f"{name}-fair", stage, group, partial(fsdp2, fair=True))
        yield Contestant(f"{name}-fair+tc", stage, group, partial(fsdp2, fair=True, compiled=True))
        yield Contestant(f"{name}-fair+rs", stage, f"{group}+rs", partial(fsdp2, fair=True, scatter=True))
        yield Contestant(f"{name}-fair+ck", stage, f"{group}+ck", partial(fsdp2, fair=True, checkpointed=True))
        half = partial(fsdp2, fair=True, half=True)
        yield Contestant(f"{name}-fair-bf16", stage, f"{group}, bfloat16", half, rounds=True)
    yield Contestant("thunder-ddp", 0, "thunder.distributed ddp", build_thunder_ddp)
    for stage, strategy in ((2, "ZERO2"), (3, "ZERO3")):
        fsdp = partial(build_thunder_fsdp, strategy=strategy)
        yield Contestant(f"thunder-fsdp{stage}", stage, "thunder.distributed fsdp", fsdp)
    if importlib.util.find_spec("deepspeed"):
        for stage in (2, 3):
            yield Contestant(f"deepspeed{stage}", stage, f"DeepSpeed {stage}", partial(build_deepspeed, stage=stage))
