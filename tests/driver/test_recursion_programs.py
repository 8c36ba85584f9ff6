"""Recursive programs of many styles beside PyTorch: results, gradients, and what Python is left with."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import daceml_train as dt
from daceml_train.driver.forests import Forests
from tests.driver.recursive_cells import (
    Arrays,
    Attention,
    Averaged,
    Caught,
    Constants,
    Dropout,
    Effects,
    Handled,
    InPlace,
    Losses,
    Made,
    Mapped,
    Recurrent,
    Reused,
    Tuples,
    Types,
    Values,
    Viewed,
)
from tests.driver.recursive_programs import (
    WIDTH,
    Closure,
    Depths,
    Dicts,
    Early,
    Generators,
    Keywords,
    Lambda,
    Memo,
    Node,
    Program,
    Stack,
    Static,
    UpAndDown,
    trees,
)

PROGRAMS = [
    *(Generators, Early, Dicts, Memo, Stack, Keywords, Closure, Static, UpAndDown, Depths, Lambda, Arrays, Tuples),
    *(Dropout, Caught, Attention, Values, InPlace, Constants, Losses, Types, Mapped, Effects, Reused, Recurrent),
]
RECORDED = [*PROGRAMS, Averaged, Handled, Made, Viewed]


def leaves(found: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]


IN_PYTORCH = {Static: "not found by name", Lambda: "not found by name", InPlace: "PyTorch runs the forward pass"}
"""Programs of which no levels are compiled."""


def check(kind: type[Program]) -> Any:
    """Compare results, gradients, and counts with PyTorch's, batch by batch; returns the compiled model."""
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    for seed in range(4):
        model.zero_grad(set_to_none=True)
        twin.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        found = leaves(compiled(kind.data(seed)))
        torch.manual_seed(seed)
        expected = leaves(twin(kind.data(seed)))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        if expected[0].requires_grad:
            for results in (found, expected):
                torch.autograd.backward(results, [torch.linspace(-1, 2, t.numel()).view(t.shape) for t in results])
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
        assert model.visits == twin.visits
    return compiled


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:daceml_train")
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_programs(kind: type[Program]) -> None:
    recursion = check(kind)._daceml_train.recursions.get("forward")
    programs = None if recursion is None else recursion.structures.programs
    compiled = programs is not None and programs.compiled > 0 and not programs.refused
    assert compiled == (kind not in IN_PYTORCH)


@pytest.mark.filterwarnings("ignore:daceml_train")
@pytest.mark.parametrize("kind", RECORDED, ids=lambda kind: kind.__name__)
def test_programs_whose_levels_pytorch_runs(kind: type[Program], monkeypatch: Any) -> None:
    monkeypatch.setattr(Forests, "run", lambda self, structures, runs: None)
    check(kind)


class Plain(Program):
    """A plain recursion."""

    def visit(self, node: Node) -> Tensor:
        """The state of a node."""
        x = self.leaf(node)
        for part in node.parts:
            x = self.both(x, self.visit(part))
        node.state = x
        return x


class Inputs(Program):
    """Data with gradients of their own."""

    def forward(self, roots: Any) -> Tensor:
        """The states of roots, for rows of data."""
        nodes, rows = roots
        return torch.cat([self.walk(node, rows) for node in nodes])

    def walk(self, node: Node, rows: Tensor) -> Tensor:
        """The state of a node."""
        x = rows[node.word : node.word + 1] * rows[0]
        for part in node.parts:
            x = self.both(x, self.walk(part, rows))
        return x


def pair(kind: type[Program]) -> tuple[Any, Any]:
    """A compiled model that has run once, and its twin."""
    torch.manual_seed(0)
    model = kind()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    return compiled, twin


def same_gradients(compiled: Any, twin: Any) -> None:
    """Compare gradients of all parameters."""
    for p, q in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.compiled
def test_without_gradients_and_in_evaluation_mode() -> None:
    compiled, twin = pair(Plain)
    for around in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with around():
            found, expected = compiled(trees(1)), twin(trees(1))
        torch.testing.assert_close(found, expected)
        assert (found.requires_grad, found.is_inference()) == (expected.requires_grad, expected.is_inference())
    compiled.eval(), twin.eval()
    torch.testing.assert_close(compiled(trees(2)), twin(trees(2)))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:daceml_train")
def test_autocast() -> None:
    compiled, twin = pair(Plain)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, expected = compiled(trees(3)), twin(trees(3))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
        compiled.zero_grad(), twin.zero_grad()
        found.float().square().sum().backward(), expected.float().square().sum().backward()
        same_gradients(compiled, twin)


@pytest.mark.compiled
def test_two_backward_passes_and_states_that_nodes_keep() -> None:
    compiled, twin = pair(Plain)
    ours, theirs = trees(4), trees(4)
    found, expected = compiled(ours), twin(theirs)
    found.sum().backward(retain_graph=True), expected.sum().backward(retain_graph=True)
    found.square().sum().backward(), expected.square().sum().backward()
    same_gradients(compiled, twin)
    with pytest.raises(RuntimeError, match="second|freed"):
        found.sum().backward()
    found, expected = compiled(ours), twin(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert isinstance(a.state, Tensor)
        torch.testing.assert_close(a.state * 2, b.state * 2)
    compiled.zero_grad(), twin.zero_grad()
    torch.cat([node.state for node in ours]).exp().sum().backward()
    torch.cat([node.state for node in theirs]).exp().sum().backward()
    same_gradients(compiled, twin)


@pytest.mark.compiled
def test_gradients_of_data() -> None:
    compiled, twin = pair(Inputs)
    for seed in range(3):
        rows = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(seed))
        ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
        compiled.zero_grad(), twin.zero_grad()
        compiled((trees(seed), ours)).square().sum().backward()
        twin((trees(seed), theirs)).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        same_gradients(compiled, twin)


@pytest.mark.compiled
def test_a_model_that_changes_between_calls() -> None:
    compiled, twin = pair(Plain)
    counts = {"ours": 0, "theirs": 0}

    def counted(name: str) -> Any:
        def hook(module: Any, given: Any, result: Tensor) -> Tensor:
            counts[name] += 1
            return result * 0.5

        return hook

    def compare(seed: int) -> None:
        compiled.zero_grad(), twin.zero_grad()
        found, expected = compiled(trees(seed)), twin(trees(seed))
        torch.testing.assert_close(found, expected)
        if expected.requires_grad:
            found.sum().backward(), expected.sum().backward()
        same_gradients(compiled, twin)

    compare(1)
    for model in (compiled, twin):
        with torch.no_grad():
            model.join.weight.mul_(0.5)
    compare(2)
    for model in (compiled, twin):
        model.words.requires_grad_(False)
    compare(3)
    for model in (compiled, twin):
        model.words.requires_grad_(True)
        model.join = copy.deepcopy(twin.join).requires_grad_()
        model.join.bias = None
    compare(4)
    hooks = [compiled.join.register_forward_hook(counted("ours")), twin.join.register_forward_hook(counted("theirs"))]
    compare(5)
    assert counts["ours"] == counts["theirs"] > 0
    for hook in hooks:
        hook.remove()
    compare(6)
