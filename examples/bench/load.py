"""Host memory while a Llama of 0.95 G parameters (1.8 GiB in bfloat16) is loaded on four ranks of one machine.

    python examples/bench/load.py

The first run writes the model into a folder with random values. Memory is the peak of a rank's resident memory
(``VmHWM`` of Linux) above that before the load; the forecast is that of ``tz.tools.memory``. Contestants: ``weights=``
reads a rank's rows, ``nf4`` also encodes them; ``whole`` is ``from_pretrained`` on each rank, then sharded; ``fsdp2``
shards on the meta device and reads by DCP; ``distributed`` is ``from_pretrained`` with a ``DistributedConfig``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import thunder_zero as tz
from thunder_zero.tools.forecast.loading import loading

WORLD_SIZE = 4
CONFIG = LlamaConfig(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, dtype=torch.bfloat16
)
FOLDER = Path(tempfile.gettempdir()) / "thunder_zero-load"


def write(folder: Path) -> None:
    """Write the model once."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    values = torch.randn(1 << 22) * 0.02
    state = {
        name: values.repeat(-(-param.numel() // len(values)))[: param.numel()].view(param.shape)
        for name, param in model.named_parameters()
    }
    model.load_state_dict(state, assign=True)
    model.save_pretrained(folder, max_shard_size="1GB")


def on_meta() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))


def by_rows(**arguments: Any) -> Any:
    module = on_meta()
    return tz.compile(module.requires_grad_(False), 3, weights=FOLDER, init=module._init_weights, **arguments)


def by_dcp() -> Any:
    model = on_meta()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    dcp.load(dict(model.state_dict()), storage_reader=dcp.HuggingFaceStorageReader(str(FOLDER)))
    return model


def by_transformers() -> Any:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, distributed_config=DistributedConfig(fsdp_size=WORLD_SIZE))
    for param in model.parameters():
        param.to_local().max()  # read it: rows are mapped from the file
    return model


CONTESTANTS: dict[str, Callable[[], Any]] = {
    "weights=": by_rows,
    "nf4": lambda: by_rows(frozen_format=tz.NF4()),
    "whole": lambda: tz.compile(AutoModelForCausalLM.from_pretrained(FOLDER), 3),
    "fsdp2": by_dcp,
    "distributed": by_transformers,
}


def peak() -> int:
    """Return the peak of this process's resident memory, in KiB."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))


def load(rank: int, name: str, store: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    tz.compile(torch.nn.Linear(4, 4), 3, broadcast_from=0)  # threads and imports are not counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    floor, start = peak(), time.perf_counter()
    model = CONTESTANTS[name]()
    seconds, used = time.perf_counter() - start, torch.tensor(peak() - floor)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    if rank == 0:
        forecast = ""
        if name in ("weights=", "nf4"):
            forecast = f"{loading(model.state.plan, on_cpu=True)['weights=folder'] / 2**20:,.0f}"
        print(f"| {name} | {int(used) / 1024:,.0f} | {forecast} | {seconds:.1f} |", flush=True)
    dist.barrier()
    del model
    os._exit(0)


if __name__ == "__main__":
    if not FOLDER.exists():
        write(FOLDER)
    print("| contestant | MiB above the start, largest rank | forecast | seconds |\n|---|---|---|---|")
    for contestant in CONTESTANTS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(load, (contestant, f"{folder}/store"), WORLD_SIZE)
