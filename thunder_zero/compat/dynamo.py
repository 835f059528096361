"""needed while: past a limit dynamo runs code without a graph, and says where and why in private.

In: a module, and a backend for its graphs. Out: a function that calls the module as captured; and, of each graph, the
user's line where it ended, why it was compiled again, and whether it holds for all grad modes.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from inspect import getfile
from pathlib import Path
from traceback import FrameSummary, extract_tb, format_list
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from thunder_zero.compat.private import (
    AutogradFunctionVariable,
    BackendCompilerFailed,
    CompileContext,
    DeletedGuardManagerWrapper,
    GraphCompileReason,
    TensorVariable,
    TorchInGraphFunctionVariable,
    TorchRuntimeError,
    TracingContext,
    Unsupported,
    allowed_in_graphs,
    builder,
    cache_entries,
    dynamo_config,
    get_compilation_metrics,
    graph_break_reasons,
)

ANY_NUMBER = 1 << 30
MOST = 200  # characters of torch's error in ours
FRAME = re.compile(r'File "(.+)", line (\d+)')
NOT_USERS = tuple(f"{folder}/" for folder in (Path(getfile(torch)).parent, Path(__file__).parents[1]))
FAKES = logging.getLogger("torch._subclasses.fake_tensor")
LOGGING = re.compile(r"(debug|info|warning|warn|error|exception|critical|log)(_once|_advice)?")
NOT_TRACED = BackendCompilerFailed, TorchRuntimeError

GRAD_MODE = frozenset(  # code with these names may have another graph in another grad mode
    (
        *("is_grad_enabled", "is_inference_mode_enabled", "is_inference", "requires_grad", "requires_grad_", "grad_fn"),
        *("is_leaf", "enable_grad", "set_grad_enabled", "inference_mode"),
    )
)


def capture(
    module: nn.Module,
    backend: Callable[..., Any],
    compiling: Callable[[], AbstractContextManager[None]],
    *,
    dynamic: bool | None = None,
    whole: bool = False,
) -> Callable[..., Any]:
    """Return a function that calls a module, whose forward dynamo captures.

    Programs that other models have of the same code do not count for dynamo's limits.

    Args:
        module: it loses the marks that torch and Lightning put on a compiled module.
        backend: gets each graph.
        compiling: returns the context in which dynamo compiles a function. Programs run outside of it.
        dynamic: as in ``torch.compile``.
        whole: raise where forward is more than one graph.
    """
    options: Any = {"dynamic": dynamic, "fullgraph": whole, "isolate_recompiles": True}
    captured: Any = torch.compile(module, backend=backend, **options)
    for mark in ("_is_torch_compile", "_compile_kwargs"):
        vars(module).pop(mark, None)
    callback = captured.dynamo_ctx.callback  # dynamo calls it for each function that it has not compiled
    callback._torchdynamo_orig_backend = _inside(compiling, callback._torchdynamo_orig_backend)
    return captured  # type: ignore[no-any-return]


def _inside(compiling: Callable[[], AbstractContextManager[None]], convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return dynamo's compiler of functions, which now runs in a context."""

    def converted(*args: Any, **kwargs: Any) -> Any:
        with compiling():
            return convert(*args, **kwargs)

    converted._torchdynamo_orig_backend = convert._torchdynamo_orig_backend  # type: ignore[attr-defined]
    return converted


def users_error(error: Exception) -> tuple[Exception, list[FrameSummary]]:
    """Return the error of the operator if dynamo wrapped it, or else the error itself; and the user's stack."""
    if not isinstance(error, TorchRuntimeError):
        return error, list(extract_tb(error.__traceback__))
    raised: BaseException = error
    while (before := raised.__cause__ or raised.__context__) is not None:
        raised = before
    return raised if isinstance(raised, Exception) else error, list(error.real_stack)


def users_line(stack: str) -> tuple[str, int] | None:
    """Return the file and number of the user's line in the text of a stack.

    It is the innermost line that is neither in torch nor in this package.
    """
    frames = [(file, int(number)) for file, number in FRAME.findall(stack) if not file.startswith(NOT_USERS)]
    return frames[-1] if frames else None


def failure(error: Exception, name: str, slices: int = 1) -> tuple[str, Exception]:
    """Return a sentence that says why a model could not be traced, and the error behind it.

    Args:
        error: what dynamo raised.
        name: the name of the model's class.
        slices: the number of ranks of tensor parallelism.
    """
    cause: Exception = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    raised, frames = users_error(cause)
    text, _, lines = str(raised).partition("While executing")
    line = users_line(lines if raised is cause else "".join(format_list(frames)))
    where, text = f" at {line[0]}:{line[1]}" if line else "", " ".join(text.split()).rstrip(".")
    text = text if len(text) <= MOST else f"{text[:MOST]} ..."
    action = "if the plain module trains, put what torch cannot trace into a function under torch.compiler.disable"
    if slices > 1 and type(raised) in (RuntimeError, ValueError):
        action = (
            f"forward has slices: choose a number of ranks of tensor parallelism (now {slices}) that divides the "
            f"heads, of queries and of keys"
        )
    if slices > 1 and isinstance(raised, RecursionError):
        action = "torch cannot trace slices of sizes that are symbols: pass dynamic=False, or give batches one shape"
    return f"cannot trace {name}: {type(raised).__name__}{where}: {text}; {action}", raised


@contextmanager
def capturing(breaks: list[str], kinds: tuple[type[Tensor], ...]) -> Iterator[None]:
    """Set dynamo up for a model of ours inside the block, in which it compiles one function.

    Everything is put back afterwards: other models are compiled by an unchanged dynamo.

    Args:
        breaks: gets one sentence for each graph that dynamo ends. It says where and why.
        kinds: the classes of placeholders. Dynamo treats their tensors as plain parameters.
    """
    earlier = len(graph_break_reasons)  # dynamo keeps the reasons of all that this process compiled
    FAKES.addFilter(_is_no_failure)
    with (
        _plain_parameters(kinds),
        _functions_in_graphs(kinds),
        _noted_questions(),
        dynamo_config.patch(
            allow_rnn=True,
            skip_nnmodule_hook_guards=False,  # a model may hook its submodules in forward, as transformers do
            use_numpy_random_stream=True,  # as the plain module draws
            recompile_limit=ANY_NUMBER,  # for one function: our caller drops the oldest program
            accumulated_recompile_limit=ANY_NUMBER,  # for all models together
            ignore_logging_functions=dynamo_config.ignore_logging_functions | _logging(),
            reorderable_logging_functions=dynamo_config.reorderable_logging_functions | {print, warnings.warn},
        ),
    ):
        try:
            yield
        finally:
            FAKES.removeFilter(_is_no_failure)
            breaks += map(_sentence, graph_break_reasons[earlier:])


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class of dynamo inside the block."""
    before = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _plain_parameters(kinds: tuple[type[Tensor], ...]) -> AbstractContextManager[None]:
    """Let dynamo treat tensors of these classes as plain tensors, or parameters, inside the block.

    Otherwise ``has_torch_function`` is true where a function of torch that dynamo traces into, such as ``F.rms_norm``,
    asks for it, and dynamo cannot trace the code that follows. Methods that torch has in Python (``w.norm()``), rows
    (``a, b = w``) and ``type(w)`` would not be a parameter's either.
    """
    home: Any = builder
    subclass_of = home.infer_subclass_type
    return _replaced(home, "infer_subclass_type", lambda value: None if type(value) in kinds else subclass_of(value))


def _functions_in_graphs(kinds: tuple[type[Tensor], ...]) -> AbstractContextManager[None]:
    """Put an autograd function that is given a placeholder into the graph as one call, if dynamo cannot trace it.

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

    return _replaced(AutogradFunctionVariable, "call_apply", call_apply)


def _is_given(kinds: tuple[type[Tensor], ...], variable: Any) -> bool:
    """Return whether a value that dynamo traces is an input of the graph, of one of these classes."""
    node = variable.as_proxy().node if variable.is_tensor() else None
    source = None if node is None else node.meta.get("grapharg")
    return source is not None and isinstance(source.example, kinds)


def floats_constant() -> Any:
    """Let dynamo make no symbols of floats, such as the epsilon of a norm, inside the block."""
    return dynamo_config.patch(specialize_float=True)


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Return whether a record is no error; torch logs an error that it then raises."""
    return record.levelno < logging.ERROR


def is_for_all_modes(graph: fx.GraphModule, forward: Any) -> bool:
    """Return whether a graph that was captured with gradients on is all of ``forward``, and holds with gradients off.

    Then no code around the graph runs, and no captured code asks for the mode. Call it while dynamo compiles the graph.
    """
    ended: Any = graph.compile_subgraph_reason
    codes = TracingContext.get_traced_code() or []
    is_whole = bool(codes) and codes[0] is forward.__code__ and not ended.graph_break
    asks = _questions() or any(GRAD_MODE & {*code.co_names} for code in codes)
    return is_whole and not asks


_asked: set[str] = set()  # questions about the grad mode since the last graph


def _questions() -> bool:
    """Return whether Python asked for the grad mode since the last call of this function."""
    asked = bool(_asked)
    _asked.clear()
    return asked


@contextmanager
def _noted_questions() -> Iterator[None]:
    """Note inside the block where captured Python asks whether gradients are on, or whether a tensor needs one.

    Code may call these functions by other names, so :data:`GRAD_MODE` alone does not find them.
    """
    handlers = TorchInGraphFunctionVariable._get_handlers()  # dynamo's own table, a dict
    answer = handlers[torch.is_grad_enabled]
    handlers[torch.is_grad_enabled] = _noted(answer)
    try:
        with _replaced(TensorVariable, "method_attr_requires_grad", _noted(TensorVariable.method_attr_requires_grad)):
            yield
    finally:
        handlers[torch.is_grad_enabled] = answer


def _noted(answer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(answer)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _asked.add(answer.__name__)
        return answer(*args, **kwargs)

    return noted


def without_compiling() -> Any:
    """Let dynamo raise a RuntimeError inside the block where it would compile something."""
    return torch.compiler.set_stance("fail_on_recompile")


class CompiledFrame(NamedTuple):
    """A compilation by dynamo: the function's number and code, and the number of the compilation."""

    function: int
    code: CodeType
    number: Any

    @staticmethod
    def now() -> CompiledFrame:
        """Return the compilation that dynamo is at."""
        number, codes = CompileContext.current_compile_id(), TracingContext.get_traced_code()
        return CompiledFrame(number.frame_id, codes[0], number)

    def reason(self) -> str | None:
        """Return why dynamo compiled the function again; None for a first compilation, or one that is long ago."""
        metrics = get_compilation_metrics()
        reasons = [metric.recompile_reason for metric in metrics if metric.compile_id == str(self.number)]
        if not reasons or not reasons[-1]:
            return None
        why: str = reasons[-1].splitlines()[0].partition(": ")[2]  # behind dynamo's number, before the user's line
        return why.partition("  #")[0].strip()

    def forget(self) -> None:
        """Let dynamo forget this compilation; an equal call compiles the function again."""
        for entry in cache_entries(self.code):
            guards = entry.guard_manager
            if entry.compile_id == self.number and guards.extra_state is not None:
                guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper("it has not run for long"))


def _sentence(ended: GraphCompileReason) -> str:
    """Return where and why dynamo ended a graph."""
    where = f" at {ended.user_stack[-1].filename}:{ended.user_stack[-1].lineno}" if ended.user_stack else ""
    return f"dynamo ended a graph{where}: {ended.reason.strip().splitlines()[0]}"


def _logging() -> set[Any]:
    """Return the methods of loggers, with those of transformers, which would end a graph; dynamo drops the calls."""
    return {method for name, method in vars(logging.Logger).items() if LOGGING.fullmatch(name)}
