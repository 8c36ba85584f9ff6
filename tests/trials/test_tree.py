"""The laws of stage trees, against sets of prefixes: what a tree is, said the slow way."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import daceml_train as dt
from daceml_train.trials.keys import Path, exact
from daceml_train.trials.simulate import simulate, simulate_helped
from daceml_train.trials.tree import Tree, merged

S = dt.schedule
END = 12

numbers = st.sampled_from([0.1, 0.2, 0.4])
cuts = st.integers(1, END - 1)
schedules = st.one_of(
    numbers.map(S.constant),
    st.builds(S.steps, numbers, st.dictionaries(cuts, st.sampled_from([0.5, 1.0]), max_size=3)),
    st.builds(lambda first, rest: S.piecewise({0: first} | rest), numbers, st.dictionaries(cuts, numbers, max_size=3)),
    st.builds(S.cosine, numbers, st.sampled_from([4, 8])),
    st.builds(lambda n, lr: S.warm_up(n, lr), st.sampled_from([2, 3]), numbers),
)
settings = st.fixed_dictionaries({"lr": schedules, "b": st.sampled_from([1, 2])})
rungs = st.lists(st.integers(1, END), min_size=1, max_size=3, unique=True).map(sorted)
trials = st.lists(st.tuples(settings, rungs), min_size=1, max_size=8)


def prefix(chosen: dict[str, Any], step: int) -> tuple[str, ...]:
    """The settings of all steps before a point, one by one."""
    return tuple(exact(tuple((k, S.of(v, k).at(t)) for k, v in sorted(chosen.items()))) for t in range(step))


def tree_of(found: list[Any], order: list[int] | None = None) -> Tree:
    tree = Tree("root")
    for number in order or range(len(found)):
        chosen, until = found[number]
        tree.add(number, Path("root", chosen, until[-1]), until)
    return tree


def shape(tree: Tree) -> list[Any]:
    return sorted((s.start, s.end, s.key, tuple(sorted(s.trials))) for s in tree.stages())


@given(trials)
def test_steps_are_distinct_prefixes(found: list[Any]) -> None:
    expected = {prefix(chosen, step) for chosen, until in found for step in range(1, until[-1] + 1)}
    assert tree_of(found).steps() == len(expected)


@given(trials)
def test_keys_are_prefixes(found: list[Any]) -> None:
    by_key: dict[str, tuple[str, ...]] = {}
    for chosen, until in found:
        path = Path("root", chosen, until[-1])
        for step in range(until[-1] + 1):
            assert by_key.setdefault(path.key(step), prefix(chosen, step)) == prefix(chosen, step)
    assert len(set(by_key.values())) == len(by_key)


@given(trials, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(found: list[Any], chance: random.Random) -> None:
    order = list(range(len(found)))
    chance.shuffle(order)
    assert shape(tree_of(found)) == shape(tree_of(found, order))


@given(trials)
def test_stages_are_chains_between_points_that_matter(found: list[Any]) -> None:
    tree = tree_of(found)
    for stage in tree.stages():
        assert stage.start < stage.end
        assert stage.parent is not None and stage.parent.end == stage.start
        assert len(stage.children) != 1 or stage.trials, "a chain is one stage"
        assert stage.children or stage.trials
        first = [exact(child.path.settings(child.start)) for child in stage.children]
        assert len(set(first)) == len(first)


@given(trials)
def test_each_trial_ends_where_its_path_does(found: list[Any]) -> None:
    ends = {(number, stage.key) for stage in tree_of(found).stages() for number in stage.trials}
    expected = {(n, Path("root", c, u[-1]).key(rung)) for n, (c, u) in enumerate(found) for rung in u}
    assert ends == expected


@given(trials)
def test_order_of_one_worker_has_parents_first(found: list[Any]) -> None:
    tree, seen = tree_of(found), {0}
    for stage in tree.ordered():
        assert stage.parent is tree.root or id(stage.parent) in seen
        seen.add(id(stage))
    assert len(seen) == 1 + len(list(tree.stages()))


@given(trials, st.integers(1, 5))
def test_simulation_is_between_its_bounds(found: list[Any], workers: int) -> None:
    tree = tree_of(found)
    result = simulate(tree, workers)
    assert result.busy == tree.steps()
    assert result.longest == max(until[-1] for _, until in found)
    assert result.bound <= result.time <= result.busy / workers + result.longest  # Graham's bound of list scheduling
    assert simulate(tree, 1).time == tree.steps()


@given(trials, st.integers(1, 5), st.integers(1, 4))
def test_helpers_shorten_a_simulation(found: list[Any], workers: int, most: int) -> None:
    """Without helpers it is list scheduling; with them, no more than that, and not below what all workers can do."""
    tree = tree_of(found)
    alone = simulate(tree, workers)
    assert simulate_helped(tree, workers, most=1).time <= alone.busy / workers + alone.longest + 1e-6
    assert simulate_helped(tree, 1).time == pytest.approx(alone.busy)
    helped = simulate_helped(tree, workers, most=most, each=1.0)
    assert helped.bound - 1e-6 <= helped.time and helped.busy == tree.steps()
    if most >= workers:  # all work at all times
        assert helped.time == pytest.approx(tree.steps() / workers)


def test_late_drops_of_the_design() -> None:
    found = [
        (Path("root", {"lr": S.steps(lr, {a: f, b: g})}, 200), None)
        for lr in (0.1, 0.05) for a in (140, 160) for b in (180, 190) for f in (0.5, 0.2, 0.1, 0.05) for g in (0.5, 0.2, 0.1, 0.05)
    ]  # fmt: skip
    tree = merged("root", found)
    assert (tree.requested, tree.steps()) == (25600, 2880)


def test_a_trial_of_another_root_is_no_part() -> None:
    with pytest.raises(ValueError, match="another root"):
        Tree("root").add(0, Path("other", {}, 3))
