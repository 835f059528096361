"""A step of a Llama in slices: thunder_zero beside FSDP2, both on torch's parallelize_module.

    sudo python examples/bench/slices_time.py                          # the table of docs/tensor-parallel.md
    python examples/bench/slices_time.py --networks loopback --rounds 2

All contestants of a mesh train in the same processes, in turns, so that noise affects all alike. A cell has the median
of the steps' seconds. Networks other than loopback need root: they are namespaces, as in ``run.py``.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import thunder_zero as tz
from examples.bench.network import LOOPBACK, can_limit, seats
from examples.bench.ranks import PORT, ROOT, environment, free_port
from examples.bench.slices import MESHES, loss_of, mesh_of, slice_llama

WORDS, LENGTH, ROWS = 2048, 128, 2  # rows of each data index
WARM, SECONDS = 3, 900


def llama() -> Any:
    """Build the Llama that all contestants train: 6.5 M parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes))


def ours(mesh: DeviceMesh, stage: int) -> Any:
    """Compile a Llama in slices, which frees parameters after forward in stage 3."""
    module = slice_llama(llama(), mesh["tp"], False)
    return tz.compile(module, stage=stage, mesh=mesh, reshard_after_forward=True if stage == 3 else None)


def fsdp2(mesh: DeviceMesh, reshard: bool) -> Any:
    """Shard a Llama in slices by FSDP2, layer by layer."""
    module: Any = slice_llama(llama(), mesh["tp"], False)
    for layer in (*module.model.layers, module):
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard)
    return module


CONTESTANTS: dict[str, Callable[[DeviceMesh], Any]] = {
    "thunder_zero, stage 2": lambda mesh: ours(mesh, 2),
    "FSDP2, kept after forward": lambda mesh: fsdp2(mesh, reshard=False),
    "thunder_zero, stage 3": lambda mesh: ours(mesh, 3),
    "FSDP2, resharded": lambda mesh: fsdp2(mesh, reshard=True),
}


def work(name: str, rounds: int) -> None:
    """Be one rank: train each contestant in turns; rank 0 prints the seconds of each, and its last loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = mesh_of(MESHES[name])
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    built = {key: make(mesh) for key, make in CONTESTANTS.items()}
    optimizers = {key: torch.optim.AdamW(model.parameters(), lr=1e-3) for key, model in built.items()}
    seconds: dict[str, list[float]] = {key: [] for key in built}
    losses: dict[str, float] = {}
    for number in range(WARM + rounds):
        for key, model in built.items():
            dist.barrier()
            start = time.perf_counter()
            optimizers[key].zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            optimizers[key].step()
            dist.barrier()
            losses[key] = loss.item()
            seconds[key] += [time.perf_counter() - start] if number >= WARM else []
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": {key: median(values) for key, values in seconds.items()}, "losses": losses}))
    dist.destroy_process_group()


def measure(network: str, name: str, rounds: int) -> dict[str, float]:
    """Run a mesh on a network; return the median seconds of each contestant.

    Raises:
        RuntimeError: a rank failed, or contestants' losses differ.
    """
    dp, tp = MESHES[name]
    command = (sys.executable, "-W", "ignore", __file__, "--work", name, "--rounds", str(rounds))
    with seats(dp * tp, network) as places:
        port = PORT if places[0].ends else free_port()
        workers = [
            subprocess.Popen(
                (*seat.prefix, *command),
                cwd=ROOT,
                env=environment(rank, places, port),
                text=True,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if rank else None,
            )
            for rank, seat in enumerate(places)
        ]
        try:
            text, _ = workers[0].communicate(timeout=SECONDS)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if not text:
        raise RuntimeError(f"rank 0 of {name} on {network} ended without a result")
    found = json.loads(text.splitlines()[-1])
    losses = found["losses"].values()
    if max(losses) - min(losses) > 1e-3 * max(losses):
        raise RuntimeError(f"the last losses differ: {found['losses']}")
    seconds: dict[str, float] = found["seconds"]
    return seconds


def main() -> None:
    """Measure all networks and meshes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    networks = [LOOPBACK, "1gbit"] if can_limit() else [LOOPBACK]
    parser.add_argument("--networks", nargs="+", default=networks)
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=["1x2", "2x2"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work", metavar="MESH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.rounds)
        return
    cases = [(network, mesh) for network in options.networks for mesh in options.meshes]
    found = {case: measure(*case, options.rounds) for case in cases}
    print("| | " + " | ".join(f"{mesh}, {network}" for network, mesh in cases) + " |")
    print("|---|" + "---|" * len(cases))
    for key in CONTESTANTS:
        print(f"| {key} | " + " | ".join(f"{found[case][key]:.3f}" for case in cases) + " |")
    print(f"\n(Median seconds of {options.rounds} steps; Python {platform.python_version()}, ", end="")
    print(", ".join(f"{package} {version(package)}" for package in ("torch", "transformers")) + ".)")


if __name__ == "__main__":
    main()
