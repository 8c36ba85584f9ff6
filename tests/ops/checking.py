"""check_op: what every operator must fulfil, given a reference in PyTorch."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph
from daceml_train.graph.leaves import leaves
from daceml_train.ops.fallback import Aten
from daceml_train.ops.operator import Operator, Value
from daceml_train.tensor import DType, Tensor, symbol

TYPES = {np.dtype(d.numpy): d for d in DType if d is not DType.bfloat16}
Reference = Callable[..., Any]


def numbers(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape)


def check_op(
    op: Operator,
    *inputs: np.ndarray,
    reference: Reference,
    wrt: Sequence[int] | None = None,
    symbolic: bool = True,
    smooth: bool = True,
    second: bool = True,
    tolerance: float = 1e-9,
) -> None:
    """Hold `op` on `inputs` against `reference`, a function of float64 tensors whose results are those of `op`.

    A result None of the reference is not compared and gets no cotangent. Checked: shapes and types; values; gradients
    for every subset of `wrt` (all float operands), against autograd and, where `smooth`, against finite differences;
    second derivatives; `h + op(h)`; the same with symbolic sizes; 32-bit and 16-bit types.
    """
    wrt = [i for i, x in enumerate(inputs) if x.dtype.kind == "f"] if wrt is None else wrt
    expected = as_tuple(reference(*map(torch.as_tensor, inputs)))
    graph, _, results = build(op, inputs)
    outputs = interpret(graph, {f"x{i}": x for i, x in enumerate(inputs)}).values
    assert len(results) == len(expected), f"{op.label} has {len(results)} results"
    for value, want in zip(results, expected, strict=True):
        if want is not None:
            assert value.shape == tuple(want.shape), (
                f"{op.label}: shape rule {value.shape}, PyTorch {tuple(want.shape)}"
            )
            compare(f"{op.label}", outputs[value.name], want, tolerance)
    check_types(op, inputs)

    differentiable = [i for i, want in enumerate(expected) if want is not None and want.dtype.is_floating_point]
    if not wrt or op.zero_gradient:
        return
    chosen = [i for i in differentiable if depends(reference, inputs, wrt, i)]
    if not chosen:
        return
    subsets = [s for n in range(1, len(wrt) + 1) for s in itertools.combinations(wrt, n)]
    for subset in subsets if len(wrt) <= 3 else [*((i,) for i in wrt), tuple(wrt)]:
        check_gradient(op, inputs, reference, subset, chosen, tolerance=tolerance)
    for i in chosen if len(chosen) > 1 else []:
        check_gradient(op, inputs, reference, tuple(wrt), [i], tolerance=tolerance)
    for i in wrt:
        if chosen[0] == 0 and inputs[i].shape == tuple(expected[0].shape):
            check_gradient(op, inputs, reference, (i,), [0], residual=i, tolerance=tolerance)
    if second:
        check_gradient(op, inputs, reference, tuple(wrt), chosen[:1], second=True, tolerance=tolerance * 10)
    if symbolic:
        check_gradient(op, inputs, reference, tuple(wrt), chosen, symbolic=True, tolerance=tolerance)
    if smooth:
        check_differences(op, inputs, wrt, chosen)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def depends(reference: Reference, inputs: Sequence[np.ndarray], wrt: Sequence[int], result: int) -> bool:
    tensors = [torch.as_tensor(x).clone().requires_grad_(i in wrt) for i, x in enumerate(inputs)]
    return bool(as_tuple(reference(*tensors))[result].requires_grad)


def build(
    op: Operator, inputs: Sequence[np.ndarray], symbolic: bool = False
) -> tuple[Graph, list[Value], tuple[Value, ...]]:
    """A graph of `op` alone, on inputs x0, x1, ...; symbolic: equal sizes above 1 are one symbol."""
    graph = Graph()
    operands: list[Value] = []
    for i, x in enumerate(inputs):
        shape = tuple(symbol(f"s{size}") if symbolic and size > 1 else size for size in x.shape)
        operands.append(graph.input(f"x{i}", Tensor(shape, TYPES[x.dtype])))
    return graph, operands, graph.emit(op, *operands)


def check_types(op: Operator, inputs: Sequence[np.ndarray]) -> None:
    """Shapes do not depend on the width of floats; lowerings and derivatives keep to the shape rule in each."""
    if isinstance(op, Aten):  # its types are attributes
        return
    wide = op.infer(*(Tensor(x.shape, TYPES[x.dtype]) for x in inputs))
    for dtype in (DType.float32, DType.bfloat16):
        graph = Graph()
        for i, x in enumerate(inputs):
            graph.input(f"x{i}", Tensor(x.shape, dtype if x.dtype.kind == "f" else TYPES[x.dtype]))
        try:
            results = graph.emit(op, *(graph.value(name) for name in graph.inputs))
        except Exception as error:
            assert dtype.short in str(error) or "f64" in str(error), (
                error
            )  # an operator with types among its attributes
            continue
        assert [r.shape for r in results] == [t.shape for t in wide]
        if dtype is DType.float32:
            assert all(
                r.dtype is (t.dtype if t.dtype is not DType.float64 else r.dtype)
                for r, t in zip(results, wide, strict=True)
            )
        leaves(graph)
        floats = [n for n, t in graph.tensors.items() if n in graph.inputs and t.dtype.is_float]
        ys = {r.name: graph.input(f"g{i}", r.tensor) for i, r in enumerate(results) if r.dtype.is_float}
        if floats and ys and not op.zero_gradient:
            try:
                gradients = differentiate(graph, dict(list(ys.items())[:1]), floats)
            except Exception as error:
                assert type(error).__name__ == "Unsupported", error
                continue
            for name, gradient in gradients.items():
                assert gradient is None or gradient.dtype is graph.tensors[name].dtype, (
                    f"gradient of {name} is {gradient.tensor}"
                )
            leaves(graph)


def check_gradient(
    op: Operator,
    inputs: Sequence[np.ndarray],
    reference: Reference,
    wrt: tuple[int, ...],
    of: Sequence[int],
    *,
    residual: int | None = None,
    second: bool = False,
    symbolic: bool = False,
    tolerance: float = 1e-9,
) -> None:
    """Gradients of the results `of` with random cotangents, for the operands `wrt`, against autograd."""
    what = f"{op.label}, gradient for operands {wrt} of results {list(of)}" + f", h + op(h) with h = {residual}" * (
        residual is not None
    )
    tensors = [torch.as_tensor(x).clone().requires_grad_(i in wrt) for i, x in enumerate(inputs)]
    outputs = [as_tuple(reference(*tensors))[i] for i in of]
    graph, operands, results = build(op, inputs, symbolic)
    values = [results[i] for i in of]
    if residual is not None:
        outputs[0] = tensors[residual] + outputs[0]
        values[0] = operands[residual] + values[0]
    keep = [k for k, y in enumerate(outputs) if y.requires_grad]
    outputs, values = [outputs[k] for k in keep], [values[k] for k in keep]
    assert outputs, f"{what}: nothing requires a gradient"
    arrays = {f"x{i}": x for i, x in enumerate(inputs)}
    cotangents = [numbers(*y.shape, seed=7 + k) for k, y in enumerate(outputs)]
    arrays |= {f"g{k}": c for k, c in enumerate(cotangents)}
    of_values = {v.name: graph.input(f"g{k}", v.tensor) for k, v in enumerate(values)}
    names = [f"x{i}" for i in wrt]
    gradients = differentiate(graph, of_values, names)

    torch_cotangents = [torch.as_tensor(c).requires_grad_(second) for c in cotangents]
    wanted = torch.autograd.grad(
        outputs, [tensors[i] for i in wrt], torch_cotangents, allow_unused=True, create_graph=second
    )
    if not second:
        created = interpret(graph, arrays).values
        for name, want in zip(names, wanted, strict=True):
            gradient = gradients[name]
            if gradient is None:
                assert want is None or not want.any(), f"{what}: the gradient of {name} is missing"
                continue
            compare(
                f"{what}: {name}",
                created[gradient.name],
                torch.zeros(created[gradient.name].shape) if want is None else want,
                tolerance,
            )
        return

    again = {g.name: k for k, g in enumerate(gradients.values()) if g is not None and wanted[k].requires_grad}
    if not again:
        return
    further = {name: numbers(*wanted[k].shape, seed=31 + k) for name, k in again.items()}
    of_second = {name: graph.input(f"h_{name}", graph.tensors[name]) for name in again}
    arrays |= {f"h_{name}": value for name, value in further.items()}
    inner = [*names, *(f"g{k}" for k in range(len(cotangents)))]
    seconds = differentiate(graph, of_second, inner)
    leaves_wanted = torch.autograd.grad(
        [wanted[k] for k in again.values()],
        [*(tensors[i] for i in wrt), *torch_cotangents],
        [torch.as_tensor(v) for v in further.values()],
        allow_unused=True,
    )
    created = interpret(graph, arrays).values
    for name, want in zip(inner, leaves_wanted, strict=True):
        value = seconds[name]
        got = np.zeros(graph.inputs[name].tensor.shape) if value is None else created[value.name]
        compare(f"{what}, second derivative: {name}", got, torch.zeros(got.shape) if want is None else want, tolerance)


def check_differences(op: Operator, inputs: Sequence[np.ndarray], wrt: Sequence[int], of: Sequence[int]) -> None:
    """The gradient's component along a random direction against a central difference of the operator itself."""
    graph, _, results = build(op, inputs)
    arrays = {f"x{i}": x for i, x in enumerate(inputs)}
    cotangents = {results[i].name: numbers(*map(int, results[i].shape), seed=7 + i) for i in of}
    directions = {f"x{i}": numbers(*inputs[i].shape, seed=11 + i) for i in wrt}

    def along(step: float) -> float:
        moved = {name: x + step * directions[name] if name in directions else x for name, x in arrays.items()}
        outputs = interpret(graph, moved).values
        return float(sum((outputs[name] * c).sum() for name, c in cotangents.items()))

    difference = (along(1e-5) - along(-1e-5)) / 2e-5
    backward = graph.copy()
    of_values = {name: backward.input(f"g{i}", backward.tensors[name]) for i, name in enumerate(cotangents)}
    gradients = differentiate(backward, of_values, list(directions))
    given = arrays | {f"g{i}": c for i, c in enumerate(cotangents.values())}
    outputs = interpret(backward, given).values
    slope = sum(float((outputs[g.name] * directions[name]).sum()) for name, g in gradients.items() if g is not None)
    assert np.isclose(slope, difference, rtol=1e-5, atol=1e-7), f"{op.label}: slope {slope}, difference {difference}"


def compare(what: str, got: np.ndarray, want: torch.Tensor, tolerance: float) -> None:
    expected = want.numpy(force=True)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, PyTorch {expected.shape}"
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=what)
