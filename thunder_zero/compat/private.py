"""needed while: torch has no public API for the functions and classes in NAMES.

The table gives the purpose of each name, and the public API that torch lacks. Names are imported lazily::

    from thunder_zero.compat.private import aot_stage2_compile

No other file of the package imports a private name of torch. Exceptions are operators (``torch.ops``) and two modules
that torch's documentation uses, ``torch.utils._pytree`` and ``torch.utils._python_dispatch``. Files outside of
``compat/`` read only those private attributes of torch's or Lightning's objects that :data:`ATTRIBUTES` lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._C import DispatchKeySet as DispatchKeySet
    from torch._functorch.aot_autograd import JointWithDescriptors as JointWithDescriptors
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    StridedShard = _StridedShard

    StorageInfo = _StorageInfo


class Private(NamedTuple):
    """A private name of torch."""

    where: str  # the module and, after a colon, the name in the module
    purpose: str  # the purpose of the name in thunder_zero
    replacement: str  # the public API that torch lacks


ATTRIBUTES = {  # attributes of objects of torch or Lightning, with their purposes
    **dict.fromkeys(("_parameters", "_buffers", "_modules"), "the members of one module, without those below it"),
    **dict.fromkeys(("_forward_hooks", "_forward_pre_hooks"), "hooks of modules that a copy, or a trace, must keep"),
    **dict.fromkeys(("_backward_hooks", "_post_accumulate_grad_hooks"), "hooks of gradients"),
    **dict.fromkeys(("_flat_weights", "_flat_weights_names"), "a recurrent layer's second list of parameters"),
    "_non_persistent_buffers_set": "buffers that are in no state dict",
    **dict.fromkeys(("_base", "_is_view", "_version"), "whether a tensor is a view, and how often it was written to"),
    "_cdata": "whether two tensors share a storage, also without values; read in each forward",
    "_local_tensor": "the part of a DTensor without a history",
    **dict.fromkeys(("_schema", "_op"), "an operator's arguments, writes and inner operator"),
    "_optimizer_load_state_dict_post_hooks": "whether an optimizer has hooks of its own",
    "_is_profiler_enabled": "whether a profiler runs; read at each launch",
    "_backward_cls": "the nodes that an autograd function puts into graphs",
    "_pg_registry": "a mesh's references to process groups, which destroyed groups must lose",
    "_layer_sync": "Lightning's plugin for synchronised layers",
}


AOT = "torch._functorch._aot_autograd"
EXPORT = "AOTAutograd's export made public, with the second stage beside it"
DESCRIBED = "public descriptors of a joint graph's inputs and outputs"
CAPTURE = "public names by which torch.compile tells a backend about a capture"
SPLIT = "a public function that runs two functions as forward and backward of a joint graph"
INDUCTOR = "torch._inductor.standalone_compile for a graph that needs no AOTAutograd"
SIZES = "an option for code that holds for all sizes"
COALESCED = "a public way to launch collectives as one"
AUTOGRAD = "a public question about the backward that runs"

# fmt: off
NAMES = {name: Private(*row) for name, row in {
    # AOTAutograd: compat/aot/
    "aot_export_joint_with_descriptors": ("torch._functorch.aot_autograd:aot_export_joint_with_descriptors",
        "traces forward and backward in one graph", EXPORT),
    "JointWithDescriptors": ("torch._functorch.aot_autograd:JointWithDescriptors",
        "the joint graph of AOTAutograd", EXPORT),
    "aot_stage2_compile": (f"{AOT}.graph_compile:aot_stage2_compile",
        "runs two functions under AOTAutograd's handling of autograd, writes and views", SPLIT),
    "detect_fake_mode": ("torch._guards:detect_fake_mode", "the symbols of the running trace", EXPORT),
    "tensorify_python_scalars": ("torch.fx.passes._tensorify_python_scalars:tensorify_python_scalars",
        "computes with tensors where forward computes with floats that change", EXPORT),
    "is_opaque_node": (f"{AOT}.graph_compile:is_opaque_node", "whether a value is no tensor, such as a mesh", EXPORT),
    "runtime_wrappers": (f"{AOT}.runtime_wrappers:",
        "whose autograd function makes zeros of missing tangents", "an option that leaves them None"),
    "OutputType": (f"{AOT}.schemas:OutputType", "whether an output is a view of an input", EXPORT),
    "SubclassCreationMeta": (f"{AOT}.schemas:SubclassCreationMeta", "how a tensor subclass is put together", EXPORT),
    "GradAOTOutput": (f"{AOT}.descriptors:GradAOTOutput", "the input that a gradient belongs to", DESCRIBED),
    "PlainAOTInput": (f"{AOT}.descriptors:PlainAOTInput", "the number of an input of dynamo's graph", DESCRIBED),
    "PlainAOTOutput": (f"{AOT}.descriptors:PlainAOTOutput", "the number of an output of dynamo's graph", DESCRIBED),
    "SubclassGetAttrAOTInput": (f"{AOT}.descriptors:SubclassGetAttrAOTInput",
        "a part of a tensor subclass among inputs", DESCRIBED),
    "SubclassGetAttrAOTOutput": (f"{AOT}.descriptors:SubclassGetAttrAOTOutput",
        "a part of a tensor subclass among outputs", DESCRIBED),
    "TangentAOTInput": (f"{AOT}.descriptors:TangentAOTInput", "the output that a tangent belongs to", DESCRIBED),
    "aot_config": ("torch._functorch.config:", "no donated buffers, autocast of backward as in eager", EXPORT),
    "cleanup_recompute_tags": ("torch._functorch.partitioners:cleanup_recompute_tags",
        "ends a checkpoint where the next checkpoint begins", "tags that need no cleaning"),
    "must_recompute": ("torch._functorch.partitioners:must_recompute", "whether a checkpoint recomputes a node",
        "a public reading of the tag"),
    "run_and_save_rng_state": ("torch._prims.rng_prims:run_and_save_rng_state",
        "draws random numbers that backward draws again", "a public operator for it"),
    "run_with_rng_state": ("torch._prims.rng_prims:run_with_rng_state",
        "draws the numbers of forward again", "a public operator for it"),
    "set_grad_enabled": ("torch._C:_set_grad_enabled", "how dynamo writes torch.no_grad into a graph",
        "a public operator in graphs"),
    "get_mkldnn_enabled": ("torch._C:_get_mkldnn_enabled", "traces an LSTM without mkldnn",
        "torch.backends.mkldnn.flags without its warning of TF32"),
    "set_mkldnn_enabled": ("torch._C:_set_mkldnn_enabled", "traces an LSTM without mkldnn",
        "torch.backends.mkldnn.flags without its warning of TF32"),
    # dynamo: compat/dynamo.py
    "dynamo_config": ("torch._dynamo.config:", "limits, and calls that dynamo may reorder or ignore", CAPTURE),
    "BackendCompilerFailed": ("torch._dynamo.exc:BackendCompilerFailed",
        "our own error while dynamo compiles", CAPTURE),
    "DeletedGuardManagerWrapper": ("torch._dynamo.guards:DeletedGuardManagerWrapper",
        "lets dynamo forget a graph that has not run for long", "a limit of dynamo's cache that drops the oldest"),
    "cache_entries": ("torch._C._dynamo.eval_frame:_debug_get_cache_entry_list",
        "finds a graph that dynamo can forget", "a limit of dynamo's cache that drops the oldest"),
    "TorchRuntimeError": ("torch._dynamo.exc:TorchRuntimeError", "an operator's error while dynamo runs it", CAPTURE),
    "GraphCompileReason": ("torch._dynamo.output_graph:GraphCompileReason", "why a graph ended", CAPTURE),
    "get_compilation_metrics": ("torch._dynamo.utils:get_compilation_metrics", "why dynamo compiled again", CAPTURE),
    "graph_break_reasons": ("torch._dynamo.utils:graph_break_reasons", "where graphs ended", CAPTURE),
    "builder": ("torch._dynamo.variables.builder:", "takes a subclass of Tensor as a plain tensor", CAPTURE),
    "GetAttrVariable": ("torch._dynamo.variables.misc:GetAttrVariable",
        "calls methods of the name of torch's class", CAPTURE),
    "skip_frame": ("torch._dynamo.decorators:skip", "runs a frame as it is, and compiles the functions that it calls",
        "torch.compiler.disable(recursive=False) without a wrapper that dynamo compiles"),
    "TorchInGraphFunctionVariable": ("torch._dynamo.variables.torch:TorchInGraphFunctionVariable",
        "traces results written into slices", CAPTURE),
    "BuiltinVariable": ("torch._dynamo.variables.builtin:BuiltinVariable", "traces range of symbolic sizes", CAPTURE),
    "ConstantVariable": ("torch._dynamo.variables.constant:ConstantVariable", "a number that dynamo traces", CAPTURE),
    "SymNodeVariable": ("torch._dynamo.variables.tensor:SymNodeVariable", "a symbolic size that dynamo traces",
        CAPTURE),
    "autograd_functions": ("torch._dynamo._trace_wrapped_higher_order_op:",
        "traces autograd functions with outputs that are None", CAPTURE),
    "AutogradFunctionVariable": ("torch._dynamo.variables.misc:AutogradFunctionVariable",
        "puts an autograd function into a graph that it cannot trace", CAPTURE),
    "allowed_in_graphs": ("torch._dynamo.trace_rules:_allowed_callable_ids",
        "puts an autograd function into the graph, for one call",
        "torch.compiler.allow_in_graph for a block"),
    "Unsupported": ("torch._dynamo.exc:Unsupported", "dynamo's error for code that it cannot trace", CAPTURE),
    "CompileContext": ("torch._guards:CompileContext", "the number of the function that is compiled", CAPTURE),
    "TracingContext": ("torch._guards:TracingContext", "the user's line that is compiled", CAPTURE),
    "InstanceNorm": ("torch.nn.modules.instancenorm:_InstanceNorm", "recognises all instance norms",
        "a public base class"),
    "OptimizedModule": ("torch._dynamo.eval_frame:OptimizedModule", "whether a module is under torch.compile",
        "a public question"),
    "innermost_fn": ("torch._dynamo.eval_frame:innermost_fn", "whether a function is under torch.compile",
        "a public question"),
    # inductor: compat/inductor.py
    "compile_fx_inner": ("torch._inductor.compile_fx:compile_fx_inner", "compiles a graph without autograd",
        INDUCTOR),
    "select_decomp_table": ("torch._inductor.decomposition:select_decomp_table", "operators that inductor decomposes",
        INDUCTOR),
    "inductor_config": ("torch._inductor.config:", "compiles without its cache on disk", INDUCTOR),
    "InductorError": ("torch._inductor.exc:InductorError", "why inductor failed", INDUCTOR),
    "DisableAutocast": ("torch._C:_DisableAutocast", "traces operators as programs run them, without autocast",
        "torch.autocast for all devices at once"),
    "fx_config": ("torch.fx.experimental._config:", "code that is valid for all values of symbolic sizes", SIZES),
    "ShapeEnvGuardError": ("torch.fx.experimental.symbolic_shapes:_ShapeEnvGuardError",
        "the error for code that is valid for some sizes only", SIZES),
    "python_dispatcher": ("torch._dispatch.python:enable_python_dispatcher", "runs operators on symbolic sizes",
        SIZES),
    "tracing": ("torch._guards:tracing", "the context in which inductor finds symbols", SIZES),
    # operators: traces/
    "OpOverload": ("torch._ops:OpOverload", "an operator's schema, tags and name", "the type made public"),
    "HigherOrderOperator": ("torch._ops:HigherOrderOperator",
        "an operator that calls functions", "the type made public"),
    # autograd, functions, kernels: compat/torch/
    "peek_interpreter_stack": ("torch._C._functorch:peek_interpreter_stack", "whether torch.func or vmap is active",
        "a public question"),
    "will_engine_execute_node": ("torch._C:_will_engine_execute_node", "whether a backward adds to .grad", AUTOGRAD),
    "current_autograd_node": ("torch._C:_current_autograd_node", "the backward node whose operators run", AUTOGRAD),
    "get_sequence_nr": ("torch.autograd:_get_sequence_nr",
        "the forward operator that a backward's operator belongs to", AUTOGRAD),
    "create_work_from_future": ("torch._C._distributed_c10d:_create_work_from_future",
        "futures with values from a group that sends nothing", "a public constructor of works"),
    "get_dispatch_mode": ("torch._C:_get_dispatch_mode", "whether operators run on shapes alone", "a public question"),
    "fake_mode_key": ("torch._C:_TorchDispatchModeKey.FAKE", "whether operators run on shapes alone",
        "a public question"),
    "resolve_process_group": ("torch.distributed.distributed_c10d:_resolve_process_group",
        "the group of a functional collective", "a public function"),
    "running_backward": ("torch._C:_current_graph_task_id", "the number of the backward that runs, or -1", AUTOGRAD),
    "at_end_of_backward": ("torch.autograd:Variable._execution_engine.queue_callback",
        "calls a function when the running backward ends", "a public hook there"),
    "foreach_div_": ("torch:_foreach_div_", "divides many tensors in one call", "public foreach functions"),
    "chunk_cat": ("torch:_chunk_cat",
        "cuts many gradients into the rows of ranks in one call", "the function made public"),
    "flatten": ("torch._utils:_flatten_dense_tensors",
        "one vector of many gradients in one call", "the function made public"),
    "DispatchKeySet": ("torch._C:DispatchKeySet", "passes an operator on to the next kernels", "a public redispatch"),
    "dispatch_keyset_full_after": ("torch._C:_dispatch_keyset_full_after", "the dispatch keys of the next kernels",
        "a public redispatch"),
    "disable_current_modes": ("torch.utils._python_dispatch:_disable_current_modes",
        "computes real numbers beside a forecast", "a public way out of modes"),
    "make_wrapper_subclass": ("torch:Tensor._make_wrapper_subclass", "tensors of any strides, without memory",
        "a public way to make them"),
    # processes and shards: compat/torch/, sharded/, checkpoint/
    "coalescing_manager": ("torch.distributed.distributed_c10d:_coalescing_manager", "launches collectives as one",
        COALESCED),
    "c10d_world": ("torch.distributed.distributed_c10d:_world", "all groups; collectives left by a failed launch",
        COALESCED),
    "threaded_groups": ("torch.testing._internal.distributed.multi_threaded_pg:",
        "ranks as threads of one process, to compare gradients", "a public process group of threads"),
    "set_thread_isolation_mode": ("torch._C._distributed_c10d:_set_thread_isolation_mode",
        "a registry of groups for each thread", "a public process group of threads"),
    "set_pg_timeout": ("torch.distributed.distributed_c10d:_set_pg_timeout", "the timeout of collectives",
        "a public setter"),
    "REGISTRY_KEY": ("torch.distributed._composable.contract:REGISTRY_KEY", "refuses fully_shard of our models",
        "a public registry"),
    "custom_op_handlers": ("torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
        "shares a gradient scaler's found_inf between ranks", "a handler that shares for sharded gradients"),
    "clear_dtensor_caches": ("torch.distributed.tensor.debug:_clear_sharding_prop_cache",
        "forgets the sizes of a rank that was traced before", "a cache that tells the ranks of a mesh apart"),
    "DTensorSpec": ("torch.distributed.tensor._dtensor_spec:DTensorSpec",
        "makes a DTensor of local rows without a collective or a copy", "DTensor.from_local as cheap as that"),
    "TensorMeta": ("torch.distributed.tensor._dtensor_spec:TensorMeta",
        "a part of a DTensorSpec", "DTensor.from_local as cheap as that"),
    "StridedShard": ("torch.distributed.tensor.placement_types:_StridedShard",
        "places the rows of a slice, where torch's tensor parallelism slices rows", "a public placement, as FSDP2's"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem:_StorageInfo", "where a part lies in a checkpoint's file",
        "a public type"),
    "narrow_tensor_by_index": ("torch.distributed._shard._utils:narrow_tensor_by_index",
        "the part of a tensor that a checkpoint asks for", "a public function of torch.distributed.checkpoint"),
}.items()}
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = NAMES[name].where.partition(":")
    if module.startswith("torch._functorch"):
        import_module("torch._dynamo")  # first: their modules import each other
    home = import_module(module)
    globals()[name] = attrgetter(path)(home) if path else home
    return globals()[name]


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class of torch inside the block. A class may have inherited it."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
