"""needed while: torch has no public API by which a module refuses ``fully_shard``."""

from __future__ import annotations

from typing import Any

from torch import nn

from thunder_zero.compat.private import REGISTRY_KEY


class Composed(dict[str, Any]):
    """A module's registry of composable APIs, in which ``fully_shard`` raises. A copy is an empty dict."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __contains__(self, function: object) -> bool:
        if function == "fully_shard":
            raise RuntimeError(
                f"fully_shard was given a {self._module} that thunder_zero already shards; leave it out: ZeroTransform "
                f"and compile take its options: stage and reshard_after_forward, mesh, mixed_precision, cpu_offload, "
                f"ignored; unit_of names the units"
            )
        return super().__contains__(function)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return dict, ()


def refuse_fully_shard(model: nn.Module, plain: nn.Module) -> None:
    """Make ``fully_shard`` of the model, of the plain module and of its submodules raise."""
    name = type(plain).__name__
    vars(model)[REGISTRY_KEY] = Composed(name)
    for path, module in plain.named_modules():
        vars(module)[REGISTRY_KEY] = Composed(f"submodule {path!r} of a {name}" if path else name)
