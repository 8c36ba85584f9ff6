"""The notation: what it accepts, what it refuses, and where its errors point."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.errors import Invalid, OutOfRange
from daceml_train.expressions import (
    argmax,
    array,
    exp,
    largest,
    least,
    logsumexp,
    product,
    size,
    tanh,
    to_float,
    total,
    where,
)
from daceml_train.expressions.program import parsed

X = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)


def line_of(function, text: str) -> str:
    """`file:line` of the first line of a function that contains a text."""
    lines, first = inspect.getsourcelines(inspect.unwrap(function))
    return f"{__file__.rsplit('/', 1)[-1]}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def refuse(function, *operands, match: str, at: str = "") -> None:
    with pytest.raises(Invalid, match=match) as raised:
        dt.expression(function)(*operands)
    if at:
        assert raised.value.where == line_of(function, at)


def test_index_out_of_bounds() -> None:
    def shifted(x):
        rows, columns = x.shape
        return array(
            x[i - 1, j]  # here
            for i in rows
            for j in columns
        )

    refuse(shifted, X, match=r"dimension 0 has size 3, the index runs over -1\.\.1", at="# here")


def test_truth_values() -> None:
    def filtered(x):
        return array(x[i, 0] for i in x.shape[0] if i > 1)

    def conditional(x):
        return array(x[i, 0] if i > 1 else 0.0 for i in x.shape[0])

    def both(x):
        return array(where(i > 0 and i < 2, x[i, 0], 0.0) for i in x.shape[0])

    def chained(x):
        return array(where(0 < i < 2, x[i, 0], 0.0) for i in x.shape[0])

    for function in (filtered, conditional, both, chained):
        refuse(function, X, match="has no truth value")


def test_names() -> None:
    def free(x):
        kept = []
        array(total(kept.append(j) or x[i, j] for j in x.shape[1]) for i in x.shape[0])
        return array(x[i, kept[0]] for i in x.shape[0])

    def shadowed(x):
        return array(total(x[i, 0] for i in x.shape[0]) for i in x.shape[0])

    def twice(x):
        return array(x[i, i] for i in x.shape[0] for i in x.shape[0])

    refuse(free, X, match="an index of another comprehension is used")
    refuse(shadowed, X, match="the loop over i hides an index of the same name")
    refuse(twice, X, match="two loops of one comprehension use the same name")


def test_shapes_and_types() -> None:
    def rank(x):
        return array(x[i] for i in x.shape[0])

    def real(x):
        return array(x[i * 0.5, 0] for i in x.shape[0])

    def nothing(x):
        return array(largest(x[i, j] for j in size(0)) for i in x.shape[0])

    def plain(x):
        return array(x[i, 0] for i in range(3))

    def number(x):
        return 3.0

    def itself(x):
        return x

    def whole(x):
        return array(x * 2 for i in x.shape[0])

    refuse(rank, X, match="x has 2 dimensions, given 1 indices")
    refuse(real, X, match="which is no integer")
    refuse(nothing, X, match="largest over a size of 0")
    refuse(plain, X, match="expects loops over sizes")
    refuse(number, X, match="an expression returns arrays")
    refuse(itself, X, match="returns an operand")
    with pytest.raises(TypeError):
        dt.expression(whole)(X)
    with pytest.raises(Invalid, match="without a tensor"):
        dt.expression(rank)(3)
    with pytest.raises(Invalid, match="option"):
        dt.expression(lambda x, o: None)(X, [1])


def test_indices_in_the_data() -> None:
    @dt.expression
    def rows(table, ids):
        return array(table[ids[i], j] for i in ids.shape[0] for j in table.shape[1])

    torch.testing.assert_close(rows(X, torch.tensor([2, 0])), X[[2, 0]])
    for wrong in (3, -1):
        with pytest.raises(OutOfRange, match="index 0 of table runs over .*out of range for size 3") as raised:
            rows(X, torch.tensor([0, wrong]))
        assert raised.value.where == line_of(rows, "return array")


def test_reductions() -> None:
    @dt.expression
    def reduced(x):
        rows, columns = x.shape
        return (
            array(total(x[i, j] for j in columns) + 1 for i in rows),
            array(largest(x[i, j] for i in rows for j in columns) - x[k, 0] for k in rows),
            array(least(x[i, j] for j in columns) for i in rows),
            array(product(x[i, j] for j in columns) for i in rows),
            array(logsumexp(x[i, j] for j in columns) for i in rows),
            array(argmax(-abs(x[i, j] - 5) for j in columns) for i in rows),
        )

    found = reduced(X)
    expected = (X.sum(1) + 1, X.max() - X[:, 0], X.amin(1), X.prod(1), X.logsumexp(1), (-(X - 5).abs()).argmax(1))
    for a, b, c in zip(found, expected, reduced.reference(X.numpy()), strict=True):
        torch.testing.assert_close(a, b)
        np.testing.assert_allclose(b.numpy(), c)


def test_product_with_zeros() -> None:
    @dt.expression
    def products(x):
        return array(product(x[i, j] for j in x.shape[1]) for i in x.shape[0])

    x = torch.tensor([[0.0, 2, 3], [0, 0, 4], [1, 2, 3]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(products, (x,))
    assert torch.autograd.gradgradcheck(products, (x,))
    (g,) = torch.autograd.grad(products(x).sum(), x)
    torch.testing.assert_close(g, torch.autograd.grad(x.prod(1).sum(), x)[0])


def test_outside() -> None:
    @dt.expression
    def around(x):
        rows, columns = x.shape
        shape = [(r, c) for r in (rows,) for c in (columns,)]
        assert len(shape) == 1
        return (
            array(x.outside(7)[i - 1, j + 1] for i in rows for j in columns),
            array(x.clamp[i - 1, j + 1] for i in rows for j in columns),
            array(x.wrap[i - 1, j + 1] for i in rows for j in columns),
        )

    for a, b in zip(around(X), around.reference(X.numpy()), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
)
def test_element_types(dtype: torch.dtype) -> None:
    @dt.expression
    def mixed(x):
        return array(where(x[i, j] > 3, x[i, j] * 2, x[i, j] + j) for i in x.shape[0] for j in x.shape[1])

    x = X.to(dtype)
    expected = torch.where(x > 3, x * 2, x + torch.arange(4))
    torch.testing.assert_close(mixed(x), expected)


def test_promotion() -> None:
    @dt.expression
    def both(x, n):
        return array(x[i, j] * n[j] + to_float(i) / 2 for i in x.shape[0] for j in x.shape[1])

    n = torch.tensor([1, 2, 3, 4])
    expected = X.float() * n + torch.arange(3)[:, None] / 2
    torch.testing.assert_close(both(X.float(), n), expected)


def test_bits() -> None:
    @dt.expression
    def bits(x):
        n = x.shape[0]
        low, odd = array(x[i] & 3 for i in n), array(((x[i] & 1) == 1) ^ (x[i] > 2) for i in n)
        return low, array(5 | x[i] for i in n), array(~x[i] for i in n), array(x[i] ^ i for i in n), odd

    x = torch.arange(-3, 5)
    results = [x & 3, 5 | x, ~x, x ^ torch.arange(8), ((x & 1) == 1) ^ (x > 2)]
    for found, expected, listed in zip(bits(x), results, bits.reference(x.numpy()), strict=True):
        assert found.dtype is expected.dtype and found.tolist() == expected.tolist() == listed.tolist()


def test_the_nearest_element_of_any_float() -> None:
    @dt.expression
    def nearest(x, p):
        return array(x.clamp[round(p[i])] for i in p.shape[0])

    x = torch.arange(4.0)
    p = torch.tensor([1e10, 1e20, math.inf, -1e20, -math.inf, 1.6, 2.0**63])
    assert nearest(x, p).tolist() == x[p.round().clamp(0, 3).long()].tolist()


def test_options_and_helpers() -> None:
    def window(x, i, j, radius):
        return total(x.outside(0)[i, j + k - radius] for k in size(2 * radius + 1))

    @dt.expression
    def smooth(x, radius=1, steps=2):
        for _ in range(steps):
            x = array(window(x, i, j, radius) / (2 * radius + 1) for i in x.shape[0] for j in x.shape[1])
        return x

    for options in ({}, {"radius": 2}, {"steps": 1}):
        np.testing.assert_allclose(smooth(X, **options).numpy(), smooth.reference(X.numpy(), **options))


def test_text_is_read_back() -> None:
    def softmax(x):
        norm = array(logsumexp(x[i, j] for j in x.shape[1]) for i in x.shape[0])
        y = array(exp(x[i, j] - norm[i]) for i in x.shape[0] for j in x.shape[1])
        return array(tanh(y[i, j]) * tanh(y[i, j]) for i in x.shape[0] for j in x.shape[1]), norm

    text = dt.expression(softmax).program(X).text
    assert parsed(text).text == text
    assert ":=" in text  # the shared tanh is named
    for wrong in ("", "t0[i0] = 1", text.replace("input x0", "input y"), text.replace("exp(", "expp(")):
        with pytest.raises(Invalid):
            parsed(wrong)


def test_the_notation_outside_of_an_expression() -> None:
    with pytest.raises(Invalid, match="outside of array and total"):
        for _ in size(3):
            pass
    with pytest.raises(Invalid, match="expects a comprehension"):
        dt.expression(lambda x: array([1, 2]))(X)


def unfinished(x):
    array(x[i] for i in x.shape[0])


def pairs(x):
    return array(x[i] * k for k, i in enumerate(x.shape[0]))


SCALE = nn.Parameter(torch.tensor(2.0))

MISTAKES = [
    (lambda x: array(x[i] * SCALE for i in x.shape[0]), "not with a Parameter.*make it an operand"),
    (lambda x: array(x.outside(SCALE)[i - 1] for i in x.shape[0]), "not with a Parameter"),
    (lambda x: array(x[i] & 3 for i in x.shape[0]), "& takes truth values or integers, not floats"),
    (lambda x: array(x[i // 0] for i in x.shape[0]), "i is divided by zero"),
    (lambda x: array(i % (x.shape[0] - 5) for i in x.shape[0]), "i is divided by zero"),
    (lambda x: array(round(x[i], 2) for i in x.shape[0]), "takes no number of digits"),
    (lambda x: array(sum(x[j] for j in x.shape[0]) for i in x.shape[0]), "a size of 5 ends within an element of array"),
    (lambda x: array(sum([x[j] for j in x.shape[0]]) for i in x.shape[0]), "ends within an element of array"),
    (lambda x: array(x[i] * k for i in x.shape[0] for k in range(3)), "array loops over something other than sizes"),
    (lambda x: array(x[i] for i, j in zip(x.shape[0], x.shape[0], strict=True)), "looped over by something other than"),
    (pairs, "looped over by something other than a for.*without zip or enumerate"),
    (lambda x: array([x[i] for i in x.shape[0]]), "outside of array and total"),
    (lambda x: array(total(x[j] for j in size(i + 1)) for i in x.shape[0]), r"size\(i \+ 1\) would differ from"),
    (lambda x: array(x[i] for i in size(-3)), r"size\(-3\) is negative"),
    (lambda x: array(x[0] for i in x.shape[0] - 9), "a loop over the negative size -4"),
    (lambda x: array(x[i] for i in size(2.5)), r"size\(2.5\): a size is an integer"),
    (lambda x: array(math.exp(x[i]) for i in x.shape[0]), r"the index expression x\[i\] is no number"),
    (lambda x: array(x[j] for i in x.shape[0] for j in range(i)), "the index expression i is no number"),
    (lambda x: array(torch.exp(x[i]) for i in x.shape[0]), "PyTorch's exp takes no index expression.*import it from"),
    (lambda x: array(exp() * x[i] for i in x.shape[0]), "exp takes 1 operands, given 0"),
    (unfinished, "returned nothing.*test_notation.py:.*return array"),
    (lambda x: (array(x[i] for i in x.shape[0]), None), "an expression returns arrays, <lambda> returned nothing"),
    (lambda x: array(total(x[i] for i in x.shape[0])), r"expects a comprehension, given Term \(at test_notation"),
    (lambda *x: array(x[0][i] for i in x[0].shape[0]), r"the expression <lambda> has the parameter \*x; name each"),
    (nn.Linear, "expression takes a Python function, given Linear"),
    (3, "expression takes a Python function, given an object of type int"),
]


@pytest.mark.parametrize(("function", "message"), MISTAKES)
def test_mistakes_name_the_cause(function, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        dt.expression(function)(torch.arange(5.0))


@dt.expression
def double(x, y):
    return array(x[i] + y[i] for i in x.shape[0])


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (lambda x: x.to("meta"), "the operand y of the expression double is on meta, and x is on cpu"),
        (lambda x: x.to_sparse(), "the operand y of the expression double has layout torch.sparse_coo"),
    ],
)
def test_operands_of_other_kinds(others, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        double(torch.arange(5.0), others(torch.arange(5.0)))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.hessian(lambda v: f(v).sum())(x),
        lambda f, x: torch.func.linearize(f, x),
        lambda f, x: torch.autograd.functional.jacobian(f, x, strategy="forward-mode", vectorize=True),
    ],
)
def test_forward_mode_is_refused(derivative) -> None:
    x = torch.arange(5.0)
    message = "expression.* has no derivative in forward mode.*use reverse mode"
    with pytest.raises(dt.Unsupported, match=message):
        derivative(lambda v: double(v, v), x)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(double(x, x), 2 * x)  # nothing has a tangent
        with pytest.raises(dt.Unsupported, match="the expression double has no derivative"):
            double(x, torch.autograd.forward_ad.make_dual(x, x))


@dt.expression
def gate(x, w):
    B, C = x.shape
    return array(exp(total(x[b, c] * w[c] for c in C)) for b in B)


def test_batches_of_gradients() -> None:
    """`is_grads_batched=True`, also within another batch, and differentiated."""
    x, w = (X / 10).requires_grad_(), torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    seeds = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)

    def gradients(y) -> list[torch.Tensor]:
        whole = torch.autograd.grad(y, (x, w), seeds, is_grads_batched=True, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in whole), (x, w), create_graph=True)

        def batched(seeds: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(y, w, seeds, retain_graph=True, is_grads_batched=True)[0]

        nested = torch._vmap_internals._vmap(batched)(torch.stack([seeds, seeds + 1, seeds - 1]))
        return [*whole, *second, nested]

    ours, theirs = gradients(gate(x, w)), gradients((x * w).sum(1).exp())
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_the_reference_expects_arrays_as_well() -> None:
    with pytest.raises(Invalid, match="this one returned NoneType"):
        dt.expression(unfinished).reference(np.ones(5))
