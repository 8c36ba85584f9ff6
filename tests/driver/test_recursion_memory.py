"""NumPy's writes within a recursion to memory that it shares with tensors, beside PyTorch."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.forests import Forests
from daceml_train.errors import Unsupported
from tests.driver.test_forests import compare

pytestmark = pytest.mark.filterwarnings("ignore:daceml_train")
TREES: list[Any] = [((1, 2), (3, (4, 5))), (4, ((5, 6), 7))]


class Shared(nn.Module):
    """A recursion that adds a tensor, after something wrote to its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(1, 4))
        self.array: Any = None
        self.added: Any = None

    def begin(self) -> None:
        """What happens before a forward pass."""
        self.array = np.ones((1, 4), dtype=np.float32)
        self.added = torch.from_numpy(self.array)

    def write(self, h: Any = None) -> None:
        """What happens at a node."""
        self.array += 1

    @dt.recursive
    def visit(self, tree: Any) -> Tensor:
        """The state of a node."""
        self.write()
        if isinstance(tree, int):
            x = self.words(torch.tensor([tree])) + self.added
            return x
        h = torch.stack([self.visit(part) for part in tree]).sum(0)
        y = self.join(h).tanh() + self.added
        self.write(y)
        return y

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of roots."""
        self.begin()
        return torch.cat([self.visit(tree) for tree in trees])


class Outside(Shared):
    """Written between the roots, where their states are joined."""

    def write(self, h: Any = None) -> None:
        """Nothing."""

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of roots."""
        self.begin()
        found = []
        for tree in trees:
            self.array += 1
            found.append(self.visit(tree) + self.added)
        result = torch.cat(found) + self.added
        self.array += 1
        return result


class Buffer(Shared):
    """A buffer, by an array that is made at each node."""

    def begin(self) -> None:
        """The buffer is what is added."""
        self.added = self.table

    def write(self, h: Any = None) -> None:
        """Written by NumPy."""
        self.table.numpy()[:] *= 1.1


class Parameter(Buffer):
    """A parameter, by an array that is made at each node."""

    def write(self, h: Any = None) -> None:
        """Written by NumPy."""
        self.join.weight.detach().numpy()[:] *= 1.01


class Earlier(Buffer):
    """A parameter, by an array that is made before."""

    def begin(self) -> None:
        """Makes the array."""
        super().begin()
        self.array = self.join.weight.detach().numpy()

    def write(self, h: Any = None) -> None:
        """Written by NumPy."""
        self.array *= 1.01


class Value(Buffer):
    """A value of the recursion, which is read again."""

    def write(self, h: Any = None) -> None:
        """Written by NumPy."""
        if h is not None:
            h.detach().numpy()[:] *= 2


@pytest.mark.parametrize("kind", [Shared, Outside, Buffer, Parameter, Earlier, Value])
def test_numpy_writes_between_nodes(kind: type[Shared], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(3):
        compare(model, compiled, twin, (TREES,), 1e-5)
        for t, u in zip((*model.parameters(), *model.buffers()), (*twin.parameters(), *twin.buffers()), strict=True):
            torch.testing.assert_close(t, u)


def test_an_array_that_was_made_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    model = Buffer()
    array = model.table.numpy()
    monkeypatch.setattr(Buffer, "write", lambda self, h=None: array.__imul__(1.1))
    compiled = dt.optimize(model)
    with pytest.raises(Unsupported, match="NumPy's writes to a parameter or a buffer"):
        compiled(TREES)
    before = array.copy()
    found = compiled(TREES)
    array[:] = before
    torch.testing.assert_close(found, model.__class__.forward(copy.copy(model), TREES))


VIEWS: dict[str, Any] = {
    "of another shape": lambda h, words: (h, h.view(4)),
    "of a part": lambda h, words: (h, h[:, :2], h[:, 1:]),
    "without a gradient": lambda h, words: (h, h.detach()),
    "of a view": lambda h, words: ((a := h.view(2, 2)), a.T, h),
    "of what is not returned": lambda h, words: (h[:, :2], h[:, :2].view(2)),
    "of a parameter": lambda h, words: (words.weight.T, h),
}


class Views(Shared):
    """Whose results share memory."""

    def forward(self, trees: list[Any]) -> Any:
        """What is returned of the state of a root."""
        self.begin()
        return VIEWS[self.name](self.visit(trees[0]), self.words)


@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_views_of_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    torch.manual_seed(0)
    model = Views()
    model.name = name
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(2):
        found, expected = compiled(TREES), twin(TREES)
        for results, own in ((found, model), (expected, twin)):
            own.zero_grad()
            sum((r * torch.arange(1, 1 + r.numel()).view(r.shape)).sum() for r in results).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        memory = [[r.untyped_storage().data_ptr() for r in results] for results in (found, expected)]
        same = [[own.index(pointer) for pointer in own] for own in memory]
        assert same[0] == same[1]
        with torch.no_grad():
            found[-1].mul_(2), expected[-1].mul_(2)
        torch.testing.assert_close(found, expected)
