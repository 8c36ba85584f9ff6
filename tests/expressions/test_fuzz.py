"""Random index programs, and the faults that they have to find."""

import pytest

from benchmarks.novel.fuzz import wrong
from daceml_train.expressions import adjoint, inverse
from daceml_train.expressions.term import apply


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_random_programs(start: int) -> None:
    for seed in range(start, start + 20):
        assert not wrong(seed), seed


def test_programs_that_failed_once() -> None:
    # no factor depends on a reduced index; every read lies outside; one element and all of a dimension are stored;
    # a second derivative was infinite where nothing is read
    for seed in (1083, 1725, 1798, 700295, 700299, 501189):
        assert not wrong(seed), seed


def found(seeds: range) -> bool:
    adjoint.derivative.cache_clear()
    adjoint.with_saved.cache_clear()
    try:
        return any(wrong(seed, lowered=False) for seed in seeds)
    finally:
        adjoint.derivative.cache_clear()
        adjoint.with_saved.cache_clear()


def test_a_forgotten_range_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse, "_within", lambda value, size: [])
    assert found(range(60))


def test_a_wrong_phase_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = inverse._dense_phase
    monkeypatch.setattr(inverse, "_dense_phase", lambda *a: None if a[-1] == 1 else original(*a))
    assert found(range(60))


def test_a_settled_index_without_its_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = inverse.apply
    monkeypatch.setattr(inverse, "apply", lambda kind, *v: apply("ge", 1, 0) if kind == "eq" else original(kind, *v))
    assert found(range(60))


def test_a_wrong_wrap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = inverse._wrapped

    def shifted(phase, dim, size, coefficients):
        return original(phase, dim, size, {**coefficients, None: coefficients.get(None, 0) + 1})

    monkeypatch.setattr(inverse, "_wrapped", shifted)
    assert found(range(200))


def test_a_wrong_extremum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjoint, "_position", lambda axes: dict.fromkeys(axes, 1))
    assert found(range(120))


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjoint, "_compiled", lambda formula: compile("g", formula, "eval"))
    assert found(range(10))
