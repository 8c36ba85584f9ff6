"""Dynamo as the driver uses it: a code object per compiled function, and descriptions of a call's arguments."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import itertools
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.utils._pytree as pytree
from torch._dynamo import external_utils
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext
from torch.fx.experimental import _config as symbols

from daceml_train import collector
from daceml_train.errors import INTERNAL, DacemlError, internal
from daceml_train.frontends.torch import absent_gradients
from daceml_train.frontends.torch.capture import gradient_hooks, graph_leaves
from daceml_train.frontends.torch.capture.trace import silent
from daceml_train.frontends.torch.dynamo import (
    assumptions,
    attributes,
    cached_functions,
    called_natively,
    caught,
    changing_containers,
    coins,
    dropouts,
    float_math,
    floats,
    formats,
    generators,
    gradient_calls,
    graph_breaks,
    growing,
    guard_latency,
    instance_dicts,
    number_ranges,
    numpy_numbers,
    optimizers,
    polyfills,
    prints,
    recurrent,
    reentrant,
    retention,
    rounded,
    scalars,
    selection,
    size_limits,
    stored_guards,
    texts,
    versions,
)
from daceml_train.frontends.torch.dynamo.entering import entered, settings

RECOMPILATIONS = 64
"""Programs per module or step before Dynamo stops: modes, frozen sets of parameters and kinds of arguments."""

LIMITS = {"recompile_limit": RECOMPILATIONS, "skip_nnmodule_hook_guards": True}
"""Settings while a step is traced, which compares hooks itself."""

FAILURES = 2
"""How often TorchDynamo may stumble over a function before Python runs it for good."""

_KNOWN = inspect.signature(torch.compile).parameters
_copies = itertools.count()
_PATCHES: Any = (
    gradient_hooks,
    graph_leaves,
    absent_gradients,
    gradient_calls,
    prints,
    growing,
    changing_containers,
    optimizers,
    scalars,
    rounded,
    selection,
    numpy_numbers,
    reentrant,
    retention,
    size_limits,
    graph_breaks,
    gradient_calls,
    caught,
    coins,
    recurrent,
    float_math,
    floats,
    attributes,
    generators,
    cached_functions,
    number_ranges,
    texts,
    called_natively,
    versions,
    dropouts,
    guard_latency,
    instance_dicts,
    assumptions,
    stored_guards,
)
"""Modules that change what TorchDynamo does in traces of ours."""


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function under a code name of its own.

    Per code name, TorchDynamo stores what it has learned about sizes and how often it has compiled: without the copy,
    modules of one class would be compiled for varying sizes because they differ from one another.
    """
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_copies)}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def with_code(function: types.FunctionType, code: types.CodeType) -> types.FunctionType:
    """A function with the code that TorchDynamo generated for it, whose calls compare no guards."""
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def traced(function: Callable[..., Any], owner: object, backend: Callable[..., Any], **options: Any) -> Any:
    """`torch.compile` of a method of `owner`, independent of those of all other objects of its class."""
    known = {"recompile_limit": RECOMPILATIONS, "isolate_recompiles": True}
    options |= {name: value for name, value in known.items() if name in _KNOWN}
    method: Any = types.MethodType(with_own_code(function), owner)
    if torch._dynamo.trace_rules.check(method):  # PyTorch's own, which TorchDynamo calls from a function that all share
        method = with_own_code(_calling(method))
    return compiled(method, backend, **options)


def _calling(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        return method(*arguments, **keywords)

    return functools.wraps(method, updated=())(call)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that is a method of the object which holds the traced code, and does not keep this object alive.

    TorchDynamo keeps backends with the code, where Python's search for cycles does not find them.
    """
    reference = weakref.WeakMethod(method)

    @functools.wraps(method, updated=())
    def call(*arguments: Any) -> Any:
        found = reference()
        assert found is not None
        return found(*arguments)

    del call.__wrapped__
    return call


def compiled(function: Callable[..., Any], backend: Callable[..., Any], limits: Any = None, **options: Any) -> Any:
    """`torch.compile`, with the settings of `tracing`, and `limits` of TorchDynamo, while it traces.

    A call of compiled code then costs no more than its guards.
    """
    known = torch._dynamo.eval_frame.cached_backends
    count = len(known)
    result = torch.compile(function, backend=backend, **options)
    if len(known) > count:
        known.popitem()  # kept for ever, to call `reset` of it, which none of ours has
    cells = dict(zip(result.__code__.co_freevars, result.__closure__ or (), strict=True))
    if "callback" in cells:
        whole = options.get("fullgraph") or getattr(backend, "alone", False)
        note = None if whole else getattr(backend, "break_off", None)
        own = getattr(function, "__code__", None)
        inner = cells["callback"].cell_contents
        cells["callback"].cell_contents = _Callback(inner, limits or {}, own, note, lambda: settings(cells))
        return entered(result, cells)

    @functools.wraps(result)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with torch._dynamo.config.patch(limits or {}), tracing():
            return result(*arguments, **keywords)

    return call


class _Callback:
    """What TorchDynamo calls for a function that it has no code for, with our settings.

    Python runs a function over which TorchDynamo stumbles, with a `note` of why. Only an error about the outermost
    function, whose code is `own`, reaches the caller: nothing has run then, and the call can be repeated.
    """

    def __init__(
        self, callback: Callable[..., Any], limits: dict[str, Any], own: Any, note: Any, around: Callable[[], Any]
    ) -> None:
        functools.wraps(callback)(self)
        self._torchdynamo_orig_backend = callback  # by which TorchDynamo finds whose code it is
        self.limits, self.own, self.note, self.around = limits, own, note, around
        self.failures: collections.Counter[int] = collections.Counter()

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        with self.around(), torch._dynamo.config.patch(self.limits), tracing(), collector.paused():
            try:
                return self._torchdynamo_orig_backend(frame, *arguments)
            except Exception as error:
                code = frame.f_code
                if self.note is None or code is self.own or code.co_filename == external_utils.__file__:
                    raise  # also about the wrapper around a function of PyTorch's
                self.note(reason(error))
                self.failures[id(code)] += 1  # an argument may be at fault once
                return ConvertFrameReturn(apply_to_code=self.failures[id(code)] > FAILURES)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """The settings while Dynamo may trace.

    Recurrent modules are decomposed; gradients inside a function are a part of its graph; sizes that are equal by
    chance, as a batch of as many samples as there are features, stay distinct; and PyTorch does not log tracebacks of
    failed traces: the error itself reaches the user.
    """
    polyfills.install()
    formats.install()
    config = torch._dynamo.config
    before = config.allow_rnn, symbols.use_duck_shape
    config.allow_rnn, symbols.use_duck_shape = True, False
    options: dict[str, Any] = {
        "trace_autograd_ops": True,
        "reorderable_logging_functions": {*config.reorderable_logging_functions, print},
        "capture_scalar_outputs": True,
        "allow_unspec_int_on_nn_module": True,  # a module's counter is an operand once it has changed
        "record_runtime_overhead": False,  # two marks for a profiler around each graph, which every call waits for
    }
    options = {name: value for name, value in options.items() if hasattr(config, name)}  # not all in every version
    theirs = {name: getattr(config, name) for name in options}
    for name, value in options.items():
        setattr(config, name, value)
    try:
        with silent(), contextlib.ExitStack() as ours:
            for patch in _PATCHES:
                ours.enter_context(patch.traces)
            yield
    finally:
        config.allow_rnn, symbols.use_duck_shape = before
        for name, value in theirs.items():
            setattr(config, name, value)


def recompilation() -> str:
    """Why Dynamo compiles what it compiles now once more, as it says it; empty for the first time."""
    current = CompileContext.current_compile_id()
    if current is None or not current.frame_compile_id:
        return ""
    noted = get_metrics_context()._metrics.get("recompile_reason")
    first = str(noted or "").split("\nUser stack trace")[0].split(" (HINT")[0]
    return " ".join(first.partition(": ")[2].split()) or "its guards do not hold"


def guards(code: types.CodeType) -> list[str]:
    """The guards that Dynamo checks before it runs the most recent compilation of this code, with the user's line
    where it is known.
    """
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(code)
    if not entries:
        return []
    found: dict[str, None] = {}  # in order, each once
    waiting: list[Any] = [entries[0].guard_manager.root]  # the newest entry comes first
    while waiting:
        manager = waiting.pop()
        for guard in manager.get_leaf_guards():
            found |= dict.fromkeys(" ".join(str(part).split()) for part in guard.verbose_code_parts())
        waiting += reversed(manager.get_child_managers())
    return list(found)


def first_to_run(code: types.CodeType, scope: dict[str, Any], holding: Any = None) -> Any:
    """The guards of the compilation of this code that Dynamo would run in this scope; None if it would compile.

    Those of `holding` are known to hold.
    """
    entries = (e.guard_manager for e in torch._dynamo.eval_frame._debug_get_cache_entry_list(code))
    return next((guards for guards in entries if guards is holding or guards.check(scope)), None)


def frame() -> int | None:
    """Which of the user's functions Dynamo is compiling now, as a number."""
    current = CompileContext.current_compile_id()
    return None if current is None else current.frame_id


def failing_guard(check: Callable[[dict[str, Any]], bool], scope: dict[str, Any]) -> str:
    """Which of the conditions of a guard manager's `check` fails; empty if it does not say."""
    try:
        parts = check.__self__.check_verbose(scope).verbose_code_parts  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # not in every version
        return ""
    return str(parts[0]).split("  #")[0].strip() if parts else ""


def has_effects(code: types.CodeType, besides: Collection[str] = ()) -> bool:
    """Whether code that Dynamo generated does more, after its one graph has run, than assemble results.

    What the user's code assigned, appended or printed stands there; a program cannot repeat it. Attributes under the
    names `besides` may be assigned.
    """
    instructions = list(dis.get_instructions(code))
    ran = [i for i, x in enumerate(instructions) if x.opname == "STORE_FAST" and x.argval == "graph_out_0"]
    acting = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR", "CALL")
    later = instructions[ran[0] :] if ran else []
    own = (x for x in later if x.opname != "STORE_ATTR" or x.argval not in besides)
    return not ran or any(x.opname.startswith(acting) for x in own)


_OURS = f"{Path(collector.__file__).parent}/"
"""The folder of this package."""
_RAISED = re.compile(r"""got (\w+)\((['"])(.*?)\2\)""", re.DOTALL)
"""The error of an operator that TorchDynamo computes sizes with."""


def reason(error: BaseException, ours: bool = False) -> str:
    """What an error of Dynamo or of ours says, in a paragraph, with the user's line.

    `ours`: the error was raised by this package; an error that Dynamo received from its backend was, too.
    """
    cause, where = error, ""
    while True:
        ours = ours or isinstance(cause, BackendCompilerFailed)
        stack = getattr(cause, "real_stack", None)
        theirs = [frame for frame in stack or () if not frame.filename.startswith(_OURS)]
        if theirs and not where:
            where = f" (at {Path(theirs[-1].filename).name}:{theirs[-1].lineno})"
        following = cause.__cause__ or getattr(cause, "inner_exception", None)
        if following is None or isinstance(cause, DacemlError):
            break
        cause = following
    kind = "" if isinstance(cause, DacemlError) else f"{type(cause).__name__}: "
    paragraph = str(cause).strip().split("\n\n")[0]
    explained = graph_breaks.explained(paragraph)
    own = explained in (graph_breaks.DECIDED, graph_breaks.REPEATED)
    text = str(explained) if own else kind + (explained or paragraph)
    if isinstance(cause, TorchRuntimeError) and (raised := _RAISED.search(str(cause))):
        text = f"{raised[1]}: {raised[3]}"
    text = f"{INTERNAL}, {text}" if ours and internal(cause) else text
    return text if " (at " in text else text + where


SHOWN = 16
"""The most arguments that a message describes."""


def describe(arguments: Sequence[Any]) -> str:
    """The arguments of a call, for error messages."""
    leaves = pytree.tree_leaves(list(arguments))
    shown = [f"argument {i}: {_describe(leaf)}" for i, leaf in enumerate(leaves[:SHOWN])]
    shown += [f"and {len(leaves) - SHOWN} more"] if len(leaves) > SHOWN else []
    return ", ".join(shown) or "no argument"


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        place = "" if leaf.device.type == "cpu" else f" on {leaf.device}"
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{place}"
    return type(leaf).__name__
