"""``thunder-zero inspect``: prints what a checkpoint has, and finds missing or cut files."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thunder_zero.amounts import name_of
from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.tools.convert.open_checkpoint import OpenCheckpoint, open_checkpoint
from thunder_zero.tools.report.trace_printer import WIDTH


def inspect(path: Path, *, verify_files: bool = False) -> None:
    """Print a checkpoint's parameters and a summary; nothing of a damaged one.

    Args:
        path: the checkpoint.
        verify_files: whether to compare all files with their SHA-256, and to read each tensor, too.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or has no manifest to verify it with.
    """
    path = folder.locate(path)
    written = manifest.read(path) if (path / manifest.NAME).is_file() else None
    if written is not None:
        manifest.require_no_faults(path, written.files, contents=False)
    source = open_checkpoint(path, verify_files=verify_files)
    if verify_files:
        source.require_readable()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table(source))
    console.print(_summary(source, written), highlight=False)


def _table(source: OpenCheckpoint) -> Table:
    """A row for each parameter and buffer; for each tensor, if the checkpoint has no model."""
    table = Table("parameter or buffer", "shape", "dtype")
    table.add_column("bytes", justify="right")
    for tensor in source.tensors_to_write("model.") or source.tensors_to_write(""):
        shape, dtype = " x ".join(map(str, tensor.shape)) or "-", name_of(tensor.dtype)
        table.add_row(tensor.name, shape, dtype, f"{tensor.nbytes:,}")
        for alias in tensor.aliases:
            table.add_row(alias, f"= {tensor.name}", "", "")
    return table


def _summary(source: OpenCheckpoint, written: Manifest | None) -> str:
    """Numbers of ranks, tensors, files and bytes, and the optimizer's step."""
    states = len(source.tensors("optim."))
    step = source.optimizer_step()
    own = sum(map(len, source.keys_of_single_ranks().values()))
    if written is None:
        by = "no manifest.json, so its files cannot be verified"
        sizes = [file.stat().st_size for file in source.path.iterdir()]
    else:
        by = f"saved by {written.ranks} {'rank' if written.ranks == 1 else 'ranks'}"
        sizes = [file.size for file in written.files]
    return (
        f"{source.path.name}: {by}; {states} tensors of an optimizer{'' if step is None else f' at step {step}'}; "
        f"{f'{own} values of single ranks; ' if own else ''}{len(sizes)} files, {sum(sizes):,} B; its tensors have "
        f"{sum(tensor.nbytes for tensor in source.tensors_to_write('')):,} B"
    )
