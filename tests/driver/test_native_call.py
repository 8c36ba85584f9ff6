"""Calls without Python: the same numbers, gradients, errors and effects as the calls before them, which Python runs."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch.nn.functional import dropout

import daceml_train as dt

CALLS = 6
"""Calls after which those of a module run without Python."""


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden), hidden * 2


class Normalized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(self.norm(x))


class Counted(Normalized):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, momentum=None)


class Shuffled(torch.nn.Module):
    """Its results have other shapes than the arrays that its kernels write, and strides of their own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 8)

    def forward(self, x):
        hidden = self.linear(x).view(-1, 2, 4)
        return hidden.transpose(1, 2).reshape(-1, 8), torch.sin(hidden.permute(2, 0, 1))


class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 64)

    def forward(self, x):
        return dropout(self.linear(x), 0.5, self.training)


@pytest.fixture(autouse=True)
def _fixed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both(kind, of_inputs=False, calls=CALLS):
    """A model, its compiled twin over parameters of its own, and the graph that the twin runs, called natively.

    `of_inputs`: its inputs have gradients, too.
    """
    eager = kind().double()
    ours = dt.optimize(copy.deepcopy(eager))
    for _ in range(calls):
        loss(ours, torch.randn(4, 6, dtype=torch.double, requires_grad=of_inputs)).backward()
        loss(eager, torch.randn(4, 6, dtype=torch.double))
    ours.load_state_dict(eager.state_dict())
    clear(eager, ours)
    (graph,) = (p for programs in ours._daceml_train.backend.programs.values() for p in programs)
    assert graph.runs > graph._runs > 0
    return eager, ours, graph


def clear(*models):
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None


def loss(model, x):
    found = model(x)
    return sum((part**2).sum() for part in found) if isinstance(found, tuple) else (found**2).sum()


def gradients(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", [TwoLayers, Normalized, Counted, Shuffled])
@pytest.mark.parametrize("of_inputs", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 2, 4, 2, 2, 2, 4)])
def test_steps(kind, of_inputs, sizes):
    eager, ours, graph = both(kind, of_inputs)
    native = graph._native.runs
    for size in sizes:
        before = [[b._version for b in model.buffers()] for model in (eager, ours)]
        x = torch.randn(size, 6, dtype=torch.double, requires_grad=of_inputs)
        y = x.detach().clone().requires_grad_(of_inputs)
        strides = []
        for model, given in ((eager, x), (ours, y)):
            clear(model)
            results = model(given)
            strides.append([r.stride() for r in results] if isinstance(results, tuple) else results.stride())
            loss(model, given).backward()
        assert strides[0] == strides[1]
        torch.testing.assert_close(y.grad, x.grad)
        torch.testing.assert_close(gradients(ours), gradients(eager))
        torch.testing.assert_close(ours.state_dict(), eager.state_dict())
        after = [[b._version for b in model.buffers()] for model in (eager, ours)]
        changes = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
        assert changes[0] == changes[1]
    assert graph._native.runs > native


def test_results_that_the_loss_does_not_use():
    eager, ours, _ = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double)
    for which in (0, 1):
        clear(eager, ours)
        eager(x)[which].sum().backward()
        ours(x)[which].sum().backward()
        torch.testing.assert_close(gradients(ours), gradients(eager))


def test_a_gradient_of_a_gradient():
    eager, ours, _ = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double)
    found = []
    for model in (eager, ours):
        first = torch.autograd.grad(loss(model, x), list(model.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in first), list(model.parameters())))
    torch.testing.assert_close(found[1], found[0])


def test_a_batch_of_cotangents():
    eager, ours, graph = both(TwoLayers)
    x, batch = torch.randn(4, 6, dtype=torch.double), torch.randn(5, 4, 3, dtype=torch.double)
    found = [
        torch.autograd.grad(m(x)[0], list(m.parameters()), batch, is_grads_batched=True, retain_graph=True)
        for m in (eager, ours)
    ]
    torch.testing.assert_close(found[1], found[0])

    def refuse(reason):
        raise KeyError(reason)

    graph.note = refuse  # an error of Python in the backward pass keeps its type
    with pytest.raises(KeyError, match="batch of cotangents"):
        torch.autograd.grad(ours(x)[0], list(ours.parameters()), batch, is_grads_batched=True)


def test_second_backward_pass():
    eager, ours, _ = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double)
    found = loss(ours, x)
    found.backward(retain_graph=True)
    found.backward()
    twice = loss(eager, x)
    twice.backward(retain_graph=True)
    twice.backward()
    torch.testing.assert_close(gradients(ours), gradients(eager))
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        found.backward()


def test_changes_before_the_backward_pass():
    _, ours, _ = both(TwoLayers)
    found = loss(ours, torch.randn(4, 6, dtype=torch.double))
    with torch.no_grad():
        ours.second.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()
    result, hidden = ours(torch.randn(4, 6, dtype=torch.double))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result.sum() + hidden.sum() * 0 + hidden.mul_(2).sum()).backward()
        eager = (TwoLayers().double())(torch.randn(4, 6, dtype=torch.double))[1]
        eager.mul_(2).sum().backward()
        raise RuntimeError("modified by an inplace operation: not of ours")  # where the program reads no result


def test_what_is_kept_alive():
    ours = both(TwoLayers)[1]
    x = torch.randn(4, 6, dtype=torch.double)
    alive = weakref.ref(x)
    kept = loss(ours, x)
    kept.backward()
    del x
    gc.collect()
    assert alive() is None
    x = torch.randn(4, 6, dtype=torch.double)
    alive = weakref.ref(x)
    unused = loss(ours, x)
    del x, unused
    gc.collect()
    assert alive() is None
    graph = weakref.ref(next(p for ps in ours._daceml_train.backend.programs.values() for p in ps))
    del ours, kept
    torch._dynamo.reset()
    gc.collect()
    assert graph() is None


def test_hooks_of_saved_tensors():
    eager, ours, _ = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t.clone())[1], lambda t: t):
        found = loss(ours, x)
    assert torch.Size([4, 6]) in packed
    found.backward()
    loss(eager, x).backward()
    torch.testing.assert_close(gradients(ours), gradients(eager))


def test_a_hook_of_saved_tensors_that_raises():
    eager, ours, _ = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double, requires_grad=True)
    with (
        pytest.raises(KeyError, match="packed"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: {}["packed"], lambda t: t),
    ):
        ours(x.detach())
    found = []
    for model in (eager, ours):  # PyTorch ends the second forward pass by an error of such a hook
        result, _ = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        found.append(torch.autograd.grad((result**2).sum(), [x, *model.parameters()]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode])
def test_without_gradients(state):
    eager, ours, _ = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double)
    with state():
        torch.testing.assert_close(ours(x), eager(x))
    for model in (eager, ours):
        model.requires_grad_(False)
        assert not any(part.requires_grad for part in model(x))
        model.requires_grad_(True)
        model.first.requires_grad_(False)
        loss(model, x).backward()
    assert ours.first.weight.grad is None
    torch.testing.assert_close(ours.second.weight.grad, eager.second.weight.grad)


def test_inference():
    eager = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).eval()
    ours = dt.optimize(copy.deepcopy(eager))
    x = torch.randn(32, 64)

    def check():
        with torch.no_grad():
            torch.testing.assert_close(ours(x), eager(x))

    for _ in range(CALLS):
        check()
    (graph,) = (p for programs in ours._daceml_train.backend.programs.values() for p in programs)
    assert graph.compiled.prepacked is not None
    torch.manual_seed(1)
    other = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    for write in (
        lambda model: model[0].weight.mul_(2),
        lambda model: model[2].weight.data.add_(1),
        lambda model: model.load_state_dict(other.state_dict()),
        lambda model: model[2].bias.set_(torch.ones(64)),
    ):
        native = graph._native.runs
        for model in (eager, ours):
            with torch.no_grad():
                write(model)
        for _ in range(3):
            check()
        assert graph._native.runs > native


def test_forward_mode():
    eager, ours, _ = both(TwoLayers)
    x, tangent = torch.randn(2, 4, 6, dtype=torch.double)
    with pytest.warns(UserWarning, match="transform of torch.func"):
        found = torch.func.jvp(ours, (x,), (tangent,))
    torch.testing.assert_close(found, torch.func.jvp(eager, (x,), (tangent,)))


def test_memory_that_is_shared_and_written():
    eager, ours, _ = both(Normalized)
    for model in (eager, ours):
        shared = torch.randn(12, dtype=torch.double, generator=torch.Generator().manual_seed(3))
        model.norm.running_mean.set_(shared[:6])
        model(shared.view(2, 6).expand(2, 6))
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())


def test_random_numbers():
    _, ours, graph = both(Dropped)
    x = torch.ones(4, 6, dtype=torch.double)
    native, seen = graph._native.runs, []
    for _ in range(2):
        torch.manual_seed(5)
        seen.append((ours(x), ours(x), torch.rand(())))
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)
    assert graph._native.runs == native + 4
    torch.manual_seed(5)
    graph(*_arguments(ours, x))  # in Python
    graph(*_arguments(ours, x))
    assert torch.equal(torch.rand(()), seen[0][2])
    assert not torch.equal(seen[0][0], seen[0][1])
    result = ours(x)
    result.sum().backward()
    kept = (result != 0).double()
    torch.testing.assert_close(ours.linear.weight.grad, kept.T @ x * 2)


def test_random_numbers_of_eager_execution():
    """They are drawn once, before a native call, and in the first calls, which Python runs."""
    theirs = Dropped().double()
    ours = copy.deepcopy(theirs)
    module = dt.optimize(ours, random="eager")
    found = []
    for model, called in ((theirs, theirs), (ours, module)):
        torch.manual_seed(5)
        results = []
        for _ in range(CALLS):
            results.append(called(torch.randn(4, 6, dtype=torch.double)))
            loss(torch.nn.Identity(), results[-1]).backward()
        found.append([*results, *gradients(model), torch.rand(3)])
    torch.testing.assert_close(found[1], found[0])
    (graph,) = (p for programs in module._daceml_train.backend.programs.values() for p in programs)
    assert 0 < graph._native.runs < graph.runs == CALLS


def _arguments(model, x):
    by_name = dict(model.named_parameters())
    (graph,) = (p for programs in model._daceml_train.backend.programs.values() for p in programs)
    paths = {
        source.position: graph.captured.graph.inputs[source.name] for source in graph.captured.inputs if source.name
    }
    return [by_name.get(str(paths[i].path).removeprefix("self."), x) for i in sorted(k for k in paths if k is not None)]


@pytest.mark.parametrize("compiles", [True, False])
def test_gradients_of_gradients(compiles):
    """Other programs run a graph most of whose gradients are differentiated again, or PyTorch where they cannot."""
    eager, ours, graph = both(TwoLayers, True)
    graph.second.failed = "" if compiles else "it cannot be compiled"
    for _ in range(8):
        x = torch.randn(4, 6, dtype=torch.double, requires_grad=True)
        for model in (eager, ours):
            (slope,) = torch.autograd.grad(loss(model, x), x, create_graph=True)
            slope.square().sum().backward()
        torch.testing.assert_close(gradients(ours), gradients(eager))
    runs = graph.runs
    assert graph._second_order is not compiles
    assert ("most of its gradients are differentiated again" in str(dt.report(ours))) is not compiles
    loss(ours, x).backward()
    loss(eager, x).backward()
    torch.testing.assert_close(gradients(ours), gradients(eager))
    assert runs == graph.runs - 1 and (compiles or graph._native.runs < runs)


def test_threads():
    eager, ours, _ = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double)
    errors = []

    def work():
        try:
            for _ in range(50):
                found = torch.autograd.grad(loss(ours, x), list(ours.parameters()))
            torch.testing.assert_close(found, torch.autograd.grad(loss(eager, x), list(eager.parameters())))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors


def test_a_measurement_and_a_profile_see_each_run():
    _, ours, graph = both(TwoLayers)
    x = torch.randn(4, 6, dtype=torch.double)
    native = graph._native.runs
    with torch.profiler.profile() as profile:
        loss(ours, x).backward()
    assert graph._native.runs == native
    names = {event.key for event in profile.key_averages()}
    assert any("daceml_train" in name and "backward" in name for name in names)
    measured = []
    dt.report(ours, lambda: measured.append(loss(ours, x).backward()))
    assert graph._native.runs == native + 1  # the call before the first that is measured
    assert len(measured) > 1
    for _ in range(3):
        loss(ours, x).backward()
    assert graph._native.runs > native


def test_a_stance_is_followed():
    eager, ours, graph = both(TwoLayers)
    x, runs = torch.randn(4, 6, dtype=torch.double), graph.runs
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(ours(x), eager(x))
    assert graph.runs == runs


def test_more_threads():
    torch.set_num_threads(2)
    eager, ours, _ = both(TwoLayers, calls=60)  # the search for their number has ended
    x = torch.randn(4, 6, dtype=torch.double)
    for _ in range(30):
        clear(eager, ours)
        loss(ours, x).backward()
        loss(eager, x).backward()
        torch.testing.assert_close(gradients(ours), gradients(eager))
    torch.set_num_threads(1)  # plans of their own
    torch.testing.assert_close(ours(x), eager(x))


def test_sizes_that_change_from_call_to_call_are_named():
    eager, ours, _ = both(TwoLayers)
    line = "through Python: sizes change from call to call"
    assert line not in str(dt.report(ours))
    for size in range(2, 24):
        x = torch.randn(size, 6, dtype=torch.double)
        for _ in range(2):
            torch.testing.assert_close(ours(x), eager(x))
    assert line in str(dt.report(ours))
