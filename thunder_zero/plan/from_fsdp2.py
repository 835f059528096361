"""A table of FSDP2's names and their replacements, for errors and pages.

In: a method or an argument of FSDP2 that a user tries. Out: an error that quotes the table's row::

    model.unshard()     ->  AttributeError: Net has no unshard, which is a name of FSDP2; here: automatic (forward ...
    compile(mp_policy=) ->  TypeError: mp_policy is an argument of FSDP2; here: mixed_precision=tz.MixedPrecision(...)
"""

from __future__ import annotations

from typing import NamedTuple


class Replacement(NamedTuple):
    """A row of the table: a feature of FSDP2, and its replacement in thunder_zero."""

    text: str  # the replacement, in Markdown
    names: tuple[str, ...] = ()  # methods and arguments of FSDP2. Errors about these names quote ``text``
    title: str = ""  # the feature of FSDP2, in Markdown (default: ``names``)

    def markdown(self) -> str:
        """Return the row as a line of a table."""
        title = self.title or ", ".join(f"`{name}`" for name in self.names)
        return f"| {title} | {self.text} |"


ROWS = (
    Replacement(
        "`tz.ZeroTransform()`: the parameters of a *unit* are sent together; each repeated block is a unit, and the "
        "remaining parameters are another; `unit_of=` names other units",
        title="`fully_shard` per block, then on the model",
    ),
    Replacement("`stage=3, reshard_after_forward=True`", title="`reshard_after_forward=True`, root included"),
    Replacement(
        "`stage=3`, the default: the last units stay gathered if this does not raise the peak memory of gathered "
        "parameters",
        title="`reshard_after_forward=None`, the default: the root stays gathered",
    ),
    Replacement("`stage=2`", title="`reshard_after_forward=False`"),
    Replacement(
        "set before sharding: `reshard_after_forward=True`, or `keep_unsharded=` for units that stay gathered",
        ("set_reshard_after_forward", "set_unshard_in_backward"),
    ),
    Replacement(
        "`prefetch=2`: gather two units ahead in forward and backward; `in_flight_bytes=` limits the memory",
        ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
    ),
    Replacement(
        "automatic (parameters are gathered and freed in each phase); `with tz.full_parameters(model) as module:` "
        "gives full values",
        ("unshard", "reshard", "reset_iter_state"),
    ),
    Replacement(
        "`mixed_precision=tz.MixedPrecision(...)`, with the same fields; `overrides=` per submodule",
        ("mp_policy",),
        title="`mp_policy=MixedPrecisionPolicy(...)`, per `fully_shard`",
    ),
    Replacement(
        "`with model.no_sync():` around forward and backward",
        ("set_requires_gradient_sync",),
        title="`set_requires_gradient_sync(False)`",
    ),
    Replacement(
        "`model.no_sync()` and `reshard_after_backward=False` (stage 2)",
        ("set_reshard_after_backward",),
        title="`set_requires_gradient_sync(False)` and `set_reshard_after_backward(False)`",
    ),
    Replacement(
        "`with model.no_sync():` around all micro-batches but the last",
        ("set_is_last_backward", "set_requires_all_reduce"),
    ),
    Replacement(
        "not supported (a gradient is always the mean over all ranks): scale the loss instead",
        ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "set_force_sum_reduction_for_comms"),
    ),
    Replacement(
        "`in_flight_bytes=` limits the memory of reductions in flight; `bucket_bytes=` limits each bucket",
        ("set_reduce_scatter_max_input_buffers",),
    ),
    Replacement(
        "not needed (all ranks run the same program, so they use the same parameters)",
        ("set_reduce_scatter_unused_params",),
    ),
    Replacement("`transport=`: your own transport", ("set_custom_all_gather", "set_custom_reduce_scatter")),
    Replacement(
        "not supported (the schedule orders collectives, and torch's process group runs them)",
        (
            "set_all_reduce_hook",
            "set_post_optim_event",
            "set_separate_reduce_scatter_group",
            "set_allocate_memory_from_process_group_for_comm",
            "set_symm_mem_for_comm",
        ),
    ),
    Replacement("`cpu_offload=True`", ("offload_policy",), title="`offload_policy=CPUOffloadPolicy()`"),
    Replacement(
        '`ignored=("router", ...)`, paths of parameters or submodules',
        ("ignored_params",),
        title="`ignored_params={parameter, ...}`",
    ),
    Replacement("the same `mesh=`", title="HSDP: `mesh` of two dimensions (replicate, shard)"),
    Replacement(
        "the same `parallelize_module`, then `tz.compile(module, mesh=mesh)`: [tensor-parallel.md](tensor-parallel.md)",
        title="`parallelize_module`, then `fully_shard` on a mesh of (dp, tp); `dp_mesh_dims=` names its dimensions",
    ),
    Replacement(
        "not supported (dimension 0 is always sharded)", ("shard_placement_fn",), title="`shard_placement_fn=`"
    ),
    Replacement(
        "meta device, then `init=` or `weights=`, which fill one shard at a time",
        title="meta device, `to_empty`, `reset_parameters`",
    ),
    Replacement(
        "the same, for example `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`: "
        "[torch-tools.md](torch-tools.md)",
        title="DTensors in `parameters()` and `state_dict()`; torch's tools for DTensors",
    ),
    Replacement(
        "`tz.clip_grad_norm_(model, max_norm)`, or torch's function",
        ("clip_grad_norm_",),
        title="`clip_grad_norm_`, a method of FSDP1",
    ),
    Replacement(
        "`tz.whole(torch.optim.Adafactor, ...)`; `AveragedModel(model)`, or `tz.EMA(model)`",
        title="optimizers that raise on DTensors; averages of weights",
    ),
    Replacement(
        "the same, or `tz.save`, `tz.load`: the same format, written atomically, with checksums",
        title="`dcp.save`, `dcp.load`",
    ),
)
INSTEAD = {name: row.text.replace("`", "") for row in ROWS for name in row.names}  # FSDP2's name: text
