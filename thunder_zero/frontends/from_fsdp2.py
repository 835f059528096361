"""FSDP2's names, with what to use here: a table that errors quote and docs/from-fsdp2.md prints.

In: a method or an argument of FSDP2 that a user tries here. Out: the sentence of its row::

    model.unshard()     ->  AttributeError: Net has no unshard, a name of FSDP2; here: nothing: each forward ...
    compile(mp_policy=) ->  TypeError: mp_policy is an argument of FSDP2; here: mixed_precision=tz.MixedPrecision(...)
"""

from __future__ import annotations

import re

# As docs/from-fsdp2.md prints them: what FSDP2 has, and what to use here.
ROWS: tuple[tuple[str, str], ...] = (
    (
        "`fully_shard` per block, then on the model",
        "`tz.ZeroTransform()`: each repeated block is a *unit*, whose parameters travel together, and the rest is one "
        "more; `unit_of=` names other units",
    ),
    ("`reshard_after_forward=True`, root included", "`stage=3, reshard_after_forward=True`"),
    (
        "`reshard_after_forward=None`, the default: the root stays gathered",
        "`stage=3`, the default: the last units stay gathered, as many as do not raise the peak memory of gathered "
        "parameters",
    ),
    ("`reshard_after_forward=False`", "`stage=2`"),
    (
        "`set_reshard_after_forward`, `set_unshard_in_backward`",
        "before sharding: `reshard_after_forward=True`, or `keep_unsharded=` for units that stay gathered",
    ),
    (
        "`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`",
        "`prefetch=2`: units gathered ahead in both phases of a step; `in_flight_bytes=` limits their memory",
    ),
    (
        "`unshard`, `reshard`, `reset_iter_state`",
        "nothing: forward and backward gather and free; `with tz.full_parameters(model) as module:` gives full values",
    ),
    (
        "`mp_policy=MixedPrecisionPolicy(...)`, per `fully_shard`",
        "`mixed_precision=tz.MixedPrecision(...)`, with the same fields; `overrides=` per submodule",
    ),
    ("`set_requires_gradient_sync(False)`", "`with model.no_sync():` around forward and backward"),
    (
        "`set_requires_gradient_sync(False)` and `set_reshard_after_backward(False)`",
        "`model.no_sync()` and `reshard_after_backward=False` (stage 2)",
    ),
    (
        "`set_is_last_backward`, `set_requires_all_reduce`",
        "`with model.no_sync():` around all micro-batches but the last",
    ),
    (
        "`set_gradient_divide_factor`, `set_reduce_scatter_divide_factor`, `set_force_sum_reduction_for_comms`",
        "nothing: a gradient is the mean over all ranks; scale the loss for another factor",
    ),
    (
        "`set_reduce_scatter_max_input_buffers`",
        "`in_flight_bytes=` limits the memory of reductions in flight; `bucket_bytes=` cuts them",
    ),
    (
        "`set_reduce_scatter_unused_params`",
        "nothing: all ranks run the same program, so a parameter is used on all of them or on none",
    ),
    (
        "`set_custom_all_gather`, `set_custom_reduce_scatter`",
        "`transport=`: a transport of one's own",
    ),
    (
        "`set_all_reduce_hook`, `set_post_optim_event`, `set_separate_reduce_scatter_group`, "
        "`set_allocate_memory_from_process_group_for_comm`, `set_symm_mem_for_comm`",
        "nothing: collectives are lines of the trace, which the schedule orders and torch's process group sends",
    ),
    ("`offload_policy=CPUOffloadPolicy()`", "`cpu_offload=True`"),
    ("`ignored_params={parameter, ...}`", '`ignored=("router", ...)`, paths of parameters or submodules'),
    ("HSDP: `mesh` of two dimensions (replicate, shard)", "the same `mesh=`"),
    (
        "`parallelize_module`, then `fully_shard` on a mesh of (dp, tp); its names by `dp_mesh_dims=`",
        "the same `parallelize_module`, then `tz.compile(module, mesh=mesh)`: [tensor-parallel.md](tensor-parallel.md)",
    ),
    ("`shard_placement_fn=`", "nothing: dimension 0 is sharded"),
    (
        "meta device, `to_empty`, `reset_parameters`",
        "meta device; `init=` or `weights=` give the values, shard by shard",
    ),
    (
        "DTensors of `parameters()` and `state_dict()`, torch's tools for them",
        "the same, such as `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`: [torch-tools.md](torch-tools.md)",
    ),
    ("`clip_grad_norm_`, a method of FSDP1", "`tz.clip_grad_norm_(model, max_norm)`, or torch's function"),
    (
        "optimizers that raise on DTensors; averages of weights",
        "`tz.whole(torch.optim.Adafactor, ...)`; `AveragedModel(model)`, or `tz.EMA(model)` to evaluate with averages",
    ),
    (
        "`dcp.save`, `dcp.load`",
        "the same, or `tz.save`, `tz.load`: the same files, complete or absent, with checksums",
    ),
)
_NAME = re.compile(r"`(\w+)")
_SAME = "the same"  # rows of what works as it is
FROM_FSDP2 = {
    name: here.replace("`", "")
    for fsdp2, here in reversed(ROWS)
    if not here.startswith(_SAME)
    for name in _NAME.findall(fsdp2)
}
