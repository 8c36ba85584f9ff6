"""Modules in PyTorch's own wrappers for several processes: what of them is compiled by itself.

`DistributedDataParallel` and `fully_shard` run hooks that TorchDynamo does not trace, and it compiles no module of
PyTorch's between such hooks. So each part that hooks surround is a compiled function of its own; the wrapper around
them is PyTorch's code.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Part = Callable[..., Any]
"""The compiled `forward` of a module, bound to it."""


def surrounded_modules(module: nn.Module) -> Sequence[nn.Module]:
    """The modules inside a parallel one that hooks of PyTorch's surround, if calls of them can be compiled one by one.

    Modules that are recomputed as a whole stay as they are: PyTorch calls them again outside the wrapper.
    """
    if isinstance(module, DistributedDataParallel):
        return () if _compiles_itself(module.module) else (module.module,)
    divided: list[nn.Module] = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    if not divided or any(isinstance(m, CheckpointWrapper) for m in module.modules()):
        return ()
    if type(module).forward.__module__.startswith("torch."):  # which TorchDynamo does not trace between hooks
        divided += [m for m in module.children() if not any(isinstance(part, FSDPModule) for part in m.modules())]
    return [m for m in divided if not _compiles_itself(m)]


def _compiles_itself(module: nn.Module) -> bool:
    return hasattr(module, "_daceml_train") or "forward" in module.__dict__


@contextlib.contextmanager
def compiled_inside(parts: Mapping[nn.Module, Part]) -> Iterator[None]:
    """Calls of these modules run their compiled forms."""
    for module, part in parts.items():
        module.__dict__["forward"] = part
    try:
        yield
    finally:
        for module in parts:
            module.__dict__.pop("forward", None)


def of_local_tensors(
    module: torch.fx.GraphModule, examples: Sequence[Any], compile_part: Callable[..., Any]
) -> Callable[..., Any] | None:
    """A graph of tensors that are divided among processes (`DTensor`) as PyTorch's autograd around two graphs of each
    process's own tensors and collectives, forward and backward, which `compile_part` compiles; None for other graphs.
    """
    held = (*examples, *module.parameters(), *module.buffers())
    if not any(isinstance(t, DTensor) for t in held):
        return None

    def part(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        own, tensors, call = _without_meshes(graph, given)
        with torch.no_grad():
            compiled = compile_part(own, tensors)

        def boxed(arguments: list[Any]) -> Any:
            return call(compiled, *arguments)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    compiler: Any = part
    found: Callable[..., Any] = aot_module_simplified(module, examples, fw_compiler=compiler, bw_compiler=compiler)
    return found


def _without_meshes(
    graph: torch.fx.GraphModule, given: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any], Callable[..., Any]]:
    """A graph without the device meshes among its inputs, which it only hands on, its inputs, and how the compiled
    form is called in place of the graph's.
    """
    meshes = {place for place, value in enumerate(given) if _is_object(value)}
    own = copy.deepcopy(graph)
    places = [node for node in own.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in own.graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    handed = {at: places.index(r) for at, r in enumerate(results) if r in places and places.index(r) in meshes}
    output.args = (tuple(r for at, r in enumerate(results) if at not in handed),)
    for place in meshes:
        if not places[place].users:  # else the frontend refuses it by name
            own.graph.erase_node(places[place])
    left = [place for place, node in enumerate(places) if node in own.graph.nodes]
    own.recompile()

    def call(compiled: Callable[..., Any], *arguments: Any) -> list[Any]:
        found = iter(compiled(*(arguments[place] for place in left)))
        return [arguments[handed[at]] if at in handed else next(found) for at in range(len(results))]

    return own, [given[place] for place in left], call


def _is_object(value: Any) -> bool:
    return isinstance(value, FakeScriptObject | torch.ScriptObject | torch.distributed.device_mesh.DeviceMesh)


__all__ = ["compiled_inside", "of_local_tensors", "surrounded_modules"]
