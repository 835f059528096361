"""``thunder-zero``: the command for checkpoints, traces, plans, reports and this machine.

``python -m thunder_zero`` is the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

INPUTS = "(module, input, ...) or (module, (input, ...), {name: input, ...})"
# options of plan that do not go with --machines, and those that do not go with --sites either
OF_ONE_MACHINE = {"world_size": None, "global_batch": None}
OF_ONE_SITE = {**OF_ONE_MACHINE, "devices_per_node": None, "tp": (1,)}
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


Add = Callable[..., object]  # adds an argument to a command's parser
Command = Callable[..., int | None]  # runs a command with its arguments as keywords; may return an exit code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. Errors are printed on stderr, with exit code 1; of ``check``, 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = vars(parser(next(iter(arguments), "")).parse_args(arguments))
    command, run = options.pop("command"), options.pop("run")
    if command == "why":  # the user's script handles its errors and warnings
        run(**options)
        return 0
    code, errors = 0, []
    with warnings.catch_warnings(record=True) as caught:
        try:
            code = run(**options) or 0
        except (OSError, ValueError) as error:
            code, errors = 2 if command == "check" else 1, [str(error)]
        except KeyboardInterrupt:
            code, errors = INTERRUPTED, ["interrupted"]
    for line in [*(str(warning.message) for warning in caught), *errors]:
        print(f"thunder-zero: {line}", file=sys.stderr)
    return code


def parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser of all commands. Only the chosen command has its arguments, which may need imports."""
    root = argparse.ArgumentParser("thunder-zero", description=DESCRIPTION)
    commands = root.add_subparsers(dest="command", required=True)
    for name, (add_arguments, help, description) in COMMANDS.items():
        description = description or f"{help[0].upper()}{help[1:]}."
        command = commands.add_parser(name, help=help, description=description)
        if name == chosen:
            command.set_defaults(run=add_arguments(command.add_argument))
    return root


def _devices() -> str:
    from thunder_zero.tools.devices.device import DEVICES

    return f"{', '.join(DEVICES)}, or OUT.json of calibrate"


def _models() -> str:
    from thunder_zero.tools.models import MODELS

    return ", ".join(MODELS)


def _later(module: str, name: str, show: Callable[[Any], None] = lambda result: None) -> Command:
    """Return a command that imports its function when it runs, and shows its result."""
    return lambda **options: show(getattr(import_module(module), name)(**options))


def _inspect(add: Add) -> Command:
    compare = "also compare all files with their SHA-256, and read all tensors"
    add("checkpoint", type=Path)
    add("--verify", dest="verify_files", action="store_true", help=compare)
    return _later("thunder_zero.tools.convert", "inspect")


def _consolidate(add: Add) -> Command:
    def show(written: Sequence[Path]) -> None:
        print("\n".join(f"{path}  {path.stat().st_size:,} B" for path in written))

    add("checkpoint", type=Path)
    add("out", type=Path, help="OUT.safetensors")
    add("--dtype", help="of floating-point tensors, such as bfloat16 or bf16 (default: as saved)")
    add("--optimizer", action="store_true", help="include the optimizer's state")
    add("--ema", metavar="NAME", help="averages of the EMA that was saved as this extra, as parameters")
    add("--max-file-bytes", metavar="BYTES", help="of each of several files, such as 5GB (default: one)")
    add("--no-verify", dest="verify_files", action="store_false", help="read another tool's checkpoint")
    return _later("thunder_zero.tools.convert", "consolidate", show)


def _shard(add: Add) -> Command:
    add("source", type=Path, help="the file, the index of several, or a folder with either")
    add("checkpoint", type=Path)
    add("--ranks", type=int, default=1, help="number of files, one for the rows of each rank (default: 1)")
    add("--dtype", help="of floating-point tensors, such as bfloat16 or bf16 (default: as in the source)")
    return _later("thunder_zero.tools.convert", "shard_safetensors", print)


def _trace(add: Add) -> Command:
    from thunder_zero.tools.table.rows import ONLY, PHASES

    def run(place: str, stage: int, phase: str, unit: str | None, only: str | None, **options: Any) -> None:
        from thunder_zero.tools.dry_run import trace
        from thunder_zero.tools.from_file import module_and_inputs, naming_the_users_line
        from thunder_zero.tools.views.print_trace import json_of, print_trace

        as_json, every_line, types = options.pop("json"), options.pop("all"), options.pop("types")
        module, args, kwargs = module_and_inputs(place)
        with naming_the_users_line(place):
            traces = trace(module, *args, policy=stage, **options, **kwargs)
        if as_json:
            print(json.dumps(json_of(traces, phase, unit=unit, only=only, types=types), indent=1))
        else:
            print_trace(traces, phase, unit=unit, only=only, every_line=every_line, types=types)

    add("place", metavar="FILE.py:function", help=f"returns {INPUTS}; meta device or not")
    add("--world-size", type=int, default=8, help="ranks that share one copy of the model (default: 8)")
    add("--stage", type=int, default=3, help="0 (DDP) to 3 (default: 3)")
    add("--rank", type=int, default=0, help="the rank to trace (default: 0)")
    add("--device", help=f"to choose sizes that the policy leaves open for (default: the module's): {_devices()}")
    add("--phase", choices=PHASES, default="both", help="(default: both)")
    add("--unit", help="only the lines where this unit computes, and its collectives")
    add("--only", choices=ONLY, help="only lines that handle or read a parameter, or that communicate")
    add("--all", action="store_true", help="each line as it runs: views, unpacking, each del")
    add("--types", action="store_true", help="what each line writes is on each axis, such as dp:S tp:P")
    add("--json", action="store_true", help="print JSON: each line as it runs, its meaning, bytes")
    return run


def _report(add: Add) -> Command:
    def run(model: str, out: Path, **options: Any) -> None:
        from thunder_zero.tools.views.page.report import html_of, report_of

        as_json = options.pop("json")
        data = report_of(model, **options)
        if as_json:
            print(json.dumps(data))
            return
        out.write_text(html_of(data), encoding="utf-8")
        print(f"{out}  {out.stat().st_size:,} B")

    add("model", help=f"FILE.py:function, which returns {INPUTS}, or {_models()}")
    add("--out", type=Path, default=Path("report.html"), help="(default: report.html)")
    add("--world-size", type=int, default=8, help="ranks that share one copy of the model (default: 8)")
    add("--stage", type=int, default=3, help="0 (DDP) to 3 (default: 3)")
    add("--beside", type=int, metavar="STAGE", help="another stage to show beside it")
    add("--device", default="h100", help=f"(default: h100) {_devices()}")
    add("--dtype", help="of compute (default: bfloat16 of a model by name, else the parameters')")
    add("--blocks", type=int, help="only so many of the model's alike blocks (default: all)")
    add("--types", action="store_true", help="what each line writes is on each axis, such as dp:S tp:P")
    add("--json", action="store_true", help="print what the page shows as JSON; write no file")
    return run


def _check(add: Add) -> Command:
    def run(place: str, mesh: str, html: Path | None, device: str, **options: Any) -> int:
        from thunder_zero.spmd.check import check_step
        from thunder_zero.tools.from_file import call

        as_json = options.pop("json")
        verdict = check_step(partial(call, place), mesh, **options)
        print(verdict.to_json() if as_json else verdict)
        if html is not None:
            from thunder_zero.tools.views.page.report import report

            report(verdict, html, device=device, title=place)
        return verdict.status

    add("place", metavar="TRAIN.py:step", help="a function that trains for one step, such as step(mesh) or main()")
    add("--mesh", required=True, help="axes and their ranks, such as dp=7,tp=2")
    add("--data", nargs="*", metavar="AXIS", help="axes whose ranks have batches of their own")
    add("--seconds", type=float, default=600.0, help="how long it may take (default: 600)")
    add("--html", type=Path, metavar="OUT.html", help="also write the step as a page: lanes, bytes, memory")
    add("--device", default="h100", help="of the page, as of thunder-zero report (default: h100)")
    add("--json", action="store_true", help="print JSON")
    return run


def _plan(add: Add) -> Command:
    def run(model: str, loss: str | None, between: str | None, **options: Any) -> None:
        from thunder_zero.tools.from_file import function_at, naming_the_users_line
        from thunder_zero.tools.plan.places import plan_places
        from thunder_zero.tools.plan.plan_training import plan_training

        as_json, loss_function = options.pop("json"), None if loss is None else function_at(loss)
        places = {name: given for name in ("sites", "machines") if (given := options.pop(name)) is not None}
        plan_it: Callable[..., Any] = plan_training
        if len(places) == 1 and between is not None:
            unused = OF_ONE_SITE if "sites" in places else OF_ONE_MACHINE
            if given := [name for name, default in unused.items() if options.pop(name) != default]:
                raise ValueError(f"--{min(places)} is given; leave out --{given[0].replace('_', '-')}")
            plan_it = partial(plan_places, **places, between=between)
        elif places or between or options["world_size"] is None:
            raise ValueError("give --world-size, or --between with either --sites or --machines")
        with naming_the_users_line(model):
            plan = plan_it(model, loss=loss_function, **options)
        print(json.dumps(plan.as_json(), indent=1) if as_json else plan)

    add("--model", required=True, help=f"{_models()}, or FILE.py:function: {INPUTS}")
    add("--world-size", type=int, help="ranks that train; or give --sites or --machines")
    add("--sites", metavar="SITESxRANKS", help="compare ways to train at several sites, such as 2x2")
    add("--machines", type=int, nargs="+", metavar="N", help="compare numbers of machines, such as 1 2: does more pay?")
    add("--between", metavar="RATE", help="of the link between sites or machines, such as 100mbit")
    add("--device", default="h100", help=f"(default: h100) {_devices()}")
    add("--memory-bytes", help="of each device, such as 80GiB (default: the device's)")
    add("--devices-per-node", type=int, help="(default: the device's)")
    add("--sequence-length", type=int, help="tokens (default: the model's)")
    add("--micro-batch", type=int, default=1, help="sequences of a rank in a step (default: 1)")
    add("--global-batch", type=int, help="sequences of all ranks in a step, for each --tp alike")
    add("--loss", metavar="FILE.py:function", help="from what forward returns to a loss")
    add("--stages", type=int, nargs="+", default=(0, 1, 2, 3), help="to compare (default: 0 to 3)")
    add("--tp", type=int, nargs="+", default=(1,), help="ranks of tensor parallelism, of a model by name")
    add("--json", action="store_true", help="print JSON")
    return run


def _why(add: Add) -> Command:
    add("--steps", type=int, default=10, help="measure so many, then print (default: 10, or all)")
    add("--device", help=f"to forecast time for (default: this GPU, if it is one of them): {_devices()}")
    add("script", type=Path, metavar="SCRIPT.py", help="runs unchanged")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    return _later("thunder_zero.tools.views.why", "why")


def _calibrate(add: Add) -> Command:
    add("out", type=Path, help="OUT.json, for tz.tools.load_device and --device")
    add("--seconds", type=float, default=30.0, help="how long to measure (default: 30)")
    return _later("thunder_zero.tools.devices.calibrate", "calibrate_to")


def _sites(add: Add) -> Command:
    add("address", help="HOST:PORT of this machine, as in tz.sites")
    return _later("thunder_zero.outer.meeting", "serve")


# what adds the arguments of a command and returns its function, the help, the description (default: the help)
COMMANDS: dict[str, tuple[Callable[[Add], Command], str, str]] = {
    "inspect": (_inspect, "print the contents of a checkpoint; find missing or cut files", ""),
    "consolidate": (_consolidate, "make one file of whole tensors, or a few", ""),
    "shard": (_shard, "make a checkpoint from safetensors files; does not move `latest`", ""),
    "trace": (_trace, "print the traces that one rank of any world runs", ""),
    "report": (_report, "write one HTML file that shows a step: time, memory, bytes, lines", ""),
    "check": (_check, "check a training step on a mesh: what is wrong on which axis", CHECK),
    "plan": (_plan, "compare stages and meshes for a model, and recommend one", ""),
    "why": (_why, "run a training script; print its measured step beside the forecast", WHY),
    "sites": (_sites, "run the store where the sites of one training meet, until it is interrupted", ""),
    "calibrate": (_calibrate, "measure CPU and gloo, no GPU", CALIBRATE),
}
