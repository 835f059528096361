"""Counts the parameters and gradients that this rank sends: each message where it is handed to torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def counted_sends() -> Iterator[Counter[torch.dtype]]:
    """Collect the bytes of the messages that this rank sends inside of the block, by their dtype.

    Only messages of floats count: parameters and gradients. The words by which ranks agree where they are travel as
    integers. Between CPUs (gloo) every message is such a send; NCCL's collectives send by themselves and are not seen.
    """
    sent: Counter[torch.dtype] = Counter()
    send = dist.isend

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        if tensor.is_floating_point():
            sent[tensor.dtype] += tensor.nbytes
        return send(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counted):
        yield sent
