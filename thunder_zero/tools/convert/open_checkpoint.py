"""Opens a checkpoint on disk: checks its files, prints its contents, reads whole tensors."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.contents import MODEL, OPTIM, STATE, split_rank_prefix
from thunder_zero.checkpoint.dcp_read import places_by_key, read_entries, read_metadata
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.plan.amounts import name_of
from thunder_zero.safetensors_files import TensorToWrite, dtype_to_write
from thunder_zero.tools.printing.progress import show_progress
from thunder_zero.tools.printing.words import WIDTH


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint on disk, with DCP's description of its contents."""

    path: Path
    metadata: Metadata

    def tensors(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Return the tensors whose keys begin with a prefix. Keys of the result omit the prefix."""
        return {
            key.removeprefix(prefix): stored
            for key, stored in self.metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
        }

    def values(self, prefix: str) -> dict[str, Any]:
        """Return the non-tensor values whose keys begin with a prefix. Keys of the result omit the prefix."""
        keys = [
            key
            for key, stored in self.metadata.state_dict_metadata.items()
            if key.startswith(prefix) and not isinstance(stored, TensorStorageMetadata)
        ]
        values = read_entries(self.path, self.metadata, keys)
        return {key.removeprefix(prefix): value for key, value in values.items()}

    def read(self, key: str, dtype: torch.dtype) -> Tensor:
        """Read a whole tensor, converted to a dtype."""
        value: Tensor = read_entries(self.path, self.metadata, [key])[key]
        return value.to(dtype)

    def require_readable(self) -> None:
        """Read all values, and all tensors one at a time. Raise if they do not match the metadata."""
        for key, stored in self.tensors("").items():
            self.read(key, stored.properties.dtype)
        self.values("")

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


def inspect(path: Path, *, verify_files: bool = False) -> None:
    """Print a checkpoint's parameters and a summary. Raise without output if the checkpoint is damaged.

    If ``verify_files`` is true, also check the SHA-256 of all files, and read each tensor.
    """
    path = folder.locate(path)
    saved = manifest.read(path) if (path / manifest.NAME).is_file() else None
    if saved is not None:
        manifest.require_no_faults(path, saved.files, contents=False)
    source = open_checkpoint(path, verify_files=verify_files)
    if verify_files:
        source.require_readable()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table(source))
    console.print(_summary(source, saved), highlight=False)


def _table(source: OpenCheckpoint) -> Table:
    """Return a table of parameters and buffers, or of all tensors if the checkpoint has no model."""
    table = Table("parameter or buffer", "shape", "dtype")
    table.add_column("bytes", justify="right")
    for tensor in source.tensors_to_write("model.") or source.tensors_to_write(""):
        shape, dtype = " x ".join(map(str, tensor.shape)) or "-", name_of(tensor.dtype)
        table.add_row(tensor.name, shape, dtype, f"{tensor.nbytes:,}")
        for alias in tensor.aliases:
            table.add_row(alias, f"= {tensor.name}", "", "")
    return table


def _summary(source: OpenCheckpoint, saved: Manifest | None) -> str:
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
