"""What the server that ranks are forked from imports: all that takes seconds, and nothing that starts a thread.

A process with threads must not fork: only the thread that forks goes on in the child, and locks that others held stay
locked. So the threads are counted here, and every rank looks at the count.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest  # noqa: F401
import torch.distributed.checkpoint.state_dict  # noqa: F401

import tests.harness.models  # noqa: F401
import thunder_zero  # noqa: F401

import thunder.transforms.autocast
import thunder.transforms.autodiff  # noqa: F401

gc.collect()
gc.freeze()  # so that no collection in a rank writes to, and so copies, the pages that all share

THREADS = len(list(Path("/proc/self/task").iterdir()))
