"""Two sites with a slow link between them: final loss, bytes, steps a second, and what kills do.

    python -m examples.bench.sites loss                # trains each setting on loopback: the loss does not depend on it
    sudo python -m examples.bench.sites speed          # 30 steps or two exchanges each, on links made with tc
    sudo python -m examples.bench.sites faults         # kills at given places, a cut link, old checkpoints, three sites
    python -m examples.bench.sites faults --kills 50   # random kills and stops; compares what the sites agree on

A site is two processes of ``examples/two_sites.py``, or of ``sites_worker.py`` for faults. On a link, each site is in a
network namespace, in which its ranks use loopback. Prints Markdown tables. docs/two-sites.md has them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from examples.bench.network import LOOPBACK, Seat, seats
from examples.bench.ranks import free_port

ROOT = Path(__file__).parents[2]
WORKER, FAULTY = "examples/two_sites.py", "examples/bench/sites_worker.py"
NAMES, RANKS = ("attic", "lab", "office"), 2
SITES = NAMES[:2]
TIMEOUT = 10
STEPS = 512
STREAMED = ("--fragments", "4", "--delay", "2")
SETTINGS: dict[str, tuple[str, ...]] = {  # options of the worker; those without --every are one job of all ranks
    "ZeRO-2": (),
    "ZeRO-2, int8": ("--wire", "int8"),
    "H 8": ("--every", "8"),
    "H 32": ("--every", "32"),
    "H 32, momentum 0.9": ("--every", "32", "--momentum", "0.9"),
    "H 32, int8": ("--every", "32", "--wire", "int8"),
    "H 32, int8, streamed": ("--every", "32", "--wire", "int8", *STREAMED),
    "H 128": ("--every", "128"),
    "H 128, int8, streamed": ("--every", "128", "--wire", "int8", *STREAMED),
    "ZeRO-2, Muon": ("--inner", "muon"),
    "H 32, int8, Muon": ("--every", "32", "--wire", "int8", "--inner", "muon"),
}
SEEDS = {"ZeRO-2": 3, "H 32": 3, "H 128": 3}
LINKS = LOOPBACK, "1gbit", "100mbit", "20mbit"
SECONDS = 900


def start(
    seat: Seat, options: Sequence[str], rank: int, world: int, master: str, log: Path, worker: str = WORKER
) -> subprocess.Popen[bytes]:
    host, port = master.split(":")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": seat.interface if world > RANKS else "lo",
    }
    command = [*seat.prefix, sys.executable, str(ROOT / worker), *options]
    return subprocess.Popen(command, env=environment, stdout=log.open("ab"), stderr=subprocess.STDOUT)


def jobs_of(places: Sequence[Seat], options: Sequence[str], folder: Path) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Start all ranks of both sites: two jobs, or one of four ranks without an outer step."""
    is_outer, workers = "--every" in options, []
    store, masters = f"{places[0].address}:{free_port()}", [f"127.0.0.1:{free_port()}" for _ in SITES]
    one = f"{places[0].address}:{free_port()}"
    for number, (site, seat) in enumerate(zip(SITES, places, strict=True)):
        for rank in range(RANKS):
            log = folder / f"{site}{rank}.log"
            own = ("--site", site, "--store", store, *options) if is_outer else options
            place = (rank, RANKS, masters[number]) if is_outer else (number * RANKS + rank, 2 * RANKS, one)
            workers.append((start(seat, own, *place, log), log))
    return workers


def run(link: str, options: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Train with these options. Return the result of the first rank, and the bytes over the link."""
    with tempfile.TemporaryDirectory() as folder, seats(len(SITES), link) as places:
        workers = jobs_of(places, options, Path(folder))
        try:
            for worker, log in workers:
                if worker.wait(SECONDS):
                    raise RuntimeError(log.read_text()[-3000:])
        finally:
            for worker, _ in workers:
                worker.kill()
        sent = sum(sent_from(seat) for seat in places) if link != LOOPBACK else 0
        return json.loads(workers[0][1].read_text().splitlines()[-1]), sent


def sent_from(seat: Seat) -> int:
    """Return the bytes that a site's interface has sent, headers included."""
    path = f"/sys/class/net/{seat.interface}/statistics/tx_bytes"
    return int(subprocess.run([*seat.prefix, "cat", path], check=True, capture_output=True).stdout)


def losses(names: Sequence[str], steps: int) -> Iterator[str]:
    yield "| setting | validation loss | least to most | exchanges |"
    yield "|---|---:|---:|---:|"
    for name in names:
        found = [
            run(LOOPBACK, (*SETTINGS[name], "--steps", str(steps), "--seed", str(seed)))[0]
            for seed in range(SEEDS.get(name, 1))
        ]
        values = [each["loss"] for each in found]
        spread = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else ""
        yield f"| {name} | {mean(values):.4f} | {spread} | {found[0]['exchanges']} |"


def speeds(names: Sequence[str], links: Sequence[str]) -> Iterator[str]:
    yield "| setting | link | ms a step | of loopback | bytes a step, both directions |"
    yield "|---|---|---:|---:|---:|"
    for name in names:
        options = dict(zip(SETTINGS[name][::2], SETTINGS[name][1::2], strict=True))
        every = int(options.get("--every", 0))
        steps = every * max(2, 28 // every) + 2 if every else 30  # the first step compiles, the second meets
        alone = None
        for link in links:
            result, sent = run(link, (*SETTINGS[name], "--steps", str(steps)))
            seconds = result["seconds"][2:]
            step = mean(seconds) if every else median(seconds)
            alone = alone or step
            counted = result["exchanges"] * every // int(options.get("--fragments", 1)) or steps
            yield f"| {name} | {link} | {step * 1e3:.1f} | {step / alone:.2f} | {sent / counted:,.0f} |"


class Jobs:
    """Sites of ``sites_worker.py``, each a job of two ranks, and what they print."""

    def __init__(self, places: Sequence[Seat], folder: Path, count: int = 2) -> None:
        self.names, self.folder, self.places = NAMES[:count], folder, places
        self.store = f"{places[0].address}:{free_port()}"
        command = [*places[0].prefix, sys.executable, "-m", "thunder_zero", "sites", self.store]
        self._store = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        self.ranks = dict[str, list[subprocess.Popen[bytes]]]()
        for name in self.names:
            self.begin(name)

    def begin(self, name: str, *options: str) -> None:
        master, log = f"127.0.0.1:{free_port()}", self.folder / f"{name}.log"
        own = ("--site", name, "--store", self.store, "--timeout", f"{TIMEOUT}", "--sites", f"{len(self.names)}")
        options = (*own, *options)
        seat = self.places[self.names.index(name)]
        self.ranks[name] = [start(seat, options, rank, RANKS, master, log, FAULTY) for rank in range(RANKS)]

    def kill(self, name: str, ranks: Sequence[int] = range(RANKS)) -> float:
        """Kill ranks of a site. Return the seconds after which its other ranks have ended."""
        begun = time.monotonic()
        for rank in ranks:
            self.ranks[name][rank].kill()
        for process in self.ranks[name]:
            process.wait(SECONDS)
        return time.monotonic() - begun

    def lines(self, name: str) -> list[dict[str, Any]]:
        log = (self.folder / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in log if line.startswith("{") and line.endswith("}")]

    def exchanges(self, *names: str) -> dict[str, set[str]]:
        """Return the digests of the exchanges in which all of these sites took part."""
        made = [{line["exchange"]: line["digest"] for line in self.lines(name) if "exchange" in line} for name in names]
        return {key: {each[key] for each in made} for key in set.intersection(*map(set, made))}

    def exchange(self, count: int, *names: str) -> float:
        """Wait until these sites, or all, have exchanged some more times. Return the seconds."""
        names, begun = names or self.names, time.monotonic()
        goal = len(self.exchanges(*names)) + count
        while len(self.exchanges(*names)) < goal:
            if time.monotonic() > begun + SECONDS:
                raise TimeoutError(f"{names} did not exchange {count} times in {SECONDS} s")
            time.sleep(0.1)
        return time.monotonic() - begun

    def end(self) -> None:
        for process in (self._store, *(rank for ranks in self.ranks.values() for rank in ranks)):
            process.kill()


@contextmanager
def jobs(count: int = 2, link: str = LOOPBACK) -> Iterator[Jobs]:
    with tempfile.TemporaryDirectory() as folder, seats(count, link) as places:
        running = Jobs(places, Path(folder), count)
        try:
            running.exchange(2)
            yield running
        finally:
            running.end()


def lost_steps(lines: Sequence[dict[str, Any]]) -> int:
    """Return the steps since the last exchange."""
    return lines[-1]["step"] - max(line["step"] for line in lines if "exchange" in line)


def aimed() -> Iterator[str]:
    """Yield a table of faults at given places."""
    yield f"| {TIMEOUT} s time-out: what happens | the others wait at most | it waits when it is back | steps lost |"
    yield "|---|---:|---:|---:|"
    for count in (2, 3):
        with jobs(count, "100mbit") as running:
            for what, fault in FAULTS.items():
                if ("three" in what) == (count == 3):
                    begun = time.monotonic()
                    lost = fault(running)
                    running.exchange(2)
                    waits = [
                        max(line["seconds"] for line in running.lines(name) if line["time"] > begun)
                        for name in ("attic", "lab")
                    ]
                    different = [each for each in running.exchanges(*running.names).values() if len(each) > 1]
                    assert not different, f"{what}: sites differ after an exchange"
                    yield f"| {what} | {waits[0]:.1f} s | {waits[1]:.1f} s | {lost} |"


def in_a_step(running: Jobs, ranks: Sequence[int] = range(RANKS)) -> str:
    while (line := running.lines("lab")[-1])["step"] % 16 != 9:
        time.sleep(0.001)
    running.kill("lab", ranks)
    lost = lost_steps(running.lines("lab"))
    running.exchange(2, "attic")
    running.begin("lab")
    return f"{lost} of step {line['step']}"


def in_an_exchange(running: Jobs, what: str = "changes") -> str:
    """Start a site anew that dies while it averages changes, or takes rows."""
    running.kill("lab")
    running.begin("lab", "--dies-in", what)
    for process in running.ranks["lab"]:
        process.wait(SECONDS)
    lost = lost_steps(running.lines("lab")) if what == "changes" else 0
    running.exchange(2, *(name for name in running.names if name != "lab"))
    running.begin("lab")
    return f"{lost}"


def without_link(running: Jobs) -> str:
    (_, _), (hub, port) = running.places[1].ends
    for state, seconds in (("down", 20), ("up", 0)):
        subprocess.run(["ip", "netns", "exec", hub, "ip", "link", "set", port, state], check=True)
        time.sleep(seconds)
    return "0"


def from_other_rounds(running: Jobs) -> str:
    for options in ("--save", "--load"):
        for name in running.names:
            running.kill(name)
            folder = running.folder / name
            chosen = max if name == "lab" else min
            saved = chosen((int(path.name) for path in folder.glob("[0-9]*")), default="")
            running.begin(name, options, f"{folder / str(saved)}")
        running.exchange(20)
    return "those after the older"


FAULTS: dict[str, Callable[[Jobs], str]] = {
    "a site is killed in an inner step": in_a_step,
    "a site is killed in an exchange": in_an_exchange,
    "a site is killed while it takes rows": partial(in_an_exchange, what="rows"),
    "one rank of a site is killed": partial(in_a_step, ranks=[1]),
    "the link is cut for 20 s": without_link,
    "both restart from checkpoints of different rounds": from_other_rounds,
    "one of three sites is killed in an exchange": in_an_exchange,
}


def faults(kills: int, seed: int) -> Iterator[str]:
    """Yield aimed faults, then kill or stop a random site, or one rank of it, again and again."""
    if not kills:
        yield from aimed()
        return
    chance, ended = random.Random(seed), [0.0]
    with jobs() as running:
        for _ in range(kills):
            running.exchange(2)
            time.sleep(chance.uniform(0, 5))
            site, what = chance.choice(running.names), chance.choice(("all ranks", "rank 0", "rank 1", "stop"))
            if what == "stop":
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    for rank in running.ranks[site]:
                        rank.send_signal(number)
                    time.sleep(chance.uniform(1, 15) if number == signal.SIGSTOP else 0)
                continue
            ended.append(running.kill(site, range(RANKS) if what == "all ranks" else [int(what[-1])]))
            running.begin(site)
        running.exchange(4)
        made, both = (running.exchanges(*names) for names in (("attic",), running.names))
        different = [each for each in both.values() if len(each) > 1]
        yield f"{kills} kills and stops: {len(made)} exchanges, {len(both)} of both sites, {len(different)} different"
        yield f"the other ranks of a site with a killed rank ended within {max(ended):.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("loss", "speed", "faults"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kills", type=int, default=0, help="random ones, in place of faults at given places")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = {
        "loss": lambda: losses(options.settings, options.steps),
        "speed": lambda: speeds(options.settings, options.links),
        "faults": lambda: faults(options.kills, options.seed),
    }[options.what]()
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
