"""Holds the forecast of time against reality: calibrates this machine, forecasts steps of the bench's GPT, takes them.

    sudo python -m examples.bench.forecast                                  all networks and worlds, about 20 minutes
    sudo python -m examples.bench.forecast --networks 1gbit --world-sizes 2
    python -m examples.bench.forecast --page                                the page again, nothing measured

Each rank has one core. On each network, rounds of calibration and steps of stages 0 to 3 alternate in the same
processes.
The forecast is of the whole step: forward, loss, backward and SGD. Rows go into docs/forecast.json, in place of earlier
ones of the same network and world, and the table into docs/cost-model.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.bench.forecast_table import Row, merged, read_rows, text_of, versions, write
from examples.bench.network import LOOPBACK, can_limit, seats, set_rate
from examples.bench.ranks import Ranks, ranks
from examples.bench.report import rate_of
from examples.bench.run import SLOW, stopped_by_term

NETWORKS = ("250mbit", "1gbit", "10gbit", LOOPBACK)
STAGES = range(4)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help=f"{LOOPBACK}, or rates such as 1gbit")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=(2, 4), help="numbers of ranks (2 4)")
    parser.add_argument("--rounds", type=int, default=5, help="of calibration and of each stage (5)")
    parser.add_argument("--page", action="store_true", help="write the page from the data file; measure nothing")
    options = parser.parse_args(arguments)
    if not options.page and not can_limit() and set(options.networks) != {LOOPBACK}:
        parser.error(f"networks other than {LOOPBACK} need Linux, root, ip and tc (iproute2)")
    return options


def measure(networks: Sequence[str], world_size: int, rounds: int, logs: Path) -> list[Row]:
    """The rows of networks that share their processes."""
    with seats(world_size, networks[0]) as places, ranks(places, logs, pinned=True) as group:
        for stage in STAGES:
            print(f"W = {world_size}: building stage {stage}", file=sys.stderr)
            group.do("build", name=f"zero{stage}")
        found = []
        for network in networks:
            for seat in places:
                set_rate(seat, network)
            print(f"W = {world_size}, {network}: measuring", file=sys.stderr)
            found += rows_of(group, network, world_size, rounds)
    return found


def rows_of(group: Ranks, network: str, world_size: int, rounds: int) -> list[Row]:
    """A row for each stage, on the network that the ranks are on."""
    steps = 1 if rate_of(network) < SLOW else 2
    seconds: dict[int, list[float]] = {stage: [] for stage in STAGES}
    for stage in STAGES:  # what others have left in caches and memory
        group.do("turn", name=f"zero{stage}", steps=1)
    for number in range(rounds):
        group.do("calibrate", again=number > 0)
        for stage in STAGES:
            replies = group.do("turn", name=f"zero{stage}", steps=steps)
            seconds[stage].append(max(reply["seconds"] for reply in replies))
    rows = []
    for stage in STAGES:
        forecast = group.do("forecast", name=f"zero{stage}")[0]
        row = Row(network, world_size, stage, tuple(seconds[stage]), **forecast, versions=versions())
        print(text_of(row), file=sys.stderr)
        rows.append(row)
    return rows


def main() -> None:
    options = parse(None)
    rows = read_rows()
    with stopped_by_term(), tempfile.TemporaryDirectory() as logs:
        for world_size in () if options.page else options.world_sizes:
            limited = [network for network in options.networks if network != LOOPBACK]
            for networks in (limited, [LOOPBACK] if LOOPBACK in options.networks else []):
                if networks:
                    rows = merged(rows, measure(networks, world_size, options.rounds, Path(logs)))
                    write(rows)
    write(rows)


if __name__ == "__main__":
    main()
