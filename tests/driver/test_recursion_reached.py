"""Parameters of a recursion that no gradient comes to have none, as in PyTorch: an optimizer leaves them alone."""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.forests import Forests
from daceml_train.frontends.torch.recursion.reached import Marks, Part, Reach, apart, gathered
from tests.driver.test_recursion import TreeLSTM, forest

WIDTH = 4
Tree = Any


class Cut(nn.Module):
    """Gradients stop at some nodes: a list detaches what is below it, a string is read without gradients.

    There are as many parameters as ways to be reached, and two passes: the second one's data are the first one's
    results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(3)])
        self.only, self.join, self.cell = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cut, self.quiet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again, self.last = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @dt.recursive
    def visit(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Two results of a node; the second one depends on fewer parameters."""
        if isinstance(tree, int):
            return self.words[tree].tanh(), self.words[tree] * 2
        if isinstance(tree, str):
            with torch.no_grad():
                h = self.quiet(self.words[int(tree)])
            return h, h + 1
        if isinstance(tree, list):
            h, c = self.visit(tree[0])
            return self.only(h.detach()).tanh(), self.cut(c).detach()
        (h, c), (left, right) = map(self.visit, tree)
        return self.join(torch.cat([h, left])).tanh() + c, self.cell(c) + right

    @dt.recursive
    def fold(self, states: list[Tensor]) -> Tensor:
        """One state from several, from the last one on."""
        if len(states) == 1:
            return states[0]
        return self.again(torch.cat([states[0], self.fold(states[1:])])).tanh()

    def forward(self, trees: list[Tree]) -> list[Tensor]:
        """Both results of each tree, and two of them together with what no tree has."""
        found = [self.visit(tree) for tree in trees]
        first = [h for h, _ in found]
        return [*first, *(c for _, c in found), self.fold([first[0], self.last(first[1]), found[2][1]])]


def tree(r: random.Random, depth: int) -> Tree:
    """A random tree."""
    if depth == 0 or r.random() < 0.15:
        word = r.randrange(3)
        return word if r.random() < 0.8 else str(word)
    if r.random() < 0.3:
        return [tree(r, depth - 1)]
    return tree(r, depth - 1), tree(r, depth - 1)


def read(results: list[Tensor], weights: list[float]) -> Tensor:
    """A loss that reads some results."""
    read = [w * h.sin().sum() for w, h in zip(weights, results, strict=True) if w]
    return torch.stack([*read, torch.zeros((), dtype=results[0].dtype)]).sum()


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_are_absent_where_pytorch_has_none(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    torch.manual_seed(0)
    eager = Cut().double()
    model = copy.deepcopy(eager)
    optimized = dt.optimize(model)
    absent = 0
    for seed in range(6 if compiled else 40):
        r = random.Random(seed)
        data = [tree(r, 4 if seed else 7) for _ in range(4)]  # the first ones have most kinds of nodes
        weights = [r.choice([0.0, 0.0, 0.0, 1.0, 0.5]) for _ in range(9)]
        eager.zero_grad(), model.zero_grad()
        loss, expected = read(optimized(data), weights), read(eager(data), weights)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert loss.requires_grad == expected.requires_grad
        if not expected.requires_grad:
            continue
        again = r.random() < 0.3  # marks of one pass do not serve the next
        for _ in range(1 + again):
            loss.backward(retain_graph=again), expected.backward(retain_graph=again)
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (seed, name, data)
            absent += q.grad is None
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-12)
    assert absent > 20


@pytest.mark.compiled
def test_a_step_leaves_alone_what_has_no_gradient() -> None:
    torch.manual_seed(0)
    eager = Cut()
    model = copy.deepcopy(eager)
    before = copy.deepcopy(eager.state_dict())
    weights = [1.0, *[0.0] * 7]
    data: list[Tree] = [((0, [1]), ["1"]), (0, [1]), 0]

    def adamw(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5)

    def loss(results: list[Tensor], _: Tensor) -> Tensor:
        return read(results, weights[: len(results)])

    optimizer = adamw(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a recursion is a part of the step
        step = dt.training_step(model, loss, adamw(model))
        for _ in range(3):
            step((data,), torch.zeros(1))
            optimizer.zero_grad()
            loss(eager(data), torch.zeros(1)).backward()
            optimizer.step()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    left = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    assert {"words.1", "words.2", "quiet.weight", "last.weight"} <= set(left)


def test_rows_of_several_tensors_and_their_gradients() -> None:
    table, single, other = (torch.randn(*shape, requires_grad=True) for shape in ((5, 2), (2,), (2,)))
    parts = [Part(torch.tensor([3, 3, 0]), torch.tensor([0, 2, 5]))]
    parts += [Part(None, torch.tensor([1, 4])), Part(None, torch.tensor([3]))]
    found, marks = gathered(parts, [table, single, other])
    plain = torch.stack([table[3], single, table[3], other, single, table[0]])
    assert torch.equal(found, plain) and marks is not None
    weights = torch.arange(12.0).view(6, 2)
    for ours, expected in zip(
        torch.autograd.grad((found * weights).sum(), [table, single, other]),
        torch.autograd.grad((plain * weights).sum(), [table, single, other]),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)


def test_a_reader_tells_which_rows_have_a_gradient() -> None:
    table, single = torch.randn(5, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    found, marks = gathered(
        [Part(torch.tensor([1, 2]), torch.tensor([0, 1])), Part(None, torch.tensor([2]))], [table, single]
    )
    assert marks is not None
    told = marks
    found.register_hook(lambda g: told.add(torch.tensor([0]).numpy(), 3))
    first, second = torch.autograd.grad(found.sum(), [table, single], allow_unused=True)
    assert second is None and first is not None


def test_rows_apart_may_change_in_place() -> None:
    table = torch.randn(4, 3, requires_grad=True)
    first, second = apart(table * 1, [2, 0], Marks())
    first.mul_(2)
    (gradient,) = torch.autograd.grad(first.sum() + second.sum(), [table])
    assert gradient[:, 0].tolist() == [1, 0, 2, 0]


@pytest.mark.compiled
@pytest.mark.parametrize("shown", [True, False])
def test_what_shows_at_once_is_what_levels_find(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[bool] = []
    whole = Reach._at_once

    def compared(self: Reach, masks: Any) -> Any:
        copies = [m.copy() for m in masks]
        found = whole(self, masks)
        ways.append(found is not None)
        if found is not None:
            shared, data = self._by_level(copies)
            assert shared == found[0] and all((data[k] == found[1][k]).all() for k in data)
        return found

    monkeypatch.setattr(Reach, "_at_once", compared)
    torch.manual_seed(0)
    model = TreeLSTM() if shown else Cut()
    optimized = dt.optimize(model)
    r = random.Random(0)
    for _ in range(3):
        if shown:
            optimized(forest(r.randrange(99))).sum().backward()
        else:
            read(
                optimized([(r.randrange(3), (r.randrange(3), r.randrange(3))) for _ in range(3)]), [1.0] * 7
            ).backward()
    assert any(ways) == shown
