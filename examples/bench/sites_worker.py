"""A rank of a small site that dies where it is told to. ``examples.bench.sites faults`` starts it.

Prints a JSON object for each step: the site, the step, the exchanges so far, the seconds that the outer step took, and
after an exchange the sites that took part and a digest of what they agreed on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import thunder_zero as tz
from examples.gpt import GPT, GPTConfig
from examples.stdlib_text import Shape, load_text, train_batch
from examples.two_sites import INT8, loss_of
from thunder_zero.outer.exchange import Messages


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--save", help="a folder: a checkpoint after every eighth exchange")
    parser.add_argument("--load", help="a checkpoint")
    parser.add_argument("--dies-in", choices=("rows", "changes"), help="while it takes rows, or averages changes")
    return parser.parse_args()


def dying(what: str | None, outer: tz.DiLoCo) -> Any:
    """Kill this process in its third messages of this kind to other sites."""
    number, trade = 0, Messages.trade

    def count(self: Messages, outgoing: Any, incoming: Any) -> None:
        nonlocal number
        number += not outgoing if what == "rows" else what == "changes" and outer.counts.met
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        trade(self, outgoing, incoming)

    return mock.patch.object(Messages, "trade", count)


def main() -> None:
    options = parse_options()
    dist.init_process_group()
    rank, site = dist.get_rank(), options.site
    torch.manual_seed(0)
    model = tz.compile(GPT(GPTConfig(blocks=2, width=32, heads=2, context=32)), stage=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sites = tz.sites(options.store, name=site, timeout=options.timeout, expected=options.sites)
    outer = tz.DiLoCo(model, sites, sync_every=32, wire=INT8, fragments=2)
    if options.load:
        tz.load(options.load, model, optimizer, extra={"outer": outer})
    text, shape = load_text(), Shape(8, 32, rank, dist.get_world_size())
    with dying(options.dies_in, outer):
        while True:
            loss_of(model, train_batch(text, outer.counts.steps, shape, ord(site[0]))).backward()
            optimizer.step()
            optimizer.zero_grad()
            begun, before = time.monotonic(), outer.counts.state
            outer.step()
            line = {"step": outer.counts.steps, "seconds": time.monotonic() - begun, "time": time.monotonic()}
            if outer.counts.state != before:
                line |= {"exchange": outer.counts.state, "version": outer.counts.version, "digest": outer.digest()}
                if options.save and outer.counts.version % 8 == 0:
                    tz.save(f"{options.save}/{outer.counts.version}", model, optimizer, extra={"outer": outer})
            if rank == 0:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
