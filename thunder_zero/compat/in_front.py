"""needed while: torch has no hooks in zero_grad, unscale_ and the norm of gradients.

Puts a kernel of ours in front of an operator that they call, by torch's own registry: nothing of torch is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

# torch has no kernel of the operators that we use there. It is passed once a call, after autograd and before the
# device's kernel, in inference mode and by operators without tensors, too.
BEFORE_DEVICE = torch.DispatchKey.BackendSelect

_libraries: dict[str, torch.library.Library] = {}  # a kernel is removed when its library is


def put_in_front(operator: OpOverload, kernel: Callable[..., Any]) -> None:
    """From now on, for the life of the process, calls of ``operator`` are calls of ``kernel``; again is no change.

    Args:
        operator: such as ``torch.ops.aten._foreach_norm.Scalar``.
        kernel: called with torch's own kernel and the operator's arguments, those with default values only if given.
    """
    name = str(operator)
    if name in _libraries:
        return

    def with_own(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # Not a guard that excludes our key: what the operator calls next, such as torch.empty, needs it.
        rest = keys & torch._C._dispatch_keyset_full_after(BEFORE_DEVICE)
        return kernel(lambda *args, **kwargs: operator.redispatch(rest, *args, **kwargs), *args, **kwargs)

    library = torch.library.Library(operator.namespace, "IMPL")
    library.impl(operator, with_own, BEFORE_DEVICE.name, with_keyset=True)
    _libraries[name] = library
