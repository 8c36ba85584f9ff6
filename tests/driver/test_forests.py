"""Recursions as compiled levels, against PyTorch: shapes of trees, DAGs, several kinds of nodes, data among states."""

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver import forests
from tests.driver.test_recursion import TreeLSTM, forest

WIDTH = 5
Dag = tuple[Any, ...]


class ChildSum(nn.Module):
    """Nodes with any number of children, of several kinds; a node that several share is computed once per call."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(WIDTH))
        self.leaf, self.inner = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.only = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    @dt.recursive
    def visit(self, node: Dag, memo: dict[int, Tensor]) -> Tensor:
        """The state of a node, whose first entry is its features."""
        if id(node) in memo:
            return memo[id(node)]
        features, *children = node
        if len(children) == 1:
            h = self.only(self.visit(children[0], memo)).relu()
        else:
            h = self.start if children else torch.zeros(WIDTH, dtype=self.start.dtype)
            for child in children:
                below = self.visit(child, memo)
                h = h + self.gate(torch.cat([h, below])).sigmoid() * below
            h = (self.inner(h) + self.leaf(features)).tanh()
        memo[id(node)] = h
        return h

    def forward(self, roots: list[Dag]) -> Tensor:
        """The states of roots."""
        memo: dict[int, Tensor] = {}
        found = torch.stack([self.visit(root, memo) for root in roots])
        return found * torch.tensor([len(root) for root in roots])[:, None]


class Swapping(nn.Module):
    """A state that is read where the other one was before, which is no one column of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @dt.recursive
    def visit(self, depth: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two states of a list."""
        if depth == 0:
            return self.a(x).tanh(), self.b(x)
        h, c = self.visit(depth - 1, x)
        h, c = (c, h) if depth % 2 else (h, c)
        return self.a(h).tanh(), self.b(c)

    def forward(self, depth: int, x: Tensor) -> Tensor:
        """The sum of both states."""
        h, c = self.visit(depth, x)
        return h + c


def dag(r: random.Random, nodes: int, dtype: torch.dtype) -> list[Dag]:
    """Nodes of a random DAG, which have up to three children among earlier ones."""
    results: list[Dag] = []
    for _ in range(nodes):
        features = torch.tensor([r.random() for _ in range(3)], dtype=dtype)
        count = min(len(results), r.randrange(4))
        results.append((features, *(r.choice(results) for _ in range(count))))
    return results[-3:]


def compare(model: nn.Module, compiled: nn.Module, twin: nn.Module, given: tuple[Any, ...], tolerance: float) -> None:
    """Hold values, and gradients of a random loss, against PyTorch's."""
    model.zero_grad(), twin.zero_grad()
    found, expected = compiled(*given), twin(*given)
    weights = torch.randn_like(expected)
    (found * weights).sum().backward(), (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            assert float((p.grad - q.grad).norm()) <= tolerance * max(float(q.grad.norm()), 1.0)


def programs(compiled: Any) -> Any:
    """What compiles the levels of a model."""
    return compiled._daceml_train.recursions["forward"].structures.programs


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_one_program_serves_all_shapes_of_trees(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = TreeLSTM().to(dtype)
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for seed in range(60):
        compare(model, compiled, twin, (forest(seed, 1 + seed % 6),), tolerance)
        if seed == 8:
            counts = programs(compiled).compiled
    assert programs(compiled).compiled == counts <= 3 and not programs(compiled).refused


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_dags_of_several_kinds_of_nodes(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    r = random.Random(0)
    model = ChildSum().to(dtype)
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for size in (30, 1, 40, 2, 7, 25, 60):
        compare(model, compiled, twin, (dag(r, size, dtype),), tolerance)
    assert programs(compiled).compiled and not programs(compiled).refused
    before = programs(compiled).compiled
    for size in (50, 35, 45):
        compare(model, compiled, twin, (dag(r, size, dtype),), tolerance)
    assert programs(compiled).compiled == before


def test_values_without_gradients() -> None:
    model = TreeLSTM()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    with torch.no_grad():
        for seed in range(4):
            found = compiled(forest(seed))
            assert not found.requires_grad
            torch.testing.assert_close(found, twin(forest(seed)), rtol=1e-5, atol=1e-6)


def test_gradients_of_data() -> None:
    model = ChildSum()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    features = [torch.randn(3, requires_grad=True) for _ in range(4)]
    leaves = [(f,) for f in features[:3]]
    root = (features[3], *leaves)
    expected = torch.autograd.grad(twin([root]).square().sum(), features)
    found = torch.autograd.grad(compiled([root]).square().sum(), features)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_levels_cannot_hold_runs_in_pytorch_and_is_noted() -> None:
    model = Swapping()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    with pytest.warns(UserWarning, match="different results of a cell in the same place"):
        compare(model, compiled, twin, (5, torch.randn(WIDTH)), 1e-5)
    compare(model, compiled, twin, (8, torch.randn(WIDTH)), 1e-5)
    assert programs(compiled).refused


class States(TreeLSTM):
    """The states of all trees."""

    def forward(self, trees: list[Any]) -> Any:
        """One state per tree."""
        return [self.visit(tree)[0] for tree in trees]


def test_equal_leaves_are_computed_once() -> None:
    torch.manual_seed(0)
    model = TreeLSTM()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    trees = [((3, 3), (3, 5)), (5, 3), 3, 3]
    compare(model, compiled, twin, (trees,), 1e-5)
    rows: list[tuple[int, ...]] = []
    forests.WATCHERS.append(watcher := lambda times: rows.append(times.rows))
    try:
        compare(model, compiled, twin, (trees,), 1e-5)
    finally:
        forests.WATCHERS.remove(watcher)
    assert rows[0][0] == 2, "of eight leaves"


def test_one_of_equal_states_can_be_changed_in_place() -> None:
    model = States()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    trees = [3, 3, (3, 3), 3]
    for _ in range(2):
        with torch.no_grad():
            found, expected = compiled(trees), twin(trees)
            found[0].mul_(2), expected[0].mul_(2)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_programs_of_a_recursion_are_dumped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TreeLSTM()
    twin, compiled = copy.deepcopy(model), dt.optimize(model, dump=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(model, compiled, twin, ([((1, 2), 3), 4],), 1e-5)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"recursion_backward.plan", "recursion.sdfg", "recursion_backward.sdfg"} <= names
    assert not [name for name in names if name.endswith(".sdfg.txt")]
