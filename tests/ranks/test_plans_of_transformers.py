"""Hugging Face's models, sliced by their own tensor-parallel plans, train in float64 as in one process."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import deep
from thunder_zero.hugging_face import parallelize
from thunder_zero.tools.plan.subject import SubjectPrograms, of_module, sliced_copy
from thunder_zero.tools.plan.training_plan import MeshShape

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
TOLERANCE = 1e-9
TOKENS, ROWS, LENGTH = 32, 4, 6
DECODER_SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
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
    "llama": ("LlamaConfig", DECODER_SIZES),
    "qwen3": ("Qwen3Config", DECODER_SIZES),
    "qwen3 of 2 layers": ("Qwen3Config", DECODER_SIZES | {"num_hidden_layers": 2}),
    "qwen3, tied": ("Qwen3Config", DECODER_SIZES | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}),
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def library() -> Any:
    return importlib.import_module("transformers")


def build_model(kind: str) -> Any:
    """Build a model from a config, with equal values on every rank."""
    name, options = KINDS[kind]
    config = getattr(library(), name)(**options, **(NO_DROPOUT if kind == "gpt2" else {}))
    torch.manual_seed(0)
    model = library().AutoModelForCausalLM.from_config(config).double()
    for name, param in model.named_parameters():  # otherwise the heads' norms would be ones
        nn.init.normal_(param, 1.0 if "norm" in name or "ln" in name else 0.0, 0.2)
    return model


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def loss_of(model: Any, step: int, part: int = 0, parts: int = 1) -> Tensor:
    rows = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: Any, plain: nn.Module, step: object) -> None:
    """Compare all parameters and their gradients."""
    actual = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        torch.testing.assert_close(
            full(actual[name].detach()), param.detach(), atol=TOLERANCE, rtol=TOLERANCE, msg=str((name, step))
        )
        if not param.requires_grad:
            assert actual[name].grad is None, name
            continue
        assert param.grad is not None, name
        assert actual[name].grad is not None, name
        error = (full(actual[name].grad) - param.grad).abs().max().item()
        assert error < TOLERANCE * (1 + param.grad.abs().max().item()), (name, "gradient", step, error)


def train_both(model: Any, plain: nn.Module, dp: int) -> None:
    """Take two AdamW steps, each with a deferred and a reduced backward."""
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-3) for trained in (model, plain)]
    part = dist.get_rank() // (dist.get_world_size() // dp)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, step, part, dp).backward()
        loss_of(model, step + 10, part, dp).backward()
        for index in (step, step + 10):
            loss_of(plain, index).backward()
        assert_same(model, plain, step)
        norms = tz.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(norms[0], norms[1], atol=TOLERANCE, rtol=TOLERANCE)
        for optimizer in optimizers:
            optimizer.step()


def train_with_plan(rank: int, world_size: int, kind: str, stage: int, plan: dict[str, str] | None = None) -> None:
    dp = world_size // 2
    mesh, plain, module = mesh_of(dp, 2), build_model(kind), build_model(kind)
    parallelize(module, mesh["tp"], plan)
    model = tz.compile(module, stage=stage, mesh=mesh)
    train_both(model, plain, dp)
    prompt = torch.arange(4).view(1, 4)
    with tz.full_parameters(model) as full_module:
        tokens = full_module.generate(prompt, max_new_tokens=3, do_sample=False)
    assert tokens.equal(plain.generate(prompt, max_new_tokens=3, do_sample=False))
    timeline = tz.traces_of(model).timeline
    summed = [op for op in timeline.ops if isinstance(op, tz.schedule.Reduce) and op.over == "tensor"]
    norms = {name for name, _ in plain.named_parameters() if "q_norm" in name or "k_norm" in name}
    assert {path for op in summed for path in op.params} == norms
    rows = 1 if not stage or dp == 1 else dp  # in an all-reduce of two ranks, each sends its rows once
    assert sum(timeline.traffic(op).sent for op in summed) == len(norms) * 4 // rows * 8
    tz.print_trace(model, file=(text := StringIO()))
    if rank == 0:  # which alone prints
        assert ("over='tensor'" in text.getvalue()) is bool(norms)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kind", "stage"),
    [
        (2, "qwen3, tied", 3),
        (4, "qwen3", 0),
        (4, "qwen3 of 2 layers", 3),
        (4, "qwen3, tied", 1),
        (4, "llama", 2),
        *deep((4, "qwen3", 1), (4, "qwen3", 2), (2, "llama", 3)),
    ],
)
def test_a_models_own_plan_trains_as_one_process(ranks_pool: RanksPool, world_size: int, kind: str, stage: int) -> None:
    ranks_pool.run(world_size, train_with_plan, kind, stage, timeout=LONG)


@pytest.mark.slow
def test_other_styles_train_as_one_process(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, train_with_plan, "llama", 3, OTHER_STYLES, timeout=LONG)


# LoRA


def add_adapters(model: Any, targets: str) -> Any:
    peft = importlib.import_module("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=2, target_modules=targets.split()))


def train_adapters(rank: int, world_size: int, stage: int) -> None:
    dp, targets = world_size // 2, "q_proj o_proj up_proj down_proj embed_tokens"
    mesh, plain, module = mesh_of(dp, 2), build_model("llama"), build_model("llama")
    parallelize(module, mesh["tp"])
    module, plain = add_adapters(module, targets).double(), add_adapters(plain, targets).double()
    sliced = dict(module.named_parameters())
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if param.requires_grad:
                part: Any = sliced[name]
                value = nn.init.normal_(param, std=0.2)
                if isinstance(part, DTensor):
                    value = distribute_tensor(value, part.device_mesh, part.placements, src_data_rank=None)
                part.copy_(value)
    model = tz.compile(module, stage=stage, mesh=mesh)
    train_both(model, plain, dp)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize(("world_size", "stage"), [(4, 3), (4, 0), *deep((2, 3))])
def test_adapters_of_sliced_layers_train_as_one_process(ranks_pool: RanksPool, world_size: int, stage: int) -> None:
    ranks_pool.run(world_size, train_adapters, stage, timeout=LONG)


def refuse_adapters(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)
    fails(
        lambda: parallelize(add_adapters(build_model("llama"), "q_proj").base_model.model, mesh["tp"]),
        "ValueError",
        "layer 'model.layers.0.self_attn.q_proj.base_layer' has adapters already; slice the model before",
    )
    module = build_model("llama")
    parallelize(module, mesh["tp"])
    unplaced = add_adapters(module, "lm_head")  # peft places no adapters of this style
    sliced = parallelize_module(
        build_model("llama"), mesh["tp"], {"model.layers.0.self_attn.o_proj": RowwiseParallel()}
    )
    for peft_model, name in ((unplaced, "lora_B"), (add_adapters(sliced, "o_proj"), "lora_A")):
        fails(
            partial(tz.compile, peft_model, stage=3, mesh=mesh),
            "ValueError",
            f"parameter '{name}.default.weight' of layer",
            "has the size of a slice and is not placed as one",
        )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_adapters_that_are_no_slices_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_adapters, timeout=LONG)


def train_loaded(rank: int, world_size: int, folder: Path) -> None:
    """Train a model that ``from_pretrained`` has sliced on its own mesh."""
    plain = build_model("qwen3")
    if rank == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    config = importlib.import_module("transformers.distributed").DistributedConfig(tp_size=2)
    module = library().AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64)
    model = tz.compile(module, stage=3, mesh=mesh_of(1, 2))
    train_both(model, plain, 1)


@pytest.mark.slow
def test_a_model_sliced_by_from_pretrained_trains_as_one_process(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, train_loaded, tmp_path / "model", timeout=LONG)


# GPT-2, whose layers are not linear modules


def slice_conv1d(layer: nn.Module, mesh: DeviceMesh, weight: Any, bias: Any, before: Any, after: Any) -> None:
    """Slice a Conv1D with torch's ``distribute_module``, as no style applies to it."""

    def cut(_: str, part: nn.Module, on: DeviceMesh) -> None:
        for name, placement in (("weight", weight), ("bias", bias)):
            full = part.get_parameter(name)
            part.register_parameter(name, nn.Parameter(distribute_tensor(full.data, on, [placement])))

    def enter(_: nn.Module, inputs: Any, on: DeviceMesh) -> Any:
        return (DTensor.from_local(inputs[0], on, [before], run_check=False), *inputs[1:])

    def leave(_: nn.Module, output: Any, on: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[after]).to_local()

    output_fn: Any = leave  # torch's annotation wrongly says that it returns nothing
    distribute_module(layer, mesh, cut, enter, output_fn)


def train_gpt2(rank: int, world_size: int, stage: int) -> None:
    dp = world_size // 2
    mesh, plain, module = mesh_of(dp, 2), build_model("gpt2"), build_model("gpt2")
    fails(lambda: parallelize(module, mesh["tp"]), "ValueError", "GPT2LMHeadModel has no plan", "distribute_module")
    for block in module.transformer.h:
        slice_conv1d(block.mlp.c_fc, mesh["tp"], Shard(1), Shard(0), Replicate(), Shard(-1))
        slice_conv1d(block.mlp.c_proj, mesh["tp"], Shard(0), Replicate(), Shard(-1), Replicate())
    model = tz.compile(module, stage=stage, mesh=mesh)
    train_both(model, plain, dp)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (4, 2)])
def test_gpt2_with_sliced_perceptrons_trains_as_one_process(ranks_pool: RanksPool, world_size: int, stage: int) -> None:
    ranks_pool.run(world_size, train_gpt2, stage, timeout=LONG)


def refuse_wrong_uses(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)
    fails(lambda: parallelize(build_model("llama"), mesh), "TypeError", "give one dimension of a mesh")
    linear: Any = nn.Linear(2, 2)
    fails(lambda: parallelize(linear, mesh["tp"]), "TypeError", "Linear is no model of transformers")
    module = build_model("llama")
    parallelize(module, mesh["tp"])
    fails(lambda: parallelize(module, mesh["tp"]), "ValueError", "is a DTensor already")
    fails(
        lambda: parallelize(build_model("llama"), mesh["tp"], {"model.layers.*.mlp.up_proj": "packed_colwise"}),
        "ValueError",
        "style 'packed_colwise' for 'model.layers.0.mlp.up_proj.weight'",
    )
    module = build_model("qwen3").float()
    parallelize(module, mesh["tp"])
    formats = {"*q_norm.weight": tz.Int8(8)}
    fails(
        lambda: tz.compile(module, stage=3, mesh=mesh, reduce_format=formats),
        "ValueError",
        "reduce_format does not sum the parts of the gradient of parameter 'model.layers.0.self_attn.q_norm.weight'",
    )
    # A hook with other code than the one of transformers' style is not taken for that style's sum.
    module = build_model("qwen3")
    parallelize(module, mesh["tp"])
    norm = module.model.layers[0].self_attn.q_norm
    forward, hooks = norm.forward, list[Any]()

    def tp_forward(x: Tensor) -> Any:
        if not hooks:
            hooks.append(norm.weight.register_post_accumulate_grad_hook(lambda param: None))
        return forward(x)

    norm.forward = tp_forward
    model = tz.compile(module, stage=3, mesh=mesh)
    fails(lambda: loss_of(model, 0), "RuntimeError", "registers a hook on the gradient of parameter", "q_norm.weight")


@pytest.mark.slow
def test_wrong_uses_of_plans_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_wrong_uses, timeout=LONG)


@pytest.mark.slow
def test_the_planner_sums_the_gradients_that_a_models_plan_sums() -> None:
    with torch.device("meta"):
        module, rows = build_model("qwen3 of 2 layers"), torch.empty(2, LENGTH, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": rows, "labels": rows}
    precision = tz.MixedPrecision()
    subject = of_module(module, (), inputs, loss=lambda output: output.loss)
    programs = SubjectPrograms(
        subject, tz.Policy(mixed_precision=precision), 2, tz.tools.DEVICES["h100"], print, 2, parallelize
    )
    policy, mesh = programs.policy(3, "none"), MeshShape(1, 2, 2)
    with tz.tools.fake_mesh((2, 2)) as ranks:
        sliced = sliced_copy(module, ranks["tp"], parallelize)
        traces = tz.trace(sliced, policy=policy, mesh=ranks, device="h100", **inputs)
    estimate = programs.evaluate(policy, mesh)[0].estimate
    summed = {param.path for param in estimate.timeline.plan.params if param.is_partial}
    assert summed == {name for name, _ in module.named_parameters() if "q_norm" in name or "k_norm" in name}
    assert estimate.busiest_bytes == tz.tools.estimate(traces, "h100").busiest_bytes
