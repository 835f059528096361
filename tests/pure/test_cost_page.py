"""Closed forms return published numbers, and docs/cost-model.md has the package's table of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thunder_zero.tools.cost.rooflines import GptShape, all_reduce_bytes, state_bytes, tensor_bytes, tokens_to_hide
from thunder_zero.tools.devices.device import DEVICES, TPU_V2, TPU_V5P

PAGE = (Path(__file__).parents[2] / "docs/cost-model.md").read_text()

# https://github.com/fattorib/ZeRO-transformer at b611190 reports 1.65 s a batch on a TPU v3-32: "2.638 PFLOP/s or 67%".
# It takes cores for chips: 123 TFLOP/s are a chip's, and a v3-32 has 16. So its 67% is no yardstick.
GPT, TOKENS, SECONDS = GptShape(layers=24, width=2048, hidden=8192, vocabulary=50304, length=1024), 512 * 1024, 1.65
PUBLISHED = {  # name -> result of a closed form, and the published number to four digits
    # C / W in bfloat16, https://jax-ml.github.io/scaling-book/training; FSDP has the bound of data parallelism
    "tokens a chip, TPU v2, data parallel": (tokens_to_hide(TPU_V2, stage=0), 181.5),
    "tokens a chip, TPU v2, FSDP": (tokens_to_hide(TPU_V2, stage=3), 181.5),
    "tokens of 256 chips": (256 * tokens_to_hide(TPU_V2, stage=3), 46450),
    "tokens a chip, TPU v5p, one axis, data parallel": (tokens_to_hide(TPU_V5P, stage=0), 2550),
    "tokens a chip, TPU v5p, one axis, FSDP": (tokens_to_hide(TPU_V5P, stage=3), 2550),
    "tokens a chip, TPU v5p, three axes": (tokens_to_hide(TPU_V5P, stage=0) / 3, 850),
    # Patarasuk and Yuan, 2009: a ring all-reduce sends 2 (N - 1) / N of the model
    "all-reduce of 2 ranks": (all_reduce_bytes(1, 2), 1),
    "all-reduce of 4 ranks": (all_reduce_bytes(1, 4), 1.5),
    "all-reduce of 8 ranks": (all_reduce_bytes(1, 8), 1.75),
    # Arithmetic
    "7 B parameters in float32, many ranks": (all_reduce_bytes(7e9 * 4), 56e9),
    "its seconds at 12 GB/s": (all_reduce_bytes(7e9 * 4) / 12e9, 4.667),
    "500 k parameters in float32": (all_reduce_bytes(500e3 * 4), 4e6),
    "its seconds on 10 Gbit/s": (all_reduce_bytes(500e3 * 4) / (10e9 / 8), 0.0032),
    "its share of a step of 50 ms": (all_reduce_bytes(500e3 * 4) / (10e9 / 8) / 0.050, 0.064),
    "600 k rows of 4,096 floats": (tensor_bytes(600_000, 4096), 9.83e9),
    # ZeRO (https://arxiv.org/abs/1910.02054): 2 + 2 + 12 bytes a parameter in mixed precision with Adam
    "bytes a parameter": (state_bytes(1), 16),
    "7 B parameters": (state_bytes(7e9), 112e9),
    "7 B parameters, ZeRO-1 on 8 ranks": (state_bytes(7e9, stage=1, ranks=8), 38.5e9),
    "7 B parameters, ZeRO-2 on 8 ranks": (state_bytes(7e9, stage=2, ranks=8), 26.25e9),
    "7 B parameters, ZeRO-3 on 8 ranks": (state_bytes(7e9, stage=3, ranks=8), 14e9),
    # ZeRO-transformer's GPT. It does not say how it counts; of three counts only Megatron-LM's rounds to its figure
    "parameters of all matrices": (GPT.parameters, 1.311e9),
    "PFLOP/s with 6 N T": (GPT.flops_6n(TOKENS) / SECONDS / 1e15, 2.499),
    "PFLOP/s with attention, as PaLM counts": (GPT.flops_with_attention(TOKENS) / SECONDS / 1e15, 2.691),
    "PFLOP/s as Megatron-LM counts": (GPT.flops_megatron(TOKENS) / SECONDS / 1e15, 2.642),
    "the source's PFLOP/s, if 1.65 s were 1.6526 s": (GPT.flops_megatron(TOKENS) / 1.6526 / 1e15, 2.638),
    "its 67%": (2.638e15 / (32 * 123e12), 0.6702),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_closed_forms_return_published_numbers(name: str) -> None:
    result, published = PUBLISHED[name]
    assert float(f"{result:.4g}") == published


def test_the_page_has_the_packages_devices() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(DEVICES)
    units = {"MiB": 1 << 20, "GiB": 1 << 30, "TB/s": 1e12, "GB/s": 1e9}

    def sizes(cell: str) -> list[float]:
        result = re.findall(r"([\d.]+) ([MGT]i?B(?:/s)?)", cell.replace(",", ""))
        return [float(number) * units[unit] for number, unit in result]

    for name, peaks, memory, inside, across, *_ in rows:
        device = DEVICES[name]
        assert {dtype: float(flops) for dtype, flops in re.findall(r"(\w+): ([\de.]+)", peaks)}.items() <= (
            device.flops_per_second.items()
        )
        assert sizes(memory) == pytest.approx([device.memory_bytes, device.memory_bytes_per_second])
        assert sizes(inside) == [device.intra_node.bytes_per_second]
        assert inside.replace(",", "").startswith(f"{device.devices_per_node} ")
        assert sizes(across) == ([] if device.inter_node is None else [device.inter_node.bytes_per_second])
