"""From a checkpoint to a few files of whole tensors, and back; one tensor at a time, without a process group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_zero import layout, manifest
from thunder_zero.manifest import Manifest
from thunder_zero.runtime import dcp, folder
from thunder_zero.runtime.contents import GROUPS, MODEL, OPTIM, STATE, groups_of
from thunder_zero.runtime.dcp import Item
from thunder_zero.runtime.onefile import DTYPES, Whole, in_files, write_safetensors, write_torch

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: its folder.
        metadata: DCP's, of all that is in it.
    """

    path: Path
    metadata: Metadata

    def tensors(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """The tensors whose names begin so, by the rest of their names."""
        found = self.metadata.state_dict_metadata.items()
        return {
            key.removeprefix(prefix): stored
            for key, stored in found
            if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
        }

    def values(self, prefix: str) -> dict[str, Any]:
        """The values that are no tensors, by the rest of their names."""
        found = self.metadata.state_dict_metadata.items()
        keys = [
            key for key, stored in found if key.startswith(prefix) and not isinstance(stored, TensorStorageMetadata)
        ]
        read = dcp.read(self.path, self.metadata, [], keys)
        return {key.removeprefix(prefix): value for key, value in read.items()}

    def read(self, key: str, dtype: torch.dtype) -> Tensor:
        """All of one tensor, in a dtype."""
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), "it is listed as one"
        value = torch.empty(stored.size, dtype=stored.properties.dtype)
        dcp.read(self.path, self.metadata, [Item((key,), value, 0, tuple(stored.size))])
        return value.to(dtype)

    def wholes(self, prefix: str, dtype: torch.dtype | None) -> list[Whole]:
        """The tensors under a prefix; those that lie in the same bytes are one with aliases."""
        places = _places(self.metadata)
        by_place: dict[Any, Whole] = {}
        for name, stored in self.tensors(prefix).items():
            place = places[prefix + name]
            if place in by_place:
                first = by_place[place]
                by_place[place] = replace(first, aliases=(*first.aliases, name))
            else:
                found = stored.properties.dtype
                kept = dtype if dtype is not None and found.is_floating_point else found
                by_place[place] = Whole(name, tuple(stored.size), kept)
        return list(by_place.values())


def opened(path: Path, *, check: bool) -> Checkpoint:
    """A checkpoint, checked against its manifest.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or has no manifest and ``check`` is asked for.
    """
    path = folder.locate(path)
    if check:
        try:
            wrong = manifest.faults(path, manifest.read(path).files)
        except FileNotFoundError:
            raise ValueError(
                f"{path} has no {manifest.NAME}, as what another tool wrote; pass check=False (--no-check) to read it"
            ) from None
        if wrong:
            raise ValueError(f"{path} is damaged: {wrong[0]}")
    return Checkpoint(path, dcp.read_metadata(path))


def _places(metadata: Metadata) -> dict[str, Any]:
    """Where the bytes of each key lie."""
    places: dict[str, list[Any]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path, info.offset))
    return {key: tuple(sorted(found)) for key, found in places.items()}


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    optimizer: bool = False,
    max_file_bytes: int | None = None,
    check: bool = True,
) -> tuple[Path, ...]:
    """Make one file (or a few) of whole tensors out of a checkpoint, one tensor at a time.

    Needs no process group and no model. Each file has its name once it is whole.

    >>> tz.consolidate("runs/latest", "model.safetensors", dtype=torch.bfloat16)

    Args:
        checkpoint: the folder that :func:`thunder_zero.save` wrote, or ``latest`` beside it.
        out: the file; what it ends in says what it is: ``.safetensors``, or ``.pt``, ``.pth``, ``.bin`` for what
            ``torch.save`` writes. A tied weight is there once: safetensors files have its other names as JSON under
            ``aliases`` in their metadata, others the same tensor under each name.
        dtype: of the model's floating-point tensors (default None: as they were saved).
        optimizer: its state, too: in ``NAME.optimizer.safetensors`` beside (names ``parameter.state``, hyper-parameters
            as JSON under ``param_groups`` in the metadata); in a torch file as ``{"model": ..., "optim": ...}``, where
            otherwise is the model's state dict alone (default False).
        max_file_bytes: safetensors only: files ``NAME-00001-of-00003.safetensors`` of at most so many bytes of tensors,
            and ``NAME.safetensors.index.json`` that says what is where (default None: one file).
        check: the files are compared with their SHA-256 first; False reads what has no manifest, too.

    Returns:
        The files that were written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged; an argument is out of its range.
        OSError: a file cannot be written.
    """
    out = Path(out)
    if out.suffix not in (SAFETENSORS, *TORCH):
        raise ValueError(
            f"{out.name} ends in {out.suffix or 'nothing'!r}; give a name that ends in .safetensors or .pt"
        )
    if dtype is not None and not (dtype in DTYPES and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; give a floating-point dtype, such as torch.bfloat16, or None")
    if max_file_bytes is not None and (out.suffix != SAFETENSORS or max_file_bytes < 1):
        raise ValueError(f"max_file_bytes is {max_file_bytes}; give 1 or more, and a name that ends in .safetensors")
    source = opened(Path(checkpoint), check=check)
    wholes = source.wholes(f"{MODEL}.", dtype)
    if not wholes:
        raise ValueError(f"{source.path} has no model; it is no checkpoint of thunder_zero.save")
    states = source.wholes(f"{OPTIM}.{STATE}.", None) if optimizer else []
    groups = source.values(f"{OPTIM}.{GROUPS}.") | _numbers(source) if optimizer else {}
    if optimizer and not groups:
        raise ValueError(f"{source.path} has no optimizer; consolidate it without one")
    if out.suffix in TORCH:
        return (_to_torch(source, out, wholes, states, groups),)
    written = _to_safetensors(source, out, wholes, f"{MODEL}.", {}, max_file_bytes)
    if optimizer:
        beside = out.with_name(f"{out.stem}.optimizer{SAFETENSORS}")
        notes = {GROUPS: json.dumps(groups)}
        written += _to_safetensors(source, beside, states, f"{OPTIM}.{STATE}.", notes, max_file_bytes)
    return tuple(written)


def _numbers(source: Checkpoint) -> dict[str, Any]:
    """Hyper-parameters that are tensors."""
    prefix = f"{OPTIM}.{GROUPS}."
    found = source.tensors(prefix).items()
    return {name: source.read(prefix + name, stored.properties.dtype).tolist() for name, stored in found}


def _to_safetensors(
    source: Checkpoint, out: Path, wholes: list[Whole], prefix: str, notes: Mapping[str, str], limit: int | None
) -> list[Path]:
    files = in_files(wholes, limit)
    numbered = [f"{out.stem}-{number:05}-of-{len(files):05}{SAFETENSORS}" for number in range(1, len(files) + 1)]
    paths = [out] if len(files) == 1 else [out.with_name(name) for name in numbered]
    read = _shown(source, prefix, wholes)
    for path, members in zip(paths, files, strict=True):
        write_safetensors(path, members, read, notes)
    if len(files) == 1:
        return paths
    index = out.with_name(f"{out.name}.index.json")
    where = {whole.name: path.name for path, members in zip(paths, files, strict=True) for whole in members}
    total = {"total_size": sum(whole.nbytes for whole in wholes)}
    index.write_text(json.dumps({"metadata": total, "weight_map": where}, indent=1) + "\n")
    return [*paths, index]


def _to_torch(
    source: Checkpoint, out: Path, wholes: list[Whole], states: list[Whole], groups: Mapping[str, Any]
) -> Path:
    extra = source.values(f"{MODEL}.")
    renamed = [replace(whole, name=f"{MODEL}.{whole.name}", aliases=_under(MODEL, whole.aliases)) for whole in wholes]
    renamed += [replace(whole, name=f"{OPTIM}.{STATE}.{whole.name}") for whole in states]

    def nest(tensors: dict[str, Any]) -> Any:
        model = {
            name.removeprefix(f"{MODEL}."): value for name, value in tensors.items() if name.startswith(f"{MODEL}.")
        } | extra
        if not groups:
            return model
        state: dict[str, dict[str, Any]] = {}
        for name, value in tensors.items():
            if name.startswith(f"{OPTIM}.{STATE}."):
                param, _, entry = name.removeprefix(f"{OPTIM}.{STATE}.").rpartition(".")
                state.setdefault(param, {})[entry] = value
        return {MODEL: model, OPTIM: {STATE: state, GROUPS: groups_of(groups)}}

    write_torch(out, renamed, _shown(source, "", renamed), nest)
    return out


def _under(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _shown(source: Checkpoint, prefix: str, wholes: list[Whole]) -> Callable[[Whole], Tensor]:
    """Reads tensors in their order, and shows how far it came where somebody looks."""
    steps = iter(track(wholes, f"{source.path.name}", transient=True))

    def read(whole: Whole) -> Tensor:
        next(steps, None)
        return source.read(prefix + whole.name, whole.dtype)

    return read


def shard_safetensors(source: str | os.PathLike[str], checkpoint: str | os.PathLike[str], ranks: int = 1) -> Path:
    """Make a checkpoint of a model out of a safetensors file, as so many ranks would have saved it.

    The other way of :func:`consolidate`; needs no process group. Any number of ranks loads it.

    >>> tz.shard_safetensors("model.safetensors", "runs/start", ranks=8)

    Args:
        source: the file; other names of tied weights are read from ``aliases`` in its metadata.
        checkpoint: the folder to write.
        ranks: into how many files the rows are cut.

    Returns:
        The folder.

    Raises:
        ValueError: ``ranks`` is out of its range; a name that means something else.
        OSError: it cannot be read, or written.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; give the number of files, 1 or more")
    path = Path(checkpoint)
    parts: list[list[Item]] = [[] for _ in range(ranks)]
    with safe_open(source, framework="pt") as stream:
        aliases: dict[str, str] = json.loads((stream.metadata() or {}).get("aliases", "{}"))
        for name in stream.keys():  # noqa: SIM118  # it is no dict
            also = tuple((MODEL, alias) for alias, first in aliases.items() if first == name)
            for rank, item in _cut(name, stream.get_tensor(name), also, ranks):
                parts[rank].append(item)
    folder.prepare(path)
    try:
        staging = folder.staging_of(path)
        written = [dcp.write(staging, rank, items) for rank, items in enumerate(parts)]
        files, tensors = dcp.finish(staging, written)
        folder.publish(path, Manifest(folder.next_number(path), ranks, files, tensors))
    except BaseException:
        folder.abandon(path)
        raise
    return path


def _cut(name: str, whole: Tensor, also: tuple[dcp.Path_, ...], ranks: int) -> Iterator[tuple[int, Item]]:
    if not layout.is_sharded(tuple(whole.shape)):
        yield 0, Item((MODEL, name), whole, 0, tuple(whole.shape), also)
        return
    for rank in range(ranks):
        start, stop = layout.row_range(whole.shape[0], ranks, rank)
        if start < stop:
            yield rank, Item((MODEL, name), whole[start:stop], start, tuple(whole.shape), also)


def optimizer_step(path: Path) -> int | None:
    """How many steps the optimizer in a checkpoint has taken; None if it does not count, or is not there."""
    source = Checkpoint(path, dcp.read_metadata(path))
    prefix = f"{OPTIM}.{STATE}."
    counts = [name for name in source.tensors(prefix) if name.endswith(".step")]
    return int(source.read(prefix + counts[0], torch.int64)) if counts else None


def total_bytes(found: Manifest) -> int:
    """Bytes of all tensors of a checkpoint; a tied weight counts under each name."""
    return sum(prod(stored.shape) * dtype_named(stored.dtype).itemsize for stored in found.tensors)


def dtype_named(name: str) -> torch.dtype:
    """``torch.bfloat16`` for ``"bfloat16"``."""
    found: torch.dtype = getattr(torch, name)
    return found
