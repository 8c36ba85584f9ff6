import numpy as np
import pytest
import torch

import daceml_train as dt
from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.ops.random import Dropout, Uniform, philox
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import build, check_types, numbers

SEED = np.array(1234567890123, np.int64)


def test_philox_known_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random123's known-answer test of philox2x32-10: counter, key -> result."""
    ones = (1 << 64) - 1
    for counter, k, answer in (
        (0, 0, (0xFF1DAE59, 0x6CD10DF2)),
        (ones, 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        (0x85A308D3243F6A88, 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ):
        monkeypatch.setattr("daceml_train.ops.random.key", lambda seed, stream, k=k: (k, 0))
        low, high = philox(np.array([counter], np.uint64), 0, 0)
        assert (int(low[0]), int(high[0])) == answer


def test_words_of_many_indices_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    index = np.arange(105, dtype=np.uint64).reshape(15, 7) * np.uint64(3)
    whole = philox(index, 5, 2)
    monkeypatch.setattr("daceml_train.ops.random.BLOCK", 10)
    for words, again in zip(whole, philox(index, 5, 2), strict=True):
        assert words.shape == index.shape and np.array_equal(words, again)


@pytest.mark.parametrize("dtype", [DType.float32, DType.float64])
def test_uniform_is_uniform_and_repeatable(dtype: DType) -> None:
    (u,) = Uniform((1000, 100), 3, dtype).evaluate(SEED)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * u.size) and abs(u.var() - 1 / 12) < 1e-3
    assert np.abs(np.histogram(u, 64)[0] / u.size * 64 - 1).max() < 0.15
    assert np.array_equal(u, Uniform((1000, 100), 3, dtype).evaluate(SEED)[0])
    assert np.array_equal(u.ravel()[:7], Uniform((7,), 3, dtype).evaluate(SEED)[0])
    for other in (
        Uniform((1000, 100), 4, dtype).evaluate(SEED)[0],
        Uniform((1000, 100), 3, dtype).evaluate(SEED + 1)[0],
    ):
        assert abs(np.corrcoef(u.ravel(), other.ravel())[0, 1]) < 0.02
    if dtype is DType.float32:
        assert np.array_equal(u, u.astype(np.float32))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout(p: float) -> None:
    x = numbers(50, 40, low=1)
    op = Dropout(p, stream=2)
    check_types(op, (x, SEED))
    graph, (h, _), (y,) = build(op, (x, SEED))
    total = h + y
    gradients = differentiate(graph, {total.name: graph.input("g", total.tensor)}, ["x0"])
    g = numbers(50, 40, seed=1)
    results = interpret(graph, {"x0": x, "x1": SEED, "g": g}).values
    kept = results[y.name] != 0
    assert abs(kept.mean() - (1 - p)) < 0.05 and (p not in (0, 1) or kept.mean() == 1 - p)
    scale = kept / (1 - p) if p < 1 else 0 * kept
    np.testing.assert_allclose(results[y.name], x * scale)
    np.testing.assert_allclose(results[gradients["x0"].name], g + g * scale)  # type: ignore[union-attr]


def test_backward_keeps_nothing_but_the_seed() -> None:
    graph = Graph()
    y = graph.input("x", Tensor((8,))).apply(Dropout(0.5), graph.input("seed", Tensor((), DType.int64)))
    differentiate(graph, {y.name: graph.input("g", y.tensor)}, ["x"])
    assert graph.nodes[-1].inputs == ("g", "seed")


def test_threshold_means_the_same_in_float32() -> None:
    for p in (0.1, 0.3, 1 / 3, 1e-9):
        threshold = next(n.op.value for n in _leaves(Dropout(p)) if n.op.label == "full" and n.op.value <= 1)  # type: ignore[attr-defined]
        assert threshold == np.float32(threshold) and p <= threshold < p + 2**-24


def _leaves(op: Dropout) -> list:  # type: ignore[type-arg]
    from daceml_train.graph.leaves import leaves

    graph = Graph()
    graph.emit(op, graph.input("x", Tensor((4,))), graph.input("seed", Tensor((), DType.int64)))
    return leaves(graph).graph.nodes


def test_errors() -> None:
    with pytest.raises(Invalid, match=r"expects a 0-d i64 seed, given i64\[1\]"):
        Uniform((2,)).infer(Tensor((1,), DType.int64))
    with pytest.raises(Invalid, match="produces f32 or f64, not bf16"):
        Uniform((2,), 0, DType.bfloat16).infer(Tensor((), DType.int64))
    with pytest.raises(Invalid, match=r"expects a probability, given 1.5"):
        Dropout(1.5).infer(Tensor((2,)), Tensor((), DType.int64))


def test_torch_agrees_on_the_scale() -> None:
    x = torch.ones(10)
    assert set(torch.nn.functional.dropout(x, 1.0).tolist()) == {0.0}


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_below_one(dtype: torch.dtype) -> None:
    """Rounding would make 1 of numbers near it, whose logarithm of the complement is infinite."""

    class Drawing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            waiting = torch.empty_like(x).exponential_(2.0)
            return torch.rand_like(x), torch.empty_like(x).uniform_(), torch.rand(x.shape, dtype=x.dtype), waiting

    *uniform, waiting = dt.optimize(Drawing())(torch.zeros(1 << 16, dtype=dtype))
    for u in uniform:
        assert u.min() >= 0 and u.max() < 1
        assert (u.float().mean() - 0.5).abs() < 0.01
    assert waiting.isfinite().all() and (waiting > 0).all()
    assert (waiting.float().mean() - 0.5).abs() < 0.01


@pytest.mark.compiled
def test_a_probability_has_a_gradient_of_zeros() -> None:
    class Drawing(torch.nn.Module):
        def forward(self, p: torch.Tensor) -> torch.Tensor:
            return torch.bernoulli(p)

    p = torch.full((8,), 0.5, requires_grad=True)
    dt.optimize(Drawing())(p).sum().backward()
    assert p.grad is not None and not p.grad.any()
