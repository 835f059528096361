"""``thunder-zero``: what can be done with a checkpoint without training.

thunder-zero inspect CHECKPOINT [--check]
thunder-zero consolidate CHECKPOINT OUT.safetensors [--dtype bfloat16] [--optimizer] [--max-file-bytes N] [--no-check]
thunder-zero shard IN.safetensors CHECKPOINT [--ranks 8] [--dtype float32]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.convert.consolidate import consolidate
from thunder_zero.convert.open_checkpoint import OpenCheckpoint, manifest_of, open_checkpoint
from thunder_zero.convert.shard_safetensors import shard_safetensors
from thunder_zero.convert.whole_tensor import FLOATS

WIDTH = 100  # columns, where no terminal says


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what cannot be done is one sentence, and exits with 1."""
    options = parse(arguments)
    with warnings.catch_warnings(record=True) as told:
        failed = _failure(options)
    for line in [str(warning.message) for warning in told] + ([failed] if failed else []):
        print(f"thunder-zero: {line}", file=sys.stderr)
    return 1 if failed else 0


def _failure(options: argparse.Namespace) -> str | None:
    """Run a command; why it cannot be done, or None."""
    try:
        run(options)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def run(options: argparse.Namespace) -> None:
    """Run a command.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a checkpoint is damaged; an option is out of its range.
    """
    if options.command == "inspect":
        inspect(options.checkpoint, check=options.check)
    elif options.command == "consolidate":
        written = consolidate(
            options.checkpoint,
            options.out,
            dtype=FLOATS.get(options.dtype),
            optimizer=options.optimizer,
            max_file_bytes=options.max_file_bytes,
            check=options.check,
        )
        print("\n".join(f"{path}  {path.stat().st_size:,} B" for path in written))
    else:
        print(shard_safetensors(options.source, options.checkpoint, options.ranks, dtype=FLOATS.get(options.dtype)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser("thunder-zero", description="Checkpoints of thunder_zero.save, without training.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("inspect", help="print what is in a checkpoint, and whether files or bytes are missing")
    show.add_argument("checkpoint", type=Path)
    show.add_argument("--check", action="store_true", help="compare all files with their SHA-256, too")
    one = commands.add_parser("consolidate", help="make one file of whole tensors")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("out", type=Path, help="OUT.safetensors, or OUT.pt for what torch.save writes")
    one.add_argument("--dtype", choices=FLOATS, help="of floating-point parameters (as they were saved)")
    one.add_argument("--optimizer", action="store_true", help="its state, too")
    one.add_argument("--max-file-bytes", type=int, help="several files and an index, above this size (one file)")
    one.add_argument("--no-check", dest="check", action="store_false", help="read what has no manifest, unchecked")
    cut = commands.add_parser("shard", help="make a checkpoint out of safetensors files; `latest` stays as it is")
    cut.add_argument("source", type=Path, help="the file, the index of several, or a folder that has one")
    cut.add_argument("checkpoint", type=Path)
    cut.add_argument("--ranks", type=int, default=1, help="into how many files the rows are cut (1)")
    cut.add_argument("--dtype", choices=FLOATS, help="of floating-point parameters (as they are)")
    return parser.parse_args(arguments)


def inspect(path: Path, *, check: bool = False) -> None:
    """Print a checkpoint's parameters, and what is in it altogether.

    Args:
        path: the checkpoint.
        check: whether all files are compared with their SHA-256, too.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged; there is nothing to check it by.
    """
    path = folder.locate(path)
    written = manifest_of(path)
    wrong = manifest.faults_of_size(path, written.files) if written else []
    source = open_checkpoint(path, check=False)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table(source))
    console.print(_summary(source, written, whole=not wrong), highlight=False)
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong[0]}")
    if check:
        open_checkpoint(path, check=True)


def _table(source: OpenCheckpoint) -> Table:
    """A row for each parameter and buffer; for all tensors, of what has no model."""
    table = Table("parameter or buffer", "shape", "dtype")
    table.add_column("bytes", justify="right")
    for whole in source.whole_tensors("model.") or source.whole_tensors(""):
        shape, dtype = " x ".join(map(str, whole.shape)) or "-", str(whole.dtype).removeprefix("torch.")
        table.add_row(whole.name, shape, dtype, f"{whole.nbytes:,}")
        for alias in whole.aliases:
            table.add_row(alias, f"= {whole.name}", "", "")
    return table


def _summary(source: OpenCheckpoint, written: Manifest | None, *, whole: bool) -> str:
    """What is in a checkpoint altogether; where files are missing the optimizer's step is not read."""
    states = len(source.tensors("optim."))
    step = source.optimizer_step() if whole else None
    own = sum(map(len, source.keys_of_single_ranks().values()))
    if written is None:
        by, sizes = "no manifest.json, so damage is not seen", [file.stat().st_size for file in source.path.iterdir()]
    else:
        by = f"saved by {written.ranks} {'rank' if written.ranks == 1 else 'ranks'}"
        sizes = [file.size for file in written.files]
    return (
        f"{source.path.name}: {by}; {states} tensors of an optimizer{'' if step is None else f' at step {step}'}; "
        f"{f'{own} values of single ranks; ' if own else ''}{len(sizes)} files, {sum(sizes):,} B; its tensors have "
        f"{sum(tensor.nbytes for tensor in source.whole_tensors('')):,} B"
    )


if __name__ == "__main__":
    sys.exit(main())
