"""Which models each front end takes: trains small ones of 15 families on two ranks, and holds them against eager.

    python -m examples.bench.zoo                                 all families, about 15 minutes on two idle cores
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
from examples.bench.zoo_steps import FRONT_ENDS, STAGES, thunder_alone, train
from examples.bench.zoo_table import Failed, Found, Row, merged, read_rows, text_of, versions, write

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
    """One rank of a family: sends ``(front end, stage, what was found, or the error's words)``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = BY_NAME[family]
    if rank == 0:
        try:
            thunder_alone(found)
            to_parent.send(("", 0, {}))
        except Exception as error:
            to_parent.send(("", 0, words_of(error)))
    for front_end in FRONT_ENDS:
        for stage in STAGES:
            name = f"{store}-{front_end}-{stage}"  # a group of its own, as an error may leave messages behind
            dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=WORLD_SIZE)
            try:
                to_parent.send((front_end, stage, train(found, front_end, stage, rank, WORLD_SIZE)))
            except Exception as error:
                to_parent.send((front_end, stage, words_of(error)))
                break
            finally:
                dist.destroy_process_group()


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


def collected(pipes: list[Connection], seconds: float) -> list[dict[tuple[str, int], Any]]:
    """What each rank sent until it ended, or until the time was over."""
    replies: list[dict[tuple[str, int], Any]] = [{} for _ in pipes]
    open_pipes, end = list(pipes), time.monotonic() + seconds
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(open_pipes, left):
            assert isinstance(pipe, Connection)
            try:
                front_end, stage, found = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                continue
            replies[pipes.index(pipe)][front_end, stage] = found
    return replies


def row_of(family: str, replies: Sequence[dict[tuple[str, int], Any]], seconds: float) -> Row:
    """The row of what both ranks sent."""
    silent = f"no answer within {seconds:g} seconds, or the process ended"
    alone = replies[0].get(("", 0), silent)
    cells = {
        name: cell_of([{at: reply.get((name, at), silent) for at in STAGES} for reply in replies])
        for name in FRONT_ENDS
    }
    return Row(family, None if alone == {} else alone, cells, versions())


def cell_of(ranks: Sequence[dict[int, Any]]) -> Found | Failed:
    """What one front end did, by rank and stage: the first failure, with the words of each rank; or the largest error,
    and everything else of stage 3."""
    for stage in STAGES:
        if any(isinstance(rank[stage], str) for rank in ranks):
            words = [rank[stage] if isinstance(rank[stage], str) else "no error" for rank in ranks]
            return Failed(stage, tuple(words))
    replies = [rank[stage] for rank in ranks for stage in STAGES]
    last = ranks[0][STAGES[-1]]
    return Found(
        error=max(reply["error"] for reply in replies),
        graphs=max(reply["graphs"] for reply in replies),
        scheduled=sum(reply["scheduled"] for reply in replies),
        launched=sum(reply["launched"] for reply in replies),
        registered=tuple(sorted({name for reply in replies for name in reply["registered"]})),
        seconds=last["seconds"],
    )


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
