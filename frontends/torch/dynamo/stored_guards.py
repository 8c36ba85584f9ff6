"""TorchDynamo's guards for another process: what a trace depended on, compared and guarded there without a trace.

A trace is a function of the code that it ran and of the objects that it read. For each object that it read it has left
a guard, which says where the object is (`L['self'].model.act`) and in which way the trace depended on it. In another
process the same guards are built of the objects that are there. If each of these has the identity that it had when the
trace was made (`identities`), the trace would have been the same. The guards that were built hold for later calls, as
those of a trace do.

A trace that depended on an object that has no identity in another process, or on modes of PyTorch that wrap its
operators, is not stored.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo.guards
from torch._dynamo import pgo
from torch._dynamo.guards import CheckFunctionManager, ShapeCodeParts, convert_int_to_concrete_values
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch._dynamo.output_graph import OutputGraph, OutputGraphGuardsState
from torch._dynamo.source import AttrSource, get_global_source_name, get_local_source_name
from torch._guards import Guard, Source
from torch.fx.experimental.symbolic_shapes import _ShapeGuardsHelper
from torch.utils.weak import TensorWeakRef

from daceml_train.frontends.torch.dynamo.identities import Identities
from daceml_train.frontends.torch.traces import Traces

_CODE = {"FUNCTION_MATCH", "CLOSURE_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH"}
_CONSTANTS = {"CONSTANT_MATCH", "EQUALS_MATCH"}
_BY_ADDRESS = {*_CODE, "ID_MATCH", "NN_MODULE", "WEAKREF_ALIVE"}
"""Guards on the very object: a trace may have depended on all of it."""
GRAPH = "__compiled_fn"
"""How the names begin under which code that TorchDynamo generated finds its graph."""
_BUILTINS = "builtins"
_SIZES = "SHAPE_ENV"
"""The guard that says how sizes and numbers which vary are related."""

Scope = dict[str, Any]
"""The local variables of a traced function, by name."""


@dataclass(frozen=True)
class GuardRecipe:
    """The guards of a trace, without the objects that they guard."""

    guards: tuple[Guard, ...]
    key_order: frozenset[Source]
    """The dicts whose order of keys matters."""
    sizes: Mapping[Source, Any]
    """Sizes and strides of the tensors that the graph reads."""
    modules: Mapping[str, str]
    """The modules that TorchDynamo put under these global names; the built-in functions are one."""
    builtins: str
    arguments: tuple[Source, ...]
    """Where the operands of the graph are."""
    numbers: frozenset[int]
    """Which of them are Python numbers that the graph reads as tensors."""
    relations: tuple[str, ...]
    """What holds of sizes and numbers that vary, as expressions."""
    conditions: tuple[Any, ...]
    """What each guard said of the object that it guarded."""
    files: Mapping[str, str]
    """The files of the code that was traced, with hashes of their content."""


class _Recording(Traces):
    """Traces of which the guards are kept until the next one."""

    last: Any = None
    """The guards, and what else is needed to build them again."""

    def taken(self) -> Any:
        """The last of this thread's, which is then forgotten."""
        last, self.last = self.last, None
        return last

    def begin(self) -> None:
        """Forget what another trace has left."""
        self.last = None


@functools.cache
def _install() -> None:
    managers: Any = CheckFunctionManager
    init = managers.__init__

    @functools.wraps(init)
    def record(self: Any, code: types.CodeType, output_graph: Any, *arguments: Any, **keywords: Any) -> None:
        init(self, code, output_graph, *arguments, **keywords)
        if traces.depth and isinstance(output_graph, OutputGraph):  # not one that was stored
            order, sizes = output_graph.guard_on_key_order, output_graph.input_source_to_sizes_strides
            builtin = output_graph.name_of_builtins_dict_key_in_fglobals or ""
            # Not what was traced: nobody may ask for it, and it would live until the next trace.
            traces.last = (
                code,
                list(output_graph.guards),
                set(order),
                dict(sizes),
                builtin,
                list(output_graph.traced_code),
            )

    graphs: Any = OutputGraph
    install_global = graphs.install_global_unsafe

    @functools.wraps(install_global)
    def install_once(self: Any, name: str, value: Any) -> None:
        if not traces.depth or self.global_scope.get(name, traces) is not value:
            install_global(self, name, value)

    managers.__init__, graphs.install_global_unsafe = record, install_once


traces = _Recording(_install)
"""Traces whose guards may be stored."""


def sources_of(module: torch.fx.GraphModule) -> list[Source | None]:
    """Where TorchDynamo found the operands of a graph."""
    return [getattr(node, "_dynamo_source", None) for node in module.graph.nodes if node.op == "placeholder"]


def plain() -> bool:
    """Whether no mode of PyTorch changes what its operators do."""
    return (
        not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


@dataclass(frozen=True)
class Traced:
    """A function that was traced: its code, its local and its global variables, what its graph read and from where, and
    the code that TorchDynamo generated, if that is to be stored.
    """

    code: types.CodeType
    scope: Scope
    names: Scope
    sources: Sequence[Source | None]
    operands: Sequence[Any]
    generated: types.CodeType | None


def recipe_of(recorded: Any, trace: Traced) -> GuardRecipe | None:
    """What was recorded of a trace, if it can be stored."""
    code, every, order, read, builtin, files = recorded
    sources = tuple(source for source in trace.sources if source is not None)
    if code is not trace.code or len(sources) < len(trace.sources):
        return None
    if any("get_num_threads" in traced.co_names for traced in files):  # which is no condition elsewhere
        return None
    guards = sorted(every, key=Guard.sort_key)
    used = map(get_global_source_name, [*(g.originating_source for g in guards), *sources, *order])
    modules = _modules({*filter(None, used), *_generated_names(trace)}, trace)
    conditions = _conditions(guards, trace.scope, trace.names)
    found = _values(sources, trace.scope, trace.names)
    if modules is None or conditions is None or found is None:
        return None
    numbers = frozenset(i for i, value in enumerate(found) if isinstance(value, int | float) and _is_tensor(trace, i))
    if not all(map(_same, _operands(found, numbers), trace.operands)):
        return None
    sizes = {
        source: {name: tuple(map(convert_int_to_concrete_values, numbers)) for name, numbers in of.items()}
        for source, of in read.items()
    }
    return GuardRecipe(
        guards=tuple(map(_unbound, guards)),
        key_order=frozenset(order),
        sizes=sizes,
        modules=modules,
        builtins=builtin,
        arguments=sources,
        numbers=numbers,
        relations=tuple(text for g in every if g.create_fn_name() == _SIZES for text in g.code_list or ()),
        conditions=conditions,
        files=_files(files),
    )


def rebuilt(recipe: GuardRecipe, code: types.CodeType, scope: Scope, names: Scope) -> tuple[Any, Sequence[Any]] | None:
    """The guards on the objects that are here, and the operands of the graph; None if the trace would be another one.

    Adds the modules to the global variables `names`, as TorchDynamo does.
    """
    if any(_content(file) != content for file, content in recipe.files.items()):
        return None
    for name, module in recipe.modules.items():
        value: Any = vars(builtins) if module == _BUILTINS else sys.modules.get(module)
        if value is None or names.setdefault(name, value) is not value:
            return None
    values = _values(recipe.arguments, scope, names)
    if values is None or not all(map(functools.partial(_fits, recipe), recipe.arguments, values)):
        return None
    tensors = [id(value) for value in values if isinstance(value, torch.Tensor)]
    if len(set(tensors)) < len(tensors):  # one tensor in two places is one operand; guards on parameters do not tell
        return None
    try:
        manager = _built(recipe, code, scope, names)
    except Exception:  # an object is not where a guard looks for it, or is not as the guard wants it
        return None
    conditions = _conditions(sorted(recipe.guards, key=Guard.sort_key), scope, names)
    if conditions != recipe.conditions or not manager.check(scope):
        return None
    return manager, _operands(values, recipe.numbers)


def _built(recipe: GuardRecipe, code: types.CodeType, scope: Scope, names: Scope) -> Any:
    state = OutputGraphGuardsState(
        local_scope=scope,
        global_scope=names,
        torch_function_mode_stack=[],
        guard_on_key_order=set(recipe.key_order),
        input_source_to_sizes_strides=dict(recipe.sizes),
        dual_level=-1,
        functorch_layers=[],
        current_device=None,
        global_state_guard=torch._C._dynamo.guards.GlobalStateGuard(),
        _guards=cast(Any, recipe.guards),
        _aotautograd_guards=[],
        name_of_builtins_dict_key_in_fglobals=recipe.builtins or None,
        skip_guards_check=True,  # which is done below: TorchDynamo measures, too, within a trace
    )
    related = _ShapeGuardsHelper(list(recipe.relations))
    relations = ShapeCodeParts(related, related, None, python_fallback=True, shape_env_sources=[])
    return CheckFunctionManager(code, cast(Any, state), shape_code_parts=relations).guard_manager


def _fits(recipe: GuardRecipe, source: Source, value: Any) -> bool:
    """Whether an operand has the sizes that the trace is for, which the guards find out later and at more cost."""
    sizes = recipe.sizes[source]["size"] if source in recipe.sizes else None
    if sizes is None or not isinstance(value, torch.Tensor):
        return sizes is None
    return len(sizes) == value.ndim and all(n in (None, size) for n, size in zip(sizes, value.shape, strict=True))


def operands(recipe: GuardRecipe, scope: Scope, names: Scope) -> list[Any] | None:
    """What the graph is called with where guards that were built hold."""
    values = _values(recipe.arguments, scope, names)
    return None if values is None else _operands(values, recipe.numbers)


def _operands(values: Sequence[Any], numbers: Collection[int]) -> list[Any]:
    """What the graph is called with, as TorchDynamo's code calls it."""
    return [torch._as_tensor_fullprec(v) if i in numbers else v for i, v in enumerate(values)]


def note(recipe: GuardRecipe, code: types.CodeType, scope: Scope, names: Scope) -> None:
    """Let TorchDynamo know sizes and numbers of a call as if it had traced it: what differs later becomes a symbol."""
    entry: Any = pgo.FrameStateSizeEntry
    known: Any = pgo.get_code_state()[pgo.CodeId.make(code)].automatic_dynamic
    for source, sizes in recipe.sizes.items():
        if get_local_source_name(source) not in (None, "self"):
            size, stride = ([pgo.auto_dynamic if n is None else n for n in sizes[of]] for of in ("size", "stride"))
            known[source.name] |= entry.make_tensor(tuple(size), tuple(stride))
    constants = [g.originating_source for g in recipe.guards if g.create_fn_name() in _CONSTANTS]
    for source, value in _objects(constants, scope, names):
        if type(value) is int:
            known[source.name] |= entry.make_scalar(value)
    for source, value in _objects(recipe.arguments, scope, names):
        if type(value) is int:
            known[source.name] |= entry.make_scalar(pgo.auto_dynamic)


def floats_of(recipe: GuardRecipe, scope: Scope, names: Scope) -> Iterator[tuple[Any, str]]:
    """The objects whose floats the graph reads, and the names of these floats."""
    for position in recipe.numbers:
        source = recipe.arguments[position]
        if isinstance(source, AttrSource):
            for _, owner in _objects([source.base], scope, names):
                yield owner, source.member


def _files(codes: Sequence[types.CodeType]) -> dict[str, str]:
    """The files of code objects with hashes of their content; code that has no file is known by its guards alone."""
    contents = {name: _content(name) for name in {code.co_filename for code in codes}}
    return {name: content for name, content in contents.items() if content is not None}


def _content(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def _unbound(guard: Guard) -> Guard:
    """A guard without the object that it was made for."""
    create = guard.create_fn
    if isinstance(create, functools.partial):
        keywords = {name: value for name, value in create.keywords.items() if not isinstance(value, TensorWeakRef)}
        create = functools.partial(create.func, *create.args, **keywords) if keywords or create.args else create.func
    nothing: dict[str, Any] = dict.fromkeys(("guard_types", "code_list", "obj_weakref", "guarded_class_weakref"))
    return dataclasses.replace(guard, create_fn=create, stack=None, user_stack=None, _hash=None, **nothing)


def _modules(used: Iterable[str], trace: Traced) -> dict[str, str] | None:
    """The modules under global names that TorchDynamo added; None if it added something else."""
    found: dict[str, str] = {}
    for name in used:
        value = trace.names.get(name)
        if value is vars(builtins):
            found[name] = _BUILTINS
        elif isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            found[name] = value.__name__
        elif name not in trace.code.co_names:
            return None
    return found


def _generated_names(trace: Traced) -> Iterator[str]:
    """The global variables that generated code reads, besides its graph."""
    for instruction in dis.get_instructions(trace.generated) if trace.generated is not None else ():
        name = instruction.argval
        if "GLOBAL" in instruction.opname and name in trace.names and not name.startswith(GRAPH):
            yield name


def _values(sources: Sequence[Source], scope: Scope, names: Scope) -> list[Any] | None:
    found = [value for _, value in _objects(sources, scope, names)]
    return None if any(value is _ABSENT for value in found) else found


_ABSENT = object()


def _objects(sources: Sequence[Source], scope: Scope, names: Scope) -> Iterator[tuple[Source, Any]]:
    """The objects that are at some places; `_ABSENT` where none is."""
    variables, functions = {"L": scope, "G": names}, torch._dynamo.guards._get_closure_vars()
    seen: dict[Any, Any] = {}
    for source in sources:
        try:
            yield source, source.get_value(variables, functions, seen)
        except Exception:  # "no such attribute" is what some guards say
            yield source, _ABSENT


def _conditions(guards: Sequence[Guard], scope: Scope, names: Scope) -> tuple[Any, ...] | None:
    """What guards that were built say, in words for all processes; None if another process cannot tell."""
    install_generation_tagging_init()  # a trace does it: it replaces methods of all modules
    identities = Identities()
    found: list[tuple[str, str, str, str]] = []
    first: dict[int, int] = {}  # where the very object matters, so does which of them are one
    for guard, (source, value) in zip(
        guards, _objects([g.originating_source for g in guards], scope, names), strict=True
    ):
        typed = guard.create_fn_name() == "TYPE_MATCH" and value is not _ABSENT  # a number that varies, for instance
        identity = "absent" if value is _ABSENT else identities.of(type(value) if typed else value)
        if identity is None:
            if _BY_ADDRESS & {guard.create_fn_name(), *(guard.guard_types or ())}:
                return None
            identity = identities.kind(value)
        text = "\n".join(guard.code_list or ()) if guard.create_fn_name() != _SIZES else ""
        for address in (id(value), id(type(value)), id(getattr(value, "__code__", None))):
            text = text.replace(f", {address})", ", here)")
        if guard.create_fn_name() == "ID_MATCH":
            text += f"\nobject {first.setdefault(id(value), len(found))}"
        found.append((source.name, guard.create_fn_name(), identity, text))
    return tuple(found)


def _is_tensor(trace: Traced, position: int) -> bool:
    return isinstance(trace.operands[position], torch.Tensor)


def _same(found: Any, value: Any) -> bool:
    """Whether a value that was found is the graph's operand; numbers are passed as new tensors."""
    if found is value or (type(found) is type(value) is int and found == value):
        return True
    both = isinstance(found, torch.Tensor) and isinstance(value, torch.Tensor)
    return both and not found.ndim and found.dtype == value.dtype and bool(torch.equal(found, value))
