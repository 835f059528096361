"""Converts checkpoints to safetensors files and back, and prints them, without a process group."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.contents import EMAS, GROUPS, MODEL, OPTIM, STATE, name_some, split_rank_prefix
from thunder_zero.checkpoint.dcp_read import places_by_key, read_entries, read_metadata
from thunder_zero.checkpoint.dcp_write import Entries, WritePlanner, key_of, write_metadata, write_planned
from thunder_zero.plan.amounts import WIDTH, bytes_of, float_dtype, name_of
from thunder_zero.plan.geometry import cut_rows
from thunder_zero.plan.mesh import Mesh
from thunder_zero.safetensors_files import (
    SUFFIX,
    SafetensorsWeights,
    TensorToWrite,
    dtype_to_write,
    is_made_here,
    remove_older,
    write_parts,
)
from thunder_zero.tools.printing.progress import show_progress


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint on disk, with DCP's description of its contents. Keys of its results omit the prefix."""

    path: Path
    metadata: dcp.Metadata

    def tensors(self, prefix: str) -> dict[str, dcp.TensorStorageMetadata]:
        return {
            key.removeprefix(prefix): stored
            for key, stored in self.metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(stored, dcp.TensorStorageMetadata)
        }

    def values(self, prefix: str) -> dict[str, Any]:
        entries, tensors = self.metadata.state_dict_metadata, self.tensors("")
        keys = [key for key in entries if key.startswith(prefix) and key not in tensors]
        values = read_entries(self.path, self.metadata, keys)
        return {key.removeprefix(prefix): value for key, value in values.items()}

    def read(self, key: str, dtype: torch.dtype) -> Tensor:
        """Read a whole tensor, converted to a dtype."""
        value: Tensor = read_entries(self.path, self.metadata, [key])[key]
        return value.to(dtype)

    def tensors_to_write(self, prefix: str, dtype: torch.dtype | None = None) -> list[TensorToWrite]:
        """Return the tensors whose keys begin with a prefix. Tied weights become one tensor with aliases.

        ``dtype`` replaces the dtype of floating-point tensors (default: as stored).
        """
        place_of = places_by_key(self.metadata)
        by_place: dict[Any, TensorToWrite] = {}
        for name, stored in self.tensors(prefix).items():
            key = prefix + name
            place = place_of.get(key, key)
            if place in by_place:
                first = by_place[place]
                by_place[place] = replace(first, aliases=(*first.aliases, name))
            else:
                target_dtype = dtype_to_write(stored.properties.dtype, dtype)
                by_place[place] = TensorToWrite(name, tuple(stored.size), target_dtype, key)
        return list(by_place.values())

    def keys_of_single_ranks(self) -> dict[str, list[str]]:
        """Return a mapping from names such as ``"model.router"`` to keys, for values that belong to one rank."""
        keys: dict[str, list[str]] = {}
        for key in self.metadata.state_dict_metadata:
            owner = split_rank_prefix(key)
            if owner is not None and owner[1].startswith((f"{MODEL}.", f"{OPTIM}.")):
                keys.setdefault(owner[1], []).append(key)
        return keys

    def optimizer_step(self) -> int | None:
        """Return the optimizer's number of steps, or None without a counter or a saved optimizer."""
        prefix, keys = f"{OPTIM}.{STATE}.", self.metadata.state_dict_metadata
        key = next((key for key in keys if key.startswith(prefix) and key.endswith(".step")), None)  # all equal
        step = None if key is None else read_entries(self.path, self.metadata, [key])[key]
        if isinstance(step, Tensor) and step.numel() == 1:
            step = step.item()
        return int(step) if isinstance(step, int | float) else None


def open_checkpoint(path: Path, *, verify_files: bool) -> OpenCheckpoint:
    """Open a checkpoint. If ``verify_files`` is true, compare the files with the manifest first."""
    path = folder.locate(path)
    if verify_files:
        files = manifest.require_manifest(path).files
        with show_progress(f"verify {path.name}", sum(file.size for file in files)) as advance:
            manifest.require_no_faults(path, files, done=advance)
    return OpenCheckpoint(path, read_metadata(path))


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    optimizer: bool = False,
    ema: str | None = None,
    max_file_bytes: int | str | None = None,
    verify_files: bool = True,
) -> tuple[Path, ...]:
    """Write the whole tensors of a checkpoint to one or more safetensors files, and return their paths.

    The function needs no process group and no model. It needs memory for one tensor. Files have temporary names until
    all files are complete. Then stale files of an earlier call for ``out`` are deleted. A warning lists values that the
    files cannot hold. For a file of ``torch.save``, ``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``
    reads checkpoints, too.

    >>> tz.tools.consolidate("runs/latest", "model.safetensors", dtype="bfloat16")

    Args:
        out: the file to write, ``NAME.safetensors``. A tied weight is written once. Its other names are in the
            metadata, as JSON under ``aliases``.
        optimizer: True to write the optimizer's state as well, to ``NAME.optimizer.safetensors``, in tensors named
            ``parameter.state``. Other states and hyper-parameters are JSON in the metadata, under ``state`` and
            ``param_groups``.
        ema: name of the extra that holds an EMA. The averages are written as parameters (default: no EMA).
        max_file_bytes: the most bytes of tensors in a file, such as ``"5GB"``. The files are
            ``NAME-00001-of-00003.safetensors`` and ``NAME.safetensors.index.json`` (default: one file).
        verify_files: True to check the SHA-256 of each file first. False also accepts checkpoints without a manifest.
    """
    out = Path(out)
    if out.suffix != SUFFIX:
        raise ValueError(
            f"{out.name} ends in {out.suffix or 'nothing'!r}; pass a name that ends in .safetensors, or call torch's "
            f"dcp_to_torch_save for a file of torch.save"
        )
    most_bytes = None if max_file_bytes is None else bytes_of("max_file_bytes", max_file_bytes)
    source = open_checkpoint(Path(checkpoint), verify_files=verify_files)
    model = _model_in(source, float_dtype("dtype", dtype), ema)
    states, notes = _read_optim(source) if optimizer else ([], {})
    _warn_of_omissions(out, source, (f"{MODEL}.", f"{OPTIM}.")[: 1 + optimizer])
    total = sum(tensor.nbytes for tensor in (*model, *states))
    with show_progress(f"write {out.name}", total) as advance, folder.create_together() as create:

        def read(tensor: TensorToWrite) -> Tensor:
            value = source.read(tensor.key, tensor.dtype)
            advance(tensor.nbytes)
            return value

        written = write_parts(create, out, model, read, {}, most_bytes)
        if optimizer:
            optimizer_file = out.with_name(f"{out.stem}.optimizer{SUFFIX}")
            written += write_parts(create, optimizer_file, states, read, notes, most_bytes)
    remove_older(out, written, is_made_here)
    return tuple(written)


def _model_in(source: OpenCheckpoint, dtype: torch.dtype | None, ema: str | None) -> list[TensorToWrite]:
    """Return the tensors of a model. The averages of an EMA, if any, replace the parameters that it tracks."""
    model = source.tensors_to_write(f"{MODEL}.", dtype)
    if not model:
        raise ValueError(f"{source.path} has no model; pass a checkpoint that thunder_zero.save wrote")
    if ema is None:
        return model
    prefix = f"{EMAS}.{ema}.{MODEL}."
    averages = source.tensors(prefix)
    if not averages:
        names = {key.split(".")[1] for key in source.metadata.state_dict_metadata if key.startswith(f"{EMAS}.")}
        raise ValueError(
            f"{source.path} has no EMA {ema!r}, it has {name_some(sorted(names))}; pass the name of its extra"
        )
    return [replace(tensor, key=prefix + tensor.name) if tensor.name in averages else tensor for tensor in model]


def _read_optim(source: OpenCheckpoint) -> tuple[list[TensorToWrite], dict[str, str]]:
    """Return the tensors of an optimizer's state, and the file's metadata: other states, and hyper-parameters."""
    prefix = f"{OPTIM}.{GROUPS}."
    tensors = source.tensors(prefix).items()
    tensor_values = {name: source.read(prefix + name, stored.properties.dtype).tolist() for name, stored in tensors}
    groups = source.values(prefix) | tensor_values
    if not groups:
        raise ValueError(f"{source.path} has no optimizer; consolidate without one")
    try:
        notes = {STATE: json.dumps(source.values(f"{OPTIM}.{STATE}.")), GROUPS: json.dumps(groups)}
    except TypeError as error:
        raise ValueError(
            f"a safetensors file cannot hold the optimizer's state ({error}); torch's dcp_to_torch_save writes it"
        ) from None
    return source.tensors_to_write(f"{OPTIM}.{STATE}."), notes


def _warn_of_omissions(out: Path, source: OpenCheckpoint, prefixes: tuple[str, ...]) -> None:
    if left_out := [name for name in source.keys_of_single_ranks() if name.startswith(prefixes)]:
        warnings.warn(
            f"{out.name} does not contain the ranks' own values of ignored parameters: {', '.join(left_out)}; "
            f"tz.load restores them on the same number of ranks",
            stacklevel=3,
        )
    if extra_states := source.values(f"{MODEL}."):  # results of get_extra_state
        warnings.warn(
            f"{out.name} does not contain {', '.join(extra_states)}: safetensors files cannot hold extra "
            f"states; torch's dcp_to_torch_save writes them",
            stacklevel=3,
        )


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
    tensors = [weights.describe(name, key_of((MODEL, name)), target) for name in weights]
    folder.prepare(path)
    staging, total = folder.staging_of(path), sum(tensor.nbytes for tensor in tensors)
    try:
        with show_progress(f"write {path.name}", total) as done:
            planners = (FromFiles(tensors, weights, Mesh.of(ranks, rank), done) for rank in range(ranks))
            parts = [write_planned(staging, rank, planner) for rank, planner in enumerate(planners)]
        folder.publish(path, ranks, write_metadata(staging, parts), latest=False)
    except BaseException:
        folder.abandon(path)
        raise
    return path


class FromFiles(WritePlanner):
    """DCP's plan to write the rows of one rank. Rows are read from files lazily, just before a write."""

    def __init__(
        self, tensors: Sequence[TensorToWrite], weights: SafetensorsWeights, mesh: Mesh, done: Callable[[int], None]
    ) -> None:
        keys: Entries = {(MODEL, tensor.name): torch.empty(tensor.shape, device="meta") for tensor in tensors}
        keys |= {(MODEL, alias): (MODEL, tensor.name) for tensor in tensors for alias in tensor.aliases}
        super().__init__(keys)
        self._tensors = {tensor.key: tensor for tensor in tensors}
        self._weights, self._mesh, self._done = weights, mesh, done

    def create_local_plan(self) -> SavePlan:
        items = (_item(tensor, self._mesh) for tensor in self._tensors.values())
        return SavePlan([item for item in items if item is not None], planner_data=self.mappings)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Read the rows of an item, or the whole tensor if it has no dimensions."""
        assert write_item.tensor_data is not None, "safetensors files have tensors only"
        chunk, tensor = write_item.tensor_data.chunk, self._tensors[write_item.index.fqn]
        start = chunk.offsets[0] if tensor.shape else 0
        stop = start + chunk.sizes[0] if tensor.shape else None
        rows = self._weights.rows(tensor.name, start, stop).to(tensor.dtype)
        self._done(rows.nbytes)
        return rows


def _item(tensor: TensorToWrite, mesh: Mesh) -> WriteItem | None:
    geometry = cut_rows(tensor.shape, mesh)
    start, stop, _ = geometry.rows.indices(tensor.shape[0] if tensor.shape else 1)
    if (start == stop) if geometry.is_cut else mesh.shard.place:
        return None
    sizes = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    offsets = torch.Size([start, *[0] * (len(sizes) - 1)] if sizes else [])
    data = TensorWriteData(
        dcp.ChunkStorageMetadata(offsets, torch.Size(sizes)),
        dcp.TensorProperties(tensor.dtype),
        torch.Size(tensor.shape),
    )
    return WriteItem(dcp.MetadataIndex(tensor.key, offsets), WriteItemType.SHARD, tensor_data=data)


def inspect(checkpoint: Path, *, verify_files: bool = False) -> None:
    """Print a checkpoint's parameters and a summary. Raise without output if the checkpoint is damaged.

    If ``verify_files`` is true, also check the SHA-256 of all files, and read all values.
    """
    path = folder.locate(checkpoint)
    saved = manifest.read(path) if (path / manifest.NAME).is_file() else None
    if saved is not None:
        manifest.require_no_faults(path, saved.files, contents=False)
    source = open_checkpoint(path, verify_files=verify_files)
    if verify_files:  # all values, and all tensors one at a time
        for key, stored in source.tensors("").items():
            source.read(key, stored.properties.dtype)
        source.values("")
    # parameters and buffers, or all tensors if the checkpoint has no model
    table = Table("parameter or buffer", "shape", "dtype")
    table.add_column("bytes", justify="right")
    for tensor in source.tensors_to_write("model.") or source.tensors_to_write(""):
        shape, dtype = " x ".join(map(str, tensor.shape)) or "-", name_of(tensor.dtype)
        table.add_row(tensor.name, shape, dtype, f"{tensor.nbytes:,}")
        for alias in tensor.aliases:
            table.add_row(alias, f"= {tensor.name}", "", "")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(_summary(source, saved), highlight=False)


def _summary(source: OpenCheckpoint, saved: manifest.Manifest | None) -> str:
    """Describe the numbers of ranks, tensors, files and bytes, and the optimizer's step."""
    states = len(source.tensors("optim."))
    step = source.optimizer_step()
    single = sum(map(len, source.keys_of_single_ranks().values()))
    if saved is None:
        origin = "no manifest.json, so its files cannot be verified"
        sizes = [file.stat().st_size for file in source.path.iterdir()]
    else:
        origin = f"saved by {saved.ranks} {'rank' if saved.ranks == 1 else 'ranks'}"
        sizes = [file.size for file in saved.files]
    return (
        f"{source.path.name}: {origin}; {states} tensors of an optimizer{'' if step is None else f' at step {step}'}; "
        f"{f'{single} values of single ranks; ' if single else ''}{len(sizes)} files, {sum(sizes):,} B; its tensors "
        f"have {sum(tensor.nbytes for tensor in source.tensors_to_write('')):,} B"
    )
