"""Train a byte-level GPT at two sites, each a torchrun job of its own, with an outer step between them.

    thunder-zero sites 127.0.0.1:29400 &                                       # where the sites meet
    for site in attic lab; do
        torchrun --standalone --nproc-per-node 2 examples/two_sites.py --site $site --store 127.0.0.1:29400 &
    done; wait

End one of the jobs while they train, and start it again: the other trains on, and gives it its parameters. Without
--site, all ranks of one job exchange every gradient (ZeRO-2), for comparison. docs/two-sites.md has what was measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from stdlib_text import Shape, load_text, train_batch, validation_batches
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz

NAMES = "attic", "lab"
INT8 = tz.Int8(block=64)
WIRES: dict[str, torch.dtype | tz.Int8] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": INT8}


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", choices=NAMES, help="the name of this site (default: no outer step)")
    parser.add_argument("--store", default="127.0.0.1:29400", metavar="HOST:PORT")
    parser.add_argument("--every", type=int, default=32, help="steps between two exchanges (default: 32)")
    parser.add_argument("--wire", choices=WIRES, default="float32", help="the encoding of what is exchanged")
    parser.add_argument("--momentum", type=float, default=0.5, help="of the outer optimizer; the papers have 0.9")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--inner", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for the other site (default: 30)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--width", type=int, default=160, help="features of each of 4 blocks (default: 160)")
    parser.add_argument("--rows", type=int, default=16, help="sequences in a step of all sites (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def optimizers_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1)]
    matrices = [param for name, param in model.named_parameters() if param.ndim == 2 and "blocks" in name]
    others = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    return [tz.whole(torch.optim.Muon, matrices, lr=0.02), torch.optim.AdamW(others, 2e-3, betas=(0.9, 0.95))]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    lossy = INT8 if options.wire == "int8" and options.site is None else None
    policy = tz.Policy(options.stage, reduce_format=lossy, gather_format=lossy)
    model = tz.compile(GPT(GPTConfig(blocks=4, width=options.width, heads=4, context=64)), policy)
    optimizers = optimizers_of(model, options.inner)
    place = rank + (ranks * NAMES.index(options.site) if options.site else 0)
    world = ranks * (len(NAMES) if options.site else 1)
    shape, text = Shape(options.rows, 64, place, world), load_text()
    outer = None
    if options.site:
        sites = tz.sites(options.store, name=options.site, timeout=options.timeout)
        outer = tz.DiLoCo(
            model,
            sites,
            sync_every=options.every,
            outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=options.momentum, nesterov=True),
            wire=WIRES[options.wire],
            fragments=options.fragments,
            delay=options.delay,
        )
    seconds = []
    for step in range(options.steps):
        start = time.perf_counter()
        loss = loss_of(model, train_batch(text, step, shape, options.seed))
        loss.backward()
        factor = min((step + 1) / 50, 1.0) * min((options.steps - step) / (0.3 * options.steps), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("highest", group["lr"]) * factor
            optimizer.step()
            optimizer.zero_grad()
        if outer is not None:
            outer.step()
        seconds.append(time.perf_counter() - start)
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if outer is not None:
        outer.leave()
    with torch.no_grad():
        whole = Shape(64, 64, rank, ranks)
        losses = torch.stack([loss_of(model, windows) for windows in validation_batches(text, 8, whole)]).mean()
    dist.all_reduce(losses)
    if rank == 0:
        result = {"loss": losses.item() / ranks, "exchanges": outer.counts.version if outer else 0, "seconds": seconds}
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
