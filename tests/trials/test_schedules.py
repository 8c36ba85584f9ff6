import math

import numpy as np
import pytest
import torch

import daceml_train as dt
from daceml_train.trials.keys import Path

S = dt.schedule

SCHEDULES = {
    "constant": (S.constant(0.5), lambda t: 0.5),
    "steps": (S.steps(0.1, {4: 0.5, 2: 0.3}), lambda t: 0.1 * (0.3 if t >= 2 else 1) * (0.5 if t >= 4 else 1)),
    "piecewise": (S.piecewise({0: 1.0, 3: 0.5}), lambda t: 1.0 if t < 3 else 0.5),
    "exponential": (S.exponential(0.2, 0.9, every=3), lambda t: 0.2 * 0.9 ** (t // 3)),
    "cosine": (S.cosine(1.0, 6, 0.1), lambda t: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 6)) if t < 6 else 0.1),
    "warm-up": (S.warm_up(3, S.steps(0.1, {5: 0.5})), lambda t: min((t + 1) / 3, 1) * 0.1 * (0.5 if t >= 5 else 1)),
    "then": (
        S.cosine(1.0, 10).then(2, S.piecewise({0: 7, 5: 8})),
        lambda t: 8 if t >= 5 else 7 if t >= 2 else 0.5 + 0.5 * math.cos(math.pi * t / 10),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_values_and_changes(name: str) -> None:
    schedule, expected = SCHEDULES[name]
    values = [schedule.at(step) for step in range(12)]
    assert values == pytest.approx([expected(step) for step in range(12)], rel=1e-15)
    for start in range(11):
        changes = list(schedule.changes(start, 12))
        assert changes == sorted(changes)
        assert all(start < step < 12 for step in changes)
        assert {step for step in range(start + 1, 12) if values[step] != values[step - 1]} <= set(changes)
    assert hash(schedule) == hash(SCHEDULES[name][0])


def test_exponentials_end_at_infinity_as_those_of_pytorch() -> None:
    assert [S.exponential(start, 1.5).at(2000) for start in (1e-7, -1.0, 0.0)] == [math.inf, -math.inf, 0.0]


def test_segments_are_maximal_and_equal_values_are_one_path() -> None:
    path = Path("root", {"lr": S.steps(0.1, {3: 0.5, 5: 1.0})}, 8)
    assert [(s.start, s.end) for s in path.segments] == [(0, 3), (3, 8)]
    other = Path("root", {"lr": S.piecewise({0: 0.1, 3: 0.05})}, 8)
    assert [path.key(step) for step in range(9)] == [other.key(step) for step in range(9)]


def test_keys_differ_with_bits_and_types() -> None:
    values = [0.1, math.nextafter(0.1, 1), 1, 1.0, True, "1", None, 0.0, -0.0, (1, 2), (1, 2.0)]
    assert len({Path("root", {"v": value}, 1).key(1) for value in values}) == len(values)
    assert Path("root", {"v": 1}, 1).key(1) != Path("other", {"v": 1}, 1).key(1)
    assert Path("root", {"v": 1}, 2).key(1) != Path("root", {"v": 1}, 2).key(2)


def test_numbers_of_libraries_are_numbers() -> None:
    plain = Path("root", {"v": 0.5, "n": 3}, 2).key(2)
    assert Path("root", {"v": np.float64(0.5), "n": torch.tensor(3)}, 2).key(2) == plain


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: S.piecewise({1: 0.5}), "no value at step 0"),
        (lambda: S.steps("a", {}), "start is a number"),
        (lambda: S.steps(1.0, {-1: 0.5}), "whole number from 0"),
        (lambda: S.constant(float("nan")), "is NaN"),
        (lambda: S.constant(object()), "is object"),
        (lambda: S.cosine(1.0, 0), "length is a whole number from 1"),
        (lambda: S.warm_up(2, "x").at(0), "multiplies numbers"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(dt.Invalid, match=message):
        call()
