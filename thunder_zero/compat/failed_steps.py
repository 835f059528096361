"""needed while: torch has no hook for an optimizer's step that fails.

Every step leaves a range of the profiler by an operator of torch, also when it raises. A kernel of ours in front of the
operator's own, by torch's own registry, sees the error: nothing of torch is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

LEAVE = torch.ops.profiler._record_function_exit._RecordFunction
# torch has no kernel of the operator there. It is passed once a call, in inference mode and without tensors, too.
KEY = torch.DispatchKey.BackendSelect

_libraries: list[torch.library.Library] = []  # a kernel is removed when its library is


def on_failed_steps(explain: Callable[[Optimizer, BaseException], None]) -> None:
    """From now on, for the life of the process, call ``explain`` with the optimizer and the error of a step that
    raises; again is no change."""
    if _libraries:
        return

    def leave(keys: torch._C.DispatchKeySet, record: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and error.__traceback__ is not None:
            optimizer = error.__traceback__.tb_frame.f_locals.get("self")  # of the wrapper around all steps
            if isinstance(optimizer, Optimizer):
                explain(optimizer, error)
        # Not a guard that excludes our key: what the operator calls next needs it.
        LEAVE.redispatch(keys & torch._C._dispatch_keyset_full_after(KEY), record)

    library = torch.library.Library(LEAVE.namespace, "IMPL")
    library.impl(LEAVE, leave, KEY.name, with_keyset=True)
    _libraries.append(library)
