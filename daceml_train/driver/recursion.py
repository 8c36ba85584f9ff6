"""Modules whose forward pass calls itself over data: recorded, and run level by level."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from daceml_train.driver.faster import LEVELS, FasterModule
from daceml_train.driver.forests import Forests
from daceml_train.frontends.torch.handlers import handles
from daceml_train.frontends.torch.recursion import columns
from daceml_train.frontends.torch.recursion.detect import MARKED, cycles, over_data, reachable
from daceml_train.frontends.torch.recursion.finished import Owned, computed
from daceml_train.frontends.torch.recursion.lazy import RECORDER, Lazy, record_by, recording
from daceml_train.frontends.torch.recursion.native_calls import values_given
from daceml_train.frontends.torch.recursion.outline import asks_for_types, outlined, with_codes, without_codes
from daceml_train.frontends.torch.recursion.paths import holding, located
from daceml_train.frontends.torch.recursion.recorder import Recorder
from daceml_train.frontends.torch.recursion.repeats import MISS
from daceml_train.frontends.torch.recursion.runs import Run
from daceml_train.frontends.torch.recursion.state import hooked_at_results
from daceml_train.frontends.torch.recursion.structures import Structures
from daceml_train.runtime.deep_calls import call_deeply
from daceml_train.runtime.records import functions as native_functions


class Recursion:
    """What is known of the recursion of a module's method."""

    def __init__(
        self,
        functions: Mapping[types.CodeType, types.FunctionType],
        programs: Forests | None = None,
        marked: bool = True,
        modules: Sequence[torch.nn.Module] = (),
    ) -> None:
        _use_native()
        self.structures = Structures(functions)
        self.structures.programs = programs
        self.marked = marked
        """Whether `recursive` names the functions."""
        whole = [function for code, function in functions.items() if function.__code__ is code]
        self.outlined = outlined(whole, self.structures.codes, self.structures.blocks, modules)
        self.refused = ""
        """Why PyTorch runs all calls."""
        self.left = 0
        """In how many calls PyTorch had to run the rest."""
        self.faster = FasterModule(LEVELS)
        self.tried = 0
        self.serves = True
        """Whether functions that were found call themselves, and compute something below such a call."""
        self.codes = [*functions, *self.outlined.values()]

    @property
    def programs(self) -> int:
        """How many programs were compiled."""
        forests = self.structures.programs
        return 0 if forests is None else int(forests.compiled)

    def __call__(
        self,
        module: torch.nn.Module,
        source: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> Any:
        """The method's result, batched by level."""

        def entry() -> Any:
            return source(module, *arguments, **keywords)

        if self.refused and not self.tried:
            self.tried += 1
            note(f"a recursion that PyTorch runs: {self.refused}")
        if not self.refused and torch.is_autocast_enabled("cpu"):
            note("a recursion under autocast, which PyTorch runs")
            return entry()
        if self.refused or recording() is not None:
            return source(module, *arguments, **keywords)  # within the recursion: `entry` is where it begins
        if torch.is_inference_mode_enabled():  # whose tensors a recording cannot keep for later calls
            with torch.inference_mode(False), torch.no_grad():
                found = self(module, source, arguments, keywords, note)
            return tree_map_only(torch.Tensor, torch.clone, found)
        modules = list(module.modules())
        if hooked_at_results(modules):
            note(
                "a recursion with hooks by register_backward_hook, which PyTorch runs; see register_full_backward_hook"
            )
            return entry()
        tensors = [*module.parameters(), *module.buffers()]
        owned = Owned(modules)
        recorder = Recorder(self.structures, tensors, entry.__code__, note, module)
        collecting = gc.isenabled()
        record_by(recorder)
        try:
            gc.disable()  # what is recorded is freed without it, and would make it examine all objects of the process
            with with_codes(self.outlined) as codes, values_given(), recorder:
                recorder.follow(codes)
                result = call_deeply(entry)
            record_by(None)
            result = computed(recorder, result)
        except Exception as error:
            if not recorder.eager and recorder.exposed.written():
                self.refused = "NumPy writes to a parameter or a buffer within a recursion; PyTorch runs all calls"
                note(self.refused)
            self._locate(error, source, arguments, keywords, recorder.failed)
            raise
        finally:
            record_by(None)
            owned.settle()
            if collecting:
                gc.enable()
        self.left += bool(recorder.eager)
        self.refused = recorder.eager if recorder.lasting or self.left >= LEFT else ""
        self.tried += 1
        found = self.structures.nested or (self.structures.inner and self.tried < TRIED)
        self.serves = self.marked or found or bool(recorder.eager)
        if recorder.looks:
            note("a recursion looks at values while it runs: it is batched between the looks")
        return result

    def _locate(
        self,
        error: Exception,
        source: Any,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        failed: list[Any],
    ) -> None:
        """Add the path of the node to an error; `failed` is what a call was given that failed after the recursion."""
        others = [code for code in self.structures.codes.values() if code not in self.structures.blocks]
        where = located(error, [*self.codes, *others], source, arguments, keywords)
        if isinstance(error, RecursionError):
            error.__traceback__ = _first(error.__traceback__, FRAMES)
            if where and "cycle" not in where:
                where += "; a function that calls itself by name may be deeper than one that does by way of a module"
        if failed and (found := holding(failed, str(error), source, arguments, keywords)):
            where = found
        if where:
            error.add_note(where)


@functools.cache
def _use_native() -> None:
    """Record natively from here on, where that is possible."""
    columns.use_native(native_functions(Lazy, Run, RECORDER, MISS))


TRIED = 4
"""In how many calls a function that was found has to call itself."""
LEFT = 3
"""After how many calls that PyTorch had to run the rest of it runs all, whatever the reasons."""
FRAMES = 20
"""How many frames of a recursion without end an error shows."""


def _first(trace: types.TracebackType | None, count: int) -> types.TracebackType | None:
    """The first frames of a traceback."""
    kept: list[types.TracebackType] = []
    while trace is not None and len(kept) < count:
        kept.append(trace)
        trace = trace.tb_next
    result: types.TracebackType | None = None
    for each in reversed(kept):
        result = types.TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def recursion_of(
    module: torch.nn.Module,
    source: Callable[..., Any],
    programs: Forests | None = None,
    arguments: Sequence[Any] = (),
) -> Recursion | None:
    """The recursion below a method; `programs` compiles its levels. None if there is none.

    That is the functions that `recursive` names, and those that call themselves by name, if `arguments` have data that
    they can call themselves over.
    """
    with without_codes():
        return _found(module, source, programs, arguments)


def _found(
    module: torch.nn.Module, source: Callable[..., Any], programs: Forests | None, arguments: Sequence[Any]
) -> Recursion | None:
    owners = list({type(m) for m in module.modules()})
    data = over_data(arguments)
    if not MARKED and not data:
        return None
    by_name = cycles(source, owners)
    marked = {code: MARKED[code] for code in reachable(source, owners) if code in MARKED} if MARKED else {}
    if not (functions := marked | (by_name if data else {})):
        return None
    found = Recursion(functions, programs, bool(marked), list(module.modules()))
    below = reachable(source, owners)
    found.structures.caught = any(map(handles, below))
    for function in dict.fromkeys(below.values()):
        if function not in found.outlined and asks_for_types(function):
            found.refused = f"type(...) of a value, in {function.__qualname__}, which differs from isinstance"
    return found
