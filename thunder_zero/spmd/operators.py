"""Classes of torch's operators, by name; runs a recorded operator again with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from thunder_zero.spmd.record import RecordedLine, Ref, argument_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COPIES = _words("clone _to_copy lift_fresh_copy contiguous")
MOVES = COPIES | _words(
    "copy_ cat stack split_with_sizes_copy chunk_cat _chunk_cat constant_pad_nd _foreach_copy_ copy repeat roll flip "
    "all_gather_copy_in"
)
CONSTANTS = _words("zero_ fill_ _foreach_zero_ empty zeros ones full")
LOOKUPS = _words("embedding gather index index_select take_along_dim")
SELECTIONS = _words("index masked_select nonzero")  # by a mask: their shape depends on the data
SCATTERS = _words(
    "embedding_dense_backward scatter scatter_add index_put_ index_put scatter_ scatter_add_ gather_backward"
)
PARTS_OF_BACKWARD = _words("slice_backward select_backward")
MEANS = _words("mean nll_loss_forward nll_loss2d_forward mse_loss binary_cross_entropy")
FACTORS = _words("mul mul_ div div_ _foreach_mul_ _foreach_div_ _foreach_mul _foreach_div")


def is_constant(name: str) -> bool:
    """Return whether an operator writes the same values on all ranks, whatever it reads."""
    return name in CONSTANTS or name.endswith("_like") or name.startswith("new_")


def averages(line: RecordedLine) -> bool:
    """Return whether a loss is a mean."""
    return argument_of(line.operator, line.args, line.kwargs, "reduction") in (1, None)


def runner(line: RecordedLine, numbers: tuple[Any, ...] | None) -> Callable[[list[Tensor], int], list[Tensor]]:
    """Return a function that runs a line with other inputs, in float64, on rank 0 or on the neighbouring rank."""
    leaves, spec = tree_flatten((line.args, line.kwargs))
    leaves = [torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item for item in leaves]

    def run(values: list[Tensor], rank: int) -> list[Tensor]:
        tensors = [value.clone() for value in values]
        rest, theirs = iter(tensors), iter((numbers if rank else None) or ())
        arguments = [
            next(rest) if isinstance(item, Ref) else next(theirs, item) if isinstance(item, int | float) else item
            for item in leaves
        ]
        args, kwargs = tree_unflatten(arguments, spec)
        torch.default_generator.manual_seed(5)  # torch.manual_seed formats a stack for each GPU
        result = [item for item in tree_leaves(line.operator(*args, **kwargs)) if isinstance(item, Tensor)]
        written = [tensors[index] for index in line.changes]
        pointers = {item.data_ptr() for item in written}
        return [*written, *(item for item in result if item.data_ptr() not in pointers)]

    return run


def key_of(
    line: RecordedLine, codes: Sequence[Tensor], values: Sequence[Tensor], numbers: tuple[Any, ...] | None, size: int
) -> bytes:
    """Return what decides the outcome of an experiment: the operator, its numbers, codes, shapes, masks and indices."""
    leaves = [item for item in tree_leaves((line.args, line.kwargs)) if not isinstance(item, Ref)]
    digest = blake2b(
        repr((str(line.operator), leaves, numbers, size, tree_flatten((line.args, line.kwargs))[1])).encode()
    )
    for code, value in zip(codes, values, strict=True):
        digest.update(repr((value.shape, value.stride(), value.dtype)).encode())
        digest.update(code.contiguous().numpy().tobytes())
        if value.is_floating_point():  # zeros and infinities are masks
            value = (value == 0).byte() + 2 * value.isinf().byte()
        elif value.is_complex():
            continue
        digest.update(value.contiguous().numpy().tobytes())
    return digest.digest()
