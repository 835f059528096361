"""Holds ``thunder-zero plan --machines 1 2`` against steps: one process alone, and two on links of several rates.

    sudo python -m examples.bench.machines                       two models, a quarter of an hour or more
    sudo python -m examples.bench.machines --models gpt --networks 1gbit

Each rank has one core and a network namespace, and is a machine. Two machines are calibrated together on the last of
the links. Plan and steps are in float32, with AdamW(fused=True). Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from examples.bench.model import SIZES, Size, loss_of, make_batch, make_model, model_bytes
from examples.bench.network import Seat, seats
from examples.bench.ranks import PORT, ROOT, environment
from thunder_zero.tools.plan.places import plan_places

MODELS = {"gpt": SIZES["gpt"], "narrow": replace(SIZES["gpt"], blocks=12, width=256, sequences=4)}
NETWORKS = ("100mbit", "500mbit", "1gbit")
WAYS = {"DDP": (0, None), "ZeRO-2": (2, None), "ZeRO-3": (3, None), "ZeRO-2, int8": (2, tz.Int8())}
STEPS = 5  # of each way; the median counts


class WithLoss(nn.Module):
    """A model of the bench that returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = make_model(size)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.model(tokens), targets)


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    return WithLoss(MODELS["gpt"]), *make_batch(MODELS["gpt"], 0)


def narrow() -> tuple[nn.Module, Tensor, Tensor]:
    return WithLoss(MODELS["narrow"]), *make_batch(MODELS["narrow"], 0)


def take_steps(name: str, ways: Sequence[str]) -> None:
    """Print the seconds of a step of each way. One rank, in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, found = MODELS[name], dict[str, float]()
    batch = make_batch(size, dist.get_rank())
    for way in ways:
        stage, form = WAYS[way]
        module = WithLoss(size)
        block = model_bytes(module.model.blocks[0])  # the sizes of a plan
        policy = tz.Policy(stage, bucket_bytes=block, in_flight_bytes=2 * block, prefetch=1)
        policy = replace(policy, gather_format=form, reduce_format=form)
        model = tz.compile(module, policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        seconds = []
        for _ in range(1 + STEPS):
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        found[way] = median(seconds[1:])
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def on_cores(places: list[Seat], *command: str, alone: bool = False) -> list[str]:
    """Run a command as ranks of one job, or each ``alone``, with a core each. Return what each has printed."""
    with ExitStack() as stack:
        workers = list[subprocess.Popen[str]]()
        stack.callback(lambda: [worker.kill() for worker in workers])
        for rank, seat in enumerate(places):
            core = ("taskset", "--cpu-list", str(rank % (os.cpu_count() or 1)))
            words = (*seat.prefix, *core, sys.executable, "-m", *command)
            env = environment(0, [seat], PORT) if alone else environment(rank, places, PORT)
            env["LOCAL_WORLD_SIZE"] = "1"  # each is a machine
            workers.append(subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
        return [worker.communicate()[0] for worker in workers]


def measured(name: str, network: str, ways: Sequence[str], *, alone: bool = False) -> dict[str, float]:
    """Seconds of a step of each way, on both machines, which may each train ``alone``: they share caches."""
    with seats(2, network) as places:
        texts = on_cores(places, "examples.bench.machines", "--steps", name, *ways, alone=alone)
    found: dict[str, float] = json.loads(texts[0].splitlines()[-1])
    return found


def planned(name: str, network: str, device: tz.tools.Device) -> dict[str, float]:
    """Seconds of a step of each way, and of one machine, as the plan has them."""
    place, precision = f"{__file__}:{name}", tz.MixedPrecision()
    plan_it = partial(
        plan_places, machines=(1, 2), between=network, device=device, devices_per_node=1, stages=(0, 2, 3)
    )
    with Path(os.devnull).open("w") as nothing, redirect_stderr(nothing):
        plan = plan_it(place, precision=precision)
    rows = {str(row["way"]).replace(" on 2", ""): row["step"] for row in plan.rows[1:]}
    return {"one": plan.rows[0]["step"], **rows}


def calibrated(seconds: float, network: str) -> tz.tools.Device:
    """A machine of one core, measured together with another one."""
    with tempfile.TemporaryDirectory() as folder, seats(2, network) as places:
        out = Path(folder) / "core.json"
        on_cores(places, "thunder_zero", "calibrate", str(out), "--seconds", str(seconds))
        return tz.tools.load_device(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(all)")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="rates such as 1gbit")
    parser.add_argument("--seconds", type=float, default=20.0, help="of calibration, before each model (20)")
    parser.add_argument("--steps", nargs="+", help=argparse.SUPPRESS)  # this process is one rank
    options = parser.parse_args()
    if options.steps:
        take_steps(options.steps[0], options.steps[1:])
        return
    print("model, link, way: planned s, measured s, planned / measured")
    for name in options.models:
        device = calibrated(options.seconds, options.networks[-1])
        one = measured(name, options.networks[-1], ["ZeRO-2"], alone=True)["ZeRO-2"]
        for network in options.networks:
            plan, real = planned(name, network, device), measured(name, network, list(WAYS))
            for way, seconds in {"one": one, **real}.items():
                ratio = plan[way] / seconds
                print(f"{name}, {network}, {way}: {plan[way]:.3f}, {seconds:.3f}, {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
