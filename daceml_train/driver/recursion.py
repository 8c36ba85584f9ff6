"""Modules whose forward pass calls itself over data: recorded, and run level by level."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from daceml_train.driver.forests import Forests
from daceml_train.frontends.torch.recursion.simple import state_of
from daceml_train.frontends.torch.recursion.detect import MARKED, cycles, over_data, reachable
from daceml_train.frontends.torch.recursion.lazy import local
from daceml_train.frontends.torch.recursion.outline import outlined, with_codes
from daceml_train.frontends.torch.recursion.recorder import Recorder, Structures, computed


class Recursion:
    """What is known of the recursion of a module's method."""

    def __init__(
        self,
        functions: Mapping[types.CodeType, types.FunctionType],
        programs: Forests | None = None,
        marked: bool = True,
    ) -> None:
        self.structures = Structures(functions)
        self.structures.programs = programs
        self.marked = marked
        """Whether `recursive` names the functions."""
        whole = [function for code, function in functions.items() if function.__code__ is code]
        self.outlined = outlined(whole, self.structures.codes, self.structures.blocks)
        self.refused = ""
        """Why PyTorch runs all calls."""
        self.serves = True
        """Whether calls compute within the recursion; not so for functions that were found and that compute nothing."""

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

        if not self.refused and torch.is_autocast_enabled("cpu"):
            note("a recursion under autocast, which PyTorch runs")
            return entry()
        if self.refused or local.recorder is not None:
            return entry()
        tensors = [*module.parameters(), *module.buffers()]
        recorder = Recorder(self.structures, tensors, entry.__code__, note, state_of(list(module.modules())))
        collecting = gc.isenabled()
        local.recorder = recorder
        try:
            gc.disable()  # what is recorded is freed without it, and would make it examine all objects of the process
            with with_codes(self.outlined), recorder:
                result = entry()
            local.recorder = None
            result = computed(recorder, result)
        finally:
            local.recorder = None
            if collecting:
                gc.enable()
        self.refused = recorder.eager
        self.serves = self.marked or self.structures.inner or bool(recorder.eager)
        if recorder.looks:
            note("a recursion looks at values while it runs: it is batched between the looks")
        return result


def recursion_of(
    module: torch.nn.Module,
    source: Callable[..., Any],
    programs: Forests | None = None,
    arguments: Sequence[Any] = (),
) -> Recursion | None:
    """The recursion below a method; `programs` compiles its levels. None if there is none.

    That is the functions that `recursive` names. Without any, functions that call themselves are one if `arguments`
    have data that they can call themselves over.
    """
    owners = list({type(m) for m in module.modules()})
    if MARKED:
        marked = {code: MARKED[code] for code in reachable(source, owners) if code in MARKED}
        if marked:
            return Recursion(marked, programs)
    found = cycles(source, owners) if over_data(arguments) else {}
    return Recursion(found, programs, marked=False) if found else None
