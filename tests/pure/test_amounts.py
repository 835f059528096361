"""Amounts of bytes and names of dtypes are read and written as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.errors import refused
from thunder_zero.plan.amounts import bits_of, bytes_of, float_dtype, itemsize, size


def test_bytes_are_read() -> None:
    amounts: dict[int | str, int] = {
        "80GiB": 80 << 30,
        "80GB": 80 * 10**9,
        "1.5 MiB": 3 << 19,
        "512B": 512,
        "7B": 7,
        12: 12,
    }
    assert {text: bytes_of("memory_bytes", text) for text in amounts} == amounts


@pytest.mark.parametrize("amount", ["", "80 GiBs", "-1GB", "0", "1.2.3GB", "5iB", "much", 0, -1, 2.5, True, None, "80"])
def test_wrong_amounts_are_refused(amount: Any) -> None:
    with refused(ValueError, f"memory_bytes is {amount!r}", "GiB"):
        bytes_of("memory_bytes", amount)


def test_rates_are_read_or_refused() -> None:
    rates = {"100 Mbit/s": 1e8, "100mbit": 1e8, "1gbit": 1e9, "2.5 Gbit/s": 2.5e9, "56 kbit/s": 56e3, "9bit": 9.0}
    assert {text: bits_of("between", text) for text in rates} == rates
    wrong: Any
    for wrong in ("", "100", "100MB/s", "0mbit", "-1gbit", "fast", "1gbit/h", 100, None):
        with refused(ValueError, f"between is {wrong!r}", "'100 Mbit/s'"):
            bits_of("between", wrong)


def test_dtypes_are_read_or_refused() -> None:
    for dtype in ("bf16", "bfloat16", torch.bfloat16):
        assert float_dtype("dtype", dtype) is torch.bfloat16
    assert float_dtype("dtype", None) is None
    wrong: Any
    for wrong in ("int8", torch.int8, "nn", "bfloat", 16):
        with refused(ValueError, f"dtype is {wrong!r}", "'bf16'"):
            float_dtype("dtype", wrong)


def test_itemsizes_are_torchs() -> None:
    dtypes = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
    assert [itemsize(str(dtype).removeprefix("torch.")) for dtype in dtypes] == [dtype.itemsize for dtype in dtypes]


@given(st.integers(0, 1 << 55))
def test_a_size_has_a_unit_and_fits_its_column(nbytes: int) -> None:
    sizes = {999: "999 B", 1000: "0.98 KiB", 10 << 10: "10.0 KiB", 1023 << 10: "1.00 MiB", 5 << 30: "5.00 GiB"}
    assert {known: size(known) for known in sizes} == sizes
    assert len(size(nbytes)) <= 8
