"""Two sites with a slow link between them: final loss, bytes, steps a second, and what kills do.

    python -m examples.bench.sites loss                # trains each setting on loopback: the loss does not depend on it
    sudo python -m examples.bench.sites speed          # 30 steps or two exchanges each, on links made with tc
    python -m examples.bench.sites faults --kills 50   # random kills and stops; compares what the sites agree on

A site is two processes of ``examples/two_sites.py``. On a link, each site is in a network namespace, in which its ranks
use loopback. Prints Markdown tables. docs/two-sites.md has them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from examples.bench.network import LOOPBACK, Seat, seats

ROOT = Path(__file__).parents[2]
WORKER = "examples/two_sites.py"
SITES, RANKS = ("attic", "lab"), 2
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
EXCHANGE = re.compile(r"\S+ (\w+) step (\d+): exchange (\d+), digest (\w+)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(seat: Seat, options: Sequence[str], rank: int, world: int, master: str, log: Path) -> subprocess.Popen[bytes]:
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
    command = [*seat.prefix, sys.executable, str(ROOT / WORKER), *options]
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


def run(link: str, options: Sequence[str]) -> tuple[dict[str, object], int]:
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
        values = [float(str(each["loss"])) for each in found]
        spread = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else ""
        yield f"| {name} | {mean(values):.4f} | {spread} | {found[0]['exchanges']} |"


def speeds(names: Sequence[str], links: Sequence[str]) -> Iterator[str]:
    yield "| setting | link | ms a step | of loopback | bytes a step, both directions |"
    yield "|---|---|---:|---:|---:|"
    for name in names:
        options = dict(zip(SETTINGS[name][::2], SETTINGS[name][1::2], strict=True))
        every = int(options.get("--every", 0))
        steps = 2 * every + 2 if every else 30  # the first step compiles
        alone = None
        for link in links:
            result, sent = run(link, (*SETTINGS[name], "--steps", str(max(steps, 30))))
            seconds = [float(value) for value in result["seconds"]][2:]  # type: ignore[attr-defined]
            step = mean(seconds) if every else median(seconds)
            alone = alone or step
            yield f"| {name} | {link} | {step * 1e3:.1f} | {step / alone:.2f} | {sent / max(steps, 30):,.0f} |"


def faults(kills: int, seed: int) -> Iterator[str]:
    """Kill or stop a random site, or one rank of it, again and again, and start it again."""
    chance, address = random.Random(seed), f"127.0.0.1:{free_port()}"
    options: tuple[str, ...] = (
        "--every",
        "8",
        "--wire",
        "int8",
        "--fragments",
        "2",
        "--steps",
        "1000000",
        "--store",
        address,
    )
    options += ("--width", "32", "--rows", "8", "--timeout", "10", "--digests")
    with tempfile.TemporaryDirectory() as folder, seats(len(SITES), LOOPBACK) as places:
        store = subprocess.Popen([sys.executable, "-m", "thunder_zero", "sites", address], cwd=ROOT)
        logs = {site: Path(folder) / f"{site}.log" for site in SITES}

        def begin(site: str) -> list[subprocess.Popen[bytes]]:
            master = f"127.0.0.1:{free_port()}"
            own = ("--site", site, *options)
            return [start(places[0], own, rank, RANKS, master, logs[site]) for rank in range(RANKS)]

        running = {site: begin(site) for site in SITES}
        ended = list[float]()
        try:
            for _ in range(kills):
                await_exchanges(list(logs.values()), 2)
                time.sleep(chance.uniform(0, 5))
                site, what = chance.choice(SITES), chance.choice(("all ranks", "rank 0", "rank 1", "stop"))
                ranks = running[site] if what in ("all ranks", "stop") else [running[site][int(what[-1])]]
                for rank in ranks:
                    rank.send_signal(signal.SIGSTOP if what == "stop" else signal.SIGKILL)
                if what == "stop":
                    time.sleep(chance.uniform(1, 15))
                    for rank in ranks:
                        rank.send_signal(signal.SIGCONT)
                    continue
                begun = time.monotonic()
                for rank in running[site]:
                    rank.wait(SECONDS)
                ended.append(time.monotonic() - begun)
                running[site] = begin(site)
            await_exchanges(list(logs.values()), 4)
        finally:
            for process in (store, *(rank for ranks in running.values() for rank in ranks)):
                process.kill()
        yield from verdict(logs, kills, ended)


def await_exchanges(logs: Sequence[Path], count: int) -> None:
    """Wait until both sites have made some more exchanges together."""

    def common() -> int:
        made = [{match[3] for match in EXCHANGE.finditer(log.read_text())} for log in logs]
        return len(set.intersection(*made))

    goal, end = common() + count, time.monotonic() + SECONDS
    while common() < goal:
        if time.monotonic() > end:
            raise TimeoutError(f"the sites did not exchange {count} times in {SECONDS} s")
        time.sleep(0.5)


def verdict(logs: dict[str, Path], kills: int, ended: Sequence[float]) -> Iterator[str]:
    digests: dict[str, dict[str, str]] = {}
    for site, log in logs.items():
        for match in EXCHANGE.finditer(log.read_text()):
            digests.setdefault(match[3], {})[site] = match[4]
    common = [each for each in digests.values() if len(each) == len(SITES)]
    different = [each for each in common if len(set(each.values())) > 1]
    yield f"{kills} kills and stops: {len(digests)} exchanges, {len(common)} of both sites, {len(different)} different"
    yield f"the other ranks of a site with a killed rank ended within {max(ended, default=0):.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("loss", "speed", "faults"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kills", type=int, default=50)
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
