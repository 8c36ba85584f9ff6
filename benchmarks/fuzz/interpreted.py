"""Programs run without a compiler: all passes, lowering and memory layouts, with NumPy in place of the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.fuzz.checking import Rejected
from daceml_train.analysis.interpret import interpret
from daceml_train.driver import compile as road
from daceml_train.graph.graph import Graph
from daceml_train.lowering.device import CPU
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import Allocation, Program
from daceml_train.runtime.executor import InputMismatch
from daceml_train.runtime.gpu.plan import same_strides
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.tensor import evaluate

_graphs: dict[int, tuple[Program, Graph]] = {}
"""Programs, and the graph after all passes from which each was lowered."""


class Interpreted:
    """Replaces an `Executable`: results are in the slots, at the offsets and in the strides of the program."""

    def __init__(self, program: Program, *_: Any) -> None:
        self.program, self.device = program, CPU
        self.graph = _graphs[id(program)][1]

    def sizes_of(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The values of the size symbols on these inputs."""
        return tuple(inputs[index].shape[dim] for index, dim in self.program.symbols.values())

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run. Raises `InputMismatch` for an input in another layout than the program's."""
        sizes = dict(zip(self.program.symbols, self.sizes_of(inputs), strict=True))
        arrays = {}
        for index, (tensor, entry) in enumerate(zip(inputs, self.program.inputs, strict=True)):
            if not same_strides(tensor, [evaluate(s, sizes) for s in entry.strides]):
                raise InputMismatch(f"input {index} has strides {tensor.stride()}", index)
            arrays[entry.name] = _array(tensor)
        results = interpret(self.graph, arrays)
        _check_range([*results.outputs, *results.writes.values()])
        slots: dict[int, torch.Tensor] = {}
        outputs = []
        for place, value in zip(self.program.outputs, results.outputs, strict=True):
            slot = self.program.slots[place.slot]
            if place.slot not in slots:
                given = inputs[slot.input] if slot.home is Allocation.input else None
                slots[place.slot] = _slot(slot, sizes) if given is None else given
            shape, strides = ([evaluate(s, sizes) for s in dims] for dims in (place.shape, place.strides))
            owner, first = slots[place.slot], evaluate(place.offset, sizes)
            result = torch.empty((), dtype=owner.dtype).set_(owner.untyped_storage(), first, shape, strides)
            if slot.home is not Allocation.input:
                np.copyto(result.numpy(), value, casting="unsafe")
            outputs.append(result)
        for index, entry in enumerate(self.program.inputs):
            if entry.mutable:
                with torch.no_grad():
                    inputs[index].copy_(torch.as_tensor(np.array(results.writes[entry.name])))
        return outputs


def _check_range(values: Sequence[np.ndarray[Any, Any]]) -> None:
    """Raise `Rejected` for numbers that float32 cannot hold: the interpreter's float64 goes on with them."""
    for value in values:
        if value.dtype == np.float64 and (np.isfinite(value) & (abs(value) > np.finfo(np.float32).max)).any():
            raise Rejected("numbers beyond float32")


def _slot(slot: Any, sizes: dict[str, int]) -> torch.Tensor:
    shape, strides = ([evaluate(s, sizes) for s in dims] for dims in (slot.shape, slot.strides))
    held = torch.empty_strided(shape, strides, dtype=torch_dtype(slot.dtype))
    return held.new_zeros(held.untyped_storage().nbytes() // held.element_size())


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().resolve_conj().numpy().copy()


def _lower(graph: Graph, *options: Any) -> Program:
    program = lower(graph, *options)
    _graphs[id(program)] = program, graph
    return program


def _uncached(graph: Graph, description: str, options: Any, device: Any, build: Callable[[], Any]) -> Any:
    return build()


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Within it, what is compiled is interpreted."""
    _graphs.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(road, "lower", _lower))
        stack.enter_context(mock.patch.object(road, "cached", _uncached))
        stack.enter_context(mock.patch.object(road, "generate", lambda *_: {}))
        stack.enter_context(mock.patch.object(road, "Executable", Interpreted))
        yield
