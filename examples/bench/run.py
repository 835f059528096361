"""Compares thunder_zero with its peers: time, bytes and memory of a training step, on networks of several speeds.

    ./dev bench                                                        loopback only
    sudo ./dev bench                                                   also networks of 0.25, 1 and 10 Gbit/s
    ./dev bench --quick                                                a first look in a few minutes
    sudo ./dev bench --networks 1gbit --world-sizes 2 --contestants zero3 fsdp2-reshard-fair

All contestants train the same GPT (23.1 M parameters, float32, SGD, 2 x 128 tokens and one thread per rank). Those of
one world size run alternately in the same processes, so that noise affects all alike. Each time comes with its bound:
the longer of compute alone and of sending the fewest bytes on this network, both measured in the same rounds. Networks
other than loopback are Linux network namespaces, made for the run and removed after it; they need root.

Writes bench.json, which examples/bench/report.py renders as tables, and bench.png.
"""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.bench.contestants import Contestant, contestants
from examples.bench.model import SIZES, floor_bytes, make_model, model_bytes, spared_bytes
from examples.bench.network import LOOPBACK, can_limit, seats, set_rate
from examples.bench.overhead import summary
from examples.bench.plot import save_plot
from examples.bench.ranks import CommandFailed, Ranks, ranks
from examples.bench.report import ALONE, Memory, Result, Row, different_losses, rate_of, table, to_json

RATES = ("250mbit", "1gbit", "10gbit")
QUICK = ("eager", "thunder", "zero0", "zero2", "zero3", "ddp", "fsdp2-keep-fair", "fsdp2-reshard-fair")
SLOW = 0.5e9  # bits per second; below it a turn is one step
WIDTH = 120  # columns, without a terminal


@dataclass
class Found:
    """All results.

    Attributes:
        memory: by world size and contestant.
        waits: "network, W = 2" -> contestant -> seconds of rank 0's waits in one step, in order, and the step's time.
        builds: world size -> contestant -> seconds to build and warm up.
        failed: contestants that could not be built, with the last line of their error.
        overhead: compile and host time of the transform on one rank.
    """

    results: list[Result] = field(default_factory=list)
    memory: dict[int, dict[str, Memory]] = field(default_factory=dict)
    waits: dict[str, dict[str, Any]] = field(default_factory=dict)
    builds: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    overhead: dict[str, Any] = field(default_factory=dict)


def parse_options(known: dict[str, Contestant], arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ``--quick`` and the machine choose the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="gpt", help="llama: of transformers, 12 layers of width 256")
    parser.add_argument("--networks", nargs="+", help=f"{LOOPBACK} or rates such as 1gbit (all; see above)")
    parser.add_argument("--world-sizes", nargs="+", type=int, help="numbers of ranks (2 4)")
    parser.add_argument("--rounds", type=int, help="turns per contestant and network (5)")
    parser.add_argument("--contestants", nargs="+", choices=known, metavar="NAME", help=f"from {' '.join(known)} (all)")
    parser.add_argument("--quick", action="store_true", help="few contestants, 2 ranks, 2 rounds, no overhead")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="output folder (runs/bench)")
    options = parser.parse_args(arguments)
    rates = (RATES[1:2] if options.quick else RATES) if can_limit() else ()
    options.networks = options.networks or [LOOPBACK, *rates]
    options.world_sizes = options.world_sizes or ([2] if options.quick else [2, 4])
    options.rounds = 2 if options.rounds is None and options.quick else 5 if options.rounds is None else options.rounds
    options.contestants = options.contestants or (QUICK if options.quick else list(known))
    try:
        limited = [network for network in options.networks if rate_of(network) < float("inf")]
    except ValueError as error:
        parser.error(f"argument --networks: {error}")
    if limited and not can_limit():
        parser.error(f"cannot limit {limited}: that needs Linux, root, ip and tc (iproute2); give only {LOOPBACK}")
    for name, least in (("world_sizes", 2), ("rounds", 1)):
        values = getattr(options, name)
        if min(values if isinstance(values, list) else [values]) < least:
            parser.error(f"--{name.replace('_', '-')} is {values}; give at least {least}")
    return options


class Bench:
    """The measurement, network by network."""

    def __init__(self, options: argparse.Namespace, chosen: list[Contestant], progress: Progress) -> None:
        self.options, self.chosen, self.progress = options, chosen, progress
        self.found = Found()
        model = make_model(SIZES[options.model])
        self.full, self.spared = model_bytes(model), spared_bytes(model)
        self.kept_unsharded: dict[str, int] = {}  # by contestant

    def run(self, logs: Path) -> None:
        """Measure everything in the options: loopback, then the networks with a rate, which share their processes."""
        limited = [network for network in self.options.networks if network != LOOPBACK]
        for world_size in self.options.world_sizes:
            for networks in ([LOOPBACK] if LOOPBACK in self.options.networks else [], limited):
                if networks:
                    self.measure(networks, world_size, logs)
        if not self.options.quick:
            task = self.progress.add_task("overhead of the transform, W = 1", total=2)
            with seats(1, LOOPBACK) as places, ranks(places, logs, model=self.options.model) as group:
                for what in ("compile", "host"):
                    self.found.overhead[what] = group.do(what)[0]
                    self.progress.advance(task)

    def measure(self, networks: list[str], world_size: int, logs: Path) -> None:
        """Measure networks that share their processes, one after the other."""
        first = world_size not in self.found.memory
        with seats(world_size, networks[0]) as places, ranks(places, logs, model=self.options.model) as group:
            built = self.build(group, world_size, memory=first)
            for network in networks:
                for seat in places:
                    set_rate(seat, network)
                self.found.results.append(self.rounds(group, built, network, world_size))
                self.progress.console.print(table(self.found.results[-1], self.found.memory[world_size]))
                zero = [contestant.name for contestant in built if contestant.group.startswith("thunder_zero")]
                waits = {name: group.do("waits", name=name)[0] for name in zero}
                self.found.waits[f"{network}, W = {world_size}"] = waits

    def build(self, group: Ranks, world_size: int, memory: bool) -> list[Contestant]:
        """Build the contestants on all ranks, count their bytes if ``memory``, and return those that could be built."""
        task = self.progress.add_task(f"W = {world_size}: building", total=len(self.chosen))
        losses: dict[str, list[list[float]]] = {}
        for contestant in self.chosen:
            self.progress.update(task, description=f"W = {world_size}: building {contestant.name}")
            try:
                replies = group.do("build", name=contestant.name)
            except CommandFailed as error:
                self.found.failed[contestant.name] = str(error).strip().splitlines()[-1]
                self.progress.console.print(f"leaving out {contestant.name}: {self.found.failed[contestant.name]}")
                continue
            finally:
                self.progress.advance(task)
            losses[contestant.name] = [reply["losses"] for reply in replies]
            self.kept_unsharded[contestant.name] = replies[0]["kept_unsharded"]
            self.found.builds.setdefault(world_size, {})[contestant.name] = max(reply["seconds"] for reply in replies)
            if memory:
                counted = Memory(**group.do("peak", name=contestant.name)[0])
                self.found.memory.setdefault(world_size, {})[contestant.name] = counted
        built = [contestant for contestant in self.chosen if contestant.name in losses]
        refuse_different(built, losses)
        for contestant in built:  # state that others have changed since may make it compile once more
            group.do("turn", name=contestant.name, steps=1)
        return built

    def rounds(self, group: Ranks, built: list[Contestant], network: str, world_size: int) -> Result:
        """Measure all contestants in each round."""
        wire_bytes = floor_bytes(2, world_size, self.full, self.spared)
        steps = 1 if rate_of(network) < SLOW else 2
        shared = world_size if network == LOOPBACK else 1  # all ranks count on the one interface
        seconds: dict[str, list[float]] = {contestant.name: [] for contestant in built}
        sent: dict[str, list[float]] = {contestant.name: [] for contestant in built}
        wire: list[float] = []
        task = self.progress.add_task(f"W = {world_size}, {network}", total=self.options.rounds * (len(built) + 1))
        for _ in range(self.options.rounds):
            wire.append(max(reply["seconds"] for reply in group.do("wire", nbytes=wire_bytes)))
            self.progress.advance(task)
            for name in seconds:
                replies = group.do("turn", name=name, steps=steps)
                seconds[name].append(max(reply["seconds"] for reply in replies))
                sent[name].append(mean(reply["sent"] for reply in replies) / shared)
                self.progress.advance(task)
        rows = tuple(
            Row(
                one.name,
                one.group,
                one.stage,
                tuple(seconds[one.name]),
                tuple(sent[one.name]),
                self.kept_unsharded[one.name],
            )
            for one in built
        )
        return Result(network, world_size, self.full, self.spared, wire_bytes, tuple(wire), rows)


def refuse_different(built: list[Contestant], losses: dict[str, list[list[float]]]) -> None:
    """Raise if contestants have different losses.

    Raises:
        RuntimeError: naming them.
    """
    for alone in (True, False):
        for rank in range(len(next(iter(losses.values())))):
            alike = [one for one in built if (one.group == ALONE) == alone and not one.rounds]
            same = {one.name: losses[one.name][rank] for one in alike}
            if wrong := different_losses(same):
                raise RuntimeError(
                    f"on rank {rank} the losses of {wrong} differ from those of {next(iter(same))}: {same}"
                )


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Date, command, machine and versions of the run."""
    model = [line for line in read_lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["examples/bench/run.py", *sys.argv[1:]]),
        "rounds": options.rounds,
        "cpu": f"{len(model)} x {model[0].partition(':')[2].strip()}" if model else platform.processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning-thunder")},
    }


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def save(found: Found, facts: dict[str, Any], folder: Path) -> None:
    """Write bench.json and bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    words = summary(found.overhead) if found.overhead else []
    (folder / "bench.json").write_text(to_json({"about": facts, **asdict(found), "overhead_in_words": words}) + "\n")
    save_plot(found.results, folder / "bench.png")


@contextmanager
def stopped_by_term() -> Iterator[None]:
    """SIGTERM exits like Ctrl-C does, so that processes and namespaces are removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    known = contestants()
    options = parse_options(known)
    chosen = [one for one in known.values() if one.name in options.contestants or one.group == ALONE]
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with stopped_by_term(), tempfile.TemporaryDirectory() as logs, Progress(*columns, console=console) as progress:
        bench = Bench(options, chosen, progress)
        bench.run(Path(logs))
    save(bench.found, about(options), options.out)
    for line in summary(bench.found.overhead) if bench.found.overhead else ():
        console.print(line)
    data = options.out / "bench.json"
    console.print(f"Data and plot are in {options.out}; print the tables with python examples/bench/report.py {data}")


if __name__ == "__main__":
    main()
