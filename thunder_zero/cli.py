"""``thunder-zero``: prints, converts and makes checkpoints, without training.

thunder-zero inspect CHECKPOINT [--verify]
thunder-zero consolidate CHECKPOINT OUT.safetensors [--dtype bfloat16] [--optimizer] [--max-file-bytes N] [--no-verify]
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
from thunder_zero.checkpoint.dcp_check import require_files
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.convert.consolidate import consolidate
from thunder_zero.convert.open_checkpoint import OpenCheckpoint, open_checkpoint
from thunder_zero.convert.shard_safetensors import shard_safetensors
from thunder_zero.convert.tensor_to_write import FLOAT_DTYPES

WIDTH = 100  # columns, if stdout is not a terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. An error is one sentence on stderr and exit code 1."""
    options = parse(arguments)
    with warnings.catch_warnings(record=True) as caught:
        failed = _failure(options)
    for line in [str(warning.message) for warning in caught] + ([failed] if failed else []):
        print(f"thunder-zero: {line}", file=sys.stderr)
    return 1 if failed else 0


def _failure(options: argparse.Namespace) -> str | None:
    """Run a command; returns the error's sentence, or None."""
    try:
        run(options)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def run(options: argparse.Namespace) -> None:
    """Run a command.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a checkpoint is damaged, or an option is invalid.
    """
    if options.command == "inspect":
        inspect(options.checkpoint, verify_files=options.verify_files)
    elif options.command == "consolidate":
        written = consolidate(
            options.checkpoint,
            options.out,
            dtype=FLOAT_DTYPES.get(options.dtype),
            optimizer=options.optimizer,
            max_file_bytes=options.max_file_bytes,
            verify_files=options.verify_files,
        )
        print("\n".join(f"{path}  {path.stat().st_size:,} B" for path in written))
    else:
        print(
            shard_safetensors(options.source, options.checkpoint, options.ranks, dtype=FLOAT_DTYPES.get(options.dtype))
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("thunder-zero", description="Print and convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("inspect", help="print the contents of a checkpoint; find missing or cut files")
    show.add_argument("checkpoint", type=Path)
    show.add_argument(
        "--verify",
        dest="verify_files",
        action="store_true",
        help="also compare all files with their SHA-256, and read all tensors",
    )
    one = commands.add_parser("consolidate", help="make one file of whole tensors, or a few")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("out", type=Path, help="OUT.safetensors, or OUT.pt for what torch.save writes")
    one.add_argument("--dtype", choices=FLOAT_DTYPES, help="of floating-point tensors (default: as saved)")
    one.add_argument("--optimizer", action="store_true", help="include the optimizer's state")
    one.add_argument("--max-file-bytes", type=int, help="of each of several files (default: one file)")
    one.add_argument(
        "--no-verify",
        dest="verify_files",
        action="store_false",
        help="read another tool's checkpoint",
    )
    cut = commands.add_parser("shard", help="make a checkpoint from safetensors files; does not move `latest`")
    cut.add_argument("source", type=Path, help="the file, the index of several, or a folder with either")
    cut.add_argument("checkpoint", type=Path)
    cut.add_argument("--ranks", type=int, default=1, help="number of files, one for the rows of each rank (default: 1)")
    cut.add_argument("--dtype", choices=FLOAT_DTYPES, help="of floating-point tensors (default: as in the source)")
    return parser.parse_args(arguments)


def inspect(path: Path, *, verify_files: bool = False) -> None:
    """Print a checkpoint's parameters and a summary.

    Args:
        path: the checkpoint.
        verify_files: whether to compare all files with their SHA-256, and to read each tensor, too.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or has no manifest to verify it with.
    """
    path = folder.locate(path)
    written = manifest.read_if_present(path)
    wrong = manifest.find_wrong_sizes(path, written.files) if written else []
    source = open_checkpoint(path, verify_files=False)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table(source))
    console.print(_summary(source, written, whole=not wrong), highlight=False)
    manifest.require_no_faults(path, wrong)
    require_files(path, source.metadata)
    if verify_files:
        open_checkpoint(path, verify_files=True).require_readable()


def _table(source: OpenCheckpoint) -> Table:
    """A row for each parameter and buffer; for each tensor, if the checkpoint has no model."""
    table = Table("parameter or buffer", "shape", "dtype")
    table.add_column("bytes", justify="right")
    for tensor in source.tensors_to_write("model.") or source.tensors_to_write(""):
        shape, dtype = " x ".join(map(str, tensor.shape)) or "-", str(tensor.dtype).removeprefix("torch.")
        table.add_row(tensor.name, shape, dtype, f"{tensor.nbytes:,}")
        for alias in tensor.aliases:
            table.add_row(alias, f"= {tensor.name}", "", "")
    return table


def _summary(source: OpenCheckpoint, written: Manifest | None, *, whole: bool) -> str:
    """Numbers of ranks, tensors, files and bytes; the optimizer's step only if the files are ``whole``."""
    states = len(source.tensors("optim."))
    step = source.optimizer_step() if whole else None
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


if __name__ == "__main__":
    sys.exit(main())
