from functools import partial

import pytest

from benchmarks import measure
from benchmarks.measure import Visit, timing, visit, visits


def test_disturbed_visits_do_not_count() -> None:
    seen = [Visit(0.010, 1, 0.0), Visit(0.012, 1, 0.05), Visit(0.011, 3, 0.0), Visit(9.0, 99, 0.8)]
    found = timing(seen)
    assert (found.median, found.faults, found.visits, found.disturbed) == (pytest.approx(11.0), 1, 3, False)


def test_the_quieter_half_stands_in() -> None:
    found = timing([Visit(0.010, 0, 0.3), Visit(0.020, 0, 0.9), Visit(0.012, 0, 0.4), Visit(0.030, 0, 0.8)])
    assert found.disturbed and found.visits == 2
    assert found.median == pytest.approx(11.0)


def test_one_visit() -> None:
    assert timing([Visit(0.010, 0, 0.0)]).lower == pytest.approx(10.0)


def test_variants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "VISIT", 1e-4)
    monkeypatch.setattr(measure, "others_seconds", lambda: 0.0)
    calls: list[str] = []
    variants = {name: partial(visit, partial(calls.append, name)) for name in "ab"}
    seen = list(visits(variants, steps=1))
    assert [name for name, _, _ in seen] == ["a", "b"] * measure.VISITS
    assert seen[-1][2] == 1.0


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(measure, "VISIT", 1e-4)
    monkeypatch.setattr(measure, "others_seconds", lambda: float(next(clock)))
    assert len(list(visits({"a": partial(visit, lambda: None)}, steps=1, patience=2))) == 2 * measure.VISITS
