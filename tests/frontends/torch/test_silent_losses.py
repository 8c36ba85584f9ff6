"""What a trace without autograd loses silently, each held to eager's gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from daceml_train.errors import Unsupported
from tests.frontends.torch.check import Interpreting, check, operators


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_detach_stops_the_gradient() -> None:
    captured = check(lambda x: (x.detach() * x, x.data + x), leaf(3, 4))
    assert "detach" in operators(captured)


def test_results_of_a_no_grad_region_are_constants() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angle = (x * 2).sin()
        return angle * x

    check(f, leaf(3, 4))


def test_enable_grad_inside_no_grad() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            a = x.exp()
            with torch.enable_grad():
                b = x.sin()
            c = b * 2
        return a * x + b, c + x

    captured = check(f, leaf(5))
    assert captured.detached == (False, False)


def test_results_of_inference_mode_are_constants() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            angle = (x * 2).sin()
            with torch.inference_mode(False):
                y = x.exp()
            z = x.sin()
        return angle.clone() * x, y, z.clone() + x

    check(f, leaf(3, 4))
    assert torch.is_grad_enabled()


@torch.no_grad()
def _norms(x: torch.Tensor) -> torch.Tensor:
    return x.norm(dim=-1, keepdim=True)


def test_no_grad_decorator() -> None:
    check(lambda x: x / _norms(x), leaf(3, 4))


def test_in_place_under_no_grad_keeps_the_gradient() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with torch.no_grad():
            y.clamp_(-0.5, 0.5)
        return y * y

    assert "graft" in operators(check(f, leaf(3, 4)))


def test_in_place_on_a_view_under_no_grad_keeps_the_gradient() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with torch.no_grad():
            y[0].zero_()
            y[1, 2] = 5.0
        return y * y + y

    check(f, leaf(3, 4))


WRITTEN = {
    "added to": "y = h * 2 |y.add_(h)",
    "an element": "y = h * 2 |y[0] = h[1]",
    "a view of it": "y = h * 2 |y.view(-1)[:3].copy_(h[0, :3])",
    "two results": "y, order = h.sort(1) |y.mul_(h)",
    "a part of a concatenation": "y = torch.cat([h, h]) |y[:3] += h",
    "with gradients enabled inside": "y = h * 2\n        with torch.enable_grad(): y.add_(h) |y = y * 1",
    "in place, and used by its result": "y = (h * 1).mul_(2) |y.add_(h)",
    "filled": "y = torch.zeros_like(h); y.copy_(h); y[1] = h[0] |y.add_(h)",
}
"""Statements without gradients, and after `|` some with gradients that write into what those have computed."""


@pytest.mark.parametrize("lines", WRITTEN.values(), ids=WRITTEN)
def test_results_of_a_no_grad_region_that_are_written_to(lines: str) -> None:
    before, after = lines.split(" |")
    scope: dict[str, object] = {"torch": torch}
    text = (
        f"def f(x):\n    h = x.tanh()\n    with torch.no_grad():\n        {before}\n    {after}\n    return y[:3] * h"
    )
    exec(text, scope)
    check(scope["f"], leaf(3, 4))


def test_operators_named_after_keywords_change_nothing() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            inside, outside = (x > 0) & (x * 2 < 1), (x < 0) | (x * 3 > 1)
        return x * inside + x.sin() * outside

    check(f, leaf(3, 4))


def test_a_change_under_no_grad_returns_the_tensor_with_its_gradient() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h, k = x * 1, (x * 3).chunk(2)
        with torch.no_grad():
            y, first = h.mul_(2), k[0]
            z = F.relu(h, inplace=True)
        return y.sin() + z * h + first.sum()

    check(f, leaf(4, 4))


def test_detach_in_place() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = x.tanh()
        u, k = h * 2, h.contiguous()
        with torch.no_grad():
            w = h * 3
        h.detach_()
        return (h * x + u + k * x.sin()) * w + (x * 2).detach_() * x

    check(f, leaf(3, 4))

    def truncated(x: torch.Tensor) -> torch.Tensor:
        h, total = torch.zeros_like(x), torch.zeros_like(x)
        for i in range(4):
            if i % 2 == 0:
                h.detach_()
            h = torch.tanh(x + h)
            total = total + h
        return total

    check(truncated, leaf(3, 4))

    def changed(x: torch.Tensor) -> torch.Tensor:
        h = x * 1
        h.detach_()
        h.add_(x)
        return h

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="detach_ of a tensor that is changed in place"):
        check(changed, leaf(3, 4))


@pytest.mark.parametrize("line", ["h = x.tanh(); h.data.mul_(2)", "y = h * h; h.data.mul_(2)"])
def test_a_change_that_autograd_does_not_see_of_what_a_derivative_reads(line: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def f(x):\n    h = y = x * 1\n    {line}\n    return y + h", scope)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="values that a derivative may read"):
        check(scope["f"], leaf(3, 4))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, factor):
        y = x.exp() * w
        ctx.save_for_backward(y, x)
        ctx.factor = factor
        return y, x + 1

    @staticmethod
    def backward(ctx, g, h):
        y, x = ctx.saved_tensors
        return g * y * ctx.factor + 3 * h, (g * x).sum(0), None


def test_autograd_function_keeps_its_backward() -> None:
    def f(x, w):
        a, b = Scaled.apply(x * 2, w, 7.0)
        return a.sin() + b

    captured = check(f, leaf(3, 4), leaf(4))
    assert "custom_vjp" in operators(captured)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, g, torch.zeros_like(g)).clamp(-0.1, 0.1)


def test_autograd_function_with_one_result() -> None:
    check(lambda x: Clip.apply(x) * x + Clip.apply(x.sin()), leaf(6))


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        top = x.max(dim=-1)
        ctx.mark_non_differentiable(top.indices)
        ctx.save_for_backward(top.indices)
        ctx.size = x.shape[-1]
        return top.values, top.indices, y * 2

    @staticmethod
    def backward(ctx, g, _, h):
        (indices,) = ctx.saved_tensors
        return F.one_hot(indices, ctx.size) * g[..., None] * 10, None


def test_autograd_function_with_integers_and_missing_gradients() -> None:
    def f(x, y):
        values, indices, z = Half.apply(x, y)
        return values * indices, z

    check(f, leaf(3, 4), leaf(2))


def test_autograd_function_under_no_grad() -> None:
    def f(x):
        with torch.no_grad():
            y = Clip.apply(x)
        return y * x

    check(f, leaf(4))


def test_functional_grad_of_grad() -> None:
    def f(x, w):
        def energy(v):
            return ((v @ w).tanh() ** 2).sum()

        return torch.func.grad(energy)(x) * x

    check(f, leaf(3, 4), leaf(4, 2))


def test_functional_grad_with_detach_inside() -> None:
    def f(x):
        def energy(v):
            return (v.tanh() * v.detach().sigmoid() * v).sum()

        return torch.func.grad(energy)(x) * 3

    check(f, leaf(3, 4))


def test_vmap() -> None:
    def f(x, w):
        return torch.func.vmap(lambda row: (w @ row).sigmoid().sum())(x)

    check(f, leaf(5, 3), leaf(4, 3))


def test_vmap_of_grad() -> None:
    def f(x, w):
        return torch.func.vmap(torch.func.grad(lambda row: (w @ row).tanh().sum()))(x)

    check(f, leaf(5, 3), leaf(4, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@torch._dynamo.config.patch(allow_rnn=True)
def test_recurrent_layers_train(kind: type[nn.Module]) -> None:
    layer = kind(3, 4, num_layers=2, batch_first=True, bidirectional=True)
    captured = check(lambda x: layer(x)[0], torch.randn(2, 3, 3, requires_grad=True), tolerance=1e-5)
    assert not captured.fallbacks


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_one_operator(causal: bool) -> None:
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    captured = check(f, leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), leaf(2, 3, 5, 4))
    assert operators(captured) == ["attention"]


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_attention_masks(boolean: bool, dropout: float) -> None:
    mask = torch.rand(2, 1, 5, 5) > 0.4
    mask[0, 0, 2] = False  # a row that sees nothing
    given = mask if boolean else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))

    def f(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, m, dropout_p=dropout)

    captured = check(f, leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), given)
    assert ("attention" in operators(captured)) == (dropout == 0)


def test_attention_with_dropout_draws_from_the_seed() -> None:
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    captured = check(f, leaf(1, 1, 4, 2), leaf(1, 1, 4, 2), leaf(1, 1, 4, 2), values=False)
    assert "dropout" in operators(captured) and captured.random


def test_attention_of_rank_three_with_scale() -> None:
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3), leaf(2, 5, 4), leaf(2, 6, 4), leaf(2, 6, 3)
    )


@pytest.mark.parametrize("change", ["setitem", "fill", "iadd"])
def test_an_array_of_numpy_that_shares_memory_with_a_value(change: str) -> None:
    def f(x):
        y = x * 2
        array = y.detach().numpy()
        if change == "setitem":
            array[0] = 0
        elif change == "fill":
            array.fill(0.5)
        else:
            array += 1
        return y * x

    check(f, leaf(3, 2))


def test_training_dropout_is_ours() -> None:
    captured = check(lambda x: F.dropout(x, 0.3) + F.dropout(x, 0.3), leaf(8, 8), values=False)
    streams = {node.op.stream for node in captured.graph.nodes if node.op.label == "dropout"}
    assert len(streams) == 2 and list(captured.graph.inputs)[-1] == "seed"


def test_hooks_are_refused_with_the_line() -> None:
    def f(x):
        y = x * 2
        z = y * y
        y.register_hook(lambda g: g * 3)
        return z

    with pytest.raises(Exception, match="register_hook after a use of the tensor") as failure:
        torch.compile(f, backend=Interpreting(), fullgraph=True)(leaf(3))
    assert "test_silent_losses.py" in str(failure.value)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(Exception, match="depends on data"):
        torch.compile(lambda x: x.nonzero().sum(), backend=Interpreting(), fullgraph=True)(leaf(3))


def test_unsupported_is_our_error() -> None:
    assert issubclass(Unsupported, Exception)
