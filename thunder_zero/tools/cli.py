"""``thunder-zero``: checkpoints, traces, what works on this machine, and how fast it is.

thunder-zero inspect CHECKPOINT [--verify]
thunder-zero consolidate CHECKPOINT OUT.safetensors [--dtype bfloat16] [--optimizer] [--ema NAME]
thunder-zero shard IN.safetensors CHECKPOINT [--ranks 8] [--dtype float32]
thunder-zero trace FILE.py:function [--world-size 8] [--stage 3] [--rank 0] [--device h100] [--json]
thunder-zero plan --model llama3-8b --world-size 1024 [--device h100] [--memory 80GiB] [--json]
thunder-zero doctor [--json]
thunder-zero calibrate OUT.json [--seconds 30]
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.dcp_check import require_files
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.checkpoint.tensor_to_write import FLOAT_DTYPES
from thunder_zero.tools.ask.print_trace import HALVES, print_trace
from thunder_zero.tools.ask.trace_json import json_of
from thunder_zero.tools.convert.consolidate import consolidate
from thunder_zero.tools.convert.open_checkpoint import OpenCheckpoint, open_checkpoint
from thunder_zero.tools.convert.shard_safetensors import shard_safetensors
from thunder_zero.tools.devices.command import calibrate_to
from thunder_zero.tools.devices.device import DEVICES
from thunder_zero.tools.doctor import examine, text_of
from thunder_zero.tools.dry_run import trace
from thunder_zero.tools.from_file import module_and_inputs
from thunder_zero.tools.planner.advise import plan_training
from thunder_zero.tools.planner.meshes import bytes_of
from thunder_zero.tools.planner.models import KNOWN
from thunder_zero.tools.planner.table import print_plan

WIDTH = 100  # columns, if stdout is not a terminal
DESCRIPTION = (
    "Print and convert checkpoints; print traces; plan a training; print what works on this machine (doctor), and "
    "measure how fast its CPU and gloo are (calibrate)."
)
CALIBRATE = (
    "Measure the CPU, and under torchrun the ranks' collectives on gloo, for forecasts of time. GPUs and NCCL are not "
    "measured."
)


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
        ValueError: a checkpoint is damaged, an option is invalid, or the package cannot run here.
    """
    if options.command == "trace":
        show_trace(options)
    elif options.command == "plan":
        show_plan(options)
    elif options.command == "doctor":
        show_health(as_json=options.json)
    elif options.command == "calibrate":
        calibrate_to(options.out, options.seconds)
    elif options.command == "inspect":
        inspect(options.checkpoint, verify_files=options.verify_files)
    elif options.command == "consolidate":
        written = consolidate(
            options.checkpoint,
            options.out,
            dtype=FLOAT_DTYPES.get(options.dtype),
            optimizer=options.optimizer,
            ema=options.ema,
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
    parser = argparse.ArgumentParser("thunder-zero", description=DESCRIPTION)
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
    one.add_argument("--ema", metavar="NAME", help="averages of the EMA that was saved as this extra, as parameters")
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
    _add_trace(commands.add_parser("trace", help="print the traces that one rank of any world runs"))
    _add_plan(commands.add_parser("plan", help="compare stages and meshes for a model, and recommend one"))
    doctor = commands.add_parser("doctor", help="print what works here; the exit code is 1 if the package does not")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    measure = commands.add_parser("calibrate", help="measure CPU and gloo, no GPU", description=CALIBRATE)
    measure.add_argument("out", type=Path, help="OUT.json, for tz.tools.load_device")
    measure.add_argument("--seconds", type=float, default=30.0, help="how long to measure (default: 30)")
    return parser.parse_args(arguments)


def _add_trace(show: argparse.ArgumentParser) -> None:
    show.add_argument("place", metavar="FILE.py:function", help="returns (module, input, ...); meta device or not")
    show.add_argument("--world-size", type=int, default=8, help="ranks that share one copy of the model (default: 8)")
    show.add_argument("--stage", type=int, default=3, help="0 (DDP) to 3 (default: 3)")
    show.add_argument("--rank", type=int, default=0, help="the rank to trace (default: 0)")
    show.add_argument("--replicas", type=int, default=1, help="copies of the sharded model (default: 1)")
    show.add_argument("--device", choices=DEVICES, help="open sizes of the policy are for it (default: the module's)")
    show.add_argument("--half", choices=HALVES, default="both", help="(default: both)")
    show.add_argument("--unit", help="only the lines where this unit computes, and its collectives")
    show.add_argument("--fold", action="store_true", help="only the lines that handle or read a parameter")
    show.add_argument("--json", action="store_true", help="print JSON: each line, its meaning, bytes")


def _add_plan(show: argparse.ArgumentParser) -> None:
    show.add_argument("--model", required=True, help=f"{', '.join(KNOWN)}, or FILE.py:function: (module, input, ...)")
    show.add_argument("--world-size", type=int, required=True, help="ranks that train")
    show.add_argument("--device", default="h100", help=f"{', '.join(DEVICES)} (default: h100)")
    show.add_argument("--memory", help="of each device, such as 80GiB (default: the device's)")
    show.add_argument("--devices-per-node", type=int, help="(default: the device's)")
    show.add_argument("--sequence-length", type=int, help="tokens (default: the model's)")
    show.add_argument("--micro-batch", type=int, default=1, help="sequences of a rank in a step (default: 1)")
    show.add_argument("--json", action="store_true", help="print JSON")


def show_plan(options: argparse.Namespace) -> None:
    """Print which stage and mesh to train a model with.

    Raises:
        OSError: the model's file cannot be read.
        ValueError: there is no such model or device; ranks that do not fill nodes; no number of bytes.
        RuntimeError: the model's file raised an error.
    """
    plan = plan_training(
        options.model,
        world_size=options.world_size,
        device=options.device,
        memory_bytes=None if options.memory is None else bytes_of(options.memory),
        devices_per_node=options.devices_per_node,
        sequence_length=options.sequence_length,
        micro_batch=options.micro_batch,
    )
    if options.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        print_plan(plan, Console(width=None if sys.stdout.isatty() else WIDTH))


def show_trace(options: argparse.Namespace) -> None:
    """Print the traces of the module that a function of a file makes.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such function, unit or rank.
        RuntimeError: the function raised an error.
    """
    module, inputs = module_and_inputs(options.place)
    traces = trace(
        module,
        *inputs,
        policy=options.stage,
        world_size=options.world_size,
        rank=options.rank,
        replicas=options.replicas,
        device=None if options.device is None else DEVICES[options.device],
    )
    if options.json:
        print(json.dumps(json_of(traces, options.half, unit=options.unit, fold=options.fold), indent=1))
    else:
        print_trace(traces, options.half, unit=options.unit, fold=options.fold)


def show_health(*, as_json: bool) -> None:
    """Print what works here.

    Raises:
        ValueError: the package does not.
    """
    findings = examine()
    faults = [one.what for one in findings if one.fault]
    if as_json:
        print(json.dumps({"works": not faults, "findings": [asdict(one) for one in findings]}, indent=1))
    else:
        print(text_of(findings))
    if faults:
        raise ValueError(f"thunder_zero cannot run here: {', '.join(faults)}")


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
    written = manifest.read_if_present(path)
    wrong = manifest.find_wrong_sizes(path, written.files) if written else []
    source = open_checkpoint(path, verify_files=verify_files)
    manifest.require_no_faults(path, wrong)
    require_files(path, source.metadata)
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
        shape, dtype = " x ".join(map(str, tensor.shape)) or "-", str(tensor.dtype).removeprefix("torch.")
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


if __name__ == "__main__":
    sys.exit(main())
