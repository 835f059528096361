"""Twelve common mistakes, made on purpose, and the message that each of them gets.

    torchrun --standalone --nproc-per-node 2 examples/wrong_on_purpose.py             # ZeRO-3
    torchrun --standalone --nproc-per-node 2 examples/wrong_on_purpose.py --stage 0   # DDP: some are no mistakes there
    python examples/wrong_on_purpose.py                                               # one process

Each function below makes one mistake with a model of its own. On several ranks all of them raise, on every rank; some
in torch's words, which knows DTensors. Where ranks say different things, the table has both. What is no mistake in DDP,
or on one rank, says so.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import Ranks, options_parser, ranks_of_torchrun, stage_name
from rich.table import Table
from show import console_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thunder_zero as tz  # before thunder

import thunder

Mistake = Callable[["Case"], str | None]
ALONE = "no message; no mistake here: there is no other rank"


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__, trains=False)
    numbers = range(1, len(MISTAKES) + 1)
    parser.add_argument("--only", type=int, choices=numbers, metavar="NUMBER", help="make this mistake only, 1 to 12")
    return parser.parse_args(argv)


class Case:
    """What each mistake starts with: this rank's place, a stage, and a folder that all ranks see."""

    def __init__(self, ranks: Ranks, stage: int, folder: Path) -> None:
        self.ranks, self.stage, self.folder = ranks, stage, folder

    def plain(self, width: int = 8) -> nn.Module:
        torch.manual_seed(0)  # the same weights on every rank
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).to(self.ranks.device)

    def sharded(self, module: nn.Module | None = None) -> nn.Module:
        return thunder.jit(module or self.plain(), transforms=[tz.ZeroTransform(stage=self.stage)])

    def loss_of(self, model: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(self.ranks.rank)
        x = torch.randn(6, 4, generator=generator).to(self.ranks.device)
        loss: Tensor = model(x).square().mean()
        return loss


def reduced_twice(case: Case) -> str:
    """A second reduction by hand, as in a script that had none of its own before."""
    model = case.sharded()
    case.loss_of(model).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= case.ranks.world_size
    return "no message; a mean of equal means is that mean, which every rank has here"


def wrapped_in_ddp(case: Case) -> None:
    """The script's line for DDP is still there."""
    model = DistributedDataParallel(case.sharded())
    case.loss_of(model).backward()


def optimizer_built_early(case: Case) -> None:
    """The optimizer has the parameters of before the transform."""
    module = case.plain()
    optimizer = torch.optim.AdamW(module.parameters())
    model = case.sharded(module)
    case.loss_of(model).backward()
    optimizer.step()


def stepped_in_an_accumulation(case: Case) -> None:
    """The optimizer steps while gradients wait for their reduction."""
    model = case.sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        case.loss_of(model).backward()
    optimizer.step()


def called_the_plain_module(case: Case) -> str:
    """The plain module is called, not the sharded model."""
    module = case.plain()
    case.sharded(module)
    case.loss_of(module).backward()
    return "no message; it computes, but nothing reduces its gradients"


def other_models(case: Case) -> str:
    """The last rank built a wider model."""
    is_last = case.ranks.rank == case.ranks.world_size - 1
    case.sharded(case.plain(width=9 if is_last else 8))
    return ALONE


def other_dtypes(case: Case) -> str:
    """The last rank's model is in float64."""
    is_last = case.ranks.rank == case.ranks.world_size - 1
    case.sharded(case.plain().to(torch.float64 if is_last else torch.float32))
    return ALONE


def replaced_parameter(case: Case) -> None:
    """The head was replaced after sharding, as for fine-tuning."""
    module = case.plain()
    model = case.sharded(module)
    module[2] = nn.Linear(8, 2)
    case.loss_of(model)


def backward_without_graph(case: Case) -> None:
    """Forward ran under no_grad."""
    model = case.sharded()
    with torch.no_grad():
        loss = case.loss_of(model)
    loss.backward()


def sharded_twice(case: Case) -> None:
    """The sharded model is sharded again."""
    tz.zero(case.sharded(), stage=case.stage)


def another_checkpoint(case: Case) -> None:
    """The checkpoint is of a wider model."""
    tz.save(case.folder / "wide", case.sharded(case.plain(width=12)))
    tz.load(case.folder / "wide", case.sharded())


MISTAKES: tuple[Mistake, ...] = (
    reduced_twice,
    wrapped_in_ddp,
    optimizer_built_early,
    stepped_in_an_accumulation,
    called_the_plain_module,
    other_models,
    other_dtypes,
    replaced_parameter,
    backward_without_graph,
    sharded_twice,
    another_checkpoint,
)


def message_of(mistake: Mistake, case: Case) -> str:
    """What a user sees: the error's sentence, or the symptom; by rank, if ranks differ."""
    try:
        found = mistake(case) or "no message"
    except (RuntimeError, ValueError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    by_rank = [found] * case.ranks.world_size
    dist.all_gather_object(by_rank, found)
    if len(set(by_rank)) == 1:
        return found
    return "\n".join(f"rank {rank}: {message}" for rank, message in enumerate(by_rank))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    chosen = MISTAKES if options.only is None else (MISTAKES[options.only - 1],)
    with ranks_of_torchrun() as ranks, tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)  # rank 0's, on this machine
        case = Case(ranks, options.stage, Path(folders[0]))
        heading = f"Mistakes, and what each of {ranks.words} says: {stage_name(options.stage)}"
        table = Table(
            "", "mistake", "message", title=heading, title_justify="left", title_style="bold", show_lines=True
        )
        for mistake in chosen:
            words = (mistake.__doc__ or "").rstrip(".")
            table.add_row(str(MISTAKES.index(mistake) + 1), words, message_of(mistake, case))
        console_of(ranks).print(table)
        dist.barrier()  # the folder is rank 0's


if __name__ == "__main__":
    main()
