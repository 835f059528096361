"""Trains models of thunder_zero in a process, and prints what that changed for other users of the process.

python -m tests.harness.side_effects

It compares two records: the tables, settings and functions of torch and Thunder, and the bits of other models after two
steps. It prints a JSON object: the names of what changed, by kind.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.fx.experimental._config
import torch.nn.modules.module as module_hooks
import torch.optim.optimizer as optimizer_hooks
from torch import Tensor, nn
from torch._dynamo import eval_frame, trace_rules
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.harness.untraceable import Tiled

Record = dict[str, Any]
X, TARGET = torch.arange(12.0).view(3, 4).cos(), torch.tensor([1, -100, 2])
CONFIGS = (torch._dynamo.config, torch._functorch.config, torch._inductor.config, torch.fx.experimental._config)
LIBRARIES = ("torch", "thunder")


class Net(nn.Module):
    """Calls the functions that thunder_zero replaces while it compiles a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.RMSNorm(4)
        self.scale = [2.0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * max(self.scale)
        if torch.is_grad_enabled() and x.requires_grad:
            x = self.norm(F.dropout(x, 0.25))
        for _, param in self.named_parameters():
            x = x + param.view(-1, 4).sum(0)
        return F.cross_entropy(x, TARGET, label_smoothing=0.1)


class WithFunction(Net):
    """Also calls an autograd function that dynamo cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layers[0].weight
        return super().forward(Tiled.apply(x, weight))  # type: ignore[no-untyped-call]


def bits(compiled: Callable[[nn.Module], Any], kind: type[Net] = Net) -> str:
    """Train a model for two steps. Return a digest of its parameters."""
    torch.manual_seed(0)
    plain = kind()
    model = compiled(plain)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(X).backward()
        optimizer.step()
    values = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()


def other_models() -> Record:
    """Train models without thunder_zero. Return digests of their parameters."""
    torch._dynamo.reset()
    trained = {
        "plain": bits(lambda plain: plain),
        "torch.compile": bits(lambda plain: torch.compile(plain, backend="aot_eager"), WithFunction),
    }
    if "thunder" in sys.modules:
        trained["thunder.jit"] = bits(sys.modules["thunder"].jit)
    return trained


def train_ours() -> None:
    """Train a model through each entry of thunder_zero."""
    import torch.distributed as dist

    import thunder_zero as tz

    import thunder

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bits(lambda plain: tz.compile(plain, stage=3), WithFunction)
        bits(lambda plain: thunder.jit(plain, transforms=[tz.ZeroTransform(stage=3)]))
    finally:
        dist.destroy_process_group()


def settings() -> Record:
    """Return the process-wide settings and tables of torch and Python."""
    record: Record = {
        f"{config.__name__}.{name}": value for config in CONFIGS for name, value in config.shallow_copy_dict().items()
    }
    tables = {
        **{f"optimizer{name}": table for name, table in vars(optimizer_hooks).items() if "_global_optimizer" in name},
        **{f"module{name}": table for name, table in vars(module_hooks).items() if name.startswith("_global_")},
        "dynamo's handlers": TorchInGraphFunctionVariable._get_handlers(),
        "DTensor's handlers": DTensor._op_dispatcher._custom_op_handlers,
    }
    for name, table in tables.items():
        record |= {f"{name}: {_called(key, value)}": id(value) for key, value in dict(table or {}).items()}
    record |= {f"environment {name}": value for name, value in os.environ.items()}
    return record | {
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "functions allowed in graphs": set(trace_rules._allowed_callable_ids()),
        "dynamo's stance": eval_frame._stance.stance,
        "garbage collection": (gc.isenabled(), gc.get_threshold(), [*gc.callbacks]),
        "warnings": len(warnings.filters),
        "finders": [type(finder).__name__ for finder in sys.meta_path],
        "threads": (torch.get_num_threads(), sys.getswitchinterval()),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()),
        "TF32": (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    }


def _called(key: Any, value: Any) -> str:
    """Name an entry of a table: by its key, or by its function if the key is a number."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(key, int) else str(key)


def functions() -> Record:
    """Return the functions, classes and methods of all loaded modules of torch and Thunder."""
    record: Record = {}
    for path, module in [*sys.modules.items()]:
        if not isinstance(module, ModuleType) or path.partition(".")[0] not in LIBRARIES:
            continue
        for name, value in [*vars(module).items()]:
            if isinstance(value, FunctionType | type):
                record[f"{path}.{name}"] = id(value)
            if isinstance(value, type) and value.__module__ == path:
                record |= {f"{path}.{name}.{method}": id(function) for method, function in _methods(value)}
    return record


def _methods(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    kinds = FunctionType, classmethod, staticmethod, property
    return ((name, function) for name, function in [*vars(kind).items()] if isinstance(function, kinds))


def tables_of_thunder() -> Record:
    """Return the entries of Thunder's tables."""
    from thunder.core import interpreter, jit_ext, prims
    from thunder.extend import _executor_map

    tables = (
        *(jit_ext._general_jit_lookaside_map, jit_ext.general_jit_callbacks, _executor_map),
        *(interpreter._default_lookaside_map, interpreter._default_opcode_handler_map),
    )
    record: Record = {"conversion": id(prims.convert_element_type.meta)}
    for number, table in enumerate(tables):
        record |= {f"table {number} of Thunder: {key}": id(value) for key, value in table.items()}
    return record


def changed(before: Record, after: Record, *, new: bool = True) -> list[str]:
    """Return the names whose values differ. Added names count if ``new``."""
    names = {*before, *after} if new else {*before}
    missing = object()
    return sorted(name for name in names if not _is_same(before.get(name, missing), after.get(name, missing)))


def _is_same(before: Any, after: Any) -> bool:
    return before is after or bool(before == after)


def main() -> None:
    """Compare before and after the import, then before and after our models' training."""
    fresh_settings, fresh_bits = settings(), other_models()
    trained = settings()
    import thunder_zero  # noqa: F401

    import thunder.core  # noqa: F401

    imported = settings()
    between = other_models()
    tables, functions_before = tables_of_thunder(), functions()
    train_ours()
    result = {
        "torch by itself": changed(fresh_settings, trained),
        "import": changed(trained, imported),
        "training": changed(imported, settings()),
        "functions": changed(functions_before, functions(), new=False),
        "Thunder": changed(tables, tables_of_thunder()),
        "bits": changed(fresh_bits, {name: between[name] for name in fresh_bits}) + changed(between, other_models()),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    with redirect_stdout(StringIO()) as printed:
        main()
    print(printed.getvalue()[printed.getvalue().index("{") :])
