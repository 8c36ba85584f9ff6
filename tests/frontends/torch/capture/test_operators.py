"""ATen operators one by one: type promotion, rules, fallbacks and their derivatives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import daceml_train as dt
from daceml_train.ops.fallback import Aten
from tests.frontends.torch.check import check, operators

TYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
BINARY: dict[str, Callable] = {
    "add": torch.add,
    "sub": lambda a, b: a - b,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "lt": torch.lt,
    "eq": torch.eq,
    "where": lambda a, b: torch.where(a > b, a, b),
    "floor": torch.floor_divide,
    "remainder": torch.remainder,
    "alpha": lambda a, b: torch.add(a, b, alpha=2),
    "and": torch.logical_and,
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "pow": torch.pow,
    "xor": torch.logical_xor,
    "stack": lambda a, b: torch.stack([a + b, b + a]),
    "rsub": lambda a, b: 3 - a + b,
}
UNSIGNED = {"sub", "alpha", "rsub"}


def number(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    result = torch.randint(1, 5, shape).to(dtype)
    return result + 0.25 if dtype.is_floating_point else result


def pairs() -> list[tuple[str, int]]:
    return [(name, seed) for name in BINARY for seed in range(4)]


@pytest.mark.parametrize(("name", "seed"), pairs())
def test_promotion_of_random_pairs(name: str, seed: int) -> None:
    draw = random.Random(f"{name}{seed}")
    first, second = draw.choice(TYPES), draw.choice(TYPES)
    shapes = draw.choice([((3, 4), (4,)), ((3, 4), ()), ((), (3, 1)), ((2, 3), (2, 3))])
    function = BINARY[name]
    a, b = number(first, *shapes[0]), number(second, *shapes[1])
    try:
        expected = function(a, b)
    except RuntimeError:
        return  # PyTorch has no such combination
    if not expected.dtype.is_signed and expected.dtype is not torch.bool and name in UNSIGNED:
        return  # wraps around
    check(function, a, b, tolerance=1e-5)


SCALARS = [2, 2.5, True, -1]


@pytest.mark.parametrize(
    ("dtype", "scalar"), list(itertools.product([torch.float32, torch.int64, torch.bool], SCALARS))
)
def test_promotion_with_python_numbers(dtype: torch.dtype, scalar: float) -> None:
    check(lambda a: (a * scalar, a + scalar, a == scalar, torch.where(a > 0, a, scalar), a / scalar), number(dtype, 3))


def test_half_precision_results() -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    check(lambda x: (x.float() @ x.float().t()).to(torch.bfloat16).softmax(-1), x, tolerance=5e-2, gradients=False)


UNARY: dict[str, Callable] = {
    "activations": lambda x: (F.silu(x), F.gelu(x), F.mish(x), F.elu(x), F.selu(x), F.softplus(x), F.hardswish(x)),
    "kinks": lambda x: (F.relu6(x * 9), F.hardsigmoid(x * 5), F.leaky_relu(x), x.clamp(-1, 1), F.threshold(x, 0, 2)),
    "logs": lambda x: (x.abs().log2(), x.abs().log10(), x.abs().log1p(), x.expm1(), F.logsigmoid(x), F.softsign(x)),
    "powers": lambda x: (x**2, x**3, x.abs() ** 0.5, x.abs() ** -0.5, x**-1, 2**x, x.abs() ** x),
    "norms": lambda x: (x.norm(), x.norm(dim=1), x.norm(1, -1), F.normalize(x), x.var(), torch.std_mean(x, 1)[0]),
    "reductions": lambda x: (x.sum(), x.mean((0, 1), True), x.prod(1), x.amax(0), x.min(), x.logsumexp(1), x.argmax(1)),
    "truths": lambda x: ((x > 0).any(1), (x > 0).all(), torch.isfinite(x), ~(x > 0), (x > 0) & (x < 1), x.isnan()),
    "views": lambda x: (x.t().reshape(-1) * 2, x[1:, ::2] + 1, x[..., None].expand(3, 4, 2) * 1, x.unfold(1, 2, 1) * 1),
    "parts": lambda x: (x.chunk(2, 1)[1] * 2, x.split([1, 3], 1)[0] + 1, x.unbind(0)[2] * 3, x[-1] * 2, x[:, -2] + 1),
    "joins": lambda x: (torch.stack([x, x], 1), torch.cat([x, x * 2], -1), torch.hstack([x, x]), x.repeat(2, 1, 3)),
    "pads": lambda x: (F.pad(x, (1, -1, 0, 2)), F.pad(x[None], (1, 1), mode="reflect"), x.flip(0, 1), x.roll(1, 1)),
    "triangles": lambda x: (x.tril(), x.triu(1), torch.diag(x.diagonal()), x.trace(), torch.eye(4) * x[:1]),
    "made": lambda x: (torch.arange(3.0) + x[:, 0], torch.full((2,), 7), torch.linspace(0, 1, 4) * x, x * 0 + 1),
    "masks": lambda x: (x.masked_fill(x > 0, 3), x.where(x > 0, -x), torch.nan_to_num(x / (x > 0)), x.sign() * x),
    "rounding": lambda x: (x.floor() + x, x.round() * x, x.trunc() + x, x.ceil() + x, x.frac(), x % 0.7, x.fmod(0.7)),
    "indices": lambda x: (x[[0, 2]], x[:, torch.tensor([1, 1])], x.gather(1, torch.tensor([[0], [1], [3]]))),
    "sorted": lambda x: (x.sort(1)[0], x.topk(2)[0], x.max(1)[0], x.cumsum(1), x.cummax(1)[0], x.median(1)[0]),
    "scatter": lambda x: x.scatter_add(1, torch.tensor([[0, 1, 1, 0]] * 3), x).index_add(0, torch.tensor([1]), x[:1]),
    "assigned": lambda x: _assigned(x),
    "products": lambda x: (x @ x.t(), x @ x[0], torch.einsum("ij,kj->ik", x, x), x[0].outer(x[1]), x[0].dot(x[1])),
    "addmm": lambda x: (torch.addmm(x[:, :3], x, x.t(), alpha=2, beta=0.5), x[None].baddbmm(x[None, :, :3], x[None])),
    "trigonometry": lambda x: (x.sin(), x.cos(), x.tan(), x.atan(), x.sinh(), x.cosh(), torch.atan2(x, x + 3)),
    "fourier": lambda x: torch.fft.rfft(x).abs(),
    "linear_algebra": lambda x: ((x @ x.t() + torch.eye(3)).inverse(), x[:, :3].det(), torch.linalg.svdvals(x)),
    "lerp": lambda x: (torch.lerp(x, x * 2, 0.3), torch.addcmul(x, x, x, value=2), torch.addcdiv(x, x, x + 5, value=3)),
}


def _assigned(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0] = 2.0
    y[:, 1:3] = x[:, :2]
    y[x > 1] = 0.0
    y[1, 2] += x[0, 0]
    return y


@pytest.mark.parametrize("name", UNARY)
def test_functions(name: str) -> None:
    torch.manual_seed(3)
    check(UNARY[name], torch.randn(3, 4, dtype=torch.float64, requires_grad=True), tolerance=1e-5)


IMAGES: dict[str, Callable] = {
    "pools": lambda x: (F.max_pool2d(x, 3, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3), F.lp_pool2d(x, 2, 2)),
    "convolutions": lambda x: (F.conv2d(x, x[:, :, :3, :3]), F.conv_transpose2d(x, x[:, :, :2, :2], stride=2)),
    "upsample": lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, size=9, mode="bilinear")),
    "shuffle": lambda x: (F.pixel_shuffle(x.repeat(1, 2, 1, 1), 2), F.unfold(x, 3), F.channel_shuffle(x, 2) * 2),
    "norms": lambda x: (F.instance_norm(x), F.group_norm(x, 2), F.local_response_norm(x, 2), F.layer_norm(x, (8,))),
    "one_image": lambda x: F.conv2d(x[0], x[:, :, :3, :3], padding=1),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str) -> None:
    check(IMAGES[name], torch.randn(2, 2, 8, 8, dtype=torch.float64, requires_grad=True), tolerance=1e-5)


def test_gradients_at_kinks_are_eagers() -> None:
    x = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0, 6.0], dtype=torch.float64, requires_grad=True)
    functions = (
        F.relu,
        F.relu6,
        F.hardswish,
        F.hardsigmoid,
        F.hardtanh,
        lambda v: v.clamp(-1, 1),
        F.leaky_relu,
        F.elu,
        abs,
    )
    for function in functions:
        check(function, x)
    zero = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    check(lambda v: (v.norm(dim=1), v.std(1), F.cosine_similarity(v, v + 1)), zero)


@pytest.mark.parametrize("shape", [(), (4,), (2, 0), (2, 1, 3)])
def test_bilinear_is_matrix_products(shape: tuple[int, ...]) -> None:
    x, y, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((*shape, 3), (*shape, 2), (5, 3, 2)))
    captured = check(F.bilinear, x, y, w, torch.randn(5, dtype=torch.float64))
    assert not any(isinstance(node.op, Aten) for node in captured.graph.nodes)


def test_hyperbolic_sine_keeps_its_digits() -> None:
    x = torch.tensor([-80.0, -9.0, -1e-6, 0.0, 1e-6, 9.0, 80.0], dtype=torch.float64, requires_grad=True)
    check(torch.sinh, x, tolerance=1e-12)


def test_fallback_says_what_and_where() -> None:
    captured = check(lambda x: x.lgamma() * 2, torch.randn(4, requires_grad=True))
    ((target, where),) = captured.fallbacks
    assert target == "aten.lgamma.default" and where.source.startswith("test_operators.py:")
    (node,) = (n for n in captured.graph.nodes if isinstance(n.op, Aten))
    assert node.op.backward is not None and len(node.op.backward.statements) < 6


def test_fallback_derivative_only_where_a_gradient_is_needed() -> None:
    captured = check(lambda x: x.lgamma() * 2, torch.randn(4))
    (node,) = (n for n in captured.graph.nodes if isinstance(n.op, Aten))
    assert node.op.backward is None


@torch.library.custom_op("daceml_train_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(lambda x: torch.empty_like(x))
cube.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_custom_operator_with_its_own_derivative() -> None:
    captured = check(lambda x: cube(x * 2).sin(), torch.randn(4, dtype=torch.float64, requires_grad=True))
    assert [target for target, _ in captured.fallbacks] == ["daceml_train_tests.cube.default"]


def test_symbolic_fallback() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    captured = check(lambda x: x.lgamma() + x.digamma().sum(), x, dynamic=True)
    assert len(captured.fallbacks) == 2


def test_random_numbers_come_from_the_seed() -> None:
    def f(x):
        return (
            x + torch.rand_like(x) + torch.randn(3, 4) * torch.bernoulli(torch.full_like(x, 0.5)) + F.dropout1d(x, 0.5)
        )

    captured = check(f, torch.randn(3, 4, requires_grad=True), values=False)
    assert not captured.fallbacks and operators(captured).count("uniform") == 5
    streams = [n.op.stream for n in captured.graph.nodes if n.op.label == "uniform"]
    assert len(set(streams)) == len(streams)


_LIBRARY = torch.library.Library("daceml_train_unregistered", "DEF")
_LIBRARY.define("double(Tensor x) -> Tensor")
_LIBRARY.impl("double", lambda x: x * 2, "CPU")
torch.library.register_fake("daceml_train_unregistered::double", torch.empty_like, lib=_LIBRARY)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_an_operator_that_autograd_does_not_know_has_the_gradient_of_its_kernel() -> None:
    """PyTorch's trace of it has none, and `torch.compile` drops it."""
    layer = torch.nn.Linear(3, 3)

    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.daceml_train_unregistered.double(self.layer(x))

    model = Doubled()
    found = []
    for call in (model, dt.optimize(model)):
        layer.weight.grad = None
        call(torch.ones(2, 3)).sum().backward()
        found.append(layer.weight.grad)
    assert found[0] is not None and torch.equal(found[0], torch.full((3, 3), 4.0))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [{"scale_factor": 2}, {"scale_factor": 1.5}, {"size": (7, 9)}], ids=str)
def test_resampling_is_one_operator(mode: str, size: dict[str, Any]) -> None:
    """PyTorch's decompositions gather elements, and the derivative of that scatters."""
    session = dt.Session(torch.nn.Upsample(mode=mode, **size), torch.randn(2, 3, 4, 6, requires_grad=True))
    assert [node.op.label for node in session.graph.nodes] == ["resample", "resample_grad"]
