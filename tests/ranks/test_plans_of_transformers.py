"""Models of Hugging Face, sliced by their own plans for tensor parallelism, beside one process; in float64."""

from __future__ import annotations

import importlib
import importlib.util
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.hugging_face import parallelize
from thunder_zero.tools.planner.programs import SubjectPrograms
from thunder_zero.tools.planner.slicing import sliced_copy
from thunder_zero.tools.planner.subject import of_module
from thunder_zero.tools.planner.training_plan import MeshShape

import thunder

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
NEAR = 1e-9
TOKENS, ROWS, LENGTH = 32, 4, 6
OF_DECODERS = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
OTHER_STYLES = {
    "model.embed_tokens": "embedding_colwise",
    "model.layers.*.mlp.gate_proj": "colwise_rep",
    "model.layers.*.mlp.up_proj": "colwise_gather_output",
    "model.layers.*.mlp.down_proj": "rowwise_split_input",
    "lm_head": "rowwise_rep",
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", OF_DECODERS),
    "qwen3": ("Qwen3Config", OF_DECODERS),
    "qwen3, tied": ("Qwen3Config", OF_DECODERS | {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "gpt2": ("GPT2Config", {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}),
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def library() -> Any:
    return importlib.import_module("transformers")


def built(kind: str) -> Any:
    """A model that is made of a config, with the same values on every rank."""
    name, options = KINDS[kind]
    config = getattr(library(), name)(**options, **(NO_DROPOUT if kind == "gpt2" else {}))
    torch.manual_seed(0)
    model = library().AutoModelForCausalLM.from_config(config).double()
    for name, param in model.named_parameters():  # or the heads' norms would be ones
        nn.init.normal_(param, 1.0 if "norm" in name or "ln" in name else 0.0, 0.2)
    return model


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def loss_of(model: Any, step: int, part: int = 0, parts: int = 1) -> Tensor:
    rows = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(model: Any, one: nn.Module, when: object) -> None:
    """Compare every parameter, and every gradient that there is."""
    found = dict(model.named_parameters())
    for name, param in one.named_parameters():
        torch.testing.assert_close(
            whole(found[name].detach()), param.detach(), atol=NEAR, rtol=NEAR, msg=str((name, when))
        )
        assert param.grad is not None, name
        assert found[name].grad is not None, name
        off = (whole(found[name].grad) - param.grad).abs().max().item()
        assert off < NEAR * (1 + param.grad.abs().max().item()), (name, "gradient", when, off)


def train(model: Any, one: nn.Module, dp: int) -> None:
    """Two steps of AdamW, each of a deferred and a reduced backward."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, one)]
    part = dist.get_rank() // (dist.get_world_size() // dp)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, step, part, dp).backward()
        loss_of(model, step + 10, part, dp).backward()
        for number in (step, step + 10):
            loss_of(one, number).backward()
        same(model, one, step)
        for optimizer in optimizers:
            optimizer.step()


def planned(rank: int, world_size: int, kind: str, stage: int, plan: dict[str, str] | None = None) -> None:
    dp = world_size // 2
    mesh, one, module = mesh_of(dp, 2), built(kind), built(kind)
    parallelize(module, mesh["tp"], plan)
    model = tz.compile(module, stage=stage, mesh=mesh)
    train(model, one, dp)
    timeline = tz.traces_of(model).timeline
    summed = [op for op in timeline.ops if op.params and op.over == "tensor"]
    norms = {name for name, _ in one.named_parameters() if "q_norm" in name or "k_norm" in name}
    assert {path for op in summed for path in op.params} == norms
    rows = 1 if not stage or dp == 1 else dp  # an all-reduce of this rank's rows between two ranks sends them once
    assert sum(map(timeline.bytes_sent, summed)) == len(norms) * 4 // rows * 8
    tz.print_trace(model, file=(text := StringIO()))
    if rank == 0:  # others print nothing
        assert ("over='tensor'" in text.getvalue()) is bool(norms)


@pytest.mark.parametrize(
    ("world_size", "kind", "stage"),
    [
        (2, "qwen3, tied", 3),
        *slow((4, "qwen3", 0), (4, "qwen3", 1), (4, "qwen3", 2), (4, "qwen3", 3), (4, "qwen3, tied", 1)),
        *slow((2, "llama", 3), (4, "llama", 2)),
    ],
)
def test_a_models_own_plan_trains_as_one_process(ranks_pool: RanksPool, world_size: int, kind: str, stage: int) -> None:
    ranks_pool.run(world_size, planned, kind, stage, timeout=280)


@pytest.mark.slow
def test_other_styles_train_as_one_process(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, planned, "llama", 3, OTHER_STYLES, timeout=280)


def loaded(rank: int, world_size: int, folder: Path) -> None:
    """``from_pretrained`` slices on a mesh of its own, whose ranks are those of a given one."""
    one = built("qwen3")
    if rank == 0:
        one.save_pretrained(folder)
    dist.barrier()
    config = importlib.import_module("transformers.distributed").DistributedConfig(tp_size=2)
    module = library().AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64)
    model = tz.compile(module, stage=3, mesh=mesh_of(1, 2))
    train(model, one, 1)


@pytest.mark.slow
def test_a_model_that_from_pretrained_slices(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, loaded, tmp_path / "model", timeout=280)


# GPT-2, whose layers are no linears


def rows_of_a_plan(layer: nn.Module, mesh: DeviceMesh, weight: Any, bias: Any, given: Any, made: Any) -> None:
    """Slice one Conv1D: torch's own function for layers that no style knows."""

    def cut(_: str, part: nn.Module, on: DeviceMesh) -> None:
        for name, placement in (("weight", weight), ("bias", bias)):
            full = part.get_parameter(name)
            part.register_parameter(name, nn.Parameter(distribute_tensor(full.data, on, [placement])))

    def enter(_: nn.Module, inputs: Any, on: DeviceMesh) -> Any:
        return (DTensor.from_local(inputs[0], on, [given], run_check=False), *inputs[1:])

    def leave(_: nn.Module, output: Any, on: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[made]).to_local()

    after: Any = leave  # which torch's annotation says to return nothing
    distribute_module(layer, mesh, cut, enter, after)


def of_gpt2(rank: int, world_size: int, stage: int) -> None:
    dp = world_size // 2
    mesh, one, module = mesh_of(dp, 2), built("gpt2"), built("gpt2")
    fails(lambda: parallelize(module, mesh["tp"]), "ValueError", "GPT2LMHeadModel has no plan", "distribute_module")
    for block in module.transformer.h:
        rows_of_a_plan(block.mlp.c_fc, mesh["tp"], Shard(1), Shard(0), Replicate(), Shard(-1))
        rows_of_a_plan(block.mlp.c_proj, mesh["tp"], Shard(0), Replicate(), Shard(-1), Replicate())
    model = tz.compile(module, stage=stage, mesh=mesh)
    train(model, one, dp)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (4, 2)])
def test_the_perceptrons_of_gpt2_in_slices(ranks_pool: RanksPool, world_size: int, stage: int) -> None:
    ranks_pool.run(world_size, of_gpt2, stage, timeout=280)


def refusals(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)
    fails(lambda: parallelize(built("llama"), mesh), "TypeError", "give one dimension of a mesh")
    linear: Any = nn.Linear(2, 2)
    fails(lambda: parallelize(linear, mesh["tp"]), "TypeError", "Linear is no model of transformers")
    module = built("llama")
    parallelize(module, mesh["tp"])
    fails(lambda: parallelize(module, mesh["tp"]), "ValueError", "is a DTensor already")
    fails(lambda: thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)]), "ValueError", "thunder_zero.compile")
    fails(
        lambda: parallelize(built("llama"), mesh["tp"], {"model.layers.*.mlp.up_proj": "packed_colwise"}),
        "ValueError",
        "style 'packed_colwise' for 'model.layers.0.mlp.up_proj.weight'",
    )
    module = built("qwen3").float()
    parallelize(module, mesh["tp"])
    formats = {"*q_norm.weight": tz.Int8(8)}
    fails(
        lambda: tz.compile(module, stage=3, mesh=mesh, reduce_format=formats),
        "ValueError",
        "reduce_format does not sum the parts of the gradient of parameter 'model.layers.0.self_attn.q_norm.weight'",
    )
    # A hook whose code is not that of transformers' style is not taken for its sum.
    module = built("qwen3")
    parallelize(module, mesh["tp"])
    norm = module.model.layers[0].self_attn.q_norm
    forward, seen = norm.forward, list[Any]()

    def tp_forward(x: Tensor) -> Any:
        if not seen:
            seen.append(norm.weight.register_post_accumulate_grad_hook(lambda param: None))
        return forward(x)

    norm.forward = tp_forward
    model = tz.compile(module, stage=3, mesh=mesh)
    fails(lambda: loss_of(model, 0), "RuntimeError", "registers a hook on the gradient of parameter", "q_norm.weight")


def test_what_is_refused_of_plans(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refusals, timeout=280)


@pytest.mark.slow
def test_a_plan_of_training_sums_what_a_models_own_plan_sums() -> None:
    with torch.device("meta"):
        module, rows = built("qwen3"), torch.empty(2, LENGTH, dtype=torch.long)
    given: dict[str, Any] = {"input_ids": rows, "labels": rows}
    precision = tz.MixedPrecision()
    subject = of_module(module, (), given, loss=lambda output: output.loss)
    programs = SubjectPrograms(
        subject, tz.Policy(mixed_precision=precision), 2, tz.tools.DEVICES["h100"], print, 2, parallelize
    )
    policy, mesh = programs.policy(3, "none"), MeshShape(1, 2, 2)
    with tz.tools.fake_mesh((2, 2)) as ranks:
        part = sliced_copy(module, ranks["tp"], parallelize)
        traces = tz.trace(part, policy=policy, mesh=ranks, device="h100", **given)
    found = programs.evaluate(policy, mesh).estimate
    summed = {path for op in found.timeline.ops if op.over == "tensor" for path in op.params}
    assert summed == {name for name, _ in module.named_parameters() if "q_norm" in name or "k_norm" in name}
    assert found.sent_bytes == tz.tools.estimate(traces, "h100").sent_bytes
    whole_plan = programs.plan(policy, mesh)
    assert {param.path for param in whole_plan.params if param.is_partial} == summed
