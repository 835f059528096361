"""What convolutions on CPUs allocate inside and free before they return: copies in other layouts.

oneDNN computes with channels in blocks of as many float32 as a vector register holds: 16 with AVX-512, 8 with AVX2.
So torch copies what a convolution reads, lets oneDNN write a third copy, and copies that into the result. What oneDNN
does not compute (float64, 1x1 on one thread) reads the input unfolded into columns instead.

The rules were deduced from oneDNN 3.12's log (``ONEDNN_VERBOSE=1``) and the record of torch 2.13's allocator with
AVX-512, and checked with AVX2 (``ONEDNN_MAX_CPU_ISA``). On one thread they are within 3 % for float32 and float64, and
nearly so for bfloat16; on more, the sums of a weight's gradient take up to one copy of it more or less for each thread.
They hold for the instruction set and the number of threads of the process that forecasts. Other CPUs have other
layouts, and no rule here. ``examples/bench/workspaces.py`` measures what the rules miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from thunder_zero.compat.torch_gaps import convolution_backend

aten = torch.ops.aten
BLOCKS = {"AVX512": 16, "AVX2": 8}  # channels, by torch.backends.cpu.get_cpu_capability()
ONEDNN = ("Mkldnn", "???")  # torch's names of backends; it has none for MkldnnTranspose
COLUMNS = "Slow2d"
FIRST = 3  # the most channels of an image that the gradient of a weight reads as they are
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Convolution:
    """From an image to features; a transposed one goes from features to an image, as the gradient of the input does.

    Attributes:
        image, features: shapes of (batch, channels, ...).
        weight: shape of (channels of features, channels of the image in a group, ...).
        itemsize: bytes of an element.
        is_strided: whether any stride is above 1.
        block: channels of a block.
        threads: that compute.
    """

    image: tuple[int, ...]
    features: tuple[int, ...]
    weight: tuple[int, ...]
    itemsize: int
    groups: int
    is_strided: bool
    block: int
    threads: int

    def to_features(self) -> int:
        """The most bytes alive while it computes features, these included, and less what it reads."""
        is_plain = self.groups == 1 and self.image[1] < self.block  # an image that is read as it is
        image, channels = (0, self.image[1]) if is_plain else (self._copy(self.image), self._padded(self.weight[1]))
        copy = self._copy(self.features)
        scratch = self._gathered() + self._summed(self.features)
        return max(image + self._weight_copy(channels) + copy + scratch, copy + self._bytes(self.features))

    def to_image(self) -> int:
        """The same of an image, from features."""
        weight, image = self._weight_copy(self._padded(self.weight[1])), self._bytes(self.image)
        if self.is_strided and self.groups == 1:  # channels last, and three copies of the result at the end
            features = self._bytes(self.features)
            one_each = features // max(self.features[0], 1) * self.threads  # padded images of features
            return max(features + weight + image + one_each, 3 * image)
        copy = self._copy(self.image)
        return max(self._copy(self.features) + weight + copy + self._summed(self.image), copy + image)

    def to_weight(self) -> int:
        """The same of a weight, from an image and features."""
        is_plain = self.groups == 1 and self.image[1] <= FIRST
        image, channels = (0, self.image[1]) if is_plain else (self._copy(self.image), self._padded(self.weight[1]))
        copy, features = self._weight_copy(channels), self._copy(self.features)
        scratch = self._gathered() + (self.threads - 1) * copy
        if self.itemsize == 2:  # a sum in float32, and one image with its features in pairs of rows
            scratch += 2 * copy
            if self.groups == 1 and not self._is_1x1():
                scratch += (image + features) // max(self.image[0], 1)
        return max(image + features + copy + scratch, copy + self._bytes(self.weight))

    def _padded(self, channels: int) -> int:
        return channels if self.groups > 1 else -(-channels // self.block) * self.block

    def _bytes(self, shape: Sequence[int]) -> int:
        return prod(shape) * self.itemsize

    def _copy(self, shape: Sequence[int]) -> int:
        """An image or features in blocks of channels."""
        return self._bytes((shape[0], -(-shape[1] // self.block) * self.block, *shape[2:]))

    def _weight_copy(self, channels: int) -> int:
        return self._bytes((self._padded(self.weight[0]), channels, *self.weight[2:]))

    def _gathered(self) -> int:
        """One image for each thread without the elements that a strided 1x1 convolution skips."""
        is_sparse = self.is_strided and self._is_1x1()
        return self._bytes((self.threads, self.image[1], *self.features[2:])) if is_sparse else 0

    def _summed(self, result: Sequence[int]) -> int:
        """One result in float32 for each thread, of a 1x1 convolution in bfloat16 or float16."""
        return 4 * self.threads * prod(result[1:]) if self.itemsize == 2 and self._is_1x1() else 0

    def _is_1x1(self) -> bool:
        return prod(self.weight[2:]) == 1


def hidden_bytes(func: Any, args: Sequence[Any], out: Any) -> int:
    """What a call of an operator of ``torch.ops.aten`` allocates at most besides its results; 0 for all but
    convolutions on known CPUs. Tensors need no values."""
    block = BLOCKS.get(torch.backends.cpu.get_cpu_capability())
    if block is None or func not in (aten.convolution.default, aten.convolution_backward.default):
        return 0
    if func is aten.convolution.default:
        given, weight, _, *how = args
        return _hidden(given, weight, how, out.shape, ["result"], block)
    grad, given, weight, _, *how, mask = args
    results = [name for name, is_wanted in zip(("input", "weight"), mask[:2], strict=True) if is_wanted]
    if mask[2] and not mask[1]:
        results.append("weight")  # oneDNN sums a bias with it
    return _hidden(given, weight, how, grad.shape, results, block)


def _hidden(
    given: Tensor, weight: Tensor, how: Sequence[Any], result: Sequence[int], wanted: Sequence[str], block: int
) -> int:
    """Of a convolution from ``given`` to a result of this shape, or of the gradients that are wanted, one by one."""
    stride, padding, _, is_transposed, _, groups = how
    read, filters = (torch.empty((), dtype=one.dtype).expand(one.shape) for one in (given, weight))  # on the CPU
    backend = convolution_backend(read, filters, how)
    shapes = (tuple(given.shape), tuple(result))
    features, image = shapes if is_transposed else shapes[::-1]
    sizes = {
        "result": prod(result) * given.itemsize,
        "input": given.numel() * given.itemsize,
        "weight": weight.numel() * weight.itemsize,
    }
    if backend == COLUMNS:  # a result and a weight read the image unfolded, or as it is: 1x1, of all elements
        is_whole = prod(weight.shape[2:]) == 1 and set(stride) == {1} and set(padding) == {0}
        unfolded = prod((image[0], *weight.shape[1:], *features[2:])) * weight.itemsize
        return 0 if is_whole or set(wanted) <= {"input"} else unfolded
    if backend not in ONEDNN:
        return 0
    if _is_channels_last(given) or _is_channels_last(weight):  # only the weight has another layout
        return max((sizes["weight"] * (2 if one == "weight" else 1) for one in wanted), default=0)
    threads = torch.get_num_threads()
    is_strided = any(number > 1 for number in stride)
    one = Convolution(image, features, tuple(weight.shape), given.itemsize, groups, is_strided, block, threads)
    to_image, to_features = one.to_image, one.to_features
    steps = {
        "result": to_image if is_transposed else to_features,
        "input": to_features if is_transposed else to_image,
        "weight": one.to_weight,
    }
    highest = held = 0
    for name in wanted:
        highest = max(highest, held + steps[name]())
        held += sizes[name]
    return max(highest - held, 0)


def _is_channels_last(tensor: Tensor) -> bool:
    order = CHANNELS_LAST.get(tensor.ndim)
    return order is not None and tensor.is_contiguous(memory_format=order) and not tensor.is_contiguous()
