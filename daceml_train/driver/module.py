"""The drop-in module: a subclass of the user's class, over the same parameters, whose forward is compiled."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from daceml_train.driver.binding import differentiable_outputs, input_tensors, with_own_code
from daceml_train.driver.compilation import Options, Record, compile_differentiable
from daceml_train.driver.function import CompiledGraph
from daceml_train.errors import DacemlError, Invalid
from daceml_train.frontends.torch.capture import capture

_STATE = "_daceml_train"


@dataclass
class ModuleState:
    """What `optimize` keeps on the module it returns."""

    options: Options
    source: type[torch.nn.Module]
    backend: Backend
    compiled: Callable[..., Any] | None = None


@dataclass
class Backend:
    """A TorchDynamo backend: captures, differentiates and compiles each graph Dynamo hands over.

    A graph that cannot be compiled runs as PyTorch runs it: a warning says so once, and `breaks` keeps the reason.
    """

    options: Options
    records: list[Record] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    graphs: int = 0
    __name__ = "daceml_train"

    def __call__(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        try:
            return self.compile(module, examples)
        except DacemlError as error:
            self.breaks.append(str(error))
            warnings.warn(f"daceml_train runs a graph as PyTorch does: {error}", stacklevel=2)
            return cast("Callable[..., Any]", module.forward)

    def compile(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """The compiled form of one Dynamo graph. Raises `DacemlError` where there is none."""
        captured = capture(module, examples)
        tensors = input_tensors(captured, examples) if torch.is_grad_enabled() else {}
        wrt = [name for name, tensor in tensors.items() if tensor.requires_grad]
        compiled = compile_differentiable(captured.graph, wrt, differentiable_outputs(captured), self.options)
        compiled.records[0].fallbacks = [(target, str(origin)) for target, origin in captured.fallbacks]
        self.records += compiled.records
        return CompiledGraph(captured, compiled, module)


def optimized(module: torch.nn.Module, options: Options) -> torch.nn.Module:
    """A drop-in replacement of `module` that shares its parameters, buffers and submodules.

    Its class is a subclass of the module's; names in `state_dict` are unchanged; the original stays usable. Nothing
    is compiled before the first call.
    """
    if not isinstance(module, torch.nn.Module):
        raise Invalid(f"optimize takes a torch.nn.Module, given {type(module).__name__}")
    module = original(module)
    source = type(module)
    kind = type(source.__name__, (_Optimized, source), {"__module__": source.__module__, "__doc__": source.__doc__})
    made = cast(torch.nn.Module, kind.__new__(kind))
    made.__dict__.update(module.__dict__)
    made.__dict__[_STATE] = ModuleState(options, source, Backend(options))
    return made


def state_of(module: Any) -> ModuleState | None:
    """What `optimize` keeps on a module it returned; None for another object."""
    return getattr(module, "__dict__", {}).get(_STATE)


def original(module: torch.nn.Module) -> torch.nn.Module:
    """The module as the user wrote it, over the same parameters, if `module` came from `optimized`."""
    state = state_of(module)
    if state is None:
        return module
    plain = state.source.__new__(state.source)
    plain.__dict__.update({k: v for k, v in module.__dict__.items() if k != _STATE})
    return plain


class _Optimized(torch.nn.Module):
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        state: ModuleState = self.__dict__[_STATE]
        if state.compiled is None:
            bound = types.MethodType(with_own_code(state.source.forward), self)
            state.compiled = torch.compile(bound, backend=state.backend)
        return state.compiled(*arguments, **keywords)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return optimized, (original(self), self.__dict__[_STATE].options)
