"""A frozen base in 4 bits trains as one process, holds and sends fewer bytes, and is saved and loaded."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.testing import assert_close

import thunder_zero as tz
from tests.harness.as_one_process import gather_objects
from tests.harness.errors import fails
from tests.harness.models import count_sends, fresh, full
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import slow
from thunder_zero.plan.traffic import gather_traffic, reduce_traffic
from thunder_zero.schedule import Gather
from thunder_zero.sharded.dtensors import local

PAGE = Path(__file__).parents[2] / "docs/formats.md"
WIDTH = 70  # a whole block and a part of one
FORM = tz.NF4()


class Lora(nn.Module):
    """A frozen layer, and two narrow ones that train."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, rows).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Net(nn.Module):
    """A net with uneven rows, fewer rows than ranks, an odd number of elements, and a frozen convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Lora(WIDTH + 1, WIDTH), Lora(WIDTH, WIDTH + 1)])
        self.conv = nn.Conv1d(1, 2, 7, padding=3).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.head(self.conv(x.unsqueeze(1)).mean(1))
        return y


FROZEN = {"layers.0.base.weight", "layers.1.base.weight", "conv.weight", "head.weight"}


def round_base(module: nn.Module) -> nn.Module:
    """Round the frozen base to its format, in place; return the module."""
    for param in module.parameters():
        if not param.requires_grad and param.dim() > 1:
            param.data = FORM.decode(FORM.encode(param), torch.empty(param.shape, dtype=param.dtype))
    return module


def make_batch(step: int, ranks: int) -> Tensor:
    return torch.randn(2 * ranks, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: Any, rank: int, ranks: int, rows: int, steps: int = 5) -> list[float]:
    """Return the losses of the rows of one rank."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    values = []
    for step in range(steps):
        loss = model(make_batch(step, rows).chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def means_over_ranks(of_rank: list[float]) -> Tensor:
    return torch.tensor(gather_objects(of_rank)).mean(0)


def bytes_of(model: Any) -> dict[str, Tensor]:
    """Return the bytes that this rank has of the frozen base."""
    return {name: local(param.detach()).clone() for name, param in model.named_parameters() if name in FROZEN}


def make_model(module: nn.Module, **options: Any) -> Any:
    return tz.compile(module, **{"stage": 3, "frozen_format": FORM, **options})


def train_beside_one_process(rank: int, world_size: int, stage: int) -> None:
    """Compare losses, bytes and final weights with one process whose base is rounded."""
    plain = round_base(fresh(Net))
    expected = train(plain, 0, 1, world_size)
    model = make_model(fresh(Net), stage=stage, reshard_after_forward=True if stage == 3 else None)
    with count_sends() as sent:
        actual = means_over_ranks(train(model, rank, world_size, world_size))
    assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-7)
    timeline = tz.traces_of(model).timeline
    assert sum(sent) == 5 * sum(timeline.traffic(op).sent for op in timeline.ops)
    gathers = [op for op in timeline.ops if isinstance(op, Gather) and FROZEN.intersection(op.params)]
    assert all(FROZEN.issuperset(op.params) for op in gathers), "a bucket mixes bytes and values"
    at_rest = bytes_of(model)
    rows = len(at_rest["layers.0.base.weight"])
    assert sum(gather_objects(rows)) == WIDTH + 1
    assert at_rest["layers.0.base.weight"].nbytes == rows * FORM.nbytes(WIDTH) == rows * (8 + 36)
    assert model.state.params["layers.0.base.weight"].rows.nbytes == -(-(WIDTH + 1) // world_size) * 44
    check_decoded_state(model, plain)
    assert "as nf4/64" in str(model)


def check_decoded_state(model: Any, plain: nn.Module) -> None:
    """Check that full values are decoded, that loading them changes no byte, and that new values are encoded."""
    before, values = bytes_of(model), tz.full_state_dict(model)
    for name, value in plain.state_dict().items():
        check = {"rtol": 0, "atol": 0} if name in FROZEN else {"rtol": 1e-4, "atol": 1e-5}
        assert_close(values[name], value, **check)
    model.load_state_dict(values)
    with tz.full_parameters(model, writeback=True) as module:
        assert torch.equal(module.get_parameter("head.weight"), values["head.weight"])
    model.load_state_dict(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in bytes_of(model).items())
    changed = {**values, "head.weight": torch.linspace(-1, 1, WIDTH).view(1, WIDTH)}
    model.load_state_dict(changed)
    arrived = FORM.decode(FORM.encode(changed["head.weight"]), torch.empty(1, WIDTH))
    assert torch.equal(tz.full_state_dict(model)["head.weight"], arrived)
    with tz.full_parameters(model, writeback=True) as module, torch.no_grad():
        module.get_parameter("head.weight").copy_(values["head.weight"])
    assert all(torch.equal(value, before[name]) for name, value in bytes_of(model).items())
    assert set(tz.EMA(model, decay=0.5).averages).isdisjoint(FROZEN)


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(2, 3), *slow((3, 2), (1, 3))],
)
def test_losses_are_those_of_one_process(ranks_pool: RanksPool, world_size: int, stage: int) -> None:
    ranks_pool.run(world_size, train_beside_one_process, stage)


def save_model(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    model = make_model(fresh(Net))
    train(model, rank, world_size, world_size, steps=1)
    tz.save(folder / "checkpoint", model)
    tz.save_pretrained(model, folder / "whole")
    return tz.full_state_dict(model)


def load_model(rank: int, world_size: int, folder: Path, saved: dict[str, Tensor]) -> None:
    """Load bytes from a checkpoint, which an exact model refuses, and encode the values of ``save_pretrained``."""
    torch.manual_seed(1)
    loaded = make_model(Net())
    tz.load(folder / "checkpoint", loaded)
    values = tz.full_state_dict(loaded)
    assert all(torch.equal(value, values[name]) for name, value in saved.items())
    with torch.device("meta"):
        module = Net()
    encoded = bytes_of(make_model(module, weights=folder / "whole"))
    assert all(torch.equal(value, encoded[name]) for name, value in bytes_of(loaded).items())
    exact = tz.compile(fresh(Net), stage=3)
    fails(lambda: tz.load(folder / "checkpoint", exact), "has shape (71, 44) and dtype torch.uint8 in it")
    tz.save(folder / "exact", exact)
    fails(lambda: tz.load(folder / "exact", loaded), "(71, 44) and dtype torch.uint8 here, which rests as nf4/64")


def test_checkpoints_have_the_bytes_and_folders_the_values(ranks_pool: RanksPool, tmp_path: Path) -> None:
    saved = ranks_pool.run(2, save_model, tmp_path)[0]
    ranks_pool.run(3, load_model, tmp_path, saved)


def train_in_other_modes(rank: int, world_size: int) -> None:
    """Train in half precision, in copies, from the meta device, and in an accumulation that keeps parameters."""
    half = make_model(fresh(Net), mixed_precision=tz.MixedPrecision(torch.bfloat16, torch.float32))
    plain = round_base(fresh(Net)).bfloat16()
    x = make_batch(0, world_size)
    assert_close(half(x).float(), plain(x.bfloat16()).float(), rtol=2e-2, atol=2e-2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    copies = make_model(fresh(Net), mesh=mesh)
    expected = train(round_base(fresh(Net)), 0, 1, world_size)
    losses = means_over_ranks(train(copies, rank, world_size, world_size))
    assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=1e-7)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Conv1d):
            module.weight.mul_(0).add_(0.5)

    torch.manual_seed(3)
    with torch.device("meta"):
        drawn = Net()
    values = tz.full_state_dict(make_model(drawn, init=torch.no_grad()(init)))
    torch.manual_seed(3)
    expected_module = Net()
    expected_module.conv.weight.data.fill_(0.5)
    for name, value in round_base(expected_module).state_dict().items():
        assert_close(values[name], value, rtol=0, atol=0)
    keeping = make_model(fresh(Net), stage=2, reshard_after_backward=False)
    with keeping.no_sync():
        keeping(x).square().mean().backward()
    with count_sends() as sent:
        keeping(x).square().mean().backward()
    plan = tz.traces_of(keeping).plan
    assert sum(sent) == sum(reduce_traffic(plan, param).sent for param in plan.params if param.requires_grad)


def write_lightning_checkpoint(rank: int, world_size: int) -> None:
    """Check that rank 0's checkpoint has decoded values, and that loading them changes no byte."""
    from thunder_zero.lightning import ZeroTrainerStrategy, full_model_state_dict

    model = make_model(fresh(Net))
    before, plain = bytes_of(model), round_base(fresh(Net))
    values = full_model_state_dict(model.plain)
    assert [name for name, value in values.items() if not torch.equal(value, plain.state_dict()[name])] == []
    assert bool(values) is (rank == 0)
    strategy = SimpleNamespace(lightning_module=model.plain)
    ZeroTrainerStrategy.load_model_state_dict(strategy, {"state_dict": plain.state_dict()})  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in bytes_of(model).items())


@pytest.mark.slow
def test_full_checkpoints_of_lightning(ranks_pool: RanksPool) -> None:
    pytest.importorskip("lightning")
    ranks_pool.run(2, write_lightning_checkpoint)


@pytest.mark.slow
def test_precision_copies_drawn_values_and_accumulation(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, train_in_other_modes)


# Hugging Face


def make_llama() -> Any:
    """Return a Llama in bfloat16 whose rows have several blocks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16()


def train_as_the_page(rank: int, world_size: int, folder: Path) -> Tensor:
    """Run the example of docs/formats.md; check its losses and bytes; return the trained model's logits."""
    import peft

    generator = torch.Generator().manual_seed(1)
    whole = [torch.randint(1, 40, (4, 8), generator=generator) for _ in range(5)]
    section = PAGE.read_text().partition("\n## A frozen base in 4 bits\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    names: dict[str, Any] = {"base": make_llama(), "folder": folder, "losses": []}
    names["batches"] = [tokens.chunk(world_size)[rank] for tokens in whole]
    exec(compile(code, PAGE.name, "exec"), names)
    model = names["model"]
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=8, target_modules="all-linear")
    plain = peft.get_peft_model(make_llama(), adapters)
    for name, param in plain.named_parameters():
        if "base_layer" in name:
            param.data = FORM.decode(FORM.encode(param), torch.empty(param.shape, dtype=param.dtype))
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=1e-3), []
    for tokens in whole:
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    # In bfloat16 the mean of two ranks' gradients is rounded otherwise than one process's gradient.
    assert_close(means_over_ranks(names["losses"]), torch.tensor(expected), rtol=3e-3, atol=0)
    check_held_and_sent_bytes(model, world_size)
    values = tz.full_state_dict(model)
    assert values["base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"].dtype is torch.bfloat16
    with tz.full_parameters(model) as module, torch.no_grad():
        return module(whole[0]).logits


def check_held_and_sent_bytes(model: Any, world_size: int) -> None:
    """Check that 9 of 32 bytes of a frozen layer are held and sent; its rows have 128 or 192 elements."""
    params = [param for param in tz.traces_of(model).plan.params if param.frozen_format]
    assert len(params) == 2 * 7
    held = sum(model.state.params[param.path].rows.nbytes for param in params)
    full_bytes = sum(param.full_bytes for param in params)
    assert held * world_size / full_bytes == 72 / 256 == 108 / 384
    ops = tz.traces_of(model).timeline.ops
    gathered = [path for op in ops if isinstance(op, Gather) for path in op.params]
    assert {param.path for param in params} <= set(gathered)
    plan = tz.traces_of(model).plan
    assert sum(gather_traffic(plan, param).sent for param in params) == held * (world_size - 1)
    assert all(full(model.get_parameter(param.path)).dtype is torch.uint8 for param in params)


@pytest.mark.slow
def test_adapters_on_a_frozen_llama(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Load the adapters that the page's code writes with peft, on top of the rounded base."""
    peft = pytest.importorskip("peft")
    logits = ranks_pool.run(2, train_as_the_page, tmp_path, timeout=LONG)[0]
    base = make_llama()
    for module in base.modules():
        if isinstance(module, nn.Linear) and module is not base.lm_head:
            module.weight.data = FORM.decode(
                FORM.encode(module.weight), torch.empty(module.weight.shape, dtype=torch.bfloat16)
            )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 40, (4, 8), generator=generator)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]
    with torch.no_grad():
        loaded_logits = peft.PeftModel.from_pretrained(base, tmp_path)(tokens).logits
    assert_close(loaded_logits.float(), logits.float(), rtol=2e-2, atol=2e-2)
    assert F.cosine_similarity(loaded_logits.float().flatten(), logits.float().flatten(), dim=0) > 0.999
