"""What user code may do with values of a recursion as with tensors, threads, and where errors of values arise."""

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.forests import Forests
from tests.driver.test_forests import compare
from tests.driver.test_recursion_limits import Node, Sum, noted, tree

pytestmark = pytest.mark.filterwarnings("ignore:daceml_train")
TREES: list[Any] = [((1, 2), (3, (4, 5))), (4, ((5, 6), 7))]


class Pairs(nn.Module):
    """A recursion over nested tuples; `used` makes something of a node's state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join, self.gate = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def used(self, h: Tensor) -> Tensor:
        """What is made of a state."""
        raise NotImplementedError

    @dt.recursive
    def visit(self, t: Any) -> Tensor:
        """The state of a tree."""
        if isinstance(t, int):
            return self.words(torch.tensor([t]))
        return self.used(self.join(torch.cat([self.visit(part) for part in t]).sum(0, keepdim=True)).tanh())

    def forward(self, trees: list[Any]) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(t) for t in trees])


class Typed(Pairs):
    """The recursive function asks for the type."""

    @dt.recursive
    def visit(self, t: Any) -> Tensor:
        """The state of a tree."""
        if type(t) is int:
            return self.words(torch.tensor([t]))
        h = self.join(torch.cat([self.visit(part) for part in t]).sum(0, keepdim=True)).tanh()
        return h * 2 if type(h) is torch.Tensor else h


def tagged(m: Any, h: Any) -> Tensor:
    h.tag = 3
    assert not hasattr(h, "other")
    return h * h.tag


def replaced(m: Any, h: Tensor) -> Tensor:
    h.data = h.data * 2
    return h


def cleared(m: Any, h: Tensor) -> Tensor:
    h.grad = None
    return h


def hooked(m: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * 2):
        return (h * h).tanh()


def looked(m: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = float(m.gate(h).sum().tanh())
    return m.gate(h) * scale


GATE = torch.compile(torch.sin, backend="eager")
USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "type": lambda m, h: h * 2 if type(h) is torch.Tensor else h,
    "a table of types": lambda m, h: h * {torch.Tensor: 2}.get(type(h), 1),
    "a parameter": lambda m, h: nn.Parameter(h) + h.detach(),
    "a parameter of a detached value": lambda m, h: nn.Parameter(h.detach()) + h,
    "a copy": lambda m, h: copy.copy(h) * 2,
    "a class of tensors": lambda m, h: h.as_subclass(torch.Tensor) * 2,  # type: ignore[arg-type]
    "the operator that made it": lambda m, h: h * 2 if "Tanh" in type(h.grad_fn).__name__ else h,
    "a compiled function": lambda m, h: GATE(h) + h,
    "strides of a parameter": lambda m, h: h * m.gate.weight.t().stride(0),
    **{f.__name__: f for f in (tagged, replaced, cleared, hooked, looked)},
}


@pytest.mark.parametrize("name", [*USES, "type in the recursive function"])
def test_values_are_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    torch.manual_seed(0)
    model = (type("Used", (Pairs,), {"used": USES[name]}) if name in USES else Typed)()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for _ in range(2):
        compare(model, compiled, twin, (TREES,), 1e-5)


@pytest.mark.compiled
def test_models_of_one_class_in_several_threads() -> None:
    torch.manual_seed(0)
    models = [Sum(width) for width in (4, 6)]
    twins, compiled = copy.deepcopy(models), [dt.optimize(m) for m in models]
    data = [[[tree(random.Random(10 * k + s), 9) for _ in range(3)] for s in range(12)] for k in range(2)]
    found: list[list[Tensor]] = [[], []]

    def run(k: int) -> None:
        found[k] = [compiled[k](roots).detach() for roots in data[k]]

    before = Sum.visit.__code__
    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, twin in enumerate(twins):
        assert len(found[k]) == len(data[k])
        for result, roots in zip(found[k], data[k], strict=True):
            torch.testing.assert_close(result, twin(roots).detach())
        recursion: Any = compiled[k]._daceml_train.recursions["forward"]  # type: ignore[union-attr]
        assert recursion is not None and recursion.programs and not recursion.structures.programs.refused
    assert Sum.visit.__code__ is before


@pytest.mark.parametrize("known", [False, True])
def test_an_index_that_is_found_out_of_range_when_levels_run(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    compiled: Any = dt.optimize(Sum())
    if known:
        compiled([Node(1), Node(0, Node(2), Node(3))])
    with pytest.raises(IndexError) as error:
        compiled([Node(1), Node(0, Node(0, Node(2), Node(17)), Node(3))])
    assert noted(error.value).endswith("computes with 17, which is at roots[1].left.right.word")
    compiled([Node(1)])


def test_an_operator_that_fails_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Wide(Pairs):
        """Its states do not fit."""

        def used(self, h: Tensor) -> Tensor:
            """What is made of a state."""
            return self.gate(torch.cat([h, h], 1))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|same reduction dim"):
        dt.optimize(Wide())(TREES)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
