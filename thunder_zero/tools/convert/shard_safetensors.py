"""Makes a checkpoint from safetensors files, one rank's rows of a tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from thunder_zero.checkpoint import folder
from thunder_zero.checkpoint.contents import MODEL
from thunder_zero.checkpoint.dcp_write import Entries, WritePlanner, key_of, write_metadata, write_planned
from thunder_zero.plan.amounts import float_dtype
from thunder_zero.plan.geometry import cut_rows
from thunder_zero.plan.mesh import Mesh
from thunder_zero.safetensors_files import SUFFIX, SafetensorsWeights, TensorToWrite
from thunder_zero.tools.printing.progress import show_progress

Tensors = Mapping[str, TensorToWrite]  # tensors by key


def shard_safetensors(
    source: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    ranks: int = 1,
    *,
    dtype: torch.dtype | str | None = None,
) -> Path:
    """Make a checkpoint of a model from safetensors files, as ``ranks`` ranks would have saved it. Return its folder.

    This is the inverse of :func:`consolidate`. It needs no process group, and holds only one rank's rows of a tensor in
    memory. Any number of ranks can load the checkpoint. The link ``latest``, used to resume training, is not changed.

    >>> tz.tools.shard_safetensors("model.safetensors", "runs/start", ranks=8, dtype="float32")

    Args:
        source: a file, the index of several files (``model.safetensors.index.json``), or a folder with
            ``model.safetensors``, an index, or other files. ``aliases`` in the metadata names tied weights.
        ranks: number of files. Each file has the rows of one rank.
        dtype: dtype of the floating-point tensors, such as ``"bfloat16"`` (default: as in the source).
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; pass the number of files, 1 or more")
    target = float_dtype("dtype", dtype)
    path = Path(checkpoint)
    model_file = Path(source) / f"model{SUFFIX}"  # the folder may also contain the optimizer's file
    weights = SafetensorsWeights(model_file if model_file.is_file() else Path(source))
    described = [weights.describe(name, key_of((MODEL, name)), target) for name in weights]
    tensors = {tensor.key: tensor for tensor in described}
    folder.prepare(path)
    staging, total = folder.staging_of(path), sum(tensor.nbytes for tensor in described)
    try:
        with show_progress(f"write {path.name}", total) as done:
            planners = (FromFiles(tensors, weights, ranks, rank, done) for rank in range(ranks))
            parts = [write_planned(staging, rank, planner) for rank, planner in enumerate(planners)]
        folder.publish(path, ranks, write_metadata(staging, parts), latest=False)
    except BaseException:
        folder.abandon(path)
        raise
    return path


class FromFiles(WritePlanner):
    """DCP's plan to write the rows of one rank. Rows are read from files lazily, just before a write."""

    def __init__(
        self, tensors: Tensors, weights: SafetensorsWeights, ranks: int, rank: int, done: Callable[[int], None]
    ) -> None:
        keys: Entries = {(MODEL, tensor.name): torch.empty(tensor.shape, device="meta") for tensor in tensors.values()}
        keys |= {(MODEL, alias): (MODEL, tensor.name) for tensor in tensors.values() for alias in tensor.aliases}
        super().__init__(keys)
        self._tensors, self._weights, self._ranks, self._rank, self._done = tensors, weights, ranks, rank, done

    def create_local_plan(self) -> SavePlan:
        """Return DCP's plan to write this rank's rows."""
        items = [item for tensor in self._tensors.values() for item in _items(tensor, self._ranks, self._rank)]
        return SavePlan(items, planner_data=self.mappings)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Read the rows of an item, or the whole tensor if it has no dimensions."""
        assert write_item.tensor_data is not None, "safetensors files have tensors only"
        chunk, tensor = write_item.tensor_data.chunk, self._tensors[write_item.index.fqn]
        start = chunk.offsets[0] if tensor.shape else 0
        stop = start + chunk.sizes[0] if tensor.shape else None
        rows = self._weights.rows(tensor.name, start, stop).to(tensor.dtype)
        self._done(rows.nbytes)
        return rows


def _items(tensor: TensorToWrite, ranks: int, rank: int) -> Iterator[WriteItem]:
    """Yield a write item for a rank's rows of a tensor, if the rank has rows."""
    geometry = cut_rows(tensor.shape, Mesh.of(ranks, rank))
    start, stop, _ = geometry.rows.indices(tensor.shape[0] if tensor.shape else 1)
    if (start == stop) if geometry.is_cut else rank:
        return
    sizes = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    offsets = torch.Size([start, *[0] * (len(sizes) - 1)] if sizes else [])
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, torch.Size(sizes)), TensorProperties(tensor.dtype), torch.Size(tensor.shape)
    )
    yield WriteItem(MetadataIndex(tensor.key, offsets), WriteItemType.SHARD, tensor_data=data)
