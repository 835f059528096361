"""Checks that tensor-parallel ranks of one model have equal batches and random generators.

Different batches would raise no error: their gradients would be added like parts of one gradient::

    mesh (dp, tp) = (2, 2)    ranks 0 and 1    tokens (2, 6)    equal, or RuntimeError on all ranks
                              ranks 2 and 3    tokens (2, 6)    any other batch, which must be equal on both
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import Ranks
from thunder_zero.comm.small_collectives import all_gather_object, all_gather_tensor, to_device
from thunder_zero.plan.params import Plan
from thunder_zero.sharded.digests import digests_of

FIRST, EVERY = 8, 16  # which forwards are compared: the first 8, then every 16th
SAMPLED = 1 << 16  # the maximum number of elements in a tensor's digest, evenly spaced
KNOWN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)  # errors show their values


class SameBatch:
    def __init__(self, plan: Plan, ranks: Ranks, device: torch.device, name: str) -> None:
        self._plan, self._device, self._name = plan, device, name
        self._group, self._mesh = ranks.world, ranks.mesh
        self._forwards = 0
        self.unlike: str | None = None  # the error message if random generators differ

    def compare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare the arguments of a forward between ranks. This is a small collective, which most forwards skip."""
        number, self._forwards = self._forwards, self._forwards + 1
        if self._plan.mesh.tensor.size == 1 or (number >= FIRST and number % EVERY):
            return
        leaves = list(_leaves(args, kwargs))
        total = to_device([_number(str([(name, text) for name, text, _ in leaves]))], torch.int64, self._device)
        for position, (_, _, value) in enumerate(leaves):
            if value is not None:
                total = total + (2 * position + 1) * value.to(self._device)
        local_digests = torch.cat(
            (total, to_device([_number(_generator_state(self._device))], torch.int64, self._device))
        )
        with doing("the comparison of the batches", self._name):
            digests_of_ranks = torch.stack(all_gather_tensor(local_digests, self._group)).cpu()
            batch, generators = (self._first_unlike(digests) for digests in digests_of_ranks.unbind(1))
            if batch is not None:
                raise RuntimeError(self._batch_sentence(leaves, batch))
        self.unlike = None if generators is None else self._generators_sentence(generators)

    def require_same_generators(self) -> None:
        """Raise RuntimeError on all ranks if generators differ. A forward that draws random numbers calls this."""
        if self.unlike is not None:
            raise RuntimeError(self.unlike)

    def _first_unlike(self, digests: Tensor) -> tuple[int, int] | None:
        """Return two neighbouring tensor-parallel ranks whose digests differ; None if all digests are equal."""
        slices = self._plan.mesh.tensor.size
        neighbours = pairwise(enumerate(digests.tolist()))
        return next(
            ((i, j) for (i, digest), (j, next_digest) in neighbours if j % slices and digest != next_digest), None
        )

    def _batch_sentence(self, leaves: Sequence[tuple[str, str, Tensor | None]], differing: tuple[int, int]) -> str:
        local_leaves = [(name, text, None if value is None else int(value)) for name, text, value in leaves]
        leaves_of_ranks = all_gather_object(local_leaves, self._group)
        leaves_of_first, leaves_of_second = (leaves_of_ranks[number] for number in differing)
        (name, text, _), (_, other_text, _) = next(
            (pair for pair in zip(leaves_of_first, leaves_of_second, strict=False) if pair[0] != pair[1]),
            (("the number of arguments", str(len(leaves_of_first)), None), ("", str(len(leaves_of_second)), None)),
        )
        shown = "values" if text == other_text else f"{text} and {other_text}"
        first, second = self._ranks(differing)
        return (
            f"{name} of {self._name} differs between rank {first} and rank {second} ({shown}), which compute with "
            f"slices of one model; give all ranks of one data-parallel index the same batch: a sampler takes "
            f"num_replicas={self._plan.mesh.batches}, rank={self._index_expression()}"
        )

    def _generators_sentence(self, differing: tuple[int, int]) -> str:
        first, second = self._ranks(differing)
        return (
            f"forward of {self._name} draws random numbers, as dropout does, and the generators of rank {first} and "
            f"rank {second} differ, which compute with slices of one model; seed ranks of one data-parallel index "
            f"alike, such as by torch.manual_seed(seed + {self._index_expression()})"
        )

    def _ranks(self, numbers: tuple[int, int]) -> tuple[int, int]:
        first, second = (dist.get_global_rank(self._group, number) for number in numbers)
        return first, second

    def _index_expression(self) -> str:
        """Return a Python expression for a rank's data-parallel index, for error messages."""
        names = (self._mesh.mesh_dim_names or ()) if self._mesh is not None else ()
        slices = self._plan.mesh.tensor.size
        return f"mesh[{names[0]!r}].get_local_rank()" if len(names) == 2 else f"dist.get_rank() // {slices}"


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor | None]]:
    """Yield a (name, description, digest) tuple for each leaf. The digest of a leaf that is not a tensor is None."""
    for number, value in [*enumerate(args), *kwargs.items()]:
        for path, leaf in tree_flatten_with_path(value)[0]:
            name = f"argument {number!r}{keystr(path)}"
            if isinstance(leaf, DTensor):
                yield name, f"shape {tuple(leaf.shape)}, {leaf.dtype}, {leaf.placements}", None
            elif isinstance(leaf, Tensor):
                yield name, f"shape {tuple(leaf.shape)}, {leaf.dtype}", digest_of(leaf)
            else:
                yield name, repr(leaf) if isinstance(leaf, KNOWN) else type(leaf).__name__, None


def digest_of(value: Tensor) -> Tensor | None:
    """Return a digest of a tensor's elements, or of a sample if there are many; None unless the tensor is strided."""
    if value.layout is not torch.strided or value.is_nested:
        return None
    elements = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    elements = elements.resolve_conj().resolve_neg().reshape(-1)
    return digests_of([elements[:: max(1, -(-elements.numel() // SAMPLED))].contiguous()])[0]


def _generator_state(device: torch.device) -> bytes:
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return bytes(state.numpy().tobytes())


def _number(value: str | bytes) -> int:
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1
