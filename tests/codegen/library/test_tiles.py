"""Tiled kernels over windows, against the interpreter's arithmetic in NumPy."""

import ctypes

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.tiles import overlapping, tiled
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.operator import REGISTRY
from daceml_train.ops.read import Read
from daceml_train.tensor import DType, Tensor, symbol


def run_all(codes, cases, tmp_path) -> None:
    """Compile the kernels together and compare each with its expected results."""
    symbols = compile_kernels(codes, tmp_path)
    for code, (arrays, results, expected) in zip(codes, cases, strict=True):
        for threads in (1, 2):
            outputs = [np.full(t.shape, np.nan, "float32") for t in results]
            pointers = (ctypes.c_void_p * (len(arrays) + len(outputs)))(*(a.ctypes.data for a in (*arrays, *outputs)))
            assert len(code.integers) == 1
            assert not code.scratch
            function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(load(symbols[code.key], code.key))
            integers = (ctypes.c_int64 * 1)(threads)
            function(ctypes.addressof(pointers), ctypes.addressof(integers))
            for a, b in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def windows(length: int, size: int) -> Read:
    """Windows of `size` over the last dimension of [5, length + size - 1]: [5, length, size]."""
    return Read((5, length, size), ((0, 0, 1), (1, 1, 1), (2, 1, 1)), (0, 0))


def statement(operator: str, inputs: str, output: str, **attributes) -> Statement:
    return Statement(REGISTRY[operator](**attributes), tuple(inputs.split()), (output,))


def layouts(tensors) -> tuple[Layout, ...]:
    return tuple(Layout(t.shape, t.strides, t.dtype) for t in tensors)


def sums(length: int, size: int, kind: str = "sum") -> tuple[Kernel, list[Tensor]]:
    body = (
        Statement(windows(length, size), ("x",), ("w",)),
        statement("mul", "w k", "p"),
        statement("reduce", "p", "s", kind=kind, dims=(2,)),
        statement("tanh", "s", "t"),
    )
    return Kernel(("x", "k"), body, ("t", "s")), [Tensor((5, length + size - 1)), Tensor((size,))]


def normalized(length: int, size: int) -> tuple[Kernel, list[Tensor]]:
    """Two reductions, one after the other, and a result with all axes."""
    body = (
        Statement(windows(length, size), ("x",), ("w",)),
        statement("reduce", "w", "m", kind="max", dims=(2,), keepdim=True),
        statement("sub", "w m", "d"),
        statement("exp", "d", "e"),
        statement("reduce", "e", "s", kind="sum", dims=(2,), keepdim=True),
        statement("div", "e s", "y"),
    )
    return Kernel(("x",), body, ("y",)), [Tensor((5, length + size - 1))]


def counted(length: int, size: int) -> tuple[Kernel, list[Tensor]]:
    """Quotients that are compared."""
    body = (
        Statement(windows(length, size), ("x",), ("w",)),
        statement("div", "w k", "q"),
        statement("full", "", "o", value=1.0, shape=(), dtype=DType.float32),
        statement("ge", "q o", "b"),
        statement("where", "b w o", "p"),
        statement("reduce", "p", "s", kind="sum", dims=(2,)),
    )
    return Kernel(("x", "k"), body, ("s",)), [Tensor((5, length + size - 1)), Tensor((size,))]


def copied(length: int, size: int) -> tuple[Kernel, list[Tensor]]:
    body = (Statement(windows(length, size), ("x",), ("w",)), statement("cast", "w", "y", dtype=DType.float32))
    return Kernel(("x",), body, ("y",)), [Tensor((5, length + size - 1))]


@pytest.mark.compiled
def test_values(tmp_path) -> None:
    producers = (sums, lambda n, k: sums(n, k, "max"), lambda n, k: sums(n, k, "min"), normalized, counted, copied)
    codes, cases = [], []
    for make_case in producers:
        for length in (4, 16, 28, 67):
            kernel, operands = make_case(length, 3)
            graph = Graph()
            graph.output(*graph.emit(kernel, *(graph.input(f"x{i}", t) for i, t in enumerate(operands))))
            draw = np.random.default_rng(length)
            arrays = [draw.standard_normal(t.shape).astype("float32") for t in operands]
            expected = interpret(graph, {f"x{i}": a for i, a in enumerate(arrays)}).outputs
            results = kernel.infer(*operands)
            codes.append(tiled(kernel, layouts(operands), layouts(results)))
            cases.append((arrays, results, expected))
    run_all(codes, cases, tmp_path)


def test_what_is_left_to_other_kernels() -> None:
    kernel, operands = sums(16, 3)
    results = kernel.infer(*operands)
    assert tiled(kernel, layouts(operands), layouts(results)) is not None
    n = symbol("n")
    symbolic = [Layout((5, n), (n, 1), DType.float32), layouts(operands)[1]]
    double = [Layout(o.shape, o.strides, DType.float64) for o in layouts(operands)]
    assert tiled(kernel, double, layouts(results)) is None
    assert tiled(kernel, symbolic, layouts(results)) is None
    long, many = sums(16, 1025)  # too many terms for a sum in float32
    assert tiled(long, layouts(many), layouts(long.infer(*many))) is None
    plain = Kernel(("x",), (statement("reduce", "x", "y", kind="sum", dims=(0,)),), ("y",))
    assert tiled(plain, layouts([Tensor((9, 64))]), layouts([Tensor((64,))])) is None


def test_overlapping() -> None:
    assert overlapping(Layout((5, 4, 3), (6, 1, 1), DType.float32))
    assert not overlapping(Layout((5, 4), (4, 1), DType.float32))
    assert not overlapping(Layout((5, 4, 3), (0, 3, 1), DType.float32))  # broadcast, not windows


def test_a_reduction_is_not_repeated_for_other_dimensions() -> None:
    """`y[b, d] * sum of x[b, c] over c` in one kernel would sum once per element of y."""
    body = (
        statement("reduce", "x", "s", kind="sum", dims=(1,), keepdim=True),
        statement("mul", "s y", "z"),
    )
    kernel = Kernel(("x", "y"), body, ("z",))
    with pytest.raises(Refused, match="would be reduced once per element of dimensions that it does not have"):
        analyze(kernel, [Tensor((4, 32)), Tensor((4, 48))])
    analyze(kernel, [Tensor((4, 32)), Tensor((4, 2))])  # twice is cheaper than an array
