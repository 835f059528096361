"""Finds the model and the optimizer in a checkpoint, which tools put under various names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from thunder_zero.checkpoint.contents import GROUPS, MODEL, OPTIM, STATE, listed

# Those of torch's tutorials, Fabric, Trainer, Accelerate, torchtune and, at the top without a name, torchtitan.
MODEL_ROOTS = (MODEL, "app.model", "state_dict", "model_state_dict", "state.model", "")
OPTIM_ROOTS = (OPTIM, "optimizer", "app.optim", "app.optimizer", "optimizer_0", "optimizer_state_dict")


def model_prefix(names: Iterable[str], keys: Collection[str]) -> str:
    """How the keys of a model's tensors begin: the root with most of these names.

    Raises:
        ValueError: there is no model under any of the usual names.
    """
    names = list(names)
    prefixes = [f"{root}." if root else "" for root in MODEL_ROOTS]
    counts = {prefix: sum(prefix + name in keys for name in names) for prefix in prefixes}
    best = max(prefixes, key=lambda prefix: counts[prefix])
    if not counts[best]:  # of another model, or none
        best = next((prefix for prefix in prefixes if prefix and any(key.startswith(prefix) for key in keys)), "")
    if not counts[best] and not best:
        raise ValueError(
            f"the checkpoint has no model under {_shown(MODEL_ROOTS)}: it has {listed(sorted(keys))}; save it as "
            f"{{{MODEL!r}: get_model_state_dict(...)}}, or load a checkpoint of this model"
        )
    return best


def optimizer_prefix(keys: Collection[str]) -> str:
    """How the keys of an optimizer's values begin.

    Raises:
        ValueError: there is no optimizer under any of the usual names.
    """
    prefixes = [f"{root}." for root in OPTIM_ROOTS]
    parts = tuple(f"{prefix}{part}." for prefix in prefixes for part in (GROUPS, STATE))
    found = next((key for key in keys if key.startswith(parts)), None)
    if found is None:
        raise ValueError(
            f"the checkpoint has no optimizer under {_shown(OPTIM_ROOTS)}: it has {listed(_tops(keys))}; load without "
            f"one, or save it as {{{OPTIM!r}: get_optimizer_state_dict(...)}}"
        )
    return next(prefix for prefix in prefixes if found.startswith((f"{prefix}{GROUPS}.", f"{prefix}{STATE}.")))


def _tops(keys: Iterable[str]) -> list[str]:
    return sorted({key.partition(".")[0] for key in keys})


def _shown(roots: Iterable[str]) -> str:
    return ", ".join(repr(root) for root in roots if root)
