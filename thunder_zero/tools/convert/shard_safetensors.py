"""Makes a checkpoint from safetensors files, one rank's rows of a tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from thunder_zero.checkpoint import folder
from thunder_zero.checkpoint.contents import MODEL
from thunder_zero.checkpoint.dcp_write import Entries, WritePlanner, key_of, write_metadata, write_planned
from thunder_zero.checkpoint.whole_files import SUFFIX, dtype_to_write
from thunder_zero.plan import layout
from thunder_zero.plan.amounts import float_dtype
from thunder_zero.sharded.initial_values.weights_folder import SafetensorsWeights
from thunder_zero.tools.printing.progress import show_progress


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file, with its dtype in the checkpoint, and its other names (tied weights)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...]
    file: Path

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Read these rows; all of a tensor without dimensions."""
        with safe_open(self.file, framework="pt") as file:
            value: Tensor = file.get_slice(self.name)[start:stop] if self.shape else file.get_tensor(self.name)
        return value.to(self.dtype)


def shard_safetensors(
    source: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    ranks: int = 1,
    *,
    dtype: torch.dtype | str | None = None,
) -> Path:
    """Make a checkpoint of a model from safetensors files, as ``ranks`` ranks would have saved it.

    The inverse of :func:`consolidate`. Needs no process group, and memory for at most one rank's rows. Any number of
    ranks can load it. Does not move the link ``latest``, from which training resumes.

    >>> tz.tools.shard_safetensors("model.safetensors", "runs/start", ranks=8, dtype="float32")

    Args:
        source: the file; or the index of several (``model.safetensors.index.json``); or a folder with
            ``model.safetensors``, an index, or other files. Other names of tied weights are read from ``aliases`` in
            the metadata.
        checkpoint: the folder to write.
        ranks: number of files, one for the rows of each rank.
        dtype: of the floating-point tensors, such as ``"bfloat16"`` (default None: as in the source).

    Returns:
        The folder.

    Raises:
        ValueError: ``ranks``, ``dtype`` or the name ``checkpoint`` is invalid; ``source`` has no safetensors file, or a
            damaged one.
        OSError: a file cannot be read or written.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; pass the number of files, 1 or more")
    to = float_dtype("dtype", dtype)
    path = Path(checkpoint)
    tensors = _find_tensors(Path(source), to)
    folder.prepare(path)
    try:
        _write(path, tensors, ranks)
    except BaseException:
        folder.abandon(path)
        raise
    return path


class FromFiles(WritePlanner):
    """Plans the rows of one of several ranks; reads those of an item right before they are written."""

    def __init__(self, tensors: Sequence[FileTensor], ranks: int, rank: int, done: Callable[[int], None]) -> None:
        keys: Entries = {(MODEL, tensor.name): torch.empty(tensor.shape, device="meta") for tensor in tensors}
        keys |= {(MODEL, alias): (MODEL, tensor.name) for tensor in tensors for alias in tensor.aliases}
        super().__init__(keys)
        self._tensors = {key_of((MODEL, tensor.name)): tensor for tensor in tensors}
        self._ranks, self._rank, self._done = ranks, rank, done

    def create_local_plan(self) -> SavePlan:
        """The rows that this rank writes."""
        found = self._tensors.items()
        items = [item for key, tensor in found for item in _items(key, tensor, self._ranks, self._rank)]
        return SavePlan(items, planner_data=self.mappings)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The rows of an item."""
        assert write_item.tensor_data is not None, "safetensors files have tensors only"
        chunk = write_item.tensor_data.chunk
        start = chunk.offsets[0] if chunk.offsets else 0
        rows = self._tensors[write_item.index.fqn].read_rows(start, start + (chunk.sizes[0] if chunk.sizes else 1))
        self._done(rows.nbytes)
        return rows


def _write(path: Path, tensors: list[FileTensor], ranks: int) -> None:
    staging = folder.staging_of(path)
    total = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    with show_progress(f"write {path.name}", total) as done:
        parts = [write_planned(staging, rank, FromFiles(tensors, ranks, rank, done)) for rank in range(ranks)]
    files = write_metadata(staging, parts)
    folder.publish(path, ranks, files, latest=False)


def _items(key: str, tensor: FileTensor, ranks: int, rank: int) -> Iterator[WriteItem]:
    """The rows of a tensor that a rank writes, if it writes any."""
    start, stop = 0, tensor.shape[0] if tensor.shape else 1
    if layout.is_sharded(tensor.shape):
        start, stop = layout.row_range(tensor.shape[0], ranks, rank)
        if start == stop:
            return
    elif rank:
        return
    sizes = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    offsets = torch.Size([start, *[0] * (len(sizes) - 1)] if sizes else [])
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, torch.Size(sizes)), TensorProperties(tensor.dtype), torch.Size(tensor.shape)
    )
    yield WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def _find_tensors(path: Path, dtype: torch.dtype | None) -> list[FileTensor]:
    """The tensors of a file, of the files that an index names, or of a folder."""
    alone = path / f"model{SUFFIX}"  # which may have the optimizer's file beside it
    files = SafetensorsWeights(alone if alone.is_file() else path).files
    return [_of_file(name, file, dtype) for name, file in files.items()]


def _of_file(name: str, path: Path, dtype: torch.dtype | None) -> FileTensor:
    with safe_open(path, framework="pt") as file:
        shape = tuple(file.get_slice(name).get_shape())
        found = (file.get_slice(name)[:0] if shape else file.get_tensor(name)).dtype
        text = (file.metadata() or {}).get("aliases", "{}")
    try:
        also = tuple(alias for alias, first in json.loads(text).items() if first == name)
    except (ValueError, AttributeError):
        raise ValueError(
            f"{path} names its tied weights in {text!r:.80}, which is no JSON object; fetch it again"
        ) from None
    return FileTensor(name, shape, dtype_to_write(found, dtype), also, path)
