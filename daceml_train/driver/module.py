"""The drop-in module: a subclass of the user's class, over the same parameters, whose forward is compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch._dynamo
from torch._dynamo.exc import SkipFrame, TorchDynamoException
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from daceml_train import logs
from daceml_train.driver.binding import differentiable_outputs, input_tensors
from daceml_train.driver.capture_only import capture_call
from daceml_train.driver.checking import check_module, forwards_of, same_forwards
from daceml_train.driver.distribution import processes
from daceml_train.driver.events import first_line, subject_of
from daceml_train.driver.faster import SLOWER, SLOWER_LEVELS, FasterModule
from daceml_train.driver.forests import Forests
from daceml_train.driver.function import CompiledGraph
from daceml_train.driver.goals import Differentiable, compile_differentiable
from daceml_train.driver.gradient_modes import leaving, transform_of_torch
from daceml_train.driver.inference import compile_inference
from daceml_train.driver.interrupts import raise_from_handler
from daceml_train.driver.native_call import needs_python
from daceml_train.driver.optimizer_updates import update_for
from daceml_train.driver.parallel_modules import compiled_inside, of_local_tensors, surrounded_modules
from daceml_train.driver.records import Record
from daceml_train.driver.recursion import Recursion, recursion_of
from daceml_train.driver.refused import Refused
from daceml_train.driver.sdfg_programs import sdfg_of
from daceml_train.driver.second_derivative import SecondDerivative
from daceml_train.driver.settings import Settings
from daceml_train.errors import DacemlError, Invalid, Unsupported, why
from daceml_train.frontends.torch import absent_gradients
from daceml_train.frontends.torch.capture import gradient_hooks
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.capture.checkpointed import as_eager
from daceml_train.frontends.torch.capture.copies import copied_inputs
from daceml_train.frontends.torch.capture.stages import Stages, stages_of
from daceml_train.frontends.torch.dynamo import graph_breaks, retention, scalars
from daceml_train.frontends.torch.dynamo.tracing import (
    describe,
    frame,
    guards,
    reason,
    recompilation,
    traced,
)
from daceml_train.lowering.device import CPU
from daceml_train.runtime.gpu.cuda_graph_pair import CudaGraphPairs
from daceml_train.runtime.placement import common_device

torch._dynamo.config.skip_nnmodule_hook_guards = False
"""PyTorch's default keeps compiled code valid when a hook is added to a module; a hook must never be ignored."""


METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""The methods of a module that are compiled: the others are what Lightning calls in place of `forward`."""


@dataclass
class ModuleState:
    """The state that `optimize` stores on the module it returns."""

    options: Settings
    plain: torch.nn.Module
    """The module as the user wrote it: what its methods, which may ask for `type(self)`, are called with."""
    backend: Backend
    compiled: dict[str, Callable[..., Any]]
    """The compiled form of each method of `METHODS` that the class has."""
    forwards: dict[type, Any] = field(default_factory=dict)
    """What the classes of the modules in it called when it was compiled."""
    worked: str = ""
    """The arguments of the first call, for messages about later ones."""
    recursions: dict[str, Recursion | None] = field(default_factory=dict)
    """Per method that was called, the recursion that it runs."""
    faster: FasterModule = field(default_factory=FasterModule)
    parts: dict[torch.nn.Module, Callable[..., Any]] | None = None
    """The compiled modules inside one that is parallel, once it was called; see `driver.parallel_modules`."""

    @property
    def source(self) -> type[torch.nn.Module]:
        """The user's class."""
        return type(self.plain)

    def trace(self, methods: Iterable[str]) -> None:
        """Compile these methods again at their next calls."""
        dynamic = self.options.dynamic
        self.compiled = {m: traced(getattr(self.source, m), self.plain, self.backend, dynamic=dynamic) for m in methods}
        for function in self.compiled.values():
            retention.forget_with(self, function)


STORM = 6
"""How many programs of one function may be compiled for one condition of which none runs more than twice."""

WEIGHTS_CHANGE = "the second program of the same: weights change from call to call, so it reads them as they are"
"""What is noted of a program that packs no weights."""


@dataclass
class Backend:
    """A TorchDynamo backend: captures, differentiates and compiles each graph Dynamo hands over.

    A graph that cannot be compiled runs in PyTorch: a warning says so once, and `breaks` stores the reason.
    """

    options: Settings
    records: list[Record] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    """Why TorchDynamo divided functions into several graphs, each reason once."""
    graphs: int = 0
    cuda_graphs: list[CudaGraphPairs] = field(default_factory=list)
    """The CUDA graphs of forward and backward passes, per captured graph."""
    programs: dict[int | None, list[CompiledGraph | Refused | Stages]] = field(default_factory=dict)
    """The last graphs of each function of the user's."""
    changes: dict[int | None, list[str]] = field(default_factory=dict)
    """Per function, why each of its programs was compiled, without numbers and values."""
    __name__ = "daceml_train"
    alone = False
    """Whether PyTorch may not run a call in its place."""

    def __reduce__(self) -> Any:
        """A copy compiles its methods again."""
        return type(self), (self.options,)

    def __call__(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        if any(isinstance(t, torch.Tensor) and t.is_meta for t in examples):  # shapes alone, as Keras builds a model
            self.graphs += 1
            return as_eager(module)
        recent, changes = self.programs.setdefault(frame(), []), self.changes.setdefault(frame(), [])
        changed = recompilation().split("  #")[0].split(" # ")[0]
        changes.append(subject_of(changed))
        del changes[: 1 - STORM]
        same = len(set(changes)) == 1  # one condition, and not a module that is called in many modes
        if len(recent) >= STORM and same and all(program.runs <= 2 for program in recent):
            reason = f"recompiled at nearly every call, since {changed} changes; PyTorch runs it"
            self.break_off(reason)
            raise SkipFrame(reason)
        self.graphs += 1
        try:
            if (divided := of_local_tensors(module, examples, self.compile)) is not None:
                return leaving(divided, module)
            result: CompiledGraph | Stages
            if (stages := stages_of(module)) is not None and not self.alone:
                stages.compile(examples, self.compile)
                result = stages
            else:
                result = self.compile(module, examples)
            self.programs[frame()] = [*recent[1 - STORM :], result]
            return leaving(result.entry if isinstance(result, CompiledGraph) else result, module)
        except Exception as error:  # training continues whatever fails in here
            raise_from_handler(error)
            scalars.start_over()
            # Unless the arguments are at fault, whose error PyTorch raises: shapes and types are traced more leniently.
            refused = Refused(as_eager(module), functools.partial(self.break_off, why(error)))
        self.programs[frame()] = [*recent[1 - STORM :], refused]
        return refused

    def break_off(self, reason: str) -> None:
        """Record, and warn once, why something runs in PyTorch."""
        if reason in self.breaks:
            return
        logs.warn(f"daceml_train runs a graph as PyTorch does: {reason}")
        logs.event(logs.BREAKS, reason)
        self.breaks.append(reason)

    def note(self, reason: str) -> None:
        """Record why PyTorch runs a call, and warn the first time."""
        if reason not in self.breaks:
            self.break_off(reason)

    def left(self, reason: str) -> None:
        """Record why PyTorch runs something that could be compiled: that is faster, so nobody is warned."""
        if reason not in self.breaks:
            self.breaks.append(reason)
            logs.event(logs.BREAKS, reason)

    def capture(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Captured:
        """The graph that is compiled for one of Dynamo's."""
        return capture(module, examples, self.options.randomness)

    def eager(self, module: torch.fx.GraphModule) -> Callable[..., Any]:
        """What runs where a compiled graph does not: for the gradient of a gradient, for instance."""
        return as_eager(module)

    def sdfg(self, captured: Captured, owner: object) -> Any:
        """What is compiled for a captured call of `owner`, as an SDFG of operators."""
        return sdfg_of(captured.graph, "module", captured.graph, owner)

    def compile(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> CompiledGraph:
        """The compiled form of one Dynamo graph. Raises `DacemlError` where it cannot be compiled."""
        captured = self.capture(module, examples)
        gradient_hooks.refuse_visible(module)
        given = input_tensors(captured, examples)
        if logs.speaks(logs.RECOMPILES) and (changed := recompilation()):
            logs.event(logs.RECOMPILES, f"{first_line(captured.graph)}: {changed}")
        device = common_device({captured.graph.inputs[name].path or name: t for name, t in given.items()})
        tensors = given if torch.is_grad_enabled() else {}
        wrt = [name for name, tensor in tensors.items() if tensor.requires_grad]
        again = None
        if wrt or device is not CPU:
            outputs = differentiable_outputs(captured)
            compiled = compile_differentiable(captured.graph, wrt, outputs, self.options, device)
        else:
            compiled = compile_inference(captured.graph, self.options)
            again = functools.partial(self._read_weights, captured)
        compiled.records[0].fallbacks = [(target, str(origin)) for target, origin in captured.fallbacks]
        compiled.records[0].constant_sizes = list(captured.constant_sizes)
        self.records += compiled.records
        others = self.options.cuda_graphs, self.note, copied_inputs(module), again
        left = None if self.alone or processes() > 1 else self.left  # processes have to go one way
        compiled_graph = CompiledGraph(captured, compiled, self.eager(module), *others, left)
        if wrt:
            compiled_graph.second = SecondDerivative(compiled_graph, self.options, device, self.records)
        compiled.records[0].needs_python = needs_python(compiled_graph) if device is CPU else ""
        self.cuda_graphs += [compiled_graph.cuda_graphs] if compiled_graph.cuda_graphs is not None else []
        return compiled_graph

    def _read_weights(self, captured: Captured) -> Differentiable:
        """A call without gradients, compiled for weights that change from call to call."""
        compiled = compile_inference(captured.graph, self.options, prepacks=False)
        compiled.records[0].notes.append(WEIGHTS_CHANGE)
        self.records += compiled.records
        return compiled


def optimized(module: torch.nn.Module, options: Settings, backend: Backend | None = None) -> torch.nn.Module:
    """A compiled twin of `module`: an object of a subclass of its class over the same attributes, modes and parameters.

    Names in `state_dict` are unchanged; the original stays usable. Nothing is compiled before the first call.
    """
    check_module("optimize", module)
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # its class changes with them
        raise Invalid(f"the parameters of the {type(module).__name__} have no sizes yet", advice="call it once before")
    if isinstance(module, torch._dynamo.OptimizedModule):  # by `torch.compile`, in whose place this one compiles
        module = module._orig_mod
    module = original(module)
    source = type(module)
    if "forward" in module.__dict__:
        raise Invalid(f"the {source.__name__} given to optimize has a forward set on the object, not on its class")
    names: dict[str, Any] = {"__module__": source.__module__, "__doc__": source.__doc__}
    names |= {"__qualname__": source.__qualname__, "__slots__": ("_daceml_train",)}
    methods = [name for name in METHODS if callable(getattr(source, name, None)) and name not in module.__dict__]
    names |= {name: _entry(getattr(source, name), name) for name in methods}
    names |= {} if hasattr(module, "sdfg") else {"sdfg": _sdfg}
    twin = cast(torch.nn.Module, object.__new__(type(source.__name__, (_Optimized, source), names)))
    object.__setattr__(twin, "__dict__", module.__dict__)
    backend = backend or Backend(options)
    state = ModuleState(options, module, backend, {})
    state.trace(methods)
    object.__setattr__(twin, "_daceml_train", state)
    update_for(twin, options)
    return twin


def state_of(module: Any) -> ModuleState | None:
    """The state that `optimize` stored on a module it returned; None for another object."""
    return getattr(module, "_daceml_train", None) if isinstance(module, _Optimized) else None


def original(module: torch.nn.Module) -> torch.nn.Module:
    """The module as the user wrote it, over the same attributes, if `module` came from `optimized`."""
    state = state_of(module)
    if state is None:
        return module
    if state.plain.__dict__ is not module.__dict__:
        object.__setattr__(state.plain, "__dict__", module.__dict__)
    return state.plain


def _entry(source: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The compiled form of a method; signature, annotations and docstring are those of the user's method."""

    @functools.wraps(source, updated=())
    def call(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger module, or another method, that is being compiled
            return source(self, *arguments, **keywords)
        return _call(self, source, name, arguments, keywords)

    return call


def _call(
    module: Any, source: Callable[..., Any], name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    state: ModuleState = module._daceml_train
    module, source = original(module), getattr(state.source, name)
    graphs = state.backend.graphs
    if transform := transform_of_torch():
        state.backend.note(f"a call inside {transform}")
        return source(module, *arguments, **keywords)
    if name not in state.recursions:
        forests = Forests(state.options, state.backend.records, state.backend.note)
        state.recursions[name] = recursion_of(module, source, forests, (*arguments, *keywords.values()))
    if (recursion := state.recursions[name]) is not None and recursion.serves:
        if _leaves_levels(module, state, recursion):
            return source(module, *arguments, **keywords)
        return recursion(module, source, arguments, keywords, state.backend.note)
    if not same_forwards(state.forwards):
        state.forwards = {}
        state.trace(list(state.compiled))
    if _gives_up(module, state, name):
        return source(module, *arguments, **keywords)
    if state.parts is None:
        inside = surrounded_modules(module)
        state.parts = {m: traced(type(m).forward, m, state.backend, dynamic=state.options.dynamic) for m in inside}
    try:
        with compiled_inside(state.parts) if state.parts else contextlib.nullcontext():
            wrapper = state.parts and isinstance(module, DistributedDataParallel)  # whose own code is PyTorch's
            result = (source.__get__(module) if wrapper else state.compiled[name])(*arguments, **keywords)
    except TorchDynamoException as error:
        result = _as_pytorch(module, state, source, error, arguments, keywords)
    except Exception as error:
        if getattr(error, "real_stack", None) is None:
            _note_arguments(error, state, arguments, keywords)
            raise
        result = _as_pytorch(module, state, source, error, arguments, keywords)  # TorchDynamo stumbled over user code
    finally:
        _keep_notes(state.backend)
    if state.backend.graphs != graphs:
        state.forwards = forwards_of(module.modules())
        if logs.speaks(logs.GUARDS):
            _log_guards(state, name)
    if not state.worked:
        state.worked = describe((*arguments, *keywords.values()))
        if not state.backend.graphs:
            where = f"{state.source.__name__}.{name}"
            state.backend.break_off(f"TorchDynamo found nothing that it can compile in {where}")
    return result


def _keep_notes(backend: Backend) -> None:
    """Keep what was noted while this module was traced, also in a call that raised: the next one may be another's."""
    for note in absent_gradients.traces.noted():
        backend.note(note)
    backend.graph_breaks += [n for n in graph_breaks.traces.noted() if n not in backend.graph_breaks]


def _gives_up(module: torch.nn.Module, state: ModuleState, name: str) -> bool:
    """Whether PyTorch runs a call of a module in pieces because that is faster, or to find out."""
    faster, backend = state.faster, state.backend
    if faster.compiled or backend.alone:
        return False
    if name != "forward" or not module.training or not torch.is_grad_enabled():
        faster.disturbed()
        return False
    if faster.compiled is False:
        return True
    if any(p.is_cuda for p in module.parameters()):
        faster.compiled = True
        return False
    runs = sum(program.runs for programs in backend.programs.values() for program in programs)
    takes = faster.takes_pieces(backend.graphs, runs, bool(backend.breaks or backend.graph_breaks))
    _note_slower(faster, backend, SLOWER)
    return not takes


def _leaves_levels(module: torch.nn.Module, state: ModuleState, recursion: Recursion) -> bool:
    """Whether PyTorch runs a call of a recursion because that is faster, or to find out."""
    faster = recursion.faster
    if faster.compiled is not None:
        return not faster.compiled
    training = module.training and torch.is_grad_enabled()
    if not training or recursion.refused or any(p.is_cuda for p in module.parameters()):
        faster.disturbed()
        return False
    takes = faster.takes_pieces(recursion.programs, recursion.tried, True)
    _note_slower(faster, state.backend, SLOWER_LEVELS)
    return not takes


def _note_slower(faster: FasterModule, backend: Backend, why: str) -> None:
    """Say why PyTorch runs a module, once that is settled."""
    if faster.compiled is False:
        backend.left(why)


def _log_guards(state: ModuleState, name: str) -> None:
    """Say what is compared before the graph that was compiled last."""
    function = getattr(state.compiled[name], "_torchdynamo_orig_callable", None)
    for condition in guards(function.__code__) if function is not None else ():
        logs.event(logs.GUARDS, f"{state.source.__name__}.{name}: {condition}")


def _sdfg(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """What the module computes on these arguments, as an SDFG of library nodes, for `daceml_train.from_sdfg`.

    One library node stands for an operator. Gradients are not in it: they follow from it.
    """
    state: ModuleState = self._daceml_train
    options = state.options
    seen = capture_call(original(self), arguments, options.randomness, keywords, options.dynamic is True)
    return state.backend.sdfg(seen.captured, self)


class _Optimized(torch.nn.Module):
    __slots__ = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        """The user's `__init_subclass__`, such as one that registers classes, does not hear of the twin's class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = state_of(self)
        assert state is not None
        if state.backend.alone:
            raise Invalid(
                "a module from an SDFG is neither copied nor pickled", advice="save the SDFG, and call from_sdfg"
            )
        return optimized, (original(self), state.options)


def _as_pytorch(
    module: torch.nn.Module,
    state: ModuleState,
    source: Callable[..., Any],
    error: Exception,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Any:
    """The call without a compiler: PyTorch's own error for arguments that do not fit, else the result."""
    raise_from_handler(error)
    if state.backend.alone:
        cause = error.__cause__ or getattr(error, "inner_exception", None)
        raise cause if isinstance(cause, DacemlError) else Unsupported(reason(error)) from error
    try:
        result = source(module, *arguments, **keywords)
    except Exception as own:
        _note_arguments(own, state, arguments, keywords)
        raise own from None
    state.backend.break_off(reason(error))
    return result


def _note_arguments(
    error: Exception, state: ModuleState, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    worked = f"; a call that worked took {state.worked}" if state.worked else ""
    error.add_note(f"daceml_train: the module was given {describe((*arguments, *keywords.values()))}{worked}")
