"""Writes the table of layers and operations into docs/zoo.md: each trains on two ranks, in stages 2 and 3.

What is trained, and how it is compared with eager mode, is in the tables of two tests, which CI runs.

    python -m examples.bench.layers          # 5 minutes on two cores
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from examples.bench.page import with_section
from tests.harness import as_one_process, eager
from tests.harness.ranks import RanksPool
from tests.ranks import test_layers_of_torch as layers
from tests.ranks import test_what_compiles as compiles

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
STAGES = (2, 3)


def largest_error(rank: int, world_size: int, group: str, name: str, stage: int) -> float:
    """The largest difference from eager mode of a tensor in two steps, by norms, relative to the tensor's."""
    seen = [0.0]
    check = as_one_process.assert_near

    def noted(found: Tensor, right: Tensor, *rest: Any) -> None:
        check(found, right, *rest)
        whole = rest[2] if len(rest) > 2 and rest[2] is not None else right
        norm = float(whole.abs().double().norm())
        if norm > as_one_process.ZERO:
            seen.append(float((found - right).abs().double().norm()) / norm)

    with mock.patch.object(as_one_process, "assert_near", noted), mock.patch.object(eager, "assert_near", noted):
        TRAIN[group](rank, world_size, name, stage)
    return max(seen)


def train_layer(rank: int, world_size: int, name: str, stage: int) -> None:
    layers.train(rank, world_size, name, stage)


def train_operation(rank: int, world_size: int, name: str, stage: int) -> None:
    row = compiles.ALL[name]
    inputs = partial(compiles.inputs_of, row.shapes)
    steps = {"forward": row.forward, "backward": row.backward, "tolerance": compiles.TOLERANCE}
    eager.trains_as_eager(rank, world_size, row.make, inputs, stage, **steps)


TRAIN: dict[str, Callable[..., None]] = {"layer": train_layer, "operation": train_operation}


def measured() -> dict[tuple[str, str], float]:
    """Return the largest error in all stages, of each layer and operation, by its group and name."""
    from examples.bench.layers import largest_error  # by its module's name, for the workers

    errors: dict[tuple[str, str], float] = {}
    with RanksPool() as pool:
        for group, names in (("layer", layers.LAYERS), ("operation", compiles.ALL)):
            for name in names:
                errors[group, name] = max(
                    error for stage in STAGES for error in pool.run(2, largest_error, group, name, stage, timeout=300)
                )
                print(f"{group} {name}: {errors[group, name]:.0e}", flush=True)
    return errors


def table(errors: Mapping[tuple[str, str], float]) -> str:
    """Return two rows: the count of what equals eager mode bit for bit; and what does not, with its error."""
    rows = ["| | layers of `torch.nn` | code in forward |", "|---|---|---|"]
    for words, differs in (("equal bit for bit", False), ("differs", True)):
        cells: dict[str, list[str]] = {"layer": [], "operation": []}
        for (group, name), error in errors.items():
            if bool(error) == differs:
                column = group if name in vars(layers.nn) else "operation"
                cells[column].append(f"{name} ({error:.0e})" if differs else name)
        named = ["; ".join(cell) if differs else f"the other {len(cell)}" for cell in cells.values()]
        rows.append(f"| {words} | {' | '.join(named)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    PAGE.write_text(with_section(PAGE.read_text(), "layers", "examples.bench.layers", table(measured())))


if __name__ == "__main__":
    main()
