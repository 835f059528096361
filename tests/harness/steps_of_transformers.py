"""Tiny language models of transformers, made parallel, and their right training steps for ``check_step``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from thunder_zero.compat.plans_of_transformers import apply_plan

SIZES = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 24}
HEADS = {"num_key_value_heads": 4, "max_position_embeddings": 64, "head_dim": 4}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {**WIDTHS, **HEADS},
    "Qwen3": {**WIDTHS, **HEADS},
    "Mistral": {**WIDTHS, **HEADS},
    "Gemma2": {**WIDTHS, **HEADS, "attn_implementation": "eager"},
    "Phi3": {**WIDTHS, "num_key_value_heads": 4},
    "GPTNeoX": {**WIDTHS},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_DROPOUT},
    "Mixtral": {**WIDTHS, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**WIDTHS, **HEADS, "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
}


def model(kind: str, layers: int = 2, **options: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, **CONFIGS[kind], **options)
    config.num_hidden_layers = layers
    return transformers.AutoModelForCausalLM.from_config(config)


def layers_of(net: Any) -> nn.ModuleList:
    inner = net.transformer if hasattr(net, "transformer") else net.gpt_neox if hasattr(net, "gpt_neox") else net.model
    return inner.h if hasattr(inner, "h") else inner.layers


def tokens(mesh: DeviceMesh) -> Tensor:
    """Return tokens of this rank: ranks of the axis ``dp`` have batches of their own."""
    rank = mesh.get_local_rank("dp") if "dp" in (mesh.mesh_dim_names or ()) else 0
    return torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(rank))


def shard(net: Any, mesh: DeviceMesh) -> None:
    if "dp" in (mesh.mesh_dim_names or ()):
        for layer in layers_of(net):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])


def train(net: Any, mesh: DeviceMesh) -> Any:
    inputs = tokens(mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return net


def fsdp(mesh: DeviceMesh, kind: str, layers: int = 2, **options: Any) -> Any:
    net = model(kind, layers, **options)
    shard(net, mesh)
    return train(net, mesh)


def accumulated(mesh: DeviceMesh, kind: str) -> Any:
    """Add the gradients of two batches, of which the second is drawn after the first forward."""
    net = model(kind)
    shard(net, mesh)
    for _ in range(2):
        inputs = tokens(mesh)
        (net(input_ids=inputs, labels=inputs, use_cache=False).loss / 2).backward()
    return net


def experts_not_summed(mesh: DeviceMesh) -> Any:
    """Average gradients by hand, but for one weight of the experts."""
    net = model("Mixtral")
    inputs = tokens(mesh)
    net(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
    for path, param in net.named_parameters():
        if not path.endswith("experts.down_proj"):
            dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    return net


def plan_of_transformers(mesh: DeviceMesh, kind: str) -> Any:
    net = model(kind)
    apply_plan(net, mesh["tp"], None)
    shard(net, mesh)
    inputs = tokens(mesh)
    net(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
    return net


def experts_in_slices(mesh: DeviceMesh, kind: str, *, sums_router: bool = True, **options: Any) -> Any:
    """Slice attention and experts as ``from_pretrained`` of transformers does with the model's own plan."""
    from transformers.distributed import DistributedConfig, tensor_parallel

    net, config = model(kind, **options), DistributedConfig(tp_size=mesh["tp"].size())
    styles, _, _ = net._resolve_parallel_plans(config)
    net.config.distributed_config, net._device_mesh, net._tp_size = config, mesh["tp"], config.tp_size
    tensor_parallel.apply_tensor_parallelism(net, mesh["tp"], styles)
    shard(net, mesh)
    inputs, summed = tokens(mesh), tensor_parallel._AllReduceBackward.apply
    unsummed = mock.patch.object(
        tensor_parallel._AllReduceBackward,
        "apply",
        lambda x, group: x if x.shape == (inputs.numel(), 2) else summed(x, group),
    )
    with nullcontext() if sums_router else unsummed:
        net(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
    return net


PLAN: dict[str, Any] = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel()),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel()),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel()),
}


def slice_tensors(net: Any, mesh: DeviceMesh) -> None:
    for layer in layers_of(net):
        parallelize_module(layer, mesh["tp"], dict(PLAN))
    outer = {
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(net, mesh["tp"], outer)


def tensor_parallel(mesh: DeviceMesh) -> Any:
    net = model("Llama")
    slice_tensors(net, mesh)
    shard(net, mesh)
    inputs = tokens(mesh)
    net(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
    return net


def slice_sequence(net: Any, mesh: DeviceMesh, *, norms: bool = True, logits_in_slices: bool = False) -> None:
    """Slice the sequence between layers. Without ``norms``, the gradients of the layers' norms are not summed."""
    norm = SequenceParallel(use_local_output=True)
    inner = {
        **PLAN,
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel(output_layouts=Shard(1))),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm") if norms else (), norm),
    }
    for layer in layers_of(net):
        parallelize_module(layer, mesh["tp"], dict(inner))
    head = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if logits_in_slices else Replicate(),
        use_local_output=not logits_in_slices,
    )
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(net, mesh["tp"], {"model.embed_tokens": embedding, "model.norm": norm, "lm_head": head})


def sequence_parallel(mesh: DeviceMesh, *, logits_in_slices: bool = False) -> Any:
    net = model("Llama")
    slice_sequence(net, mesh, logits_in_slices=logits_in_slices)
    shard(net, mesh)
    inputs = tokens(mesh)
    with loss_parallel():
        logits = net(input_ids=inputs, use_cache=False, position_ids=torch.arange(8)[None]).logits
        assert isinstance(logits, DTensor) == logits_in_slices
        F.cross_entropy(logits.flatten(0, 1), inputs.flatten()).backward()
    return net


DP, TP, BOTH = {"dp": 7}, {"tp": 2}, {"dp": 7, "tp": 2}
RIGHT: list[tuple[str, Any, dict[str, int]]] = [
    *((f"FSDP2 of {kind}", partial(fsdp, kind=kind), DP) for kind in CONFIGS),
    *(
        (f"{kind} with {name} experts", partial(fsdp, kind=kind, experts_implementation=name), DP)
        for kind, name in (("Mixtral", "batched_mm"), ("Qwen3Moe", "eager"))
    ),
    *((f"{kind}'s plan", partial(plan_of_transformers, kind=kind), TP) for kind in ("Llama", "Qwen3")),
    *((f"{kind}'s plan and FSDP2", partial(plan_of_transformers, kind=kind), BOTH) for kind in ("Llama", "Qwen3")),
    ("FSDP2 of Mixtral with accumulation", partial(accumulated, kind="Mixtral"), DP),
    *((f"{kind}'s experts in slices", partial(experts_in_slices, kind=kind), TP) for kind in ("Mixtral", "Qwen3Moe")),
    ("eager experts in slices", partial(experts_in_slices, kind="Mixtral", experts_implementation="eager"), TP),
    ("experts in slices and FSDP2", partial(experts_in_slices, kind="Mixtral"), BOTH),
    ("tensor parallel", tensor_parallel, TP),
    ("sequence parallel", sequence_parallel, TP),
    ("loss parallel", partial(sequence_parallel, logits_in_slices=True), TP),
    ("FSDP2 and tensor parallel", tensor_parallel, BOTH),
    ("FSDP2 and sequence parallel", sequence_parallel, BOTH),
]
