"""Counts the parameters and gradients that this rank sends: each message where it is handed to torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_zero.comm import pairwise


@contextmanager
def counted_sends() -> Iterator[Counter[torch.dtype]]:
    """Collect the bytes of the messages that this rank sends inside of the block, by their dtype.

    Only messages of floats count: parameters and gradients. The words by which ranks agree where they are travel as
    integers. Between CPUs (gloo) every message is a send of thunder_zero's, or of torch's ``isend``; NCCL's collectives
    send by themselves and are not seen.
    """
    sent: Counter[torch.dtype] = Counter()

    def counting(send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_floating_point():
                sent[tensor.dtype] += tensor.nbytes
            return send(tensor, *args, **kwargs)

        return counted

    with ExitStack() as stack:
        for of, name in ((pairwise, "send"), (dist, "isend")):
            stack.enter_context(mock.patch.object(of, name, counting(getattr(of, name))))
        yield sent
