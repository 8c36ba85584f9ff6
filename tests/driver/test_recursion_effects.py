"""What recursions do besides computing values, beside PyTorch: looks, changes in place, hooks, calls of native code."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import daceml_train as dt
from daceml_train.errors import Unsupported

pytestmark = pytest.mark.compiled
TREES = [(((1, 2), 3), (4, 5)), ((4, 5), (6, 7)), (1, (2, 3))]


class Pairs(nn.Module):
    """A recursion over nested tuples; what `joined` makes of a node's state is added to it."""

    joined: Callable[[Any, Tensor], Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join, self.gate = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(1, 4))
        self.seen: list[Any] = []

    def cell(self, x: Tensor) -> Tensor:
        """A state from the sum of others."""
        return self.join(x).tanh()

    @dt.recursive
    def visit(self, tree: Any) -> Tensor:
        """The state of a node."""
        if isinstance(tree, int):
            return self.words(torch.tensor([tree]))
        state = self.cell(sum(self.visit(part) for part in tree))
        return state if self.joined is None else state + self.joined(state)

    def forward(self, trees: Any) -> Tensor:
        """The states of roots."""
        return torch.cat([self.visit(tree) for tree in trees])


def with_(joined: Callable[[Any, Tensor], Tensor]) -> type[Pairs]:
    """The recursion with this addition to states."""
    return type("With", (Pairs,), {"joined": joined})


def check(kind: type[Pairs], trees: Any = TREES, batches: int = 2) -> Any:
    """Compare values, gradients, buffers, and what was seen; the compiled module."""
    torch.manual_seed(0)
    eager = kind()
    compiled = dt.optimize(copy.deepcopy(eager))
    for number in range(batches):
        found = []
        for module in (eager, compiled):
            torch.manual_seed(number)
            found.append(module(trees))
        expected, result = found
        assert expected.requires_grad == result.requires_grad
        torch.testing.assert_close(result, expected)
        if expected.requires_grad:
            for values in found:
                values.square().sum().backward()
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            ours, theirs = q.grad.to_dense(), p.grad.to_dense()
            # Terms of all nodes are added in another order: rounding is in units of the largest element.
            rounding = 1e-6 * max(10.0, float(theirs.abs().max()))
            torch.testing.assert_close(ours, theirs, rtol=1.3e-6, atol=rounding, msg=name)
    for p, q in zip(eager.buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(q, p)
    assert len(eager.seen) == len(compiled.seen)
    return compiled


def logged(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen.append(h.norm().item())
    return h


def branching(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        positive = bool(h.sum() > 0)
    return h * 2 if positive else h


def averaged(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.average.mul_(0.9).add_(h * 0.1)
    return h * m.average.clone()


@pytest.mark.parametrize("joined", [logged, branching, averaged])
def test_looks_without_gradients_leave_them_to_what_is_recorded(joined: Any) -> None:
    check(with_(joined))


class Context(Pairs):
    """A tensor that is passed down changes between the roots."""

    @dt.recursive
    def go(self, tree: Any, context: Tensor) -> Tensor:
        """The state of a node."""
        if isinstance(tree, int):
            return self.words(torch.tensor([tree])) + context
        return self.cell(sum(self.go(part, context) for part in tree))

    def forward(self, trees: Any) -> Tensor:
        """The states of roots."""
        context, found = torch.zeros(1, 4), []
        for tree in trees:
            context += 1
            found.append(self.go(tree, context))
        return torch.cat(found)


class Counted(Pairs):
    """A buffer counts the calls, and scales what is looked up."""

    @dt.recursive
    def visit(self, tree: Any) -> Tensor:
        """The state of a node."""
        self.average += 1
        if isinstance(tree, int):
            return self.words(torch.tensor([tree])) * self.average.clone()
        return self.cell(sum(self.visit(part) for part in tree))


class Halved(Pairs):
    """A parameter changes between the roots, in place or by other memory."""

    other = False

    def forward(self, trees: Any) -> Tensor:
        """The states of roots."""
        found = []
        for tree in trees:
            found.append(self.visit(tree).detach())
            if self.other:
                self.words.weight.data = self.words.weight.data * 0.5
            else:
                with torch.no_grad():
                    self.words.weight.mul_(0.5)
        return torch.cat(found)


@pytest.mark.parametrize("kind", [Context, Counted, Halved, type("Other", (Halved,), {"other": True})])
def test_what_changes_in_place_waits_for_what_reads_it(kind: type[Pairs]) -> None:
    check(kind)


def scaled(m: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda g: g * 3)
    return h


def kept(m: Any, h: Tensor) -> Tensor:
    h.retain_grad()
    m.seen.append(h)
    return h


def backward(m: Any, h: Tensor) -> Tensor:
    h.square().sum().backward(retain_graph=True)
    return h


def graded(m: Any, h: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return found


def leaf(m: Any, h: Tensor) -> Tensor:
    return h.detach().requires_grad_() * 2


def leaf_by_attribute(m: Any, h: Tensor) -> Tensor:
    copied = h.detach()
    copied.requires_grad = True
    return copied


@pytest.mark.parametrize("joined", [scaled, kept, backward, graded, leaf, leaf_by_attribute])
def test_what_needs_pytorchs_own_graph_has_it(joined: Any) -> None:
    compiled = check(with_(joined))
    assert any("PyTorch runs the forward pass" in why for why in dt.report(compiled).breaks)
    if joined is kept:
        assert all(state.grad is not None for state in compiled.seen)


def detached(m: Any, h: Tensor) -> Tensor:
    return h * m.gate(h).sigmoid().detach()


def without(m: Any, h: Tensor) -> Tensor:
    m.gate(h)
    with torch.no_grad():
        weight = m.gate(h).sigmoid()
    return h * weight


@pytest.mark.parametrize("joined", [detached, without])
def test_parameters_without_a_gradient_have_none(joined: Any) -> None:
    compiled = check(with_(joined))
    assert compiled.gate.weight.grad is None


class Doubled(torch.autograd.Function):
    """Twice a tensor, with a gradient of its own, and operators on tensors that require gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


doubled = Doubled.apply


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    """A function of TorchScript."""
    return x.cos() * 2


@pytest.mark.parametrize(
    "joined",
    [
        lambda m, h: Doubled.apply(h),
        lambda m, h: doubled(h),
        lambda m, h: checkpoint(m.gate, h, use_reentrant=False),
        lambda m, h: checkpoint(m.gate, h, use_reentrant=True),
        lambda m, h: torch.func.vmap(lambda row: m.gate(row).sin())(h),
        lambda m, h: torch.func.grad(lambda x: (x**3).sum())(h),
        lambda m, h: torch.func.vjp(lambda x: x.sin(), h)[1](torch.ones_like(h))[0],
        lambda m, h: torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1],
        lambda m, h: scripted(h),
    ],
    ids=["function", "apply", "checkpoint", "reentrant", "vmap", "grad", "vjp", "jvp", "script"],
)
def test_native_code_is_given_tensors(joined: Any) -> None:
    """It takes lazy values for tensors, and would read what is not there."""
    check(with_(joined))


class Given(Pairs):
    """A module joins the states of two children."""

    make: Callable[[], nn.Module]
    use: Callable[[Any, Tensor, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.given = type(self).make()

    @dt.recursive
    def visit(self, tree: Any) -> Tensor:
        """The state of a node."""
        if isinstance(tree, int):
            return self.words(torch.tensor([tree]))
        return type(self).use(self.given, *map(self.visit, tree))


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: nn.Bilinear(4, 4, 4), lambda m, a, b: m(a, b).tanh()),
        (lambda: nn.GRU(4, 4, batch_first=True), lambda m, a, b: m(torch.stack([a, b], 1))[0][:, -1]),
        (lambda: nn.BatchNorm1d(4), lambda m, a, b: m(torch.cat([a, b])).sum(0, keepdim=True)),
        (nn.Identity, lambda m, a, b: a * F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean")),
        (nn.Identity, lambda m, a, b: nn.utils.rnn.pad_sequence([a, torch.cat([a, b])]).sum((0, 1))[None].tanh()),
        (nn.Identity, lambda m, a, b: a + copy.deepcopy(b.detach())),
    ],
    ids=["bilinear", "gru", "statistics", "batchmean", "pad", "deepcopy"],
)
def test_what_pytorch_does_not_batch_runs_call_by_call(make: Any, use: Any) -> None:
    check(type("Made", (Given,), {"make": staticmethod(make), "use": staticmethod(use)}))


@pytest.mark.parametrize("options", [{"sparse": True}, {"scale_grad_by_freq": True}])
def test_gradients_that_depend_on_the_indices_of_a_call(options: dict[str, bool]) -> None:
    class Words(Pairs):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 4, **options)

        @dt.recursive
        def visit(self, tree: Any) -> Tensor:
            if isinstance(tree, int):
                return self.words(torch.tensor([tree, tree, 1])).sum(0, keepdim=True)
            return self.cell(sum(self.visit(part) for part in tree))

    check(Words)


@pytest.mark.parametrize(
    "joined",
    [
        lambda m, h: h * ((h.sum() + 1) / 2) * 0.5,
        lambda m, h: (h - h.mean()) / (h.std() + 1e-5),
        lambda m, h: h / (1e-5 + h.square().mean().sqrt()),
        lambda m, h: h.masked_fill(h > 9, float("nan")),
    ],
)
def test_single_values_and_numbers(joined: Any) -> None:
    compiled = check(with_(joined))
    assert not dt.report(compiled).breaks


class Weighted(Pairs):
    """Leaves have weights, which are Python's numbers."""

    @dt.recursive
    def visit(self, tree: Any) -> Tensor:
        """The state of a node."""
        if isinstance(tree, float):
            return tree - self.words(torch.tensor([int(tree)])) * tree
        return self.cell(sum(self.visit(part) for part in tree))


def test_numbers_of_the_data_compile_nothing() -> None:
    torch.manual_seed(0)
    eager = Weighted()
    compiled = dt.optimize(copy.deepcopy(eager))
    for batch in range(4):
        trees = [((k + batch / 8, k + 0.25 + batch / 7), k + batch / 5) for k in range(5)]
        torch.testing.assert_close(compiled(trees), eager(trees))
    (programs,) = (r.programs for r in compiled._daceml_train.recursions.values())
    assert programs <= 2  # the first numbers of a place are constants


def test_inference_and_training_take_turns() -> None:
    torch.manual_seed(0)
    eager = Pairs()
    compiled = dt.optimize(copy.deepcopy(eager))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(TREES), eager(TREES))
    compiled(TREES).sum().backward()
    eager(TREES).sum().backward()
    torch.testing.assert_close(compiled.join.weight.grad, eager.join.weight.grad)


def test_a_debugger_keeps_its_trace_function() -> None:
    compiled = dt.optimize(Pairs())
    compiled(TREES)
    before, lines = sys.gettrace(), []

    def traced(frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code is Pairs.cell.__code__:
            lines.append(frame.f_lineno)
        return traced

    sys.settrace(traced)
    try:
        compiled(TREES)
        assert sys.gettrace() is traced
    finally:
        sys.settrace(before)
    assert len(lines) >= 1


def test_second_derivatives_say_that_there_are_none() -> None:
    compiled = dt.optimize(Pairs())
    loss = compiled(TREES).square().sum()
    gradients = torch.autograd.grad(loss, list(compiled.join.parameters()), create_graph=True)
    with pytest.raises(Unsupported, match="the second derivative of a recursion"):
        sum(g.square().sum() for g in gradients).backward()


def test_a_recursion_over_few_values_is_left_to_pytorch() -> None:
    """Levels of one or two rows take longer than the calls."""
    compiled = dt.optimize(Pairs())
    for _ in range(14):
        compiled([(1, 2)]).sum().backward()
    (recursion,) = compiled._daceml_train.recursions.values()
    assert recursion.faster.compiled is not None
    assert recursion.faster.compiled or any(
        "a recursion over so few values" in why for why in dt.report(compiled).breaks
    )


class Enabled(Pairs):
    """Gradients where the caller has none."""

    def forward(self, trees: Any) -> Tensor:
        """The states of roots."""
        with torch.enable_grad():
            return super().forward(trees)


def test_gradients_within_a_call_without() -> None:
    torch.manual_seed(0)
    eager = Enabled()
    compiled = dt.optimize(copy.deepcopy(eager))
    for _ in range(2):
        with torch.no_grad():
            found = [module(TREES) for module in (compiled, eager)]
        assert [values.requires_grad for values in found] == [True, True]
        for values in found:
            values.sum().backward()
        torch.testing.assert_close(compiled.join.weight.grad, eager.join.weight.grad)
