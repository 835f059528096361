"""From training to one file: a convolutional network learns handwritten digits, sharded, and leaves as a plain module.

    torchrun --standalone --nproc-per-node 2 examples/digits_checkpoint.py                          # ZeRO-3
    torchrun --standalone --nproc-per-node 2 examples/digits_checkpoint.py --dtype bfloat16 --activation-checkpointing
    python examples/digits_checkpoint.py --stage 1 --resume runs/digits/latest --epochs 16   # resumes

Trains on the 1,797 digits that scikit-learn ships (`pip install scikit-learn`), saves a sharded checkpoint, makes one
file of it with the command line (`thunder-zero consolidate`), loads that into the plain module, and tests both on the
same digits: in float32 both have the same accuracy. Batch norm's running statistics are each rank's own while it
trains; before they are used, the ranks pool them. Units are nested: each residual block, and in the last stage each
convolution, travels alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pictures import save_curve
from ranks import Ranks, add_format_options, formats_of, options_parser, positive, ranks_of_torchrun, stage_name
from safetensors.torch import load_file
from show import Bar, console_of, figures, progress_bar
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz  # before thunder

import thunder

TEST_ROWS = 360  # of 1,797
BATCH = 48  # over all ranks, and rounded up for them
WIDTHS = (16, 32, 48)  # channels of the stages
FULL = tz.MixedPrecision()  # the parameters' own dtype, float32
DTYPES = {"float32": FULL, "bfloat16": tz.MixedPrecision(torch.bfloat16, overrides={"*norm*": FULL})}


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=12, help="passes over the training digits, in all (12)")
    words = "dtype of compute; parameters, batch norm and the optimizer's state stay float32 (float32)"
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=words)
    add_format_options(parser)
    words = "compute each block's activations again in backward instead of keeping them"
    parser.add_argument("--activation-checkpointing", action="store_true", help=words)
    parser.add_argument("--resume", type=Path, help="continue from this checkpoint, of any stage and number of ranks")
    options = parser.parse_args(argv)
    if options.resume and not options.resume.exists():
        parser.error(f"--resume is {options.resume}, which does not exist; give the folder of a checkpoint")
    return options


class Block(nn.Module):
    """Two convolutions with batch norm and a residual connection; halves the image if it changes the width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (rows, inputs, height, width)
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class Digits(nn.Module):
    """A network that returns logits of the ten digits from 8 x 8 images."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.stem = nn.Conv2d(1, WIDTHS[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        pairs = [(inputs, outputs) for inputs, outputs in zip(WIDTHS, (*WIDTHS[1:], WIDTHS[-1]), strict=True)]
        self.blocks = nn.ModuleList(Block(*pair) for pair in pairs)
        self.head = nn.Linear(WIDTHS[-1], 10)

    def forward(self, images: Tensor) -> Tensor:  # (rows, 1, 8, 8) -> (rows, 10)
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def units_of(module: nn.Module) -> tuple[str, ...]:
    """Return the units: each block, and inside the last block each convolution."""
    return (*(f"blocks.{number}" for number in range(len(WIDTHS))), "blocks.2.conv_1", "blocks.2.conv_2")


def load_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (rows, 1, 8, 8) in 0 to 1 and labels, for training and for testing."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(digits.images).float().div(16)[:, None][order]
    labels = torch.from_numpy(digits.target).long()[order]
    return images[TEST_ROWS:], labels[TEST_ROWS:], images[:TEST_ROWS], labels[:TEST_ROWS]


def pool_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the running statistics of all their rows: the law of total variance, over ranks."""
    with torch.no_grad():
        buffers = dict(model.named_buffers())
        for name, mean in buffers.items():
            if name.endswith("running_mean"):
                variance = buffers[name.replace("running_mean", "running_var")]
                moments = ranks.mean(torch.stack([mean, variance + mean.square()]))
                mean.copy_(moments[0])
                variance.copy_(moments[1] - moments[0].square())


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of images that the model reads right; every rank reads all of them."""
    model.eval()
    with torch.no_grad():
        found = model(images).argmax(dim=1)
    model.train()
    return (found == labels).double().mean().item()


class Trainer:
    """A sharded model, its optimizer, and the data."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        self.images, self.labels, self.test_images, self.test_labels = load_data(options.seed)
        torch.manual_seed(options.seed)  # the same weights on every rank
        module = Digits(options.activation_checkpointing).to(ranks.device)
        precision, formats = DTYPES[options.dtype], formats_of(options)
        policy = tz.Policy(options.stage, unit_of=units_of, mixed_precision=precision, **formats)
        self.model = thunder.jit(module, transforms=[tz.ZeroTransform(policy)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)
        self.folder = options.out / "digits"
        self.batch = ranks.rounded_up(BATCH)
        self.steps_in_epoch = len(self.images) // self.batch

    def train_epoch(self, epoch: int, bar: Bar) -> float:
        """Train once on all images, in an order that depends only on the epoch; return the last loss."""
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(self.batch)[: self.steps_in_epoch]:
            images, labels = self.ranks.rows_of(self.images[rows]), self.ranks.rows_of(self.labels[rows])
            loss = F.cross_entropy(self.model(images).float(), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            bar.step(loss.item())
        return self.ranks.mean(loss.detach()).item()

    def test(self) -> float:
        """Return the sharded model's accuracy, with the statistics of all ranks' rows."""
        pool_statistics(self.model, self.ranks)
        return accuracy(self.model, self.test_images.to(self.ranks.device), self.test_labels.to(self.ranks.device))

    def save(self, epochs: int) -> Path:
        """Save a sharded checkpoint; return its folder."""
        path = self.folder / f"epoch-{epochs}"
        tz.save(path, self.model, self.optimizer, extra={"epochs": epochs})
        return path


def test_plain(file: Path, trainer: Trainer) -> float:
    """Return the accuracy of the plain module, without Thunder, with the weights of one file."""
    plain = Digits()
    plain.load_state_dict(load_file(file))
    return accuracy(plain, trainer.test_images, trainer.test_labels)


def consolidate(checkpoint_folder: Path) -> Path:
    """Make one file with the command line, as a user would."""
    file = checkpoint_folder.parent / "digits.safetensors"
    command = ["consolidate", str(checkpoint_folder), str(file)]
    subprocess.run([sys.executable, "-m", "thunder_zero", *command], check=True, stdout=subprocess.DEVNULL)
    return file


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with ranks_of_torchrun() as ranks:
        console, trainer = console_of(ranks), Trainer(options, ranks)
        first = 0
        if options.resume:
            loaded = tz.load(options.resume, trainer.model, trainer.optimizer)
            first = loaded.of_rank[0]["epochs"]
            console.print(f"Resumed after epoch {first} of {options.resume}.")
        if first >= options.epochs:
            console.print(f"Nothing to train: --epochs is {options.epochs}; give more than {first}.")
            return
        found: list[float] = []
        steps = (options.epochs - first) * trainer.steps_in_epoch
        with progress_bar(console, "training", steps, trainer.batch, "images") as bar:
            for epoch in range(first, options.epochs):
                trainer.train_epoch(epoch, bar)
                found.append(trainer.test())
                bar.note(f"test accuracy {found[-1]:.1%}")
        folder = trainer.save(options.epochs)
        of_ranks: list[float] = [0.0] * ranks.world_size
        dist.all_gather_object(of_ranks, found[-1])
        if ranks.rank == 0:
            report(trainer, of_ranks, test_plain(consolidate(folder), trainer), found, first)


def report(trainer: Trainer, of_ranks: list[float], plain: float, found: list[float], first: int) -> None:
    """Print the accuracies, and draw them by epoch."""
    options, ranks = trainer.options, trainer.ranks
    where = f"{stage_name(options.stage)} on {ranks.words}, {options.dtype}"
    rows = [
        (
            "test accuracy, sharded",
            f"{of_ranks[0]:.4%}",
            f"on every rank: {', '.join(f'{one:.4%}' for one in of_ranks)}",
        ),
        ("plain module, from one file", f"{plain:.4%}", f"computes in float32; {trainer.folder}/digits.safetensors"),
        ("checkpoint", f"epoch {options.epochs}", str(trainer.folder / f"epoch-{options.epochs}")),
    ]
    figures(console_of(ranks), f"Handwritten digits, {where}", rows)
    path = options.out / f"digits_checkpoint_stage{options.stage}.png"
    heading, y = f"Digits, {where}: {found[-1]:.1%}", "share of test digits read right"
    save_curve(path, heading, found, x="epoch", y=y, first=first + 1)
    console_of(ranks).print(f"The picture is {path}.")


if __name__ == "__main__":
    main()
