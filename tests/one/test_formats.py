"""Int8 values with a scale for each block are within the printed bound and right in the mean; formats in plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.traced import traced
from thunder_zero.encodings.encoding import PIECE, Encoding
from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.schedule import Reduce

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def send(form: Int8, x: Tensor, key: str = "", piece: int = PIECE) -> Tensor:
    payload = torch.empty(form.nbytes(x.numel()), dtype=torch.uint8).fill_(255)
    assert form.encode(x, out=payload, key=key, piece=piece) is payload
    return form.decode(payload, torch.full(x.shape, 7.0), piece=piece)


def scales(x: Tensor, form: Int8) -> Tensor:
    """Return the step of each element's block in float64, as ``explain`` prints it."""
    blocks = nn.functional.pad(x.double(), (0, -x.numel() % form.block)).view(-1, form.block)
    return (blocks.abs().amax(1) / 127).clamp(min=2.0**-126).repeat_interleave(form.block)[: len(x)]


@given(
    st.integers(0, 700),
    st.sampled_from((1, 4, 64, 128)),
    st.sampled_from(DTYPES),
    st.integers(-42, 36),
    st.integers(0, 99),
    st.sampled_from(("", "a", "b")),
    st.sampled_from((1, 256, PIECE)),
)
def test_each_element_is_within_the_bound(
    numel: int, block: int, dtype: torch.dtype, exponent: int, seed: int, key: str, piece: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10.0 ** (
        exponent + torch.randint(-3, 3, (numel,), generator=generator)
    )
    x = x.masked_fill(torch.rand(numel, generator=generator) < 0.1, 0.0).to(dtype)
    x = torch.where(x.isfinite(), x, 0).float()
    step = scales(x, Int8(block))
    error = (send(Int8(block), x.to(dtype), key, piece).double() - x.double()).abs()
    assert bool((error <= step * (1.001 if key else 0.5005)).all())


def test_a_cast_is_an_encoding_and_exact_values_are_not_copied() -> None:
    x, exact, cast = torch.tensor([[1.0, 1 / 3]]), Encoding(torch.float32), Encoding(torch.bfloat16)
    assert exact.encode(x) is x
    payload = cast.encode(x)
    assert payload.nbytes == cast.nbytes(x.numel()) == 4
    assert torch.equal(cast.decode(payload, torch.empty(1, 2)), x.bfloat16().float())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_becomes_nan(value: float) -> None:
    x = torch.ones(300)
    x[130] = value
    result = send(Int8(128), x)
    assert bool(result[128:256].isnan().all())
    assert bool((result[:128] == 1).all() and (result[256:] == 1).all())


def test_reductions_are_right_in_the_mean_and_repeatable() -> None:
    # The mean of 4,000 uniform errors of one step is within 4 standard deviations of 0, for 1,000 elements.
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    total, count = torch.zeros_like(x), 4000
    for number in range(count):
        Int8().decode(Int8().encode(x, key=f"w {number} 0"), total, add=True)
    error = (total / count - x) / scales(x, Int8())
    assert error.abs().max() < 4.5 * 0.5 / count**0.5
    assert abs(error.mean()) < 1e-3
    assert torch.equal(send(Int8(), x, "w 1 0"), send(Int8(), x, "w 1 0"))
    assert not torch.equal(send(Int8(), x, "w 1 0"), send(Int8(), x, "w 2 0"))


def test_the_largest_value_of_a_block_does_not_wrap_around() -> None:
    # 127 plus the largest random number is below 128, even if 127 is rounded up.
    x = torch.rand(1 << 14, generator=torch.Generator().manual_seed(0)).add_(0.5).repeat_interleave(Int8().block)
    error = (send(Int8(), x, "a").double() - x.double()).abs()
    assert bool((error <= scales(x, Int8()) * 1.001).all())


def test_formats_have_bytes_and_names() -> None:
    assert [str(encoding) for encoding in (Encoding(torch.bfloat16), Int8(64))] == [
        "bfloat16",
        "int8/64",
    ]
    assert [Int8(128).nbytes(numel) for numel in (0, 1, 128, 129)] == [0, 8, 132, 140]
    assert Encoding(torch.bfloat16).nbytes(3) == 6
    assert repr((Int8(), Int8(64))) == "(Int8(block=128), Int8(block=64))"


class Net(nn.Module):
    """An embedding, a norm, two layers and a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.zeros(4, 2, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(self.norm(self.embedding(x))))
        return y * self.table.sum()


def formatted(**fields: object) -> dict[str, str]:
    plan = make_plan(Net(), replace(tz.ZERO3, **fields), Mesh.of(2))  # type: ignore[arg-type]
    return {
        param.path: f"{param.gather_format}, {param.reduce_format}"
        for param in plan.params
        if param.gather_format or param.reduce_format
    }


def test_embeddings_and_vectors_are_exact_by_default() -> None:
    formats = "int8/128, int8/128"
    assert formatted(gather_format=Int8(), reduce_format=Int8()) == {"a.weight": formats, "b.weight": formats}
    by_pattern = {"*": Int8(16), "table": None, "norm": None, "a": Int8(32), "b.weight": None}
    assert formatted(gather_format=by_pattern) == {
        "embedding.weight": "int8/16, None",
        "a.weight": "int8/32, None",
        "a.bias": "int8/32, None",
        "b.bias": "int8/16, None",
    }


def test_impossible_formats_are_refused() -> None:
    fails(lambda: formatted(gather_format={"*": Int8()}), "asks for Int8(block=128) of 'table'", "torch.int64")
    fails(lambda: formatted(gather_format={"c": Int8()}), "gather_format 'c', which fits no parameter")
    fails(lambda: tz.Policy(0, reduce_format=Int8()), "stage 0 gathers nothing", "take stage 1, 2 or 3")
    fails(lambda: tz.Policy(3, gather_format="int8"), "give thunder_zero.Int8()")  # type: ignore[arg-type]
    fails(lambda: Int8(0), "block is 0")
    fails(lambda: Int8(-1), "block is -1")


def test_a_bucket_has_one_format_and_the_bytes_of_the_plan() -> None:
    # Each of 4 ranks has 16 elements of the weight and 2 of the bias, which is exact and travels alone.
    policy = replace(tz.ZERO3, gather_format=Int8(), reduce_format=Int8(), reshard_after_forward=True)
    timeline = traced(lambda: nn.Sequential(nn.Linear(8, 8)), (2, 8), policy, world_size=4).timeline
    sent = {op.params: timeline.traffic(op).sent for op in timeline.ops if timeline.traffic(op).sent}
    assert sent == {("0.weight",): 3 * (4 + 16), ("0.bias",): 3 * 2 * 4}
    text = str(tz.explain(traced(lambda: nn.Sequential(nn.Linear(8, 8)), (2, 8), policy, world_size=4), "0.weight"))
    assert "as int8/128: rounded to nearest, off" in text
    assert "as int8/128: rounded at random, off" in text


def test_a_bucket_has_one_format_on_each_axis() -> None:
    policy = replace(tz.ZERO3, reduce_format=Int8())
    timeline = traced(lambda: nn.Sequential(nn.Linear(8, 8)), (2, 8), policy, replicas=2).timeline
    reduced = [(op.params, op.over) for op in timeline.ops if isinstance(op, Reduce)]
    assert sorted(reduced) == [((f"0.{name}",), over) for name in ("bias", "weight") for over in ("replicate", "shard")]
