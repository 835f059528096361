"""From a checkpoint to a few files of whole tensors, one tensor at a time, without a process group."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thunder_zero.convert.atomic_files import Create, create_together
from thunder_zero.convert.open_checkpoint import OpenCheckpoint, open_checkpoint
from thunder_zero.convert.safetensors_file import (
    INDEX_SUFFIX,
    MADE_HERE,
    SUFFIX,
    require_float,
    split_into_files,
    write_safetensors,
)
from thunder_zero.convert.torch_file import write_torch
from thunder_zero.convert.whole_tensor import ReadTensor, WholeTensor
from thunder_zero.report.progress import show_progress
from thunder_zero.state_dict.contents import GROUPS, MODEL, OPTIM, STATE, groups_of

TORCH = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Optim:
    """An optimizer in a checkpoint.

    Attributes:
        tensors: its states that are tensors, named ``"parameter.state"``.
        values: those that are none, by such names.
        groups: hyper-parameters by ``"<group>.<name>"``.
    """

    tensors: list[WholeTensor]
    values: dict[str, Any]
    groups: dict[str, Any]


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

    Needs no process group and no model. The files have their names once all are whole; then what an earlier call has
    left under the name ``out`` (parts, index, optimizer) and is not written again is removed. What each rank has for
    itself is not in them, and safetensors files have no extra states (``get_extra_state``): a warning names those.

    >>> tz.consolidate("runs/latest", "model.safetensors", dtype=torch.bfloat16)

    Args:
        checkpoint: the folder that :func:`thunder_zero.save` wrote, or ``latest`` beside it.
        out: the file; what it ends in says what it is: ``.safetensors``, or ``.pt``, ``.pth``, ``.bin`` for what
            ``torch.save`` writes. A tied weight is there once: safetensors files have its other names as JSON under
            ``aliases`` in their metadata, others the same tensor under each name.
        dtype: of the model's floating-point tensors (default None: as they were saved).
        optimizer: its state, too: in ``NAME.optimizer.safetensors`` beside (names ``parameter.state``; as JSON in the
            metadata states that are no tensors, by such names under ``state``, and hyper-parameters under
            ``param_groups``); in a torch file as ``{"model": ..., "optim": ...}``, where otherwise is the model's state
            dict alone (default False).
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
    _require_possible(out, max_file_bytes)
    require_float(dtype)
    source = open_checkpoint(Path(checkpoint), check=check)
    model = source.whole_tensors(f"{MODEL}.", dtype)
    if not model:
        raise ValueError(f"{source.path} has no model; it is no checkpoint of thunder_zero.save")
    optim = _optim_of(source) if optimizer else None
    _warn_of_ranks_own(source, out, optimizer)
    if out.suffix == SUFFIX:
        _warn_of_extra_states(source, out)
    total = sum(whole.nbytes for whole in [*model, *(optim.tensors if optim else ())])
    with show_progress(f"write {out.name}", total) as done, create_together() as create:
        read = _reader(source, done)
        if out.suffix == SUFFIX:
            written = _to_safetensors(create, out, model, optim, read, max_file_bytes)
        else:
            written = _to_torch(create, out, _tree(model, source.values(f"{MODEL}."), optim), read)
    if out.suffix == SUFFIX:
        _remove_older(out, written)
    return tuple(written)


def _require_possible(out: Path, max_file_bytes: int | None) -> None:
    if out.suffix not in (SUFFIX, *TORCH):
        raise ValueError(
            f"{out.name} ends in {out.suffix or 'nothing'!r}; give a name that ends in .safetensors or .pt"
        )
    if max_file_bytes is not None and (out.suffix != SUFFIX or max_file_bytes < 1):
        raise ValueError(f"max_file_bytes is {max_file_bytes}; give 1 or more, and a name that ends in .safetensors")


def _optim_of(source: OpenCheckpoint) -> Optim:
    prefix = f"{OPTIM}.{GROUPS}."
    tensors = source.tensors(prefix).items()
    numbers = {name: source.read(prefix + name, stored.properties.dtype).tolist() for name, stored in tensors}
    groups = source.values(prefix) | numbers
    if not groups:
        raise ValueError(f"{source.path} has no optimizer; consolidate it without one")
    return Optim(source.whole_tensors(f"{OPTIM}.{STATE}."), source.values(f"{OPTIM}.{STATE}."), groups)


def _warn_of_ranks_own(source: OpenCheckpoint, out: Path, optimizer: bool) -> None:
    prefixes = (f"{MODEL}.", f"{OPTIM}.") if optimizer else (f"{MODEL}.",)
    names = [name for name in source.keys_of_single_ranks() if name.startswith(prefixes)]
    if names:
        warnings.warn(
            f"{out.name} lacks what each rank has for itself, of parameters that the policy ignores: "
            f"{', '.join(names)}; tz.load gives it to the ranks that saved it",
            stacklevel=3,
        )


def _warn_of_extra_states(source: OpenCheckpoint, out: Path) -> None:
    names = list(source.values(f"{MODEL}."))
    if names:
        warnings.warn(
            f"{out.name} lacks {', '.join(names)}, since safetensors files hold no extra states; "
            f"{out.with_suffix('.pt').name} would have them",
            stacklevel=3,
        )


def _reader(source: OpenCheckpoint, done: Callable[[int], None]) -> ReadTensor:
    def read(whole: WholeTensor) -> Tensor:
        value = source.read(whole.key, whole.dtype)
        done(whole.nbytes)
        return value

    return read


def _tree(model: Iterable[WholeTensor], extra: Mapping[str, Any], optim: Optim | None) -> dict[str, Any]:
    """What a torch file has."""
    named: dict[str, Any] = {name: whole for whole in model for name in (whole.name, *whole.aliases)}
    named |= extra
    if optim is None:
        return named
    state: dict[str, dict[str, Any]] = {}
    for name, value in ({whole.name: whole for whole in optim.tensors} | optim.values).items():
        param, _, entry = name.rpartition(".")
        state.setdefault(param, {})[entry] = value
    return {MODEL: named, OPTIM: {STATE: state, GROUPS: groups_of(optim.groups)}}


def _notes(optim: Optim) -> dict[str, str]:
    """What of an optimizer stands in a safetensors file's metadata."""
    try:
        return {STATE: json.dumps(optim.values), GROUPS: json.dumps(optim.groups)}
    except TypeError as error:
        raise ValueError(f"the optimizer has what safetensors files cannot hold ({error}); write a .pt file") from None


def _to_torch(create: Create, out: Path, tree: dict[str, Any], read: ReadTensor) -> list[Path]:
    with create(out) as stream:
        write_torch(stream, tree, read)
    return [out]


def _to_safetensors(
    create: Create, out: Path, model: list[WholeTensor], optim: Optim | None, read: ReadTensor, limit: int | None
) -> list[Path]:
    if optim is None:
        return _in_parts(create, out, model, read, {}, limit)
    notes = _notes(optim)
    beside = out.with_name(f"{out.stem}.optimizer{SUFFIX}")
    written = _in_parts(create, out, model, read, {}, limit)
    return written + _in_parts(create, beside, optim.tensors, read, notes, limit)


def _in_parts(
    create: Create, out: Path, wholes: list[WholeTensor], read: ReadTensor, notes: Mapping[str, str], limit: int | None
) -> list[Path]:
    """Write the files, and their index if there are several."""
    files = split_into_files(wholes, limit)
    numbered = [f"{out.stem}-{number:05}-of-{len(files):05}{SUFFIX}" for number in range(1, len(files) + 1)]
    paths = [out] if len(files) == 1 else [out.with_name(name) for name in numbered]
    for path, members in zip(paths, files, strict=True):
        with create(path) as stream:
            write_safetensors(stream, members, read, notes)
    if len(files) == 1:
        return paths
    where = {whole.name: path.name for path, members in zip(paths, files, strict=True) for whole in members}
    total = {"total_size": sum(whole.nbytes for whole in wholes), **MADE_HERE}
    index = out.with_name(out.name + INDEX_SUFFIX)
    with create(index) as stream:
        stream.write(json.dumps({"metadata": total, "weight_map": where}, indent=1).encode() + b"\n")
    return [*paths, index]


def _remove_older(out: Path, written: Iterable[Path]) -> None:
    """Delete what an earlier consolidation of this name wrote and this one did not: a reader would mix them."""
    stem, dot, end = re.escape(out.stem), re.escape(SUFFIX), re.escape(INDEX_SUFFIX)
    ours = re.compile(rf"{stem}(\.optimizer)?(-\d{{5,}}-of-\d{{5,}}{dot}|{dot}({end})?)")
    kept = {path.name for path in written}
    for path in list(out.parent.iterdir()):
        if ours.fullmatch(path.name) and path.name not in kept and _is_made_here(path):
            path.unlink()


def _is_made_here(path: Path) -> bool:
    """Whether a safetensors file, or the index of several, says that it is of ``consolidate``."""
    try:
        if path.name.endswith(INDEX_SUFFIX):
            said = json.loads(path.read_text())["metadata"]
        else:
            with safe_open(path, "pt") as file:
                said = file.metadata() or {}
        return bool(said.items() >= MADE_HERE.items())
    except (SafetensorError, ValueError, LookupError, AttributeError, TypeError):
        return False
