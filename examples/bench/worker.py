"""One rank of the bench: holds all contestants, and runs the commands that ``run.py`` writes to its standard input.

Each line is one JSON command, and gets one JSON reply::

    {"do": "build", "name": "zero3"}               {"losses": [8.3, ...], "seconds": 11.2, "kept_unsharded": 0}
    {"do": "turn", "name": "zero3", "steps": 2}    {"seconds": 0.81, "sent": 69538000}       per step
    {"do": "wire", "nbytes": 92700000}             {"seconds": 0.78, "sent": 92760000}
    {"do": "peak", "name": "zero3"}                {"rest": 46200000, "peak": 120000000}
    {"do": "waits", "name": "zero3"}               {"seconds": 0.81, "waits": [0.012, ...]}
    {"do": "compile"}, {"do": "host"}              the measurements of overhead.py
    {"do": "calibrate", "again": false}            {}   one round; of a new calibration unless ``again``
    {"do": "forecast", "name": "zero3"}            {"seconds": 0.80, "compute": 0.5, "exposed": 0.2, "wire": 0.6}
    {"do": "device"}                               the calibrated device as JSON

Start it as ``python -m examples.bench.worker`` with the environment variables of ``torch.distributed``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz  # before thunder
from examples.bench.contestants import LEARNING_RATE, Step, contestants, kept_unsharded_bytes
from examples.bench.held import alive, held_bytes
from examples.bench.model import SIZES, loss_of, make_batch
from examples.bench.network import bytes_sent
from examples.tensor_memory import added_at_peak
from thunder_zero.comm.handle import Handle
from thunder_zero.tools.devices.calibrate import Calibration

WARM_UP = 3  # steps: the first one compiles, and DDP rebuilds its buckets after it
MESSAGE_BYTES = 8 << 20  # of the bare exchange
TAG = 77
CPU = torch.device("cpu")


class Worker:
    """The contestants of one rank, by name."""

    def __init__(self, model: str) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.interface = os.environ["GLOO_SOCKET_IFNAME"]
        self.size = SIZES[model]
        self.batch = make_batch(self.size, self.rank)
        self.known = contestants()
        self.built: dict[str, tuple[nn.Module, Step]] = {}
        self.rest: dict[str, int] = {}  # bytes alive between steps
        self.slots: list[tuple[int, Tensor, Tensor]] = []  # of the bare exchange: peer, outgoing, incoming
        self.calibration: Calibration | None = None

    def build(self, name: str) -> dict[str, Any]:
        """Make a contestant and warm it up."""
        before, start = alive(), time.perf_counter()
        model, step = self.built[name] = self.known[name].build(self.size)
        losses = [step(*self.batch).item() for _ in range(WARM_UP)]
        seconds = time.perf_counter() - start
        model.zero_grad()
        self.rest[name] = held_bytes(before, model)
        return {"losses": losses, "seconds": seconds, "kept_unsharded": kept_unsharded_bytes(model)}

    def turn(self, name: str, steps: int) -> dict[str, Any]:
        """Some steps between two barriers."""
        step = self.built[name][1]
        reply = self._timed(lambda: [step(*self.batch) for _ in range(steps)])
        self.built[name][0].zero_grad()  # so that the next contestant finds the same memory
        return {key: value / steps for key, value in reply.items()}

    def wire(self, nbytes: float) -> dict[str, Any]:
        """A bare exchange: each rank sends ``nbytes`` in equal parts to all others, and receives as many."""
        if not self.slots:
            self.slots = self._slots(nbytes)
        return self._timed(self._exchange)

    def peak(self, name: str) -> dict[str, Any]:
        """Bytes of tensors alive between steps without gradients, and at the peak of a step."""
        model, step = self.built[name]
        model.zero_grad()
        added = added_at_peak(lambda: [step(*self.batch), model.zero_grad()], CPU)
        return {"rest": self.rest[name], "peak": self.rest[name] + added}

    def waits(self, name: str) -> dict[str, Any]:
        """How long compute waited in each wait of one step of thunder_zero, in order; and the time of the step."""
        waits: list[float] = []
        wait = Handle.wait

        def timed(handle: Handle) -> tuple[Tensor, ...]:
            start = time.perf_counter()
            results = wait(handle)
            waits.append(time.perf_counter() - start)
            return results

        with patch.object(Handle, "wait", timed):
            reply = self.turn(name, steps=1)
        return {"seconds": reply["seconds"], "waits": waits}

    def calibrate(self, again: bool) -> dict[str, Any]:
        """One round of a calibration."""
        if self.calibration is None or not again:
            self.calibration = Calibration(dist.group.WORLD, dtypes=(torch.float32,))
        self.calibration.round()
        return {}

    def forecast(self, name: str) -> dict[str, Any]:
        """The time of a contestant's whole step on the device that was calibrated last."""
        assert self.calibration is not None, "calibrate comes first"
        model, targets = self.built[name][0], self.batch[1]
        step = tz.tools.estimate(
            tz.traces_of(model),
            self.calibration.device(),
            loss=lambda logits: loss_of(logits, targets),
            optimizer=lambda params: torch.optim.SGD(params, LEARNING_RATE),
        )
        return {
            "seconds": step.seconds,
            "compute": step.compute_seconds,
            "exposed": step.exposed_seconds,
            "wire": sum(step.wire_seconds.values()),
        }

    def device(self) -> dict[str, Any]:
        """The device that was calibrated last."""
        assert self.calibration is not None, "calibrate comes first"
        return asdict(self.calibration.device())

    def compile(self) -> dict[str, Any]:
        from examples.bench.overhead import compile_times

        return compile_times(self.size)

    def host(self) -> dict[str, Any]:
        from examples.bench.overhead import host_times

        return host_times(self.size)

    def _timed(self, work: Callable[[], object]) -> dict[str, float]:
        dist.barrier()
        sent, start = bytes_sent(self.interface), time.perf_counter()
        work()
        dist.barrier()  # so that bytes still in flight count
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "sent": bytes_sent(self.interface) - sent}

    def _slots(self, nbytes: float) -> list[tuple[int, Tensor, Tensor]]:
        left = int(nbytes / max(self.world_size - 1, 1))
        slots = []
        while left > 0:
            size = min(left, MESSAGE_BYTES)
            for step in range(1, self.world_size):
                peer = (self.rank + step) % self.world_size
                slots.append((peer, torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)))
            left -= size
        return slots

    def _exchange(self) -> None:
        comes = [dist.irecv(into, src=peer, tag=TAG) for peer, _, into in self.slots]
        goes = [dist.isend(out, dst=peer, tag=TAG) for peer, out, _ in self.slots]
        for work in (*comes, *goes):
            work.wait()


def reply_to(worker: Worker, command: dict[str, Any]) -> dict[str, Any]:
    """The reply to a command; if it raises, ``{"error": traceback}``."""
    commands = {
        "build": worker.build,
        "turn": worker.turn,
        "wire": worker.wire,
        "peak": worker.peak,
        "waits": worker.waits,
        "calibrate": worker.calibrate,
        "forecast": worker.forecast,
        "device": worker.device,
        "compile": worker.compile,
        "host": worker.host,
    }
    try:
        return commands[command.pop("do")](**command)
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' prints must not mix with the replies
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # several contestants compile the same block
    worker = Worker(sys.argv[1])
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        replies.write(json.dumps(reply_to(worker, command)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
