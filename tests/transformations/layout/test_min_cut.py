"""A minimum cut finds what trying every assignment finds."""

import itertools
import random

import pytest

from daceml_train.transformations.layout.min_cut import Assignment


@pytest.mark.parametrize("seed", range(20))
def test_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    names = "abcdef"
    single = {n: (draw.randint(0, 9), draw.randint(0, 9)) for n in names}
    pairs = {(a, b): draw.randint(0, 9) for a, b in itertools.permutations(names, 2) if draw.random() < 0.4}
    implied = [p for p in itertools.permutations(names, 2) if draw.random() < 0.1]
    fixed = {draw.choice(names): draw.random() < 0.5}

    def cost(labels: dict[str, bool]) -> float:
        if any(labels[a] and not labels[b] for a, b in implied) or any(labels[n] is not v for n, v in fixed.items()):
            return float("inf")
        alone = sum(single[n][labels[n]] for n in names)
        return alone + sum(c for (a, b), c in pairs.items() if labels[a] and not labels[b])

    problem = Assignment()
    for n, (no, yes) in single.items():
        problem.cost(n, False, no)
        problem.cost(n, True, yes)
    for (a, b), amount in pairs.items():
        problem.unless(a, b, amount)
    for a, b in implied:
        problem.implies(a, b)
    for n, label in fixed.items():
        problem.fix(n, label)
    best = min(cost(dict(zip(names, labels, strict=True))) for labels in itertools.product((False, True), repeat=6))
    found, reported = problem.solve()
    assert cost({n: found[n] for n in names}) == best == reported


def test_large_costs_are_scaled() -> None:
    problem = Assignment()
    problem.cost("a", False, 3e12)
    problem.cost("a", True, 1e12)
    problem.apart("a", "b", 1.5e12)
    problem.cost("b", True, 1.6e12)
    found, cost = problem.solve()
    assert (found["a"], found["b"]) == (True, False)
    assert cost == pytest.approx(2.5e12)


def test_without_costs_there_is_nothing_to_choose() -> None:
    assert Assignment().solve() == ({}, 0.0)
