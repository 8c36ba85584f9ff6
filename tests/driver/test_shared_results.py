"""Results that share memory: values, gradients, strides, storage, versions, whatever layout a program chose for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.binding import results_of
from daceml_train.driver.module import state_of
from daceml_train.errors import Invalid
from tests.driver.holding import Function, close, hold_step, total

pytestmark = pytest.mark.compiled

Case = Callable[[Tensor, Tensor], Any]
CASES: dict[str, Case] = {}


def case(f: Case) -> Case:
    CASES[f.__name__] = f
    return f


# ---- layouts that passes and libraries choose -----------------------------------------------------------------------
@case
def convolution_of_sequences(w: Tensor, x: Tensor) -> Any:
    h = F.conv1d(x.view(1, 3, 4).transpose(1, 2), w.view(3, 4, 1)).transpose(1, 2) * x.view(1, 3, 4)[..., :1]
    return torch.split(h, 2, dim=2)


@case
def convolution_of_images(w: Tensor, x: Tensor) -> Any:
    h = F.conv2d(x.view(1, 1, 3, 4).to(memory_format=torch.channels_last), w.view(3, 1, 2, 2))
    return h, h[:, 1:], h.relu().permute(0, 2, 3, 1)


@case
def normalized_images(w: Tensor, x: Tensor) -> Any:
    h = F.batch_norm((x * w).view(2, 3, 1, 2).permute(0, 3, 1, 2), None, None, training=True)
    return h, h.permute(0, 2, 3, 1), F.max_pool2d(h, (2, 1)).squeeze(2).unbind(1)


@case
def batched_matmul(w: Tensor, x: Tensor) -> Any:
    h = torch.bmm(x.t().reshape(1, 4, 3), w.view(1, 3, 4)).transpose(1, 2)
    return h, h[0], h.flatten()[::3]


@case
def linear_of_sequences(w: Tensor, x: Tensor) -> Any:
    return F.linear(x.view(3, 1, 4).expand(3, 2, 4), w).chunk(3, -1)


@case
def attention(w: Tensor, x: Tensor) -> Any:
    q = x.view(1, 1, 3, 4).expand(2, 1, 3, 4) * w
    h = F.scaled_dot_product_attention(q, q, q)
    return h, h[0], h.transpose(1, 2)


@case
def reduction(w: Tensor, x: Tensor) -> Any:
    h = (x.view(3, 2, 2).permute(2, 0, 1) * w.view(2, 3, 2)).softmax(0)
    return h, h[1], h.cumsum(1).transpose(0, 2)


@case
def copies_of_windows(w: Tensor, x: Tensor) -> Any:
    h = w.view(2, 3, 2).unfold(0, 2, 2)[0:1:2, 2:3].contiguous()  # a part of what a program computes
    return h, h.view(4, 1), w.view(1, 12).unfold(1, 3, 1)[:, 2:4].clone()


@case
def concatenation(w: Tensor, x: Tensor) -> Any:
    h = torch.cat([x.t(), w.t()])
    return h.t(), h[1:], h.view(-1)


# ---- in place -------------------------------------------------------------------------------------------------------
@case
def added_to_a_column(w: Tensor, x: Tensor) -> Any:
    y = x * w
    y.t()[2].add_(1.0)
    return y, y[0]


@case
def zeroed_column(w: Tensor, x: Tensor) -> Any:
    y = x * w
    y.transpose(0, 1)[0].zero_()
    return y, y.unsqueeze(0)


@case
def scaled_column(w: Tensor, x: Tensor) -> Any:
    y = x * w
    y.T[1] *= 3
    return y, y.reshape(-1)


@case
def one_element(w: Tensor, x: Tensor) -> Any:
    y = x * w
    y.permute(1, 0)[0, 1] = 5
    return y, y[:2]


@case
def two_views_of_what_is_not_returned(w: Tensor, x: Tensor) -> Any:
    y = x * w
    y.t()[2].add_(1.0)
    return y.view(2, 6), y.view(12)


@case
def square(w: Tensor, x: Tensor) -> Any:
    y = x[:, :3].t() * w[:, :3]
    y.t()[1].mul_(2)
    return y, y.t()


# ---- owners ---------------------------------------------------------------------------------------------------------
@case
def a_copy_of_its_own(w: Tensor, x: Tensor) -> Any:
    y = x * w
    return y, y.clone(), x.clone(), x.clone()


@case
def one_without_a_gradient(w: Tensor, x: Tensor) -> Any:
    y = (x * w).t()
    return y.detach(), y[1:], y.detach()[2:], y.data.t().view(-1)


@case
def complex_numbers(w: Tensor, x: Tensor) -> Any:
    y = (x * w).view(3, 2, 2)
    z = torch.view_as_complex(y)
    return y, z, z[1:], torch.view_as_real(z).flatten(1)


@case
def bits(w: Tensor, x: Tensor) -> Any:
    y = x * w
    return y, y.detach()[1:].view(torch.int32), y.detach()[1:].view(torch.int64)


@case
def complex_view_of_an_argument(w: Tensor, x: Tensor) -> Any:
    return torch.view_as_complex(x.view(3, 2, 2))[1:], x * w


def run(called: Callable[..., Any], owner: nn.Module, again: bool) -> dict[str, Any]:
    """What can be seen of a call and its backward pass; with `again` the gradient of a gradient, too."""
    x = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()
    inputs = [x, *owner.parameters()]
    results = [r for r in torch.utils._pytree.tree_leaves(called(x)) if isinstance(r, Tensor)]
    storages = [t.untyped_storage()._cdata for t in (x, *results)]
    seen: dict[str, Any] = {"shared": [storages.index(s) for s in storages]}
    for i, r in enumerate(results):
        seen |= {f"result {i}": r.detach().clone(), f"meaning {i}": (r.requires_grad, r.is_leaf, r._version)}
        if seen["shared"].count(seen["shared"][i + 1]) > 1:
            strides = [s for n, s in zip(r.shape, r.stride(), strict=True) if n > 1]
            seen[f"place {i}"] = strides, r.storage_offset(), r.untyped_storage().nbytes()
    loss = total([r.abs() if r.is_complex() else r for r in results])
    found = torch.autograd.grad(loss, inputs, create_graph=again, allow_unused=True)
    seen |= {f"gradient {i}": g for i, g in enumerate(found)}
    further = [(g**2).sum() for g in found if again and g is not None and g.requires_grad]
    if further:
        sum(further[1:], further[0]).backward()
        seen |= {f"second gradient {i}": t.grad for i, t in enumerate(inputs)}
    return seen


def hold(function: Case, way: str, again: bool = False) -> None:
    theirs, ours = Function(function, 3, 4), Function(function, 3, 4)
    torch._dynamo.reset()
    called = dt.optimize(ours) if way == "optimize" else torch.compile(ours, backend="daceml_train")
    expected, found = run(theirs, theirs, again), run(called, ours, again)
    assert expected.keys() == found.keys()
    for name in expected:
        close(found[name], expected[name], name, 1e-5)
    state = state_of(called)
    assert state is None or not state.backend.breaks


@pytest.mark.parametrize("name", CASES)
def test_optimize(name: str) -> None:
    hold(CASES[name], "optimize")


@pytest.mark.parametrize("name", ["convolution_of_sequences", "square", "linear_of_sequences", "complex_numbers"])
def test_compile(name: str) -> None:
    hold(CASES[name], "compile")


@pytest.mark.parametrize(
    "name", ["square", "one_without_a_gradient", "linear_of_sequences", "added_to_a_column", "bits"]
)
def test_gradient_of_a_gradient(name: str) -> None:
    hold(CASES[name], "optimize", again=True)


@pytest.mark.parametrize("name", ["convolution_of_sequences", "scaled_column", "a_copy_of_its_own", "reduction"])
def test_step(name: str) -> None:
    hold_step(lambda: Function(CASES[name], 3, 4), lambda: (torch.randn(3, 4),))


def test_sizes_that_vary() -> None:
    theirs = Function(added_to_a_column, 1, 4)
    ours = dt.optimize(Function(added_to_a_column, 1, 4), dynamic=True)
    for rows in (3, 5, 2):
        x = torch.randn(rows, 4)
        for expected, found in zip(theirs(x), ours(x), strict=True):
            close(found, expected, f"{rows} rows", 1e-5)
            assert found.stride() == expected.stride()


def test_a_write_reaches_the_other_results() -> None:
    with torch.no_grad():
        y, row = dt.optimize(Function(added_to_a_column, 3, 4))(torch.ones(3, 4))
        row.fill_(7.0)
        y[0, 1] = 8.0
    assert y[0].tolist() == row.tolist() == [7.0, 8.0, 7.0, 7.0]


def test_another_layout_than_at_capture_is_an_error() -> None:
    result = dt.optimize(Function(added_to_a_column, 3, 4))
    captured: Sequence[Any] = []

    def watched(captured_graph: Any, outputs: Any, arguments: Any) -> Any:
        nonlocal captured
        captured = [captured_graph, arguments]
        return results_of(captured_graph, outputs, arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("daceml_train.driver.function.results_of", watched)
        result(torch.ones(3, 4))
    graph, arguments = captured
    with pytest.raises(Invalid, match=r"compiled for strides \(4, 1\), found \(1, 3\)"):
        results_of(graph, [torch.ones(4, 3).t()], arguments)


def test_an_argument_with_gaps_is_changed_in_place() -> None:
    def changed(w: Tensor, x: Tensor) -> Any:
        x.t()[1].mul_(2.0)
        x.add_(1.0)
        return x * w, x[1:]

    for called in (owner := Function(changed, 3, 4), dt.optimize(owner)):
        wide = torch.arange(24.0).view(3, 8)
        product, rows = called(wide[:, ::2])
        assert wide[:, 0].tolist() == [1.0, 9.0, 17.0] and wide[:, 1].tolist() == [1.0, 9.0, 17.0]
        assert wide[:, 2].tolist() == [5.0, 21.0, 37.0]
        assert (wide._version, rows._version, product._version) == (2, 2, 0)
        assert rows.untyped_storage()._cdata == wide.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda y: y.unfold(0, 2, 2).zero_(), "windows"),
        (lambda y: y.expand(2, 3, 4).fill_(1.5), "share memory with one another"),
        (lambda y: y.t().as_strided((2,), (1,), 7).mul_(2.0), "as_strided"),
    ],
    ids=["unfold", "expand", "as_strided"],
)
def test_a_change_that_traces_get_wrong(change: Callable[[Tensor], Any], reason: str) -> None:
    def changed(w: Tensor, x: Tensor) -> Any:
        change(x)
        return x * w, x[1:]

    owner = Function(changed, 3, 4)
    ours, theirs = torch.ones(3, 4), torch.ones(3, 4)
    called = dt.optimize(owner)
    with pytest.warns(UserWarning, match=reason):
        found = called(ours)
    for a, b in zip((*found, ours), (*owner(theirs), theirs), strict=True):
        close(a, b, "after the change", 1e-6)
