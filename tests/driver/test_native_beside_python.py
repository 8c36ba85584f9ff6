"""The first calls of a graph run in Python and later ones without: both do as eager execution, call by call."""

import copy
import gc
import weakref

import pytest
import torch
from torch.nn import functional

import daceml_train as dt

CALLS = 6


class Layer(torch.nn.Module):
    """A function of a matrix of parameters and an argument."""

    def __init__(self, function, width=6):
        super().__init__()
        self.function, self.weight = function, torch.nn.Parameter(torch.randn(width, width))

    def forward(self, *arguments):
        return self.function(self.weight, *arguments)


@pytest.fixture(autouse=True)
def _fixed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both(function, width=6):
    eager = Layer(function, width).double()
    return eager, dt.optimize(copy.deepcopy(eager))


def native_runs(model):
    graphs = [p for programs in model._daceml_train.backend.programs.values() for p in programs]
    return sum(graph._native.runs for graph in graphs if graph._native is not None)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: ((x @ w).reshape(2, 12), (x @ w).sum()),
        lambda w, x: torch.max(x @ w, 1),
        lambda w, x: ((x @ w).view(4, 2, 3).permute(2, 0, 1) * 1, w.sum()),
    ],
)
def test_results_that_are_changed_in_place(function):
    eager, ours = both(function)
    for _ in range(CALLS):
        x, found = torch.randn(4, 6, dtype=torch.double), []
        for model in (eager, ours):
            model.weight.grad = None
            results = model(x)
            versions = [result._version for result in results]
            results[0].mul_(2)
            (results[0] ** 2).sum().backward()
            found.append([*results, model.weight.grad, versions])
        torch.testing.assert_close(found[1], found[0])
    assert native_runs(ours) > 0


def test_results_without_history_that_are_changed_in_place():
    eager, ours = both(lambda w, x: torch.max(x @ w, 1))
    for _ in range(CALLS):
        x, found = torch.randn(4, 6, dtype=torch.double), []
        for model in (eager, ours):
            with torch.no_grad():
                result = model(x).values
            found.append(result.add_(model.weight.sum()))
        torch.testing.assert_close(found[1], found[0])
    assert native_runs(ours) > 0


called = []


@torch.library.custom_op("daceml_train_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    called.append(x.shape)
    if x.sum() < 0:
        raise ValueError("a negative sum")
    return x * 2


positive.register_fake(torch.empty_like)
positive.register_autograd(lambda _, cotangent: positive(cotangent), setup_context=lambda ctx, inputs, output: None)


def test_an_operator_that_fails_is_called_once():
    _, ours = both(lambda w, x: positive(x @ w.abs()))
    x = torch.ones(4, 6, dtype=torch.double)

    def check():
        ours.weight.grad = None
        ours(x).sum().backward()
        torch.testing.assert_close(ours.weight.grad, 8 * ours.weight.sign())

    for _ in range(CALLS):
        check()
        before = len(called)
        with pytest.raises(ValueError, match="a negative sum") as raised:
            ours(-x)
        assert any("test_native_beside_python" in note for note in raised.value.__notes__)
        assert len(called) == before + 1
        result, before = ours(x), len(called)
        with pytest.raises(ValueError, match="negative sum"):
            (-result).sum().backward()
        assert len(called) == before + 1
    check()
    assert native_runs(ours) > CALLS


def test_random_numbers_beside_prepared_weights():
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Dropout(), torch.nn.Linear(128, 64))
    ours, x, seen = dt.optimize(layers), torch.ones(8, 64), []
    for i in range(CALLS):
        torch.manual_seed(3)
        with torch.no_grad():
            if i % 3 == 0:
                ours[0].weight.neg_().neg_()  # another version, equal values
            seen.append((ours(x), ours(x), torch.rand(())))
    assert native_runs(ours) > CALLS / 2
    for each in seen:
        torch.testing.assert_close(each, seen[0])
    assert not torch.allclose(seen[0][0], seen[0][1])
    (graph,) = (p for programs in ours._daceml_train.backend.programs.values() for p in programs)
    assert graph.compiled.prepacked is not None


def test_random_numbers_where_tensors_are_created_on_another_device():
    ours = dt.optimize(Layer(lambda w, x: functional.dropout(x @ w)))
    x = torch.randn(4, 6)
    with torch.device("meta"):
        assert all(ours(x).device.type == "cpu" for _ in range(CALLS))


def test_an_argument_that_is_overwritten_by_a_result_is_freed():
    _, ours = both(lambda w, x, state: x * w[0] + state)
    alive = []
    for _ in range(CALLS):
        state = torch.zeros(4, 6, dtype=torch.double)
        state.copy_(ours(torch.randn(4, 6, dtype=torch.double), state))
        alive.append(weakref.ref(state))
    del state
    gc.collect()
    assert not any(each() is not None for each in alive)
    assert native_runs(ours) > 0


def test_numbers_that_change():
    eager, ours = both(lambda w, x, factor, summand=1: (x @ w * factor + summand, torch.sin(x) + factor))
    calls = [(i + 2,) for i in range(CALLS)] + [(i + 2, 40 - i) for i in range(CALLS)]
    for numbers in [*calls, (-7,), (2**40,), (True,), (5, 0), (2**70,)]:
        x, found = torch.randn(4, 6, dtype=torch.double, requires_grad=True), []
        for model in (eager, ours):
            model.weight.grad = x.grad = None
            if numbers[0] == 2**70:
                with pytest.raises((OverflowError, RuntimeError, ValueError)):
                    model(x, *numbers)
                continue
            results = model(x, *numbers)
            results[0].sum().backward()
            found.append([*results, model.weight.grad, x.grad])
        torch.testing.assert_close(found[1:], found[:-1])
    assert native_runs(ours) > CALLS


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda w, x: (x @ w).split(2), "a result is a view"),
        (lambda w, x: (x @ w).add_(1), "a result was changed in place"),
        (lambda w, x: (x @ w, (x @ w).detach()), ""),
    ],
)
def test_why_each_call_needs_python(function, reason):
    _, ours = both(function)
    for _ in range(CALLS):
        ours(torch.randn(4, 6, dtype=torch.double))
    assert (native_runs(ours) == 0) == bool(reason)
    lines = [line for line in str(dt.report(ours)).splitlines() if "through Python" in line]
    assert lines == ([f"each call runs through Python: {reason}"] if reason else [])
    assert reason in dt.report(ours).to_html()


def test_more_arguments_than_a_byte_counts():
    """Python 3.11 crashes at the eighth call of a builtin function with more than 255 arguments."""

    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.randn(2) for _ in range(300))

        def forward(self, x):
            return (x + torch.stack(list(self.parts)).sin().sum(0)).cos()

    eager = Many().double()
    ours = dt.optimize(copy.deepcopy(eager))
    for _ in range(20):
        x = torch.randn(3, 2, dtype=torch.double)
        for model in (eager, ours):
            model.zero_grad()
            model(x).sum().backward()
        torch.testing.assert_close(ours(x), eager(x))
        for expected, found in zip(eager.parts, ours.parts, strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
    assert native_runs(ours) > 10


kept = []


@torch.library.custom_op("daceml_train_tests::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    if x.isnan().any():
        raise KeyError("not a number")
    return x * 2


keeps.register_fake(torch.empty_like)
keeps.register_autograd(lambda _, cotangent: keeps(cotangent), setup_context=lambda ctx, inputs, output: None)


def test_an_operator_that_keeps_what_it_is_given():
    models, seen = both(lambda w, x: keeps(torch.sin(keeps(x @ w)) + 1).cos()), ([], [])
    for _ in range(CALLS):
        x = torch.randn(4, 6, dtype=torch.double)
        for model, own in zip(models, seen, strict=True):
            model(x).sum().backward()
            own += kept
            kept.clear()
    torch.testing.assert_close(seen[1], seen[0])
    assert len(seen[0]) == 4 * CALLS and native_runs(models[1]) > 0
    with pytest.raises(KeyError):
        models[1](x * torch.nan)
    models[1](x)
    assert kept.pop(0).isnan().all() and not kept.pop(0).isnan().any()
    kept.clear()


@pytest.mark.parametrize("rows", [4, 800])
@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: ((x @ w).exp().view(2, -1, 6), ((x @ w).exp() @ w).sum()),
        lambda w, x: torch.max((x @ w).repeat(6, 1), 1)[:1],
    ],
)
def test_results_in_memory_that_the_backward_pass_reads(function, rows):
    """A change in place changes no gradient: a small result has memory of its own, that of a larger one is an error."""
    eager, ours = both(function)
    for _ in range(CALLS):
        x = torch.randn(rows, 6, dtype=torch.double)
        first, *others = eager(x)
        expected = torch.autograd.grad(sum(part.sin().sum() for part in (first * 2, *others)), eager.weight)
        first, *others = ours(x)
        first.mul_(2)
        loss = sum(part.sin().sum() for part in (first, *others))
        if rows == 4:
            torch.testing.assert_close(torch.autograd.grad(loss, ours.weight), expected)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_compiled_autograd():
    """It knows no node of C++: such calls run through Python."""
    eager, ours = both(lambda w, x: torch.sin(x @ w))
    x = torch.randn(4, 6, dtype=torch.double)
    for _ in range(CALLS):
        ours(x).sum().backward()
    before = native_runs(ours)
    assert before > 0
    for model in (eager, ours):
        model.weight.grad = None
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            model(x).sum().backward()
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad)
    assert native_runs(ours) == before
    ours(x)
    assert native_runs(ours) == before + 1


def test_errors_of_linear_algebra_have_their_class():
    _, ours = both(lambda w, x: torch.linalg.cholesky(x @ x.mT - 2 * w.detach().abs().sum() * torch.eye(6).double()))
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError, match=r"(?s)not positive-definite.*test_native_beside_python"):
            ours(torch.randn(6, 6, dtype=torch.double))
