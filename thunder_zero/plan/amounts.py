"""Parses and formats numbers of bytes, seconds, and dtypes; folds the words of a ``repr``."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import torch

WIDTH = 100  # columns, without a terminal
SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
}


def bytes_of(name: str, amount: int | str) -> int:
    """Return the number of bytes in ``"80GiB"``, ``"80GB"``, ``"1000000B"`` or an int. Errors name it ``name``."""
    if isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
        return amount
    text = amount.upper() if isinstance(amount, str) else ""
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]*)?) *([KMGT]?)(I?)(B?)", text)
    if not match or not float(match[1]) or (match[3] and not match[2]):
        raise ValueError(f"{name} is {amount!r}; give a number of bytes, or one with a unit, such as '80GiB' or '80B'")
    if not match[2] and not match[4]:
        raise ValueError(f"{name} is {amount!r}, without a unit; give it one, such as GiB, GB, or B for bytes")
    power = " KMGT".index(match[2] or " ")
    return round(float(match[1]) * float((1024 if match[3] else 1000) ** power))


def bits_of(name: str, rate: str) -> float:
    """Return the bits a second in ``"100 Mbit/s"``, ``"100mbit"`` or ``"1gbit"``. Errors name it ``name``."""
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]*)?) *([KMG]?)BIT(?:/S)?", rate.upper() if isinstance(rate, str) else "")
    if not match or not float(match[1]):
        raise ValueError(f"{name} is {rate!r}; give a rate such as '250mbit', '1gbit' or '100 Mbit/s'")
    return float(match[1]) * 1000.0 ** " KMG".index(match[2] or " ")


def size(nbytes: int) -> str:
    """Format a number of bytes in at most 8 characters, such as ``"1.50 KiB"``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    value, power = float(nbytes), 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1024, power + 1
    if not power:
        return f"{nbytes} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {units[power]}"


def duration(seconds: float) -> str:
    """Format seconds, such as ``"1.23 ms"``. The text has at most 8 characters below a thousand seconds."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return "0 s" if seconds < 5e-10 else f"{seconds * 1e9:.3g} ns"


@overload
def float_dtype(name: str, dtype: torch.dtype | str) -> torch.dtype: ...
@overload
def float_dtype(name: str, dtype: torch.dtype | str | None) -> torch.dtype | None: ...
def float_dtype(name: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype for a name, such as ``"bfloat16"`` or ``"bf16"``. Return a dtype, or None, unchanged. Errors
    name the field ``name``."""
    if dtype is None:
        return None
    import torch

    result = getattr(torch, SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(result, torch.dtype) or not result.is_floating_point:
        raise ValueError(f"{name} is {dtype!r}; give a dtype of floating-point numbers, such as 'bfloat16' or 'bf16'")
    return result


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def itemsize(dtype: str) -> int:
    """Return the size of an element in bytes, at least 1. The first number in the dtype's name is the size in bits.

    >>> itemsize("bfloat16"), itemsize("float8_e4m3fn"), itemsize("complex64"), itemsize("bool")
    (2, 1, 8, 1)
    """
    bits = re.search(r"[0-9]+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


def summed_up(thing: object, words: str) -> str:
    """Return the folded ``repr`` of large data, such as ``<Estimate: step 3 ms on H100>``."""
    return folded(f"<{type(thing).__name__}: {words}>")


def folded(words: str) -> str:
    """Fold words into lines of at most 100 columns."""
    return "\n".join(wrap(" ".join(words.split()), WIDTH, subsequent_indent="  "))
