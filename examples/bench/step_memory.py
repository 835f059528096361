"""The memory of a case's training step: forecast in this process, and measured on real ranks. They share no code.

Measured is rank 0, which has the most rows, on gloo, in a step after one that warms up. The record of torch's allocator
says what each part of the step adds (``tensor_memory.py``).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

import thunder_zero as tz  # before thunder
from examples.bench.cases import PEERS, TASKS, Case
from examples.tensor_memory import Added, added_in_parts, bytes_held, parameters_of

CPU = torch.device("cpu")
PEER_RUNS = 3
FORWARD, LOSS, BACKWARD, OPTIMIZER = "forward", "loss", "backward", "optimizer step"
PASSES = (FORWARD, LOSS, BACKWARD)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes of tensors on rank 0.

    Attributes:
        at_rest: parameters, buffers and optimizer state.
        peak: the most in forward, the loss and backward, inputs included.
        optimizer_step: the most in the optimizer's step, without inputs; 0 if there is none.
    """

    at_rest: int
    peak: int
    optimizer_step: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A step of rank 0.

    Attributes:
        at_rest: bytes of parameters, buffers and optimizer state.
        inputs: bytes of forward's inputs.
        parts: what each part of the step adds.
    """

    at_rest: int
    inputs: int
    parts: Mapping[str, Added]

    @property
    def peaks(self) -> Peaks:
        """Those of the step."""
        step = self.parts.get(OPTIMIZER)
        added = max(part.highest for name, part in self.parts.items() if name in PASSES)
        return Peaks(self.at_rest, self.at_rest + self.inputs + added, self.at_rest + step.highest if step else 0)


def forecast(case: Case) -> tz.tools.Memory:
    """Rank 0's memory, without processes and without values."""
    return forecast_of(case, traces_of(case))


def traces_of(case: Case) -> tz.tools.Traces:
    """Rank 0's traces."""
    task = TASKS[case.task]
    with torch.device("meta"):
        model = task.model()
    model.train(case.training)
    with nullcontext() if case.training else torch.no_grad():
        return tz.trace(
            model,
            **task.inputs(),
            policy=case.policy,
            world_size=case.world_size,
            synced=not case.deferring,
            **case.options,
        )


def forecast_of(case: Case, traces: tz.tools.Traces) -> tz.tools.Memory:
    """The memory of a step with these traces."""
    if not case.training:
        return tz.tools.memory(traces)
    loss = TASKS[case.task].loss
    return tz.tools.memory(traces, loss=loss, optimizer=torch.optim.AdamW, accumulating=case.deferring)


def peak_of_peer(case: Case) -> int:
    """The lowest measured peak of the case's peer: FSDP2's differs from run to run, as it frees when it comes to it."""
    return min(measure(case, case.peer).peaks.peak for _ in range(PEER_RUNS))


def measure(case: Case, peer: str = "") -> Measured:
    """Rank 0's memory in real processes; of a peer (a key of ``PEERS``) that trains the same model, if one is named."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (case, peer, folder), nprocs=case.world_size)
        found = json.loads((Path(folder) / "measured.json").read_text())
    return Measured(found["at_rest"], found["inputs"], {name: Added(**part) for name, part in found["parts"].items()})


def _rank(rank: int, case: Case, peer: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), case.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size)
    torch.manual_seed(0)
    model = TASKS[case.task].model().train(case.training)
    model = PEERS[peer](model) if peer else tz.compile(model, case.policy, **case.options)
    found = measured_step(case, model, TASKS[case.task].inputs())
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


def measured_step(case: Case, model: nn.Module, inputs: Mapping[str, Tensor]) -> Measured:
    """Take two steps, and count in the second."""
    task = TASKS[case.task]
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[Any] = []

    def forward() -> None:
        with nullcontext() if case.training else torch.no_grad():
            kept.append(model(**inputs))

    def loss() -> None:
        kept.append(task.loss(kept.pop()))  # the outputs live as long as the loss reads them

    def backward() -> None:
        kept.pop().backward()

    def micro_batch() -> None:
        for part in (forward, loss, backward) if case.training else (forward, kept.clear):
            part()

    parts: dict[str, Callable[[], object]] = {FORWARD: forward}
    if case.training:
        parts |= {LOSS: loss, BACKWARD: backward}
    if case.deferring:
        parts = {"an earlier micro-batch": micro_batch} | parts
    elif case.training:
        parts[OPTIMIZER] = optimizer.step
    micro_batch()
    optimizer.step()
    optimizer.zero_grad()
    held = [*parameters_of(model), *model.buffers()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    at_rest, of_inputs = bytes_held(held), bytes_held(inputs.values())
    with model.no_sync() if case.deferring else nullcontext():
        return Measured(at_rest, of_inputs, added_in_parts(parts, CPU))
