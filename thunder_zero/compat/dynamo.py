"""needed while: dynamo has no public API to lift its limits, or to tell why a graph ended."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from inspect import getfile
from pathlib import Path
from traceback import FrameSummary, extract_tb, format_list
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thunder_zero.compat.aot.nodes import hint, is_contiguous
from thunder_zero.compat.private import (
    AutogradFunctionVariable,
    BackendCompilerFailed,
    BuiltinVariable,
    CompileContext,
    ConstantVariable,
    DeletedGuardManagerWrapper,
    GetAttrVariable,
    GraphCompileReason,
    OptimizedModule,
    SymNodeVariable,
    TorchInGraphFunctionVariable,
    TorchRuntimeError,
    TracingContext,
    Unsupported,
    allowed_in_graphs,
    autograd_functions,
    builder,
    cache_entries,
    dynamo_config,
    get_compilation_metrics,
    graph_break_reasons,
    innermost_fn,
    replaced,
)

ANY_NUMBER = 1 << 30
MAX_QUOTED = 170  # characters of torch's message in our message
FRAME = re.compile(r'File "(.+)", line (\d+)')
NOT_USERS = tuple(f"{folder}/" for folder in (Path(getfile(torch)).parent, Path(__file__).parents[1]))
FAKES = logging.getLogger("torch._subclasses.fake_tensor")
LOGGING = re.compile(r"(debug|info|warning|warn|error|exception|critical|log)(_once|_advice)?")
NOT_TRACED = BackendCompilerFailed, TorchRuntimeError


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module, or the function set as its forward, is a result of ``torch.compile``."""
    return isinstance(module, OptimizedModule) or innermost_fn(module.forward) != module.forward


def capture(
    module: nn.Module,
    backend: Callable[..., Any],
    make_context: Callable[[], AbstractContextManager[None]],
    *,
    dynamic: bool | None = None,
    whole: bool = False,
) -> Callable[..., Any]:
    """Return a function that calls a module, whose forward dynamo captures. ``backend`` gets each graph.

    Programs of other models with equal code do not count for dynamo's limits. The attributes by which torch and
    Lightning mark a compiled module are removed. Programs run outside of the context that ``make_context`` returns.
    With ``whole``, a forward of more than one graph raises.
    """
    options: Any = {"dynamic": dynamic, "fullgraph": whole, "isolate_recompiles": True}
    captured: Any = torch.compile(module, backend=backend, **options)
    for mark in ("_is_torch_compile", "_compile_kwargs"):
        vars(module).pop(mark, None)
    callback = captured.dynamo_ctx.callback  # dynamo calls it for each function that it has not compiled
    convert = callback._torchdynamo_orig_backend  # its compiler of functions

    def converted(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return convert(*args, **kwargs)

    vars(converted)["_torchdynamo_orig_backend"] = convert._torchdynamo_orig_backend
    vars(converted)["_clone_with_backend"] = lambda _: converted  # DDP around the module would split its graphs
    callback._torchdynamo_orig_backend = converted
    return captured  # type: ignore[no-any-return]


def users_error(error: Exception) -> tuple[Exception, list[FrameSummary]]:
    """Return the operator's error if dynamo wrapped it, else the given error. Also return the user's stack."""
    if not isinstance(error, TorchRuntimeError):
        return error, list(extract_tb(error.__traceback__))
    raised: BaseException = error
    while (cause := raised.__cause__ or raised.__context__) is not None:
        raised = cause
    return raised if isinstance(raised, Exception) else error, list(error.real_stack)


def users_line(stack: str) -> tuple[str, int] | None:
    """Return the file and number of the user's line in the text of a stack trace.

    The user's line is the innermost line that is neither in torch nor in this package.
    """
    frames = [(file, int(number)) for file, number in FRAME.findall(stack) if not file.startswith(NOT_USERS)]
    return frames[-1] if frames else None


def failure(error: Exception, name: str, slices: int = 1) -> tuple[str, Exception]:
    """Return a sentence that says why a model could not be traced, and the error that caused it."""
    cause: Exception = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    raised, frames = users_error(cause)
    text, _, lines = str(raised).partition("While executing")
    line = users_line(lines if raised is cause else "".join(format_list(frames)))
    where, text = f" at {line[0]}:{line[1]}" if line else "", " ".join(text.split()).rstrip(".")
    text = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]} ..."
    action = "if the plain module trains, put what torch cannot trace into a function under torch.compiler.disable"
    if slices > 1 and type(raised) in (RuntimeError, ValueError):
        action = (
            f"forward has slices: choose a number of ranks of tensor parallelism (now {slices}) that divides the "
            f"heads, also those of keys, and hidden sizes"
        )
    return f"cannot trace {name}: {type(raised).__name__}{where}: {text}; {action}", raised


@contextmanager
def capturing(breaks: list[str], kinds: tuple[type[Tensor], ...]) -> Iterator[None]:
    """Change dynamo's settings inside the block, in which dynamo compiles one function of our model.

    All settings are restored afterwards, so that dynamo compiles other models with unchanged settings. ``breaks`` gets
    a sentence for each graph that dynamo ends. Dynamo treats the classes ``kinds`` of placeholders as plain parameters.
    """
    earlier = len(graph_break_reasons)  # dynamo keeps the reasons of all graphs of the process
    FAKES.addFilter(_is_no_error)
    # methods whose calls would end a graph, also of transformers
    logging_methods = {method for name, method in vars(logging.Logger).items() if LOGGING.fullmatch(name)}
    with (
        _plain_parameters(kinds),
        _parameters_of_fixed_sizes(),
        _methods_of_names(),
        _functions_in_graphs(kinds),
        replaced(autograd_functions, "autograd_function_backward_rewritten", _with_contiguous_gradients),
        _slices_written(),
        _steps_counted(),
        dynamo_config.patch(
            allow_rnn=True,
            skip_nnmodule_hook_guards=False,  # a model may hook its submodules in forward, as transformers do
            use_numpy_random_stream=True,  # draws the numbers that the plain module draws
            recompile_limit=ANY_NUMBER,  # a limit for one function: our caller drops the oldest program
            accumulated_recompile_limit=ANY_NUMBER,  # a limit for all models together
            ignore_logging_functions=dynamo_config.ignore_logging_functions | logging_methods,
            reorderable_logging_functions=dynamo_config.reorderable_logging_functions | {print, warnings.warn},
        ),
    ):
        try:
            yield
        finally:
            FAKES.removeFilter(_is_no_error)
            breaks += map(_sentence, graph_break_reasons[earlier:])


def _plain_parameters(kinds: tuple[type[Tensor], ...]) -> AbstractContextManager[None]:
    """Let dynamo treat tensors of these classes as plain tensors, or parameters, inside the block.

    Otherwise ``has_torch_function`` would be true in functions of torch that dynamo traces into, such as
    ``F.rms_norm``, and dynamo cannot trace the code that follows. ``type(w)``, unpacking (``a, b = w``) and methods
    that torch writes in Python (``w.norm()``) would also give other results.
    """
    home: Any = builder
    subclass_of = home.infer_subclass_type
    return replaced(home, "infer_subclass_type", lambda value: None if type(value) in kinds else subclass_of(value))


def _parameters_of_fixed_sizes() -> AbstractContextManager[None]:
    """Let dynamo keep the sizes of all parameters constant inside the block, also of classes other than nn.Parameter.

    Dynamo then calls a graph only with parameters of the sizes that it captured. A graph whose parameters had symbols
    for sizes would also run for a submodule of other shapes, whose programs are not those of the captured shapes.
    """
    home: Any = builder
    static_shape = home.tensor_always_has_static_shape

    def static_parameter(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, nn.Parameter):
            return True, None
        return static_shape(tensor, *args, **kwargs)

    return replaced(home, "tensor_always_has_static_shape", static_parameter)


def _methods_of_names() -> AbstractContextManager[None]:
    """Let dynamo call methods of a name of torch's, as in ``type(w).__module__.startswith("torchao.")``.

    Otherwise each such call ends a graph. peft's DoRA has one for each layer.
    """
    inherited: Any = GetAttrVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        of_torch = isinstance(self.obj, TorchInGraphFunctionVariable)
        text = getattr(self.obj.value, self.name, None) if of_torch else None
        if isinstance(text, str):
            return self.build(tx, text).call_method(tx, name, args, kwargs)
        return inherited(self, tx, name, args, kwargs)

    return replaced(GetAttrVariable, "call_method", call_method)


def _functions_in_graphs(kinds: tuple[type[Tensor], ...]) -> AbstractContextManager[None]:
    """Put an autograd function of a placeholder into the graph as one call, if dynamo cannot trace the function.

    AOTAutograd traces the call. Outside of graphs the function would read parameters that nothing gathers.
    """
    traced = AutogradFunctionVariable.call_apply

    @wraps(traced)
    def call_apply(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return traced(self, tx, args, kwargs)
        except Unsupported:
            if not any(_is_given(kinds, variable) for variable in (*args, *kwargs.values())):
                raise
        function = id(self.fn_cls)
        was_allowed = function in allowed_in_graphs
        allowed_in_graphs.add(function)
        try:
            return self.call_method(tx, "apply", args, kwargs)
        finally:
            if not was_allowed:
                allowed_in_graphs.remove(function)

    return replaced(AutogradFunctionVariable, "call_apply", call_apply)


def _is_given(kinds: tuple[type[Tensor], ...], variable: Any) -> bool:
    """Return whether a value that dynamo traces is an input of the graph, and of a class in ``kinds``."""
    node = variable.as_proxy().node if variable.is_tensor() else None
    grapharg = None if node is None else node.meta.get("grapharg")
    return grapharg is not None and isinstance(grapharg.example, kinds)


def _with_contiguous_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward that gets contiguous gradients. Dynamo's own wrapper fails if an output of forward is None."""

    def contiguous(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, *[None if grad is None else grad.contiguous() for grad in grads])

    return contiguous


def _slices_written() -> AbstractContextManager[None]:
    """Trace ``torch.mm(a, b, out=x[:, :n])`` as a copy into the slice, where dynamo would end the graph."""
    traced = TorchInGraphFunctionVariable.call_function

    @wraps(traced)
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        if out is None or not out.is_tensor() or not _is_strided(target := _example(out)):
            return traced(self, tx, args, kwargs)
        result = traced(self, tx, args, {name: value for name, value in kwargs.items() if name != "out"})
        if not result.is_tensor() or (_example(result).shape, _example(result).dtype) != (target.shape, target.dtype):
            return traced(self, tx, args, kwargs)  # torch resizes, casts or refuses
        return out.call_method(tx, "copy_", [result], {})

    return replaced(TorchInGraphFunctionVariable, "call_function", call_function)


def _example(variable: Any) -> Tensor:
    example: Tensor = variable.as_proxy().node.meta["example_value"]
    return example


def _is_strided(value: Tensor) -> bool:
    """Return whether a tensor of known sizes has gaps between its elements, or another order of dimensions."""
    return None not in map(hint, (*value.shape, *value.stride())) and not is_contiguous(value)


def _steps_counted() -> AbstractContextManager[None]:
    """Let ``range(start, size, step)`` specialise on the number of steps, instead of on a symbolic size.

    Dynamo unrolls the loop, so one program serves all sizes with this number of steps.
    """
    traced = BuiltinVariable.call_function

    @wraps(traced)
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.fn is range and len(args) == 3:
            start, stop, step = args = [arg.realize() for arg in args]
            is_known = isinstance(start, ConstantVariable) and isinstance(step, ConstantVariable)
            if is_known and isinstance(stop, SymNodeVariable) and hint(stop.sym_num) is not None and step.value > 1:
                steps = int((stop.sym_num - start.value + step.value - 1) // step.value)  # dynamo guards the number
                args[1] = ConstantVariable.create(start.value + max(steps, 0) * step.value)
        return traced(self, tx, args, kwargs)

    return replaced(BuiltinVariable, "call_function", call_function)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


class CompiledFrame(NamedTuple):
    """A compilation by dynamo: the function's number and code, and the number of the compilation."""

    function: int
    code: CodeType
    number: Any

    @staticmethod
    def now() -> CompiledFrame:
        number, codes = CompileContext.current_compile_id(), TracingContext.get_traced_code()
        return CompiledFrame(number.frame_id, codes[0], number)

    def reason(self) -> str | None:
        """Return why dynamo compiled the function again, or None for a first compilation, or an old compilation."""
        metrics = get_compilation_metrics()
        reasons = [metric.recompile_reason for metric in metrics if metric.compile_id == str(self.number)]
        if not reasons or not reasons[-1]:
            return None
        reason: str = reasons[-1].splitlines()[0].partition(": ")[2]  # behind dynamo's number
        return reason.partition("  #")[0].strip()

    def forget(self) -> None:
        """Make dynamo forget this compilation, so that an equal call compiles the function again."""
        for entry in cache_entries(self.code):
            guards = entry.guard_manager
            if entry.compile_id == self.number and guards.extra_state is not None:
                guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper("it has not run for long"))


def _sentence(ended: GraphCompileReason) -> str:
    where = f" at {ended.user_stack[-1].filename}:{ended.user_stack[-1].lineno}" if ended.user_stack else ""
    return f"dynamo ended a graph{where}: {ended.reason.strip().splitlines()[0]}"
