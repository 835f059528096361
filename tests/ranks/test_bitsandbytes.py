"""bitsandbytes' 4-bit layers train as they are, keep their bits, and come back in ``full_parameters``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.quantized import StoredLinear


class Adapted(nn.Module):
    """Layers in 4 bits with rows that are whole blocks, that are not, and that are tied; and layers that train."""

    def __init__(self, quantised: Any, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        options = {"quant_type": "nf4", "compute_dtype": torch.bfloat16}
        self.wide = quantised(64, 96, compress_statistics=True, **options).to("cpu")
        self.narrow = quantised(96, 64, compress_statistics=False, **options).to("cpu")
        self.again = quantised(96, 64, bias=False, quant_type="nf4").to("cpu")
        self.again.weight = self.narrow.weight
        for layer in (self.wide, self.narrow):
            layer.bias.requires_grad_(False)  # bitsandbytes casts it to the input's dtype, for good
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.wide(x) + self.up(self.down(x)))
        z: Tensor = self.narrow(y) + self.again(y)
        return z


def bits(module: nn.Module) -> dict[str, Any]:
    """Return all parameters, as bitsandbytes decodes its own."""
    bnb: Any = pytest.importorskip("bitsandbytes")
    values: dict[str, Any] = dict(module.named_parameters())
    for name, value in values.items():
        if isinstance(value, bnb.nn.Params4bit):
            values[name] = bnb.functional.dequantize_4bit(value.data, value.quant_state)
    return values


def trains_and_comes_back(rank: int, world_size: int, stage: int) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes").nn
    one, model = Adapted(bnb.Linear4bit), tz.compile(Adapted(bnb.Linear4bit, seed=rank), stage=stage, broadcast_from=0)
    mixed = bnb.Linear4bit(64, 64, quant_type="fp4" if rank else "nf4").to("cpu")
    fails(partial(tz.compile, mixed, stage=stage), "the format fp4", "; ")  # on both ranks
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    for module in (one, model):
        optimizer = torch.optim.SGD([param for param in module.parameters() if param.requires_grad], 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert torch.equal(model(x), one(x))
    expected = bits(one)
    full: dict[str, Any] = tz.full_state_dict(model)
    assert all(torch.equal(full[name].to(value.dtype), value) for name, value in expected.items())
    rows = dict(model.named_parameters())["wide.weight"]
    assert (rows.dtype, tuple(rows.shape)) == (torch.uint8, (96, 4 + 32)), "a scale and 64 codes"

    before = {name: local(param).clone() for name, param in model.named_parameters()}
    model.load_state_dict(full)
    with tz.full_parameters(model, writeback=True) as module:
        assert type(module.wide) is bnb.Linear4bit
        assert all(torch.equal(bits(module)[name].to(value.dtype), value) for name, value in expected.items())
    assert type(module.wide) is StoredLinear
    assert all(torch.equal(local(param), before[name]) for name, param in model.named_parameters())

    with tz.full_parameters(model) as module:
        assert torch.equal(module(x), one(x))
    with tz.full_parameters(model, writeback=True) as module:  # as peft merges
        merged = bnb.Params4bit(torch.ones(96, 64), quant_type="nf4").to("cpu")
        module.wide.weight = merged
    assert torch.equal(tz.full_state_dict(model)["wide.weight"], torch.ones(96, 64))


@pytest.mark.parametrize("stage", [3, *slow(2)])
def test_layers_of_bitsandbytes_train_as_they_are(ranks_pool: RanksPool, stage: int) -> None:
    pytest.importorskip("bitsandbytes")
    ranks_pool.run(2, trains_and_comes_back, stage)


class Packed(nn.Parameter):
    """As a weight of torchao, which this test does not install."""

    __module__ = "torchao.quantization"


def what_has_no_rows_is_refused(rank: int, world_size: int) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes").nn
    refused = [
        (bnb.Linear4bit(64, 64, quant_type="fp4").to("cpu"), ("'weight' has the format fp4", "nf4")),
        (bnb.Linear4bit(63, 64, quant_type="nf4").to("cpu"), ("rows of 63 elements", "llm_int8_skip_modules")),
        (bnb.Linear4bit(64, 64, quant_type="nf4"), ("without codes", "move the module to its device")),
        (bnb.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu"), ("a Int8Params of bitsandbytes", "NF4()")),
        (bnb.Embedding4bit(64, 64, quant_type="nf4").to("cpu"), ("a Params4bit of bitsandbytes", "NF4()")),
    ]
    packed = nn.Linear(4, 4)
    packed.weight = Packed(torch.ones(4, 4), requires_grad=False)
    for layer, words in [*refused, (packed, ("a Packed of torchao", "NF4()"))]:
        kind = type(layer)
        fails(partial(tz.compile, layer, stage=3), *words)
        assert type(layer) is kind
    good = nn.Sequential(bnb.Linear4bit(64, 64, quant_type="nf4").to("cpu"), nn.Linear(64, 4))
    weight, weights = good[0].weight, {"0.weight": torch.ones(64, 64)}
    fails(lambda: tz.compile(good, stage=1), "'0.weight' rests in 4 bits, as bitsandbytes has it, and stage 1 keeps")
    fails(lambda: tz.compile(good, stage=0), "'0.weight' rests in 4 bits, as bitsandbytes has it, and stage 0 keeps")
    fails(lambda: tz.compile(good, stage=3, weights=weights), "weights cannot replace '0.weight'")
    assert good[0].weight is weight
    assert good(torch.ones(2, 64)).shape == (2, 4), "an error gives the layers back"
    tz.trace(good, torch.ones(2, 64))
    assert good[0].weight is weight


def test_what_has_no_rows_is_refused(ranks_pool: RanksPool) -> None:
    pytest.importorskip("bitsandbytes")
    ranks_pool.run(1, what_has_no_rows_is_refused)
