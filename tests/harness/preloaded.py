"""Imports of the server that forks the ranks: all that take seconds, and none that starts a thread.

A process with threads must not fork. Only the forking thread continues in the child, so a lock of another thread stays
locked for ever. This module therefore counts the threads, and every rank checks the count.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict  # noqa: F401

import tests.harness.models  # noqa: F401
import thunder_zero
import thunder_zero.tools

import thunder.transforms.autocast
import thunder.transforms.autodiff  # noqa: F401

for package in (thunder_zero, thunder_zero.tools):
    for name in package.__all__:
        getattr(package, name)  # the package imports it lazily

gc.collect()
gc.freeze()  # so that no collection in a rank writes to the shared pages, which copies them

THREADS = len(list(Path("/proc/self/task").iterdir()))
