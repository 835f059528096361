"""``thunder-zero``: what can be done with a checkpoint without training.

thunder-zero inspect CHECKPOINT
thunder-zero consolidate CHECKPOINT OUT.safetensors [--dtype bfloat16] [--optimizer] [--max-file-bytes N]
thunder-zero shard IN.safetensors CHECKPOINT [--ranks 8]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thunder_zero import manifest
from thunder_zero.runtime import folder
from thunder_zero.runtime.consolidate import consolidate, dtype_named, optimizer_step, shard_safetensors, total_bytes

WIDTH = 100  # columns, where no terminal says
FLOATS = ("float64", "float32", "float16", "bfloat16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what cannot be done is one sentence, and exits with 1."""
    options = parse(arguments)
    try:
        if options.command == "inspect":
            inspect(options.checkpoint)
        elif options.command == "consolidate":
            written = consolidate(
                options.checkpoint,
                options.out,
                dtype=options.dtype and dtype_named(options.dtype),
                optimizer=options.optimizer,
                max_file_bytes=options.max_file_bytes,
                check=options.check,
            )
            print("\n".join(f"{path}  {path.stat().st_size:,} B" for path in written))
        else:
            print(shard_safetensors(options.source, options.checkpoint, options.ranks))
    except (OSError, ValueError) as error:
        print(f"thunder-zero: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser("thunder-zero", description="Checkpoints of thunder_zero.save, without training.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("inspect", help="print what is in a checkpoint")
    show.add_argument("checkpoint", type=Path)
    one = commands.add_parser("consolidate", help="make one file of whole tensors")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("out", type=Path, help="OUT.safetensors, or OUT.pt for what torch.save writes")
    one.add_argument("--dtype", choices=FLOATS, help="of floating-point parameters (as they were saved)")
    one.add_argument("--optimizer", action="store_true", help="its state, too")
    one.add_argument("--max-file-bytes", type=int, help="several files and an index, above this size (one file)")
    one.add_argument("--no-check", dest="check", action="store_false", help="read what has no manifest, unchecked")
    cut = commands.add_parser("shard", help="make a checkpoint out of a safetensors file")
    cut.add_argument("source", type=Path)
    cut.add_argument("checkpoint", type=Path)
    cut.add_argument("--ranks", type=int, default=1, help="into how many files the rows are cut (1)")
    return parser.parse_args(arguments)


def inspect(path: Path) -> None:
    """Print a checkpoint's parameters, and what is in it altogether.

    Raises:
        FileNotFoundError: there is none.
        ValueError: its manifest is damaged.
    """
    path = folder.locate(path)
    found = manifest.read(path)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table("parameter or buffer", "shape", "dtype")
    for stored in found.tensors:
        if stored.key.startswith("model."):
            table.add_row(stored.key.removeprefix("model."), " x ".join(map(str, stored.shape)) or "-", stored.dtype)
    console.print(table)
    states = sum(stored.key.startswith("optim.") for stored in found.tensors)
    step = optimizer_step(path)
    console.print(
        f"{path.name}: saved by {found.ranks} {'rank' if found.ranks == 1 else 'ranks'}; "
        f"{states} tensors of an optimizer{'' if step is None else f' at step {step}'}; "
        f"{len(found.files)} files, {sum(file.size for file in found.files):,} B; its tensors have "
        f"{total_bytes(found):,} B",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
