"""Train LitGPT's GPT in Lightning Fabric: an ordinary Fabric script, except for its strategy.

    pip install -e ".[lightning,litgpt]"
    python examples/fabric_litgpt.py                                                     # Fabric starts two ranks
    torchrun --standalone --nproc-per-node 2 examples/fabric_litgpt.py                   # torchrun starts them
    python examples/fabric_litgpt.py --accelerator cuda --devices 8 --model pythia-160m  # one of LitGPT's models

A byte-level model trains on the source text of Python's standard library; nothing is downloaded. Each step accumulates
micro-batches, reduces gradients in the last one only, and clips their norm. At the end model and optimizer are saved to
one file, which any number of ranks can load (``--resume``), and plain torch, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt.config import Config
from litgpt.model import GPT
from stdlib_text import Shape, load_text, train_batch
from torch import Tensor
from torch.nn import functional as F

import thunder_zero as tz  # before thunder
from thunder_zero.lightning import ZeroStrategy, zero_module

SEED = 0
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "intermediate_size": 64}  # to try it out


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, help="0 for DDP, 1 to 3 for ZeRO")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks on this machine")
    parser.add_argument("--precision", default="32-true", help="Fabric's name for it, such as bf16-true")
    parser.add_argument("--model", help="name of a LitGPT model, built with 256 tokens (default: a tiny Llama)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--micro-batches", type=int, default=2, help="number in a step")
    parser.add_argument("--rows", type=int, default=4, help="number in a micro-batch on each rank")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--resume", type=Path, help="continue from this file")
    parser.add_argument("--out", type=Path, default=Path("runs/fabric_litgpt.pt"))
    return parser.parse_args()


def config_of(name: str | None, context: int) -> Config:
    sizes = {"block_size": context, "padded_vocab_size": 256}
    if name:
        return Config.from_name(name, **sizes)
    return Config(**TINY, **sizes, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP")


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte; ``windows`` is (rows, context + 1)."""
    logits = model(windows[:, :-1])  # (rows, context, 256)
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def step(fabric: Fabric, model: Any, optimizer: Any, micro_batches: Sequence[Tensor]) -> tuple[float, float]:
    """Run one optimizer step; return the mean loss over all ranks and the gradients' norm."""
    optimizer.zero_grad()
    total = torch.zeros((), device=fabric.device)
    for number, windows in enumerate(micro_batches, 1):
        with fabric.no_backward_sync(model, enabled=number < len(micro_batches)):
            loss = loss_of(model, fabric.to_device(windows)) / len(micro_batches)
            fabric.backward(loss)
        total += loss.detach()
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    return fabric.all_reduce(total).item(), norm.item()


def main() -> None:
    options = parse_options()
    strategy = ZeroStrategy(stage=options.stage)
    fabric = Fabric(
        accelerator=options.accelerator, devices=options.devices, strategy=strategy, precision=options.precision
    )
    fabric.launch()
    fabric.seed_everything(SEED, verbose=False)
    with fabric.init_module():
        module = GPT(config_of(options.model, options.context))
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), options.learning_rate, fused=True))
    state = {"model": model, "optimizer": optimizer, "steps": 0}
    if options.resume:
        fabric.load(options.resume, state)

    text = load_text()
    rows = options.rows * options.micro_batches * fabric.world_size
    shape = Shape(rows, options.context, fabric.global_rank, fabric.world_size)
    for number in range(state["steps"], options.steps):
        micro_batches = train_batch(text, number, shape, SEED).chunk(options.micro_batches)
        loss, norm = step(fabric, model, optimizer, micro_batches)
        fabric.print(f"step {number}: loss {loss:.5f}, norm {norm:.5f}")
    fabric.save(options.out, {**state, "steps": options.steps})
    if fabric.is_global_zero:
        tz.print_trace(zero_module(model), unit="transformer.h.1", only="parameters")
    fabric.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
