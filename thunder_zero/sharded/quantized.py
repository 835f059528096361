"""Takes bitsandbytes' 4-bit layers as they are: their codes and scales become rows at rest.

::

    Linear4bit      weight: codes of all elements, a scale for each 64 of them
    StoredLinear    weight: full shape and dtype; at rest, the same codes and scales row by row

bitsandbytes lets a block continue in the next row, but a row here has its own scales. So a block here is the largest
that divides a row and bitsandbytes' block, and has the scale of the block that it is a part of. Each decoded element
has the bits of ``bitsandbytes.functional.dequantize_4bit``. ``full_parameters`` gives bitsandbytes' layers back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thunder_zero.encodings.nf4 import NF4
from thunder_zero.plan.stored import Stored


class StoredLinear(nn.Linear):
    """Computes as bitsandbytes' ``Linear4bit`` does in training: in ``compute_dtype``; None: in the input's dtype."""

    compute_dtype: torch.dtype | None
    options: Mapping[str, Any]  # of bitsandbytes' weight

    def forward(self, input: Tensor) -> Tensor:
        dtype = input.dtype if self.compute_dtype is None else self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias).to(input.dtype)


@contextmanager
def taken(module: nn.Module, *, restore: bool = False) -> Iterator[None]:
    """Turn bitsandbytes' 4-bit layers into :class:`StoredLinear`. An error turns them back, or, on request, the end.

    Raises:
        ValueError: a layer has another format than nf4, rows of an odd length, or a weight without codes.
    """
    bnb: Any = sys.modules.get("bitsandbytes.nn")
    layers = {path: part for path, part in module.named_modules() if bnb and type(part) is bnb.Linear4bit}
    before = [(layer, dict(vars(layer)), layer.weight) for layer in layers.values()]
    stored: dict[Tensor, Stored] = {}
    done = False
    try:
        for path, layer in layers.items():
            weight = layer.weight
            if weight not in stored:
                layer.state_dict()  # which undoes bitsandbytes' own order of codes for inference on a CPU
                stored[weight] = _stored(weight, layer, f"{path}.weight".lstrip("."))
            names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
            layer.options = {name: getattr(weight, name) for name in names}
            if not layer.compute_type_is_set:
                layer.compute_dtype = None
            layer.__class__, layer.weight, layer.quant_state = StoredLinear, stored[weight], None
        yield
        done = not restore
    finally:
        for layer, attributes, weight in () if done else before:
            layer.__class__ = bnb.Linear4bit
            vars(layer).clear()
            vars(layer).update(attributes)
            layer.weight = weight


@contextmanager
def given_back(layers: Iterable[StoredLinear]) -> Iterator[None]:
    """Temporarily turn layers whose weights :func:`packed` has made into those of bitsandbytes."""
    bnb: Any = sys.modules.get("bitsandbytes.nn")
    given: list[Any] = [layer for layer in layers if isinstance(layer.weight, bnb.Params4bit)]
    try:
        for layer in given:
            layer.__class__, layer.quant_state = bnb.Linear4bit, layer.weight.quant_state
        yield
    finally:
        for layer in given:
            layer.__class__, layer.quant_state = StoredLinear, None


def stored_weights(module: nn.Module) -> dict[str, StoredLinear]:
    """Return the layers by the names of their weights."""
    layers = module.named_modules(remove_duplicate=False)
    return {f"{path}.weight".lstrip("."): part for path, part in layers if isinstance(part, StoredLinear)}


def packed(payload: Tensor, layer: StoredLinear, fmt: NF4, dtype: torch.dtype) -> nn.Parameter:
    """Return the weight of a layer as bitsandbytes has it, without double quantisation."""
    bnb: Any = sys.modules["bitsandbytes"]
    shape, options = torch.Size((len(payload), layer.in_features)), layer.options
    codes, scales = fmt.parts(payload, layer.in_features)
    storage = options["quant_storage"]
    data = F.pad(codes.reshape(-1), (0, -codes.numel() % storage.itemsize)).view(storage).view(-1, 1)
    first = torch.arange(0, shape.numel(), options["blocksize"], device=codes.device)
    state = bnb.functional.QuantState(
        absmax=scales.reshape(-1)[first // fmt.block],
        shape=shape,
        code=bnb.functional.get_4bit_type(options["quant_type"], device=codes.device),
        blocksize=options["blocksize"],
        quant_type=options["quant_type"],
        dtype=dtype,
    )
    weight: nn.Parameter = bnb.nn.Params4bit(data, quant_state=state, bnb_quantized=True, module=layer, **options)
    return weight


def unpacked(weight: nn.Parameter, layer: StoredLinear, name: str) -> Tensor:
    """Return the payload of a weight of bitsandbytes; the inverse of :func:`packed`."""
    return _stored(weight, layer, name).payload


def _stored(weight: Any, layer: Any, name: str) -> Stored:
    state = getattr(weight, "quant_state", None) or layer.quant_state
    if state is None:
        raise ValueError(
            f"parameter {name!r} is of bitsandbytes' {type(layer).__name__} without codes; move the module to its "
            f"device, which quantises it, and do not slice it"
        )
    (rows, width), block = state.shape, gcd(state.blocksize, state.shape[1])
    if state.quant_type != "nf4" or block % 2:
        wrong = f"rows of {width} elements" if block % 2 else f"the format {state.quant_type}"
        raise ValueError(
            f"parameter {name!r} has {wrong} in bitsandbytes; thunder_zero takes nf4 with rows of an even length: load "
            f"with bnb_4bit_quant_type='nf4', and name other layers in llm_int8_skip_modules"
        )
    codes = weight.detach().contiguous().view(torch.uint8).view(-1)[: rows * width // 2].view(rows, -1)
    first = torch.arange(0, rows * width, block, device=codes.device)  # the first element of each block
    scales = _scales(state)[first // state.blocksize].view(rows, -1)
    fmt = NF4(block)
    return Stored.of(fmt.joined(codes, scales), (rows, width), state.dtype, fmt)


def _scales(state: Any) -> Tensor:
    """Return the scale of each block, float32. Double quantisation stores scales as codes, too."""
    if not state.nested:
        return state.absmax.float()  # type: ignore[no-any-return]
    functional: Any = sys.modules["bitsandbytes.functional"]
    return (functional.dequantize_blockwise(state.absmax, state.state2) + state.offset).float()  # type: ignore[no-any-return]
