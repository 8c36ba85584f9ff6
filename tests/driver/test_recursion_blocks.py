"""Blocks of recursive functions: what they record is repeated, all else runs at each call."""

import ast
import copy
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.frontends.torch.recursion.lifting import Lifter
from daceml_train.frontends.torch.recursion.outline import outline
from daceml_train.frontends.torch.recursion.pure import Checker, parsed
from tests.driver.test_forests import compare
from tests.driver.test_recursion import TreeLSTM, forest


class Effects(nn.Module):
    """Effects next to computation: a counter, notes in a method, an attribute that changes, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(10, 4), nn.Linear(8, 4)
        self.seen, self.scale = 0, 1.0
        self.notes: list[str] = []

    def noted(self, x: Tensor) -> Tensor:
        """A method with an effect."""
        self.notes.append("noted")
        return x.relu() + 1

    def plain(self, x: Tensor, y: Tensor) -> Tensor:
        """A method that only computes."""
        z = torch.cat([x, y], 1)
        return self.join(z).tanh()

    @dt.recursive
    def visit(self, t: Any) -> Tensor:
        """The state of a tree."""
        self.seen += 1
        if isinstance(t, int):
            x = self.words(torch.tensor([t])) * self.scale
            return self.noted(x)
        left, right = self.visit(t[0]), self.visit(t[1])
        self.scale = 1.0 + 0.5 * (self.seen % 2)
        h = self.plain(left, right) * self.scale
        y = h * left
        return y.tanh() + h

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(t) for t in trees])


def test_effects_happen_at_each_call() -> None:
    torch.manual_seed(0)
    model = Effects()
    twin = copy.deepcopy(model)
    compiled, calls = dt.optimize(model), [0, 0]
    for k, m in enumerate((model, twin)):
        m.join.register_forward_hook(lambda *_, k=k: calls.__setitem__(k, calls[k] + 1))
    for seed in range(6):
        compare(model, compiled, twin, (forest(seed),), 1e-5)
        assert (model.seen, model.scale, model.notes) == (twin.seen, twin.scale, twin.notes)
        assert calls[0] == calls[1]


def test_the_state_of_modules_is_part_of_what_is_kept() -> None:
    torch.manual_seed(0)
    model = TreeLSTM()
    model.extra = nn.ELU(alpha=1.0)
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    compare(model, compiled, twin, (forest(0),), 1e-5)
    for m in (model, twin):
        m.leaf.weight.requires_grad_(False)
        m.eval()
    compare(model, compiled, twin, (forest(1),), 1e-5)


def test_blocks_repeat_what_they_recorded(monkeypatch: Any) -> None:
    model = TreeLSTM()
    compiled: Any = dt.optimize(model)
    compiled(forest(0, 8))
    recursion = compiled._daceml_train.recursions["forward"]
    code = next(iter(recursion.outlined.values()))
    blocks = [block for last in recursion.structures.last.values() for block in last]
    assert len(blocks) == 3, "leaves, inner nodes, and what both return"
    for block in blocks:
        monkeypatch.setattr(block, "function", lambda *_: 1 / 0)
    for memo in recursion.structures.memo.values():
        memo.clear()
    compiled(forest(5, 8))  # by what was recorded last, without the block itself
    assert TreeLSTM.visit.__code__ is not code


def test_functions_are_what_they_were_after_an_error() -> None:
    model = TreeLSTM()
    compiled, before = dt.optimize(model), TreeLSTM.visit.__code__
    for _ in range(2):
        try:
            compiled([(1, "no word")])
        except Exception:
            assert TreeLSTM.visit.__code__ is before
        else:
            raise AssertionError("a tree with a string")


def test_functions_that_do_more_than_compute_have_no_blocks() -> None:
    def looks(t: Any, x: Tensor) -> Any:
        y = (x + 1).item()
        z = x.add_(1)
        w = torch.rand(3)
        return looks(t, y + z + w)

    assert outline(looks, frozenset({"looks"})) is None


class Operands(nn.Module):
    """Blocks with lists of states, numbers of both kinds, scalars that vary, a memo table, and an order of effects."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(10, 4), nn.Linear(5, 4)
        self.bias = nn.Parameter(torch.zeros(4))

    @dt.recursive
    def visit(self, t: Any, depth: int, memo: dict[Any, Tensor]) -> Tensor:
        """The state of a tree."""
        if isinstance(t, int):
            memo[t] = self.words(torch.tensor([t])).tanh() + self.bias
            return memo[t]
        x = torch.stack([self.visit(part, depth + 1, memo) for part in t]).sum(0) * (depth + 1)
        y = torch.cat([x, torch.tensor([0.5 * depth]).view(1, 1)], 1)
        memo[depth] = self.join(y)
        return memo[depth] + self.join(torch.cat([self.visit(1, depth + 1, memo), torch.ones(1, 1)], 1))

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of roots."""
        memo: dict[Any, Tensor] = {}
        roots = [self.visit(t, 0, memo) for t in trees]
        return torch.cat([*roots, *[memo[k] for k in sorted(memo)]])


def test_operands_of_blocks() -> None:
    torch.manual_seed(0)
    model = Operands()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for trees in ([(1, (2, 3)), (4, 5, (6,))], [((7, 8), (9, (1, 2, 3)))], [3, (4, 5)]):
        compare(model, compiled, twin, (trees,), 1e-5)


def test_calls_within_expressions_keep_the_order_of_effects() -> None:
    def function(self: Any, t: Any, x: Tensor, memo: Any) -> Any:
        a = torch.cat([self.visit(c) for c in t], 1)  # lifted
        b = x.tanh() + self.visit(t)  # what is computed before the call could depend on it
        c = memo[0] + self.visit(t)
        d = torch.cat([self.visit(t), self.visit(x)])  # both, in order
        return torch.tanh(self.visit(a)), b, c, d

    tree = parsed(function)  # type: ignore[arg-type]
    assert tree is not None
    lifter = Lifter(Checker(function), frozenset({"visit"}))  # type: ignore[arg-type]
    values = [node.value for node in tree.body[:4] if isinstance(node, ast.Assign)]
    found = [lifter.lifted(value) for value in values]
    assert [None if f is None else [ast.unparse(s) for s in f[0]] for f in found] == [
        ["__lifted_0 = [self.visit(c) for c in t]"],
        None,
        None,
        ["__lifted_1 = self.visit(t)", "__lifted_2 = self.visit(x)"],
    ]
