"""A frozen base in 4 bits: levels, error bound, bytes that survive decoding and encoding; plans and reports."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.traced import traced
from thunder_zero.encodings.nf4 import LEVELS
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.plan.traffic import gather_traffic
from thunder_zero.schedule import Gather
from thunder_zero.tools.time.estimate import step_time

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = max(high - low for low, high in pairwise(LEVELS)) / 2


def test_each_element_has_the_nearest_level() -> None:
    levels = torch.tensor(LEVELS)
    midpoints = (levels[1:] + levels[:-1]) / 2
    edges = torch.cat([midpoints, levels, torch.arange(65) / 32 - 1])
    values = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1), torch.rand(4096) * 2 - 1])
    values = values[values.abs() <= 1].unsqueeze(1)
    pairs = torch.cat([torch.ones_like(values), values], 1)  # a block of 2, whose scale is 1
    codes, _ = tz.NF4(2).parts(tz.NF4(2).encode(pairs), 2)
    assert torch.equal(codes[:, 0] & 15, torch.bucketize(values[:, 0], midpoints).byte())


def test_the_levels_are_those_of_the_paper() -> None:
    # Appendix E of QLoRA: quantiles of a normal distribution, eight above 0 and seven below, scaled to 1.
    tail = 0.9677083
    above = torch.special.ndtri(torch.linspace(tail, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(tail, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([above, below, torch.zeros(1)]).sort().values / above.max()
    torch.testing.assert_close(torch.tensor(LEVELS, dtype=torch.float64), levels, rtol=0, atol=1e-6)
    assert f"{WIDEST:.1%}" == "15.2%", "as in the docstring of NF4"


@given(
    st.integers(0, 9),
    st.lists(st.integers(1, 9), max_size=2),
    st.integers(1, 70),
    st.sampled_from((2, 16, 64)),
    st.sampled_from(DTYPES),
    st.integers(-3, 3),
    st.integers(0, 99),
)
def test_each_element_becomes_the_nearest_level_and_encodes_to_equal_bytes(
    rows: int, more: list[int], width: int, block: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    form, shape = tz.NF4(block), (rows, *more, width)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10.0**exponent
    x = x.masked_fill(torch.rand(shape, generator=generator) < 0.3, 0.0).to(dtype)
    payload = form.encode(x)
    assert payload.shape == (rows, form.nbytes(prod(shape[1:])))
    expected = nearest(x.float().view(rows, prod(shape[1:])), block).view(shape)
    result = form.decode(payload, torch.empty(shape, dtype=torch.float32))
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
    decoded = form.decode(payload, torch.empty(shape, dtype=dtype))
    assert torch.equal(form.encode(decoded), payload), "decoded values have the same bytes"
    if rows:
        assert torch.equal(form.encode(x[-1:]), payload[-1:]), "the bytes of a row do not depend on its rank"


def nearest(x: Tensor, block: int) -> Tensor:
    """Return the nearest level of each element times the largest magnitude of its block, by all distances."""
    padded = nn.functional.pad(x, (0, -x.shape[1] % block))
    blocks = padded.view(len(x), padded.shape[1] // block, block)
    scale = blocks.abs().amax(2, keepdim=True)
    levels = torch.tensor(LEVELS)
    chosen = ((blocks / scale.clamp(min=1e-30)).unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[chosen] * scale).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_is_decoded_as_nan(value: float) -> None:
    form, x = tz.NF4(4), torch.ones(2, 10)
    x[0, 5] = value
    payload = form.encode(x)
    result = form.decode(payload, torch.empty((2, 10), dtype=torch.float32))
    assert result.isnan().nonzero().tolist() == [[0, 4], [0, 5], [0, 6], [0, 7]]
    assert torch.equal(form.encode(result), payload)


def test_formats_have_bytes_and_names() -> None:
    assert [tz.NF4(64).nbytes(numel) for numel in (0, 1, 64, 65, 1000)] == [0, 8, 36, 44, 564]
    assert (str(tz.NF4()), repr(tz.NF4(32))) == ("nf4/64", "NF4(block=32)")
    first_is_upper = tz.NF4(2).encode(torch.tensor([[1.0, -1.0]]))
    assert first_is_upper[0, 4] == 0xF0


class Adapted(nn.Module):
    """A frozen base, with an embedding, a norm and three layers, one of which is narrow; and a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.a, self.b, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(1, 8)
        self.requires_grad_(False)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(self.norm(self.embedding(x))))
        return self.adapter(y + self.narrow(y[..., :1]))


def plan(**fields: object) -> Plan:
    return make_plan(Adapted(), replace(tz.ZERO3, **fields), Mesh.of(3))  # type: ignore[arg-type]


def formats(**fields: object) -> dict[str, str]:
    return {param.path: str(param.frozen_format) for param in plan(**fields).params if param.frozen_format}


def test_only_frozen_matrices_that_get_smaller_are_encoded() -> None:
    assert formats(frozen_format=tz.NF4()) == {"a.weight": "nf4/64", "b.weight": "nf4/64"}
    by_pattern = {"*": tz.NF4(), "embedding": tz.NF4(4), "a": None}
    assert formats(frozen_format=by_pattern) == {"embedding.weight": "nf4/4", "b.weight": "nf4/64"}
    assert formats(frozen_format=tz.NF4(), replicated=("a",)) == {"b.weight": "nf4/64"}
    with_gather_format = plan(frozen_format=tz.NF4(), gather_format=tz.Int8())
    assert [param.path for param in with_gather_format.params if param.gather_format] == [
        "narrow.weight",
        "adapter.weight",
    ]


def test_the_plan_has_the_bytes_of_rows() -> None:
    # Rank 0 has three of eight rows, rank 2 two. A row has 4 bytes for its scale and 4 for eight elements.
    result = plan(frozen_format=tz.NF4())
    param = result.by_name["a.weight"]
    assert (param.rest_shape, param.rest_dtype, param.rest_bytes) == ((8, 8), torch.uint8, 64)
    assert (param.shape, param.dtype, param.full_bytes) == ((8, 8), torch.float32, 256)
    assert result.shard_shape(param) == (3, 8)
    assert (gather_traffic(result, param).sent, gather_traffic(result, param).received) == (2 * 3 * 8, 5 * 8)
    assert plan().state_bytes - result.state_bytes == 2 * 3 * (32 - 8)


def test_impossible_formats_are_refused() -> None:
    fails(lambda: tz.Policy(1, frozen_format=tz.NF4()), "stage 1 keeps all parameters in full", "take stage 2 or 3")
    fails(lambda: tz.Policy(0, frozen_format=tz.NF4()), "stage 0 gathers nothing")
    fails(lambda: tz.Policy(3, frozen_format=tz.Int8()), "give thunder_zero.NF4()")
    fails(lambda: tz.Policy(3, gather_format=tz.NF4()), "give thunder_zero.Int8()")
    fails(lambda: tz.NF4(63), "block is 63; give an even number")
    fails(lambda: tz.NF4(0), "block is 0")
    fails(lambda: formats(frozen_format={"c": tz.NF4()}), "frozen_format 'c', which fits no parameter")
    trained = "'adapter.weight' is (8, 8) torch.float32, trains", "freeze or unfreeze them before the model is sharded"
    fails(lambda: formats(frozen_format={"*": tz.NF4(), "adapter": tz.NF4()}), *trained)
    fails(
        lambda: formats(frozen_format={"*": tz.NF4(), "norm": tz.NF4()}), "of 'norm'", "is (8,) torch.float32, frozen"
    )
    everything = tz.Policy(3, frozen_format=tz.NF4())
    fails(lambda: make_plan(nn.Linear(4, 4), everything, Mesh.of(2)), "no parameter there can have it", "trains")
    tied = Adapted()
    tied.b.weight = tied.a.weight
    differs = replace(tz.ZERO3, frozen_format={"*": tz.NF4(), "a": None})
    fails(lambda: make_plan(tied, differs, Mesh.of(2)), "frozen_format differs for 'a.weight' and 'b.weight'")


class Frozen(nn.Sequential):
    """A frozen layer of 128 x 128, and a trained one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
        self[0].requires_grad_(False)


def test_traces_and_reports_have_the_format() -> None:
    policy = replace(tz.ZERO3, frozen_format=tz.NF4(), reshard_after_forward=True)
    traces = traced(Frozen, (2, 128), policy, world_size=4)
    timeline, exact = traces.timeline, traced(Frozen, (2, 128), replace(policy, frozen_format=None), world_size=4)
    gathers = {op.params: timeline.traffic(op).sent for op in timeline.ops if isinstance(op, Gather)}
    assert gathers == {("0.weight",): 3 * 32 * 72, ("1.weight",): 3 * 32 * 512}
    costs = step_time(timeline, tz.tools.DEVICES["h100"]).costs
    (cost,) = [cost for op, cost in zip(timeline.ops, costs, strict=True) if op.reads == ("t_0_weight",)]
    assert (cost.busiest_bytes, cost.traffic_bytes) == (3 * 32 * 72, 128 * (72 + 512)), (
        "reads encoded bytes, writes decoded values"
    )
    lines = tz.tools.step_table(traces).rows(where=lambda row: row.op is not None)
    assert [row.moved for row in lines] == [costs[row.ran].traffic_bytes for row in lines]
    text = str(tz.explain(traces, "0.weight"))
    assert "rows 0 to 31 of 128 on this rank, 2.25 KiB of 9.00 KiB, as nf4/64" in text
    assert "as nf4/64: rounded to nearest, off by at most 15.2% of" in " ".join(text.split())
    saved = tz.tools.memory(exact).at_rest - tz.tools.memory(traces).at_rest
    assert saved == 32 * (512 - 72)


def test_a_plan_of_training_has_the_format() -> None:
    frozen = {"world_size": 4, "devices_per_node": 4, "loss": lambda y: y.square().mean()}
    x = torch.empty(2, 128, device="meta")
    bits, exact = (
        tz.tools.plan_training(Frozen().to("meta"), x, stages=(1, 3), frozen_format=form, **frozen)  # type: ignore[arg-type]
        for form in (tz.NF4(), None)
    )
    assert [a.busiest_bytes < b.busiest_bytes for a, b in zip(bits.rows, exact.rows, strict=True)] == [False, True]
    assert [a.at_rest_bytes < b.at_rest_bytes for a, b in zip(bits.rows, exact.rows, strict=True)] == [False, True]
    assert any("from stage 2 on frozen parameters rest as nf4/64" in text for text in bits.assumed)


@pytest.mark.usefixtures("group")
def test_a_parameter_in_4_bits_stays_frozen() -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    plain[0].requires_grad_(False)
    model = tz.compile(plain, stage=3, frozen_format=tz.NF4())
    fails(model.requires_grad_, "parameter '0.weight' cannot be unfrozen", "frozen_format stores it as NF4(block=64)")
    fails(lambda: model.get_submodule("0").requires_grad_(True), "only Tensors of floating point dtype")
    assert [name for name, param in model.named_parameters() if param.requires_grad] == ["1.weight", "1.bias"]
    model.get_submodule("0").bias.requires_grad_(True)
    model(torch.ones(2, 64)).sum().backward()
    assert model.get_parameter("0.bias").grad is not None
