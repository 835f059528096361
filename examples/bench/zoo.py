"""Trains small models of all families on two ranks by ``thunder.jit``, and holds them against eager.

    python -m examples.bench.zoo                                 all families, about 5 minutes on two idle cores
    python -m examples.bench.zoo --families Llama T5
    python -m examples.bench.zoo --page                          the page again, nothing trained

Needs transformers and litgpt; downloads nothing. Each family has two processes of its own, which end after
``--seconds``. Rows go into docs/zoo.json, in place of earlier ones of the same family, and the table into docs/zoo.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.bench.families import BY_NAME
from examples.bench.zoo_steps import eager, fresh, train
from examples.bench.zoo_table import STAGES, Failed, Found, Row, merged, read_rows, text_of, versions, write

WORLD_SIZE = 2
PRELOADED = ["examples.bench.zoo_steps", "transformers.modeling_utils", "litgpt"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=tuple(BY_NAME), choices=BY_NAME, metavar="FAMILY")
    parser.add_argument("--seconds", type=float, default=600.0, help="that a family may take (600)")
    parser.add_argument("--page", action="store_true", help="write the page from the data file; train nothing")
    return parser.parse_args(arguments)


def on_rank(family: str, rank: int, store: str, to_parent: Connection) -> None:
    """One rank of a family: sends ``(stage, what was found, or the error's words)``; first, as stage 0, the name of the
    model's class."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    members = BY_NAME[family]
    to_parent.send((0, type(fresh(members)).__name__))
    dist.init_process_group("gloo", init_method=f"file://{store}-eager", rank=rank, world_size=WORLD_SIZE)
    right = eager(members, rank, WORLD_SIZE)
    dist.destroy_process_group()
    for stage in STAGES:  # each in a group of its own, as an error may leave messages behind
        dist.init_process_group("gloo", init_method=f"file://{store}-{stage}", rank=rank, world_size=WORLD_SIZE)
        try:
            to_parent.send((stage, train(members, stage, rank, right)))
        except Exception as error:
            to_parent.send((stage, words_of(error)))
        finally:
            dist.destroy_process_group()
            torch.compiler.reset()  # each stage compiles anew


def words_of(error: Exception) -> str:
    """The error's type and words, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def run_family(family: str, seconds: float, folder: Path) -> Row:
    """The row of a family, from two processes of its own, which end with this call."""
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
    processes = [
        context.Process(target=on_rank, args=(family, rank, str(folder / family), pipes[rank][1]), daemon=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        for process in processes:
            process.start()
        for _, sending in pipes:
            sending.close()
        replies = collected([receiving for receiving, _ in pipes], seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return row_of(family, replies, seconds)


def collected(pipes: list[Connection], seconds: float) -> list[dict[int, Any]]:
    """What each rank sent until it ended, or until the time was over."""
    replies: list[dict[int, Any]] = [{} for _ in pipes]
    open_pipes, end = list(pipes), time.monotonic() + seconds
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(open_pipes, left):
            assert isinstance(pipe, Connection)
            try:
                stage, found = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                continue
            replies[pipes.index(pipe)][stage] = found
    return replies


def row_of(family: str, replies: Sequence[dict[int, Any]], seconds: float) -> Row:
    """The row of what both ranks sent."""
    silent = f"no answer within {seconds:g} seconds, or the process ended"
    cells = {stage: cell_of([reply.get(stage, silent) for reply in replies]) for stage in STAGES}
    return Row(family, replies[0].get(0, ""), cells, versions())


def cell_of(ranks: Sequence[Any]) -> Found | Failed:
    """What one stage did, by rank: the words of each; or the largest error, and everything else of rank 0."""
    if any(isinstance(rank, str) for rank in ranks):
        return Failed(tuple(rank if isinstance(rank, str) else "no error" for rank in ranks))
    return Found(**ranks[0] | {"error": max(rank["error"] for rank in ranks)})


def main() -> None:
    options = parse(None)
    rows = read_rows()
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        for number, family in enumerate(() if options.page else options.families):
            print(f"{number + 1} of {len(options.families)}: {family}", file=sys.stderr, flush=True)
            rows = merged(rows, [run_family(family, options.seconds, Path(folder))])
            write(rows)
            print(text_of(next(row for row in rows if row.family == family)), file=sys.stderr, flush=True)
    write(rows)


if __name__ == "__main__":
    main()
