"""The verdict on a typed record: what is wrong, the first cause first, and what was sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from thunder_zero.plan.amounts import name_of
from thunder_zero.spmd.flow import AxisTypes
from thunder_zero.spmd.lines import StepRecord
from thunder_zero.spmd.verdict import Fault, Gradient, Sent, Verdict

ORDER = ("error", "unknown", "warning")


def verdict_of(
    record: StepRecord, types: Mapping[str, AxisTypes], data: Sequence[str], extra: Sequence[Fault]
) -> Verdict:
    """Return the verdict on a typed record. ``extra`` are faults that need no types."""
    gradients = tuple(_gradient(item.path, types) for item in record.gradients)
    equal = {axis for axis, found in types.items() if axis in data and not found.inputs_differ}
    faults = [*extra, *map(_equal_batches, sorted(equal)), *_optimizer(record), *_missing(record)]
    faults += _precisions(record, gradients)
    faults += [fault for axis, found in types.items() for fault in found.faults if axis not in equal]
    faults.sort(key=lambda fault: (ORDER.index(fault.kind), fault.line))
    assumed = [f"ranks along {axis} have batches of their own" for axis in data if axis in types]
    assumed += [f"ranks along {axis} work on one batch" for axis in types if axis not in data]
    assumed += [text for found in types.values() for text in found.assumed]
    count = len(record.lines)
    return Verdict(
        dict(record.axes), tuple(faults), tuple(_sent(record)), gradients, tuple(dict.fromkeys(assumed)), count
    )


def _gradient(path: str, types: Mapping[str, AxisTypes]) -> Gradient:
    letters = {axis: found.gradients[path][0] for axis, found in types.items()}
    factors = {axis: round(found.gradients[path][1], 6) for axis, found in types.items()}
    return Gradient(path, letters, factors, next(found.reductions[path] for found in types.values()))


def _sent(record: StepRecord) -> Iterator[Sent]:
    for line in record.lines:
        for inputs, outputs in line.pairs:
            item = line.collective
            assert item is not None
            nbytes = sum(ref.nbytes for ref in (outputs if item.kind == "all_gather" else inputs))
            phase = "backward" if line.backward else "forward"
            yield Sent(item.kind, item.op, item.axes, name_of(outputs[0].dtype), nbytes, phase, line.where)


def _equal_batches(axis: str) -> Fault:
    text = "all ranks of this axis get the same batch; give each rank its own, as a DistributedSampler does"
    return Fault(axis, "error", text, line=-1)


def _optimizer(record: StepRecord) -> Iterator[Fault]:
    changed = {item.path for item in record.parameters if item.ref.writes}  # as from masters in another dtype
    missing = tuple(item.path for item in record.gradients if item.path not in record.stepped | changed)
    if record.foreign and missing:
        text = (
            f"the optimizer steps {record.foreign} tensors that are no parameters of the model, which have stale "
            "values; make the optimizer after fully_shard or parallelize_module"
        )
        yield Fault("every axis", "error", text, line=len(record.lines), parameters=missing)


def _missing(record: StepRecord) -> Iterator[Fault]:
    if not record.gradients:
        text = "no parameter of the model has a gradient at the optimizer's step, or at the end of the step"
        yield Fault("every axis", "error" if record.stepped else "unknown", text, line=len(record.lines))


def _precisions(record: StepRecord, gradients: Sequence[Gradient]) -> Iterator[Fault]:
    """Warn of gradients whose reductions have several dtypes."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for item in gradients:
        if len({text.rpartition(" in ")[2] for text in item.reductions}) > 1:
            groups.setdefault(item.reductions, []).append(item.path)
    for texts, paths in groups.items():
        text = f"one gradient is summed in two precisions: {', '.join(texts)}"
        yield Fault("every axis", "warning", text, line=len(record.lines), parameters=tuple(paths))
