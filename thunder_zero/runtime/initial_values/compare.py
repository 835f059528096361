"""Cuts full values to this rank's rows, and compares digests of them between ranks."""

from __future__ import annotations

from torch import Tensor

from thunder_zero.comm import agree
from thunder_zero.comm.staging import rest_device
from thunder_zero.rows import own_rows
from thunder_zero.runtime.initial_values.data import PlainModel


class Cuts:
    """Full parameters cut to what is at rest; digests of them where every rank makes its own."""

    def __init__(self, model: PlainModel, *, are_read: bool) -> None:
        self._model = model
        self._are_read = are_read
        self._digests: dict[str, str] = {}

    def cut(self, full: Tensor, path: str) -> Tensor:
        """The parameter as it is at rest: in full, or this rank's rows."""
        if self._model.sender is None and self._model.ranks.everyone.size() > 1:
            self._digests[path] = agree.digest(full)
        param, plan, device = self._model.plan.by_name[path], self._model.plan, self._model.device
        if param.resident:
            return full.to(device)
        # Cut where the full values are: if the rows rest in host memory, the device never has all of them.
        return own_rows(full, param, plan).to(rest_device(param, plan, device))

    def compare(self) -> None:
        """Raise on every rank if ranks cut different values; a collective, unless one rank sent them.

        Raises:
            RuntimeError: naming the first parameter that differs.
        """
        if self._model.sender is None:
            facts = [self._fact(path, digest) for path, digest in self._digests.items()]
            agree.require_same(facts, self._model.ranks.everyone)

    def _fact(self, path: str, digest: str) -> agree.Fact:
        when = "before it builds the module"
        if self._model.module.get_parameter(path).is_meta:
            when = "before the transform, which draws them"
        remedy = f"seed every rank alike {when}, or pass broadcast_from=0"
        if self._are_read:
            remedy = "give every rank the same weights, or pass broadcast_from=0"
        return agree.Fact(f"the initial value of parameter {path!r}", f"weights with SHA-256 {digest}", remedy)
