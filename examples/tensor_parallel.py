"""Tensor parallelism inside ZeRO: a Llama in slices, on a mesh of (dp, tp).

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py

Torch's parallelize_module gives each rank of tp some heads and some features of every layer; ZeRO cuts the rows of
these slices over the ranks of dp. Prints the lines of a layer that communicate, the loss beside that of one process,
and what a step sends; writes a page that shows the step line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from llama import Llama, LlamaConfig, WithLoss
from ranks import Ranks, options_parser, positive, ranks_of_torchrun, stage_name
from show import console_of, figures
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import thunder_zero as tz

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
CONFIG = LlamaConfig()
BATCH, LENGTH = 8, 64


def in_slices(module: WithLoss, mesh: DeviceMesh) -> nn.Module:
    """Slice each layer: by heads of attention and by features of the MLP, whose outputs are summed over tp."""
    layer = "model.model.layers.*"
    styles: dict[str, ParallelStyle] = {f"{layer}.{name}": ColwiseParallel() for name in COLUMNS}
    styles |= {f"{layer}.{name}": RowwiseParallel() for name in ROWS}
    return parallelize_module(module, mesh["tp"], styles)


def batch_of(step: int, seed: int) -> Tensor:
    """Return sequences that count upwards, each from a start of its own."""
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    starts = torch.randint(CONFIG.vocab_size, (BATCH, 1), generator=generator)
    return (starts + torch.arange(LENGTH)) % CONFIG.vocab_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in slices and, on rank 0, whole; print and write what a step does."""
    parser = options_parser(__doc__)
    parser.add_argument("--tp", type=positive, default=2, help="ranks among which layers are sliced (2)")
    parser.add_argument("--steps", type=positive, default=20, help="steps of training (20)")
    options = parser.parse_args(arguments)
    with ranks_of_torchrun(on_cpus=True) as ranks:
        if ranks.world_size % options.tp:
            parser.error(f"--tp {options.tp} does not divide {ranks.world_size} ranks")
        mesh = init_device_mesh("cpu", (ranks.world_size // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(options.seed)  # the same weights on every rank
        whole = WithLoss(Llama(CONFIG))
        model = tz.compile(in_slices(deepcopy(whole), mesh), stage=options.stage, mesh=mesh, progress=False)
        losses, alone = train(model, whole, mesh, ranks, steps=options.steps, seed=options.seed)
        console = console_of(ranks)
        tz.print_trace(model, "forward", unit="model.model.layers.0", only="communication")
        if ranks.rank == 0:
            traces = tz.traces_of(model)
            options.out.mkdir(parents=True, exist_ok=True)
            page = options.out / f"tensor_parallel_stage{options.stage}.html"
            tz.tools.report(traces, page, device="h100", optimizer=torch.optim.AdamW, title="A Llama in slices")
            by_zero = sum(traces.timeline.traffic(op).sent for op in traces.timeline.launches.values())
            for_slices = sum(traces.timeline.traffic(op).sent for op in traces.timeline.collectives.values()) - by_zero
            apart = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
            rows = [
                ("loss of the first step", f"{losses[0]:.4f}"),
                ("loss of the last step", f"{losses[-1]:.4f}"),
                ("furthest from one process", f"{apart:.1e}"),
                ("bytes sent in a step by ZeRO", f"{by_zero:,}"),
                ("bytes sent in a step for slices", f"{for_slices:,}"),
                ("page", str(page)),
            ]
            figures(console, f"{stage_name(options.stage)} on {tuple(mesh.mesh.shape)} ranks of (dp, tp)", rows)


def train(
    model: nn.Module, whole: nn.Module, mesh: DeviceMesh, ranks: Ranks, *, steps: int, seed: int
) -> tuple[list[float], list[float]]:
    """Return the losses of the batches in slices, and in one process."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (model, whole)]
    data = mesh["dp"]
    losses: tuple[list[float], list[float]] = [], []
    for step in range(steps):
        batch = batch_of(step, seed)
        rows = batch.chunk(data.size())[data.get_local_rank()]  # ranks of one dp index take the same rows
        for each, optimizer, tokens, found in zip((model, whole), optimizers, (rows, batch), losses, strict=True):
            optimizer.zero_grad()
            loss = each(tokens)
            loss.backward()
            optimizer.step()
            found.append(float(ranks.mean(loss.detach())))
    return losses


if __name__ == "__main__":
    main()
