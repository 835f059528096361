"""Trains with every optimizer of torch and of pytorch_optimizer on two ranks, and compares with one process.

    OMP_NUM_THREADS=1 python -m examples.bench.optimizers               all, a few minutes; writes docs/optimizers.md
    OMP_NUM_THREADS=1 python -m examples.bench.optimizers Lion SOAP     these; prints the table

Each trains two layers of uneven rows for 20 steps in float32, stage 3: on ``model.parameters()``, and by ``tz.whole``.
The command ends with an error if one is off by more than 1e-5, unless it draws random numbers, or one process is off
from itself where its gradients are rounded otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import thunder_zero as tz  # before thunder
from examples.bench.page import with_section

import thunder

NOT_TRIED_VERDICT = "not tried"
NOT_TRIED = "does not run in one process as it is called here"
RANKS, STEPS, ROWS, RIGHT = 2, 20, 8, 1e-5
SUMMED_IN_BFLOAT16, RIGHT_IN_BFLOAT16 = ("torch.optim.Muon",), 1e-3  # products of DTensors, which ranks add up
THIRDS = (1, 0, 1, 0, 1, 0)  # the same parts of a batch, added up three times: the mean is rounded otherwise
PAGE = Path(__file__).parents[2] / "docs/optimizers.md"
SECTION = ("optimizers", "examples.bench.optimizers")
PACKAGE = "pytorch_optimizer"
REFUSED = (  # what an error of tz.whole says, and the table's word for it; the first that fits
    ("closure", "needs a closure"),
    ("cannot be tried", "cannot be tried"),
    ("couples parameters", "couples parameters"),
)

Params = list[nn.Parameter]
Make = Callable[[Any], optim.Optimizer]


def matrices(params: Params) -> Params:
    return [param for param in params if param.ndim == 2]


def flagged(params: Params) -> list[dict[str, Any]]:
    vectors = [param for param in params if param.ndim != 2]
    return [{"params": matrices(params), "use_muon": True}, {"params": vectors, "use_muon": False}]


@dataclass(frozen=True)
class Way:
    """A way to construct an optimizer.

    Attributes:
        words: for the table.
        chosen: what it is given, from the model's parameters.
        options: of the constructor.
        around: an optimizer that it wraps.
        closure: whether its step takes one.
    """

    words: str
    chosen: Callable[[Params], Any] = list
    options: tuple[tuple[str, Any], ...] = ()
    around: type[optim.Optimizer] | None = None
    closure: bool = False

    def make(self, kind: Any, params: Params) -> optim.Optimizer:
        given = self.chosen(params) if self.around is None else self.around(params, lr=0.01)
        return kind(given, **dict(self.options))


WAYS = (  # the first that works is taken
    Way(""),
    Way("matrices alone", matrices),
    Way("groups with `use_muon`", flagged),
    Way("20 iterations", options=(("num_iterations", STEPS),)),
    Way("16 samples", options=(("num_data", 16),)),
    Way("around AdamW", around=optim.AdamW),
    Way("a closure", closure=True),
    Way("around AdamW, a closure", options=(("base_optimizer", optim.AdamW),), closure=True),
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 5, generator=generator)


def loss(model: nn.Module, step: int, part: int) -> Tensor:
    x, y = (whole.chunk(RANKS)[part] for whole in batch(step))
    return (model(x) - y).square().mean()


def train(model: nn.Module, optimizer: Any, way: Way, parts: Sequence[int], seed: int = 1) -> None:
    """Train on these parts of each batch, of one for each rank."""
    torch.manual_seed(seed)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            found = [loss(model, step, part) for part in parts]
            for each in found:
                each.backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad /= len(parts)
            return torch.stack(found).mean()

        closure()
        optimizer.step(closure) if way.closure else optimizer.step()


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class Right:
    """What one process trains: the parameters, or why there are none."""

    way: Way
    params: dict[str, Tensor]
    why: str = ""

    def off(self, found: Mapping[str, Tensor]) -> float:
        """How far parameters are from these, relative to their norm."""
        square = sum(float((found[name] - value).square().sum()) for name, value in self.params.items())
        return float((square / sum(float(value.square().sum()) for value in self.params.values())) ** 0.5)


def one_process(kind: Any, parts: Sequence[int] = range(RANKS), seed: int = 1) -> Right:
    """Train in this process on these parts of each batch."""
    errors = []
    for way in WAYS:
        module = build()
        try:
            optimizer = way.make(kind, list(module.parameters()))
            train(module, optimizer, way, parts, seed)
        except Exception as error:
            errors.append(in_words(error))
        else:
            return Right(way, {name: param.detach() for name, param in module.named_parameters()})
    return Right(WAYS[0], {}, errors[0])


class Sharded:
    """A model on ranks, trained from the same values with one optimizer after the other."""

    def __init__(self) -> None:
        self.model: Any = thunder.jit(build(), transforms=[tz.ZeroTransform(stage=3)])
        self._start = [param.detach().clone() for param in self.model.parameters()]

    def off(self, make: Make, right: Right) -> tuple[float | None, str]:
        """How far training leads from that of one process, relative to the parameters; or None, and the error."""
        params = list(self.model.parameters())
        with torch.no_grad():
            for param, start in zip(params, self._start, strict=True):
                param.copy_(start)
                param.grad = None
        try:
            train(self.model, make(params), right.way, [dist.get_rank()])
        except Exception as error:
            return None, in_words(error)
        return right.off(tz.full_state_dict(self.model)), ""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: of the class.
        way: how it was constructed.
        shards, whole: how far off it is on ``model.parameters()``, and by ``tz.whole``; None: it raised, or was not
            tried.
        random: another seed leads one process elsewhere.
        rounded: how far off one process is from itself, where its gradients are rounded otherwise.
        why, why_not_whole: the errors.
    """

    name: str
    way: str
    shards: float | None = None
    whole: float | None = None
    random: bool = False
    rounded: float = 0.0
    why: str = ""
    why_not_whole: str = ""


def row_of(name: str, kind: Any, model: Sharded) -> Row:
    right = one_process(kind)
    if right.why:
        return Row(name, right.way.words, why=f"{NOT_TRIED}: {right.why}")

    shards, why = model.off(lambda params: right.way.make(kind, params), right)
    whole: tuple[float | None, str] = (None, "")
    if right.way.around is None:
        options = dict(right.way.options)
        whole = model.off(lambda params: tz.whole(kind, right.way.chosen(params), **options), right)
    if max(shards or 0, whole[0] or 0) <= RIGHT:
        return Row(name, right.way.words, shards, whole[0], why=why, why_not_whole=whole[1])
    rounded, drawn = right.off(one_process(kind, THIRDS).params), right.off(one_process(kind, seed=2).params)
    return Row(name, right.way.words, shards, whole[0], drawn > 0, rounded, why, whole[1])


def classes(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The classes to try, torch's first, by their full names."""
    for room in (optim, import_module(PACKAGE)):
        for name, kind in sorted(vars(room).items(), key=lambda item: item[0].lower()):
            is_class = isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
            if is_class and kind.__module__.startswith(room.__name__) and (not names or name in names):
                yield f"{room.__name__}.{name}", kind


def on_rank(rank: int, port: int, names: Sequence[str], found: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = Sharded()
    for name, kind in classes(names):
        row = row_of(name, kind, model)
        if rank == 0:
            print(line_of(row), flush=True)
            found.put(row)
    if rank == 0:
        found.put(None)
    dist.barrier()
    dist.destroy_process_group()


def figure(off: float | None) -> str:
    if off is None:
        return ""
    return "more than 100%" if off > 1 else f"{100 * off:.2g}%" if off > RIGHT else f"{off:.0e}" if off else "0"


def cells_of(row: Row) -> tuple[str, str, str, str]:
    name = f"`{row.name}`" + (f" ({row.way})" if row.way else "")
    if row.why.startswith(NOT_TRIED):
        return name, NOT_TRIED_VERDICT, "", row.why
    by_whole = cell_of(row.whole, row) or ("refused" if row.why_not_whole else "")
    return name, cell_of(row.shards, row) or "raises", by_whole, shortened(row.why_not_whole or row.why)


def cell_of(off: float | None, row: Row) -> str:
    """How far off it is, and why; empty if that is not known."""
    if off is None or off <= RIGHT:
        return "" if off is None else f"exact ({figure(off)})"
    if row.random:
        return f"random ({figure(off)})"
    if row.name in SUMMED_IN_BFLOAT16 and off <= RIGHT_IN_BFLOAT16:
        return f"rounding ({figure(off)})"
    return f"rounding ({figure(off)}; {figure(row.rounded)})" if row.rounded > RIGHT else "WRONG"


def shortened(why: str) -> str:
    """An error without what follows from it."""
    why = re.split(r", and each rank| Please | The input has | Sharding propagation failed for|, need to convert", why)[
        0
    ]
    return re.sub(r"\(DTensorSpec.*|\(Spec.*", "...", why)[:160]


def line_of(row: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells_of(row)) + " |"


def versions() -> str:
    """The versions whose classes the table has."""
    return f"torch {torch.__version__.partition('+')[0]}, {PACKAGE} {version(PACKAGE)}"


def verdict_of(row: Row) -> tuple[str, str]:
    """Return what becomes of a class on the model's parameters, and by ``tz.whole``, without figures."""
    _, shards, whole, why = cells_of(row)
    words = [cell.partition(" (")[0] for cell in (shards, whole)]
    if words[1] == "refused":
        words[1] += next((f": {reason}" for part, reason in REFUSED if part in why), "")
    elif not words[1] and words[0] != NOT_TRIED_VERDICT:
        words[1] = "wraps an optimizer"
    return words[0], words[1]


def name_in_table(row: Row) -> str:
    """Return the class's name, and how far off it is, unless it is exact."""
    figures = [cell.partition(" (")[2].rstrip(")") for cell in cells_of(row)[1:3] if not cell.startswith("exact")]
    name = row.name.rpartition(".")[2]
    return f"{name} ({', '.join(filter(None, figures))})" if any(figures) else name


def table(rows: Sequence[Row]) -> str:
    """Return a row for each verdict, the most frequent first."""
    verdicts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        verdicts.setdefault(verdict_of(row), []).append(row)
    lines = ["| on `model.parameters()` | with `tz.whole` | `torch.optim` | `pytorch_optimizer` |", "|---|---|---|---|"]
    for verdict, members in sorted(verdicts.items(), key=lambda item: -len(item[1])):
        packages = [[row for row in members if row.name.startswith(start)] for start in ("torch.", PACKAGE)]
        lines.append("| " + " | ".join((*verdict, *(", ".join(map(name_in_table, part)) for part in packages))) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes; all by default")
    names = parser.parse_args().names
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    found: Any = context.SimpleQueue()
    ranks = [context.Process(target=on_rank, args=(rank, port, names, found)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    rows = list(iter(found.get, None))
    for process in ranks:
        process.join()
    if not names:
        body = f"\n{versions()}\n\n{table(rows)}\n"
        PAGE.write_text(with_section(PAGE.read_text(), *SECTION, body))
    wrong = [row.name for row in rows if "WRONG" in cells_of(row)]
    sys.exit(f"off by more than {RIGHT}: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
