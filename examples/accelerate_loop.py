"""The loop of an Accelerate user: accumulation, clipping, metrics over all ranks, a state to resume from, one file.

    pip install -e ".[hugging-face]"
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py                         # ZeRO-3
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --precision bf16
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --plain                 # DDP, by Accelerate
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --resume runs/accelerate_loop/epoch-0

A perceptron learns which of three numbers is the largest. One line differs from Accelerate's own data parallelism: the
class of the accelerator. Losses, norms and accuracies are those of `--plain`. Any number of ranks can resume, in any
stage. The file at the end holds the whole model, and a plain module loads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ranks import options_parser, positive
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from thunder_zero.hugging_face import sharded


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--plain", action="store_true", help="train by Accelerate alone (DistributedDataParallel)")
    parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="no", help="Accelerate's; fp16: a GPU")
    parser.add_argument("--epochs", type=positive, default=3, help="(3)")
    parser.add_argument("--resume", type=Path, help="the folder of an epoch, from which to go on")
    return parser.parse_args(argv)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 33), nn.Tanh(), nn.Dropout(0.1), nn.Linear(33, 3))


def make_data(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.argmax(1))


def train(options: argparse.Namespace, folder: Path) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    kind: Any = Accelerator if options.plain else sharded(Accelerator, stage=options.stage)  # the line that differs
    accelerator = kind(
        mixed_precision=options.precision,
        gradient_accumulation_steps=2,
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(options.seed)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    rows: Any = DataLoader(make_data(203, seed=1), batch_size=8, shuffle=True)
    held_out: Any = DataLoader(make_data(45, seed=2), batch_size=8)
    model, optimizer, rows, held_out, scheduler = accelerator.prepare(model, optimizer, rows, held_out, scheduler)
    start = 0
    if options.resume:
        accelerator.load_state(options.resume)
        start = int(options.resume.name.partition("-")[2]) + 1
    for epoch in range(start, options.epochs):
        model.train()
        rows.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(rows):
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                mean = accelerator.reduce(loss.detach(), "mean")
                accelerator.print(f"epoch {epoch}, batch {number}: loss {mean:.6f}, norm {norm:.6f}")
        model.eval()
        right: list[Tensor] = []
        for inputs, labels in held_out:
            with torch.no_grad():
                guesses = model(inputs).argmax(1)
            right.append(accelerator.gather_for_metrics(guesses == labels))
        accelerator.print(f"epoch {epoch}: {sum(map(len, right))} rows, {torch.cat(right).float().mean():.2%} right")
        accelerator.save_state(folder / f"epoch-{epoch}")
    accelerator.save_model(model, folder / "model")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        plain = make_model()
        plain.load_state_dict(load_file(folder / "model/model.safetensors"))
        same = all(torch.equal(value, weights[name].cpu()) for name, value in plain.state_dict().items())
        print(f"one file, of {sum(map(torch.numel, plain.parameters()))} numbers: {'equal' if same else 'differs'}")
    accelerator.end_training()


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    train(options, options.out / "accelerate_loop")


if __name__ == "__main__":
    main()
