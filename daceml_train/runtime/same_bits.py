"""Whether a library's result has the same bits on any number of threads: it is called on random arrays to find out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from daceml_train.lowering.aten import Placeholder
from daceml_train.lowering.program import Buffer, BufferView, CallLaunch
from daceml_train.runtime.executor import Arena, Plan
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.tensor import Dim, DType

PURE = frozenset({"aten::convolution", "aten::convolution_backward"})
"""Calls whose results depend on their arguments alone, and that touch nothing else."""

Matrix = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Element type, sizes and strides in elements."""


def matrix_of(view: BufferView | Buffer | Placeholder, value: Callable[[Dim], int]) -> Matrix:
    """The layout of a view at known sizes."""
    tensor = view.tensor if isinstance(view, Placeholder) else view
    shape, strides = (tuple(map(value, sizes)) for sizes in (tensor.shape, tensor.strides))
    return torch_dtype(tensor.dtype), shape, strides


def same_matmul(name: str, matrices: Sequence[Matrix], threads: int, count: int) -> bool:
    """Whether a matmul has the same bits on `count` threads as on all; its matrices are out, what is added, if
    anything, a, and b.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = [_random(matrix, generator) for matrix in matrices]
    plan = Plan(len(tensors), Arena())
    for slot, tensor in enumerate(tensors):
        plan.input_slot(slot, slot, tensor.dtype, tensor.shape, tensor.stride(), slot == 0)
    views = [plan.view(slot, 0, t.dtype, t.shape, t.stride()) for slot, t in enumerate(tensors)]
    getattr(plan, name)(*views)
    plan.finalize(0, [])

    def run() -> list[torch.Tensor]:
        out = tensors[0]
        given = [torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cpu").copy_(out), *tensors[1:]]
        plan.run(given)
        return given[:1]

    return _same(plan, run, threads, count)


def same_call(
    launch: CallLaunch, returned: Sequence[Matrix], value: Callable[[Dim], int], threads: int, count: int
) -> bool:
    """Whether a call has the same bits on `count` threads as on all; `returned` are the layouts of its results."""
    generator, tensors = torch.Generator().manual_seed(0), list[torch.Tensor]()
    kept = [slot for slot in launch.returns if slot is not None]
    stand_in, places = len(launch.arguments) + len(kept), iter(range(len(launch.arguments), 1 << 30))
    plan, space = Plan(stand_in + 1, Arena()), 0
    plan.arena_slot(stand_in, 0)

    def argument(given: Any) -> Any:
        nonlocal space
        match given:
            case BufferView():
                tensors.append(_random(matrix_of(given, value), generator))
                slot, layout = len(tensors) - 1, matrix_of(given, value)
                plan.input_slot(slot, slot, *layout, False)
                return plan.view(slot, 0, *layout)
            case Placeholder(tensor=tensor):
                space = max(space, value(tensor.bytes))
                return plan.view(stand_in, 0, *matrix_of(given, value))
            case DType():
                return torch_dtype(given)
            case tuple() | list():
                return [argument(item) for item in given]
            case sympy.Expr():
                return value(given)
        return given

    arguments, results = [argument(a) for a in launch.arguments], list[int | None]()
    layouts = iter(returned)
    for slot in launch.returns:
        results.append(None if slot is None else next(places))
        if results[-1] is not None:
            plan.result_slot(results[-1], *next(layouts))
    plan.call(launch.target, launch.overload, arguments, results)
    plan.finalize(space, [slot for slot in results if slot is not None])
    return _same(plan, lambda: plan.run(tensors), threads, count)


def _same(plan: Plan, run: Callable[[], list[torch.Tensor]], threads: int, count: int) -> bool:
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for most in (0, count):
            plan.threads([most])
            found.append([tensor.clone() for tensor in run()])
    finally:
        torch.set_num_threads(before)
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def _random(matrix: Matrix, generator: torch.Generator) -> torch.Tensor:
    dtype, sizes, strides = matrix
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    extent = extent if math.prod(sizes) else 1
    memory = torch.rand(max(extent, 1), generator=generator, dtype=torch.float32, device="cpu").sub_(0.5).to(dtype)
    return memory.as_strided(sizes, strides)
