"""Inputs that are no dense tensors of numbers, and models that break rules: PyTorch's behavior or an error that says so.

Either way model and optimizer are as they were, and the next good call works.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.holding import Function

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore"),
]

INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "mkldnn": lambda x: x.to_mkldnn(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x[:3], x[3:]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged),
    "complex": lambda x: x.to(torch.complex64),
    "integers": lambda x: x.long(),
    "a list": lambda x: x.tolist(),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the error."""
    try:
        return call()
    except Exception as error:
        return error


WIDE = ("compressed", "quantized", "complex", "a list")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.wide] * (k in WIDE)) for k in INPUTS])
def test_inputs_of_other_kinds(kind: str) -> None:
    theirs = network()
    ours, stepped = copy.deepcopy(theirs), copy.deepcopy(theirs)
    optimized = dt.optimize(ours)
    optimizer = torch.optim.Adam(stepped.parameters())
    step = dt.training_step(stepped, lambda y: y.square().mean(), optimizer)
    x = torch.randn(6, 8)
    for _ in range(2):
        given = INPUTS[kind](x)
        expected, found = outcome(lambda g=given: theirs(g)), outcome(lambda g=given: optimized(g))
        if isinstance(expected, Exception):
            assert isinstance(found, type(expected) | dt.errors.DacemlError), repr(found)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        theirs.load_state_dict(ours.state_dict())  # running statistics, as far as either came
        before, eager = copy.deepcopy((stepped.state_dict(), optimizer.state_dict())), copy.deepcopy(stepped)
        if isinstance(outcome(lambda g=given: step(g)), Exception):
            after = (stepped.state_dict(), optimizer.state_dict())
            if kind == "jagged":  # PyTorch runs the step, up to the layer that refuses it
                assert isinstance(outcome(lambda g=given, m=eager: m(g)), Exception)
                before = (eager.state_dict(), before[1])
            leaves = (torch.utils._pytree.tree_leaves(tree) for tree in (before, after))
            for a, b in zip(*leaves, strict=True):
                assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
        torch.testing.assert_close(optimized(x), theirs(x), rtol=1e-4, atol=1e-5)
        assert torch.isfinite(step(x))


def test_a_leaf_that_the_model_changes() -> None:
    def change(w: Tensor, x: Tensor) -> Tensor:
        x.mul_(2)
        return x * w

    module = Function(change, 4)
    optimized = dt.optimize(copy.deepcopy(module))
    for called in (module, optimized):
        x = torch.ones(3, 4, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            called(x)
        assert torch.equal(x, torch.ones(3, 4))


def test_an_inference_tensor_that_the_model_changes() -> None:
    module = Function(lambda w, x: x.mul_(2) * w, 4)
    with torch.inference_mode():
        x = torch.ones(3, 4)
    results = [outcome(lambda m=m: m(x)) for m in (module, dt.optimize(copy.deepcopy(module)))]
    assert type(results[1]) is type(results[0]), results


def test_a_saved_tensor_that_is_changed_before_backward_is_an_error() -> None:
    module = Function(lambda w, x: (x * w).tanh() * x, 4)
    for called in (module, dt.optimize(copy.deepcopy(module))):
        x = torch.randn(3, 4)
        result = called(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_an_error_in_the_loss_updates_nothing() -> None:
    """Running statistics follow the forward pass that went well, as in eager execution."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if target.shape[0] == 5:
            raise ValueError("five targets")
        return F.mse_loss(output, target)

    step = dt.training_step(model, loss, optimizer)
    step(torch.randn(6, 8), torch.randn(6, 4))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for target in (torch.randn(5, 4), torch.randn(6, 3), torch.randn(6, 4).to("meta")):
        with pytest.raises((ValueError, RuntimeError)):
            step(torch.randn(6, 8), target)
        leaves = (torch.utils._pytree.tree_leaves(t) for t in (before, (model.state_dict(), optimizer.state_dict())))
        for a, b in zip(*leaves, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert torch.isfinite(step(torch.randn(6, 8), torch.randn(6, 4)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"one element, given shape \[6\]; reduce it: reduction='mean'"),
        (lambda y, t: F.cross_entropy(y, t).item(), "one element, given float; return it as a tensor, without item"),
        (lambda y, t: (F.cross_entropy(y, t), y), "one element, given tuple; return it as a tensor, .* by itself"),
        (lambda y, t: F.cross_entropy(y, t).backward(), "one element, given NoneType; .* a step calls backward"),
        (lambda y, t: (y.argmax(1) == t).sum(), "the loss has no gradient; no parameter that it depends on requires"),
    ],
)
def test_a_loss_that_is_none_is_said(loss: Callable[..., Any], message: str) -> None:
    model = nn.Linear(8, 4)
    before = copy.deepcopy(model.state_dict())
    step = dt.training_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with pytest.raises(dt.Invalid, match=message):
            step(torch.randn(6, 8), torch.randint(4, (6,)))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("breaks", [False, True])
def test_an_optimizer_of_another_model_is_said(breaks: bool) -> None:
    def forward(w: Tensor, x: Tensor) -> Tensor:
        if breaks:
            torch._dynamo.graph_break()
        return x * w

    model, other = Function(forward, 4), Function(forward, 4)
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="updates nothing: no parameter of its optimizer has a gradient; make") as told:
        step(torch.randn(6, 4), torch.randn(6, 4))
    assert told[-1].filename == __file__
    assert not any(p.grad is not None for p in other.parameters())


@pytest.mark.parametrize(
    "call",
    [lambda step, x: step.graph(x, x), lambda step, x: step.sdfg(x, x), lambda step, x: dt.to_sdfg(step.model, x)],
)
def test_sizes_that_do_not_fit_are_said_without_a_call(call: Callable[[Any, Tensor], Any]) -> None:
    model = nn.Linear(8, 4)
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    message = r"Linear cannot be called with argument 0: float32\[6, 5\].*: RuntimeError: a and b must have same reduc"
    with pytest.raises(dt.Invalid, match=message):
        call(step, torch.randn(6, 5))


def test_a_fallback_names_module_and_line() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.embedding(x, self.table.weight * 2, sparse=True)

    model = nn.Sequential(nn.Sequential(Inner()), nn.Tanh())
    optimized = dt.optimize(model)
    with pytest.warns(UserWarning, match=r"sparse tensor.*\(at 0\.0 test_bad_input\.py:\d+\)"):
        optimized(torch.tensor([[1, 2]]))


class Replacing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.bias.data = self.bias.data * 0.5
        return super().forward(x)


class Locking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with threading.Lock():
            return super().forward(x)


class Deciding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if float(y.sum()) > 0 else y


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Deciding, r"a Python decision on a tensor's value \(at test_bad_input.py:\d+\)"),
        (
            Replacing,
            r"a tensor whose memory is replaced \(x\.data = \.\.\.\); x\.data\.copy_\(\.\.\.\) keeps the memory",
        ),
        (Locking, r"Attempted to call function marked as skipped: Dynamo does not know how to trace .*allocate_lock.*"),
    ],
)
def test_a_reason_is_one_sentence_without_hints(kind: type[nn.Linear], reason: str) -> None:
    model = kind(4, 4)
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.randn(2, 4), torch.randn(2, 4))
    assert re.match(reason, step.breaks[0].removeprefix("Unsupported: ")), step.breaks
    assert not any("\n" in text or "Hint" in text for text in step.breaks)
    assert kind is Replacing or repr(step).endswith("along paths for 1 kind of arguments>")


def test_not_a_number_stays_one() -> None:
    theirs = network()
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (theirs, ours)]
    step = dt.training_step(ours, lambda y: y.square().mean(), optimizers[1])
    for value in (1.0, float("inf"), 2.0):
        x = torch.randn(6, 8)
        x[0, 0] = value
        optimizers[0].zero_grad()
        loss = theirs(x).square().mean()
        loss.backward()
        optimizers[0].step()
        torch.testing.assert_close(step(x), loss.detach(), equal_nan=True)
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "Adam",
        "AdamW",
        "NAdam",
        *(pytest.param(k, marks=pytest.mark.wide) for k in ("SGD", "RAdam", "ASGD", "Adadelta")),
    ],
)
def test_a_batch_that_is_refused_changes_nothing(kind: str) -> None:
    """Neither parameters nor buffers nor state, whose counters depend on no gradient: the next steps are as without it."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3)] if kind == "AdamW" else [nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Linear(6, 3)]
    theirs = nn.Sequential(nn.Embedding(7, 4), *layers).double()
    ours = copy.deepcopy(theirs)
    optimizers: list[Any] = [getattr(torch.optim, kind)(m.parameters(), lr=0.1) for m in (theirs, ours)]
    step = dt.training_step(ours, F.cross_entropy, optimizers[1])
    for number in range(6):
        words, classes = torch.randint(0, 7, (5,)), torch.randint(0, 3, (5,))
        refused = number in (2, 4)
        (words if number == 2 else classes)[0] += 9 * refused
        if refused:
            with pytest.raises(IndexError) as caught:
                step(words, classes)
            assert "are those from before the step" in caught.value.__notes__[0]
            continue
        optimizers[0].zero_grad()
        F.cross_entropy(theirs(words), classes).backward()
        optimizers[0].step()
        step(words, classes)
    assert step.breaks == []
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-12)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        for name, value in optimizers[0].state[q].items():
            torch.testing.assert_close(optimizers[1].state[p][name], value, rtol=1e-9, atol=1e-12)


def test_a_wrong_type_is_the_arguments_fault(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch traces more types and shapes than its operators take: its error is raised, and nothing is called a defect."""
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
    optimized = dt.optimize(model)
    x = torch.randn(4, 6)
    optimized(x)
    for wrong in (x.double(), x.long()):
        with warnings.catch_warnings(record=True) as seen, pytest.raises(RuntimeError, match="same dtype") as raised:
            warnings.simplefilter("always")
            optimized(wrong)
        assert not [each for each in seen if "daceml_train" in str(each.message)]
        assert "a call that worked took" in "".join(raised.value.__notes__)
    torch.testing.assert_close(optimized(x), model(x))
    assert state_of(optimized).backend.breaks == []  # type: ignore[union-attr]
    assert capfd.readouterr().err == ""
