"""Gathers a bucket of parameters, and decides which parameters need a gather.

::

    ZeRO-1, rank 1 of 2      buffer [ rows of rank 0 | of rank 1 ]   the optimizer steps this rank's rows in place;
                                      ^ stale after a step           a gather then updates the other rows
    ZeRO-2, accumulating     the first micro-batch gathers, later micro-batches read these tensors, the last frees them
    otherwise                every gather sends the whole bucket, and the program frees the results

If an optimizer may have stepped, ranks agree on the stale parameters before the next forward. Otherwise a rank without
stale parameters would not take part in the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.sharded.param import ShardedParam, changed_digests, note_digests
from thunder_zero.sharded.state import LocalState


class GatherBucket:
    """The parameters that one collective gathers. Either all of them are kept between forwards, or none."""

    def __init__(self, state: LocalState, paths: Sequence[str]) -> None:
        self._state, self._wire = state, state.wire
        self._params = tuple(state.params[path] for path in paths)
        self._planned = tuple(param.planned for param in self._params)
        self._keeps, self._is_resident = self._params[0].keeps, self._planned[0].resident
        self._decodes = state.plan.decodes(*self._planned)

    def encode(self, shards: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the payloads of the parameters that are due, and other shards unchanged."""
        if not self._keeps:
            return self._wire.encode(shards, self._planned)
        return self._replace(self._wire.encode, self._due(), shards)

    def launch(self, sent: Sequence[Tensor]) -> Waitable:
        """Launch the gather of the parameters that are due. The handle returns all parameters of the bucket."""
        if not self._keeps:
            return self._wire.gather(sent, self._planned)
        due = self._due()
        full = {index: param.full_value() for index, param in enumerate(self._params) if index not in due}
        handle = self._wire.gather(*self._select(due, sent)) if due else None
        self._note_launch([self._params[index] for index in due])  # after it, since rows are still stale if it fails

        def wait() -> tuple[Tensor, ...]:
            arrived = full | dict(zip(due, handle.wait() if handle else (), strict=True))
            results = tuple(arrived[index] for index in range(len(self._params)))
            return results if self._decodes else self._note_arrival(results)

        return WaitsBy(wait)

    def decode(self, arrived: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return full parameters: decode parameters that arrived as bytes, and return other parameters unchanged."""
        if not self._keeps:
            return self._wire.decode(arrived, self._planned)
        due = [index for index, tensor in enumerate(arrived) if tensor.dtype is torch.uint8]
        return self._note_arrival(self._replace(self._wire.decode, due, arrived))

    def _due(self) -> list[int]:
        for param in self._params:
            if not self._is_resident and not param.must_gather and param.is_written:  # ranks agree on resident ones
                param.expire()
        return [index for index, param in enumerate(self._params) if param.must_gather]

    def _select(self, due: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """Return the arguments of a function of ``Wire``: tensors, plans, and ZeRO-1's buffers to gather into."""
        into = [self._params[index].full for index in due] if self._is_resident else None
        return [tensors[index] for index in due], [self._planned[index] for index in due], into

    def _replace(self, function: Callable[..., Any], due: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replace the tensors at the indices ``due`` by the results of a function of ``Wire``."""
        results = list(tensors)
        for index, result in zip(due, function(*self._select(due, tensors)) if due else (), strict=True):
            results[index] = result
        return results

    def _note_launch(self, due: Sequence[ShardedParam]) -> None:
        for param in due:
            param.gather()
        if self._is_resident:
            return
        if self._state.synced:  # the last micro-batch, whose results are not kept: they arrive after they have expired
            for param in self._params:
                param.expire()
        else:
            self._state.holds_gathered = True
            note_digests(due)

    def _note_arrival(self, full: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for param, tensor in zip(self._params, full, strict=True):
            param.arrive(tensor)
        return tuple(full)


def agree_on_stale(state: LocalState) -> None:
    """Let ranks agree on the parameters that the next forward must gather.

    This is one small collective after each backward, since an optimizer may have stepped on some ranks only, for
    example if a scaler found an Inf. It also runs after a load or a write in place, which all ranks must make.

    Digests detect writes that bump no version, such as writes through ``.data``. If ranks agree in this call, such a
    write makes its parameter stale. Otherwise this function raises, since other ranks would not join a collective.
    """
    if state.holds_gathered:
        _require_unwritten(state)
    if not (params := state.resident):
        return
    stale = {param.path for param in params if param.must_gather or param.is_written}
    is_written, digests = changed_digests(params) if state.compares_digests else (None, ())
    if state.must_agree or stale:
        for path in state.on_any_rank([param.path for param in params], stale, is_written):
            state.params[path].expire()
        state.must_agree = False
        note_digests(params[: len(digests)], digests)
    elif is_written is not None and is_written.any():
        raise RuntimeError(
            f"parameter {_first(params, is_written)!r} was written to in a way that PyTorch does not see (.data, "
            f"numpy, a kernel), with no backward since ranks last compared their rows, so ZeRO-1 cannot know whether "
            f"all ranks did so; write in place, as in param.copy_(new) under torch.no_grad(), on every rank"
        )


def _require_unwritten(state: LocalState) -> None:
    """Raise RuntimeError if a write since ZeRO-2 gathered bumped no version: other ranks join no second gather."""
    params = (param for param in state.params.values() if not param.planned.resident)
    kept = [param for param in params if not param.must_gather and not param.is_written]
    if kept and (is_written := changed_digests(kept)[0]).any():
        raise RuntimeError(
            f"parameter {_first(kept, is_written)!r} was written to in the middle of an accumulation, in a way that "
            f"PyTorch does not see (.data, numpy, a kernel), and reshard_after_backward=False still holds its old "
            f"values; write to it after the last micro-batch, outside of no_sync"
        )


def _first(params: Sequence[ShardedParam], flags: Tensor) -> str:
    return params[int(flags.int().argmax())].path


def may_be_stale(state: LocalState, paths: Sequence[str]) -> list[bool]:
    """Return a flag for each path: False only if this rank knows that ZeRO-1's full value equals the shards.

    The flag is True for a parameter without such a value, and for one that shares no memory with the shard.
    """
    params = [state.params[path] for path in paths]
    seen = [param for param in params if param.shares_memory and not param.must_gather and not param.is_written]
    flags = changed_digests(seen)[0].tolist() if seen and state.compares_digests else [False] * len(seen)
    up_to_date = {param.path for param, is_written in zip(seen, flags, strict=True) if not is_written}
    return [path not in up_to_date for path in paths]
