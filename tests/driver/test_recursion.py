"""Models that call themselves over trees, against PyTorch: values, gradients, Python effects, structures."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt


class TreeLSTM(nn.Module):
    """A network over pairs of pairs of words, which notes what it visits."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words, self.leaf = nn.Embedding(10, width), nn.Linear(width, 2 * width)
        self.inner, self.out = nn.Linear(2 * width, 3 * width), nn.Linear(width, 3)
        self.notes: list[Any] = []

    @dt.recursive
    def visit(self, tree: Any) -> tuple[Tensor, Tensor]:
        """The state of a tree."""
        self.notes.append(tree)
        if isinstance(tree, int):
            o, u = self.leaf(self.words(torch.tensor([tree]))).chunk(2, -1)
            c = u.tanh()
        else:
            (h, c), (g, d) = self.visit(tree[0]), self.visit(tree[1])
            o, f, u = self.inner(torch.cat([h, g], 1)).chunk(3, -1)
            c = f.sigmoid() * (c + d) + u.tanh()
        return o.sigmoid() * c.tanh(), c

    def forward(self, trees: list[Any]) -> Tensor:
        """A row of scores per tree."""
        return torch.cat([self.out(self.visit(tree)[0]) for tree in trees])


class Looking(TreeLSTM):
    """The same, with a look at a value in each tree."""

    def forward(self, trees: list[Any]) -> Tensor:
        """Rows of scores, of which negative ones count double."""
        rows = []
        for tree in trees:
            h = self.visit(tree)[0]
            rows.append(self.out(h) * (2 if h.sum().item() < 0 else 1))
        return torch.cat(rows)


class InPlace(TreeLSTM):
    """The same, with a state that is changed in place while another name refers to it."""

    def forward(self, trees: list[Any]) -> Tensor:
        """Rows of scores."""
        rows = []
        for tree in trees:
            h = self.visit(tree)[0]
            part = h[:, :2]
            h *= 2
            rows.append(self.out(h) + part.sum() * torch.arange(3))
        return torch.cat(rows)


class Noisy(TreeLSTM):
    """The same, with noise in each node, and after the scores are joined."""

    @dt.recursive
    def visit(self, tree: Any) -> tuple[Tensor, Tensor]:
        """The state of a tree."""
        if isinstance(tree, int):
            o, u = self.leaf(self.words(torch.tensor([tree]))).chunk(2, -1)
            return o.sigmoid(), u + torch.rand_like(u)
        (h, c), (g, d) = self.visit(tree[0]), self.visit(tree[1])
        o, f, u = self.inner(torch.cat([h, g], 1)).chunk(3, -1)
        c = f.sigmoid() * (c + d) + u.tanh() * torch.bernoulli(u.detach().sigmoid())
        return o.sigmoid() * c.tanh(), c

    def forward(self, trees: list[Any]) -> Tensor:
        """A row of scores per tree."""
        rows = torch.cat([self.out(self.visit(tree)[0]) for tree in trees])
        return rows + torch.randn_like(rows)


class InPlaceAfter(TreeLSTM):
    """The same, with scores that are changed in place after another value was computed from them."""

    def forward(self, trees: list[Any]) -> Tensor:
        """Rows of scores."""
        rows = torch.cat([self.out(self.visit(tree)[0]) for tree in trees])
        before, view = rows + 1, rows[:2]
        rows *= 2
        return torch.cat([rows, before, view])[: len(trees)] + view.sum() * torch.arange(3) + before.sum()


def tree(r: random.Random, leaves: int) -> Any:
    """A random binary tree."""
    if leaves == 1:
        return r.randrange(10)
    left = r.randint(1, leaves - 1)
    return tree(r, left), tree(r, leaves - left)


def forest(seed: int, count: int = 4) -> list[Any]:
    """Random trees."""
    r = random.Random(seed)
    return [tree(r, r.randint(1, 9)) for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param(torch.float32, 1e-5, marks=pytest.mark.wide), (torch.float64, 1e-12)],
)
@pytest.mark.parametrize("kind", [TreeLSTM, Looking, InPlace, InPlaceAfter, Noisy])
@pytest.mark.filterwarnings("ignore:daceml_train runs a graph as PyTorch does")
def test_values_gradients_and_effects_equal_eager_execution(
    kind: type[TreeLSTM], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    model = kind().to(dtype)
    twin = copy.deepcopy(model)
    compiled = dt.optimize(model)
    for seed in range(4):
        trees, labels = forest(seed), torch.arange(4) % 3
        model.zero_grad(), twin.zero_grad()
        torch.manual_seed(seed)
        found = F.cross_entropy(compiled(trees), labels)
        torch.manual_seed(seed)
        expected = F.cross_entropy(twin(trees), labels)
        found.backward(), expected.backward()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert float((p.grad - q.grad).norm()) <= tolerance * float(q.grad.norm())
        assert model.notes == twin.notes


def test_cells_are_traced_once_for_many_shapes_of_trees() -> None:
    model = TreeLSTM()
    compiled: Any = dt.optimize(model)
    for seed in range(200):
        compiled(forest(seed)).sum().backward()
        if seed == 10:
            structures = compiled._daceml_train.recursions["forward"].structures
            count, traced = len(structures.cells), [cell.traced for cell in structures.cells]
    assert len(structures.cells) == count <= 5
    assert [cell.traced for cell in structures.cells] == traced


@pytest.mark.filterwarnings("ignore:daceml_train runs a")
def test_a_training_step_trains_as_eager_execution() -> None:
    torch.manual_seed(0)
    model = TreeLSTM()
    twin = copy.deepcopy(model)
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for seed in range(3):
        trees, labels = forest(seed), torch.arange(4) % 3
        found = step([trees], labels)
        optimizer.zero_grad()
        expected = F.cross_entropy(twin(trees), labels)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_look_is_noted() -> None:
    compiled: Any = dt.optimize(Looking())
    with pytest.warns(UserWarning, match="looks at values"):
        compiled(forest(0))


def test_recursive_takes_a_function() -> None:
    with pytest.raises(dt.Invalid, match="takes a Python function"):
        dt.recursive(3)  # type: ignore[arg-type]
