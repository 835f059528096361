"""``thunder-zero``: the command for checkpoints, traces, plans, reports and this machine.

thunder-zero inspect CHECKPOINT [--verify]
thunder-zero consolidate CHECKPOINT OUT.safetensors [--dtype bfloat16] [--optimizer] [--ema NAME]
thunder-zero shard IN.safetensors CHECKPOINT [--ranks 8] [--dtype float32]
thunder-zero trace FILE.py:function [--world-size 8] [--stage 3] [--rank 0] [--all] [--json]
thunder-zero report FILE.py:function [--out report.html] [--world-size 8] [--stage 3] [--beside 2] [--json]
thunder-zero check TRAIN.py:step --mesh dp=7,tp=2 [--data dp] [--json]
thunder-zero plan --model llama3-8b --world-size 1024 [--device h100] [--memory-bytes 80GiB] [--json]
thunder-zero why [--device machine.json] SCRIPT.py [its arguments]
thunder-zero calibrate OUT.json [--seconds 30]

``python -m thunder_zero`` is the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thunder_zero.tools.devices.named import DEVICES
from thunder_zero.tools.models.named import MODELS
from thunder_zero.tools.table.rows import PHASES
from thunder_zero.tools.views.selection import ONLY

INPUTS = "(module, input, ...) or (module, (input, ...), {name: input, ...})"
INTERRUPTED = 130  # the exit code that shells use for an interrupted command
DESCRIPTION = (
    "Print and convert checkpoints; print traces; plan a training; measure a script's step beside its forecast (why), "
    "and how fast this machine's CPU and gloo are (calibrate)."
)
WHY = (
    "Run a training script unchanged (torchrun --nproc-per-node 2 -m thunder_zero why SCRIPT.py), and print on rank 0, "
    "for each model, the time, the waits and the memory of a step beside their forecast, and what was compiled."
)
CHECK = (
    "Check a step of any training script, which need not use thunder_zero: FSDP2, parallelize_module, DDP or groups by "
    "hand. The exit status is 0 if nothing is wrong, 1 if something is, 2 if the check cannot say."
)
CALIBRATE = (
    "Measure the CPU, and under torchrun the ranks' collectives on gloo, for forecasts of time. GPUs and NCCL are not "
    "measured."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. Errors are printed on stderr, with exit code 1; of ``check``, 2."""
    options = parser().parse_args(arguments)
    if options.command == "why":  # the user's script handles its errors and warnings
        options.run(options)
        return 0
    code, errors = 0, []
    with warnings.catch_warnings(record=True) as caught:
        try:
            code = options.run(options) or 0
        except (OSError, ValueError) as error:
            code, errors = 2 if options.command == "check" else 1, [str(error)]
        except KeyboardInterrupt:
            code, errors = INTERRUPTED, ["interrupted"]
    for line in [*(str(warning.message) for warning in caught), *errors]:
        print(f"thunder-zero: {line}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Commands import modules lazily, so that help is quick."""
    root = argparse.ArgumentParser("thunder-zero", description=DESCRIPTION)
    commands = root.add_subparsers(dest="command", required=True)
    for add_command in (_inspect, _consolidate, _shard, _trace, _report, _check, _plan, _why, _calibrate):
        add_command(commands.add_parser)
    return root


Add = Callable[..., argparse.ArgumentParser]  # takes name, help and description of a command, and returns its parser


def _command(
    add: Add, name: str, help: str, run: Callable[[argparse.Namespace], int | None], description: str = ""
) -> argparse.ArgumentParser:
    """Add a command that calls ``run``, and return its parser."""
    command = add(name, help=help, description=description or f"{help[0].upper()}{help[1:]}.")
    command.set_defaults(run=run)
    return command


def _inspect(add: Add) -> None:
    def run(options: argparse.Namespace) -> None:
        from thunder_zero.tools.convert.open_checkpoint import inspect

        inspect(options.checkpoint, verify_files=options.verify_files)

    cmd = _command(add, "inspect", "print the contents of a checkpoint; find missing or cut files", run)
    cmd.add_argument("checkpoint", type=Path)
    cmd.add_argument(
        "--verify",
        dest="verify_files",
        action="store_true",
        help="also compare all files with their SHA-256, and read all tensors",
    )


def _consolidate(add: Add) -> None:
    def run(options: argparse.Namespace) -> None:
        from thunder_zero.tools.convert.consolidate import consolidate

        written = consolidate(options.checkpoint, options.out, **_options_except(options, "checkpoint", "out"))
        print("\n".join(f"{path}  {path.stat().st_size:,} B" for path in written))

    cmd = _command(add, "consolidate", "make one file of whole tensors, or a few", run)
    cmd.add_argument("checkpoint", type=Path)
    cmd.add_argument("out", type=Path, help="OUT.safetensors")
    cmd.add_argument("--dtype", help="of floating-point tensors, such as bfloat16 or bf16 (default: as saved)")
    cmd.add_argument("--optimizer", action="store_true", help="include the optimizer's state")
    cmd.add_argument("--ema", metavar="NAME", help="averages of the EMA that was saved as this extra, as parameters")
    cmd.add_argument("--max-file-bytes", metavar="BYTES", help="of each of several files, such as 5GB (default: one)")
    cmd.add_argument("--no-verify", dest="verify_files", action="store_false", help="read another tool's checkpoint")


def _shard(add: Add) -> None:
    def run(options: argparse.Namespace) -> None:
        from thunder_zero.tools.convert.shard_safetensors import shard_safetensors

        print(shard_safetensors(options.source, options.checkpoint, options.ranks, dtype=options.dtype))

    cmd = _command(add, "shard", "make a checkpoint from safetensors files; does not move `latest`", run)
    cmd.add_argument("source", type=Path, help="the file, the index of several, or a folder with either")
    cmd.add_argument("checkpoint", type=Path)
    cmd.add_argument("--ranks", type=int, default=1, help="number of files, one for the rows of each rank (default: 1)")
    cmd.add_argument("--dtype", help="of floating-point tensors, such as bfloat16 or bf16 (default: as in the source)")


def _trace(add: Add) -> None:
    cmd = _command(add, "trace", "print the traces that one rank of any world runs", _show_trace)
    cmd.add_argument("place", metavar="FILE.py:function", help=f"returns {INPUTS}; meta device or not")
    cmd.add_argument("--world-size", type=int, default=8, help="ranks that share one copy of the model (default: 8)")
    cmd.add_argument("--stage", type=int, default=3, help="0 (DDP) to 3 (default: 3)")
    cmd.add_argument("--rank", type=int, default=0, help="the rank to trace (default: 0)")
    cmd.add_argument(
        "--device", help=f"to choose sizes that the policy leaves open for (default: the module's): {_devices()}"
    )
    cmd.add_argument("--phase", choices=PHASES, default="both", help="(default: both)")
    cmd.add_argument("--unit", help="only the lines where this unit computes, and its collectives")
    cmd.add_argument("--only", choices=ONLY, help="only lines that handle or read a parameter, or that communicate")
    cmd.add_argument("--all", action="store_true", help="each line as it runs: views, unpacking, each del")
    cmd.add_argument("--json", action="store_true", help="print JSON: each line as it runs, its meaning, bytes")


def _report(add: Add) -> None:
    cmd = _command(add, "report", "write one HTML file that shows a step: time, memory, bytes, lines", _write_report)
    cmd.add_argument("model", help=f"FILE.py:function, which returns {INPUTS}, or {', '.join(MODELS)}")
    cmd.add_argument("--out", type=Path, default=Path("report.html"), help="(default: report.html)")
    cmd.add_argument("--world-size", type=int, default=8, help="ranks that share one copy of the model (default: 8)")
    cmd.add_argument("--stage", type=int, default=3, help="0 (DDP) to 3 (default: 3)")
    cmd.add_argument("--beside", type=int, metavar="STAGE", help="another stage to show beside it")
    cmd.add_argument("--device", default="h100", help=f"(default: h100) {_devices()}")
    cmd.add_argument("--dtype", help="of compute (default: bfloat16 of a model by name, else the parameters')")
    cmd.add_argument("--blocks", type=int, help="only so many of the model's alike blocks (default: all)")
    cmd.add_argument("--json", action="store_true", help="print what the page shows as JSON; write no file")


def _check(add: Add) -> None:
    cmd = _command(add, "check", "check a training step on a mesh: what is wrong on which axis", _check_step, CHECK)
    cmd.add_argument("place", metavar="TRAIN.py:step", help="step(mesh) trains for one step and returns the model")
    cmd.add_argument("--mesh", required=True, help="axes and their ranks, such as dp=7,tp=2")
    cmd.add_argument("--data", nargs="*", metavar="AXIS", help="axes whose ranks have batches of their own")
    cmd.add_argument("--seconds", type=float, default=600.0, help="how long it may take (default: 600)")
    cmd.add_argument("--json", action="store_true", help="print JSON")


def _plan(add: Add) -> None:
    cmd = _command(add, "plan", "compare stages and meshes for a model, and recommend one", _show_plan)
    cmd.add_argument("--model", required=True, help=f"{', '.join(MODELS)}, or FILE.py:function: {INPUTS}")
    cmd.add_argument("--world-size", type=int, required=True, help="ranks that train")
    cmd.add_argument("--device", default="h100", help=f"(default: h100) {_devices()}")
    cmd.add_argument("--memory-bytes", help="of each device, such as 80GiB (default: the device's)")
    cmd.add_argument("--devices-per-node", type=int, help="(default: the device's)")
    cmd.add_argument("--sequence-length", type=int, help="tokens (default: the model's)")
    cmd.add_argument("--micro-batch", type=int, default=1, help="sequences of a rank in a step (default: 1)")
    cmd.add_argument("--global-batch", type=int, help="sequences of all ranks in a step, for each --tp alike")
    cmd.add_argument("--loss", metavar="FILE.py:function", help="from what forward returns to a loss")
    cmd.add_argument("--stages", type=int, nargs="+", default=(0, 1, 2, 3), help="to compare (default: 0 to 3)")
    cmd.add_argument("--tp", type=int, nargs="+", default=(1,), help="ranks of tensor parallelism, of a model by name")
    cmd.add_argument("--json", action="store_true", help="print JSON")


def _why(add: Add) -> None:
    def run(options: argparse.Namespace) -> None:
        from thunder_zero.tools.views.why import why

        why(options.script, options.arguments, steps=options.steps, device=options.device)

    cmd = _command(add, "why", "run a training script; print its measured step beside the forecast", run, WHY)
    cmd.add_argument("--steps", type=int, default=10, help="measure so many, then print (default: 10, or all)")
    cmd.add_argument("--device", help=f"to forecast time for (default: this GPU, if it is one of them): {_devices()}")
    cmd.add_argument("script", type=Path, metavar="SCRIPT.py", help="runs unchanged")
    cmd.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def _calibrate(add: Add) -> None:
    def run(options: argparse.Namespace) -> None:
        from thunder_zero.tools.devices.calibrate import calibrate_to

        calibrate_to(options.out, options.seconds)

    cmd = _command(add, "calibrate", "measure CPU and gloo, no GPU", run, CALIBRATE)
    cmd.add_argument("out", type=Path, help="OUT.json, for tz.tools.load_device and --device")
    cmd.add_argument("--seconds", type=float, default=30.0, help="how long to measure (default: 30)")


def _check_step(options: argparse.Namespace) -> int:
    """Print what is wrong with a step, and return the exit status."""
    from functools import partial

    from thunder_zero.spmd.check import check_step
    from thunder_zero.tools.from_file import call

    verdict = check_step(partial(call, options.place), options.mesh, data=options.data, seconds=options.seconds)
    print(verdict.to_json() if options.json else verdict)
    return verdict.status


def _options_except(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the keyword arguments of a command's function: all options except ``names``."""
    return {name: value for name, value in vars(options).items() if name not in ("command", "run", *names)}


def _devices() -> str:
    return f"{', '.join(DEVICES)}, or OUT.json of calibrate"


def _show_plan(options: argparse.Namespace) -> None:
    """Print the recommended stage and mesh for a model."""
    from thunder_zero.tools.from_file import function_at, naming_the_users_line
    from thunder_zero.tools.plan.plan_training import plan_training

    loss = None if options.loss is None else function_at(options.loss)
    with naming_the_users_line(options.model):
        plan = plan_training(options.model, loss=loss, **_options_except(options, "model", "loss", "json"))
    print(json.dumps(plan.as_json(), indent=1) if options.json else plan)


def _show_trace(options: argparse.Namespace) -> None:
    """Print the traces of a module from ``FILE.py:function``."""
    from thunder_zero.tools.dry_run import trace
    from thunder_zero.tools.from_file import module_and_inputs, naming_the_users_line
    from thunder_zero.tools.views.print_trace import json_of, print_trace

    module, args, kwargs = module_and_inputs(options.place)
    world = {name: getattr(options, name) for name in ("world_size", "rank", "device")}
    with naming_the_users_line(options.place):
        traces = trace(module, *args, policy=options.stage, **world, **kwargs)
    if options.json:
        print(json.dumps(json_of(traces, options.phase, unit=options.unit, only=options.only), indent=1))
    else:
        print_trace(traces, options.phase, unit=options.unit, only=options.only, every_line=options.all)


def _write_report(options: argparse.Namespace) -> None:
    """Write the report of a model with AdamW, under one or two stages."""
    from thunder_zero.tools.views.page.report import html_of, report_of

    data = report_of(options.model, **_options_except(options, "model", "out", "json"))
    if options.json:
        print(json.dumps(data))
        return
    options.out.write_text(html_of(data), encoding="utf-8")
    print(f"{options.out}  {options.out.stat().st_size:,} B")
