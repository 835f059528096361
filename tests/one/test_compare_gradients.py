"""``tz.tools.compare_gradients``: right programs give no alarm, and each wrong one the sentence that names its error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import thunder_zero as tz
from thunder_zero.compat.plans_of_transformers import apply_plan
from thunder_zero.tools import GradientComparison, compare_gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
Parallelize = Callable[[Any, DeviceMesh], Any]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(3, 32, (4, 8), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(8).expand(4, 8)}


class Net(nn.Module):
    """An MLP with a buffer, a frozen parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(16, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * self.frozen + self.shift)
        return self.down(F.relu(self.up(x)))


def llama(kind: str = "Llama") -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config)


def qwen3() -> Any:
    return llama("Qwen3")


# right programs


def fsdp(model: Any, mesh: DeviceMesh) -> None:
    for layer in getattr(model, "model", model).children():
        for block in layer if isinstance(layer, nn.ModuleList) else ():
            fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def sliced(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


COLUMNS = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
COLUMNS |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}


def llama_sliced(model: Any, mesh: DeviceMesh) -> None:
    rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {**COLUMNS, **rows})


def sequence_sliced(norms: bool = True) -> Parallelize:
    """Return sequence parallelism. Without ``norms``, gradients of the layers' norms are not reduced."""

    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        rows = RowwiseParallel(output_layouts=Shard(1))
        hidden = {"hidden_states": Shard(1)}
        plan: dict[str, Any] = {
            **COLUMNS,
            **{"self_attn.o_proj": rows, "mlp.down_proj": rows},
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts=hidden, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            ),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        if norms:
            norm = SequenceParallel(use_local_output=True)
            plan |= {"input_layernorm": norm, "post_attention_layernorm": norm}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan)
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(use_local_output=True),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], ends)

    return parallelize


def by_hand(divisor: float = 2.0) -> Parallelize:
    """Return DDP by hand: gradients are summed and divided."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        group = mesh.get_group("dp")

        def reduce(grad: Tensor) -> Tensor:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            return grad / divisor

        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(reduce)

    return parallelize


@pytest.mark.parametrize(
    ("build", "parallelize", "mesh"),
    [
        pytest.param(Net, fsdp, {"dp": 2}, id="FSDP2"),
        pytest.param(Net, by_hand(), {"dp": 2}, id="DDP by hand"),
        pytest.param(Net, lambda model, mesh: tz.compile(model, stage=3), {"dp": 2}, id="ours"),
        pytest.param(llama, lambda model, mesh: (llama_sliced(model, mesh), fsdp(model, mesh))[1], {"dp": 2, "tp": 2}),
        pytest.param(llama, sequence_sliced(), {"tp": 2}, id="SP"),
        pytest.param(Net, sliced, {"tp": 2}, id="TP"),
        pytest.param(llama, lambda model, mesh: apply_plan(model, mesh["tp"], None), {"tp": 2}, id="transformers' plan"),
    ],
)
def test_a_right_program_gives_no_alarm(build: Callable[[], nn.Module], parallelize: Any, mesh: dict[str, int]) -> None:
    comparison = compare_gradients(build, parallelize, X if build is Net else TEXT, mesh)
    assert comparison.right, str(comparison)
    assert str(comparison).endswith("against one process: all values right") or comparison.notes
    module = build()
    params = [name for name, _ in module.named_parameters()]
    names = ["loss", *params, *["total norm"] * (not comparison.notes)]
    assert [row.name for row in comparison.rows] == names
    assert max(row.error for row in comparison.rows) < 1e-6
