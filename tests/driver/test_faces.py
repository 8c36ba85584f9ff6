"""What `optimize` and the backend of `torch.compile` look like from outside: signatures, methods, options."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.logged: list[int] = []

    def forward(self, features: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Scores of features."""
        return self.inner(features).tanh() * scale

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """As Lightning calls it."""
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.logged.append(batch_idx)
        return loss

    def helper(self) -> int:
        return 3


def test_signature_annotations_and_docstring_stay() -> None:
    module = dt.optimize(Scorer())
    for owner, plain in ((module, Scorer()), (type(module), Scorer)):
        assert inspect.signature(owner.forward) == inspect.signature(plain.forward)
    assert list(inspect.signature(module.forward).parameters) == ["features", "labels", "scale"]
    assert inspect.get_annotations(type(module).forward) == inspect.get_annotations(Scorer.forward)
    assert inspect.getdoc(module.forward) == "Scores of features." and module.forward.__name__ == "forward"
    assert type(module).__qualname__ == "Scorer" and module.helper() == 3
    assert not hasattr(dt.optimize(nn.Linear(2, 2)), "training_step")


@pytest.mark.compiled
def test_the_methods_that_lightning_calls_are_compiled() -> None:
    torch.manual_seed(0)
    theirs = Scorer()
    ours = copy.deepcopy(theirs)
    module, x, y = dt.optimize(ours), torch.randn(5, 4), torch.randn(5, 3)
    for index in range(2):
        losses = [m.training_step((x, y), index) for m in (module, theirs)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(ours.inner.weight.grad, theirs.inner.weight.grad)
    state = state_of(module)
    assert state is not None and state.backend.graphs and state.backend.breaks == []
    assert ours.logged == theirs.logged == [0, 1]
    torch.testing.assert_close(module(x, scale=2.0), theirs(x, scale=2.0))


@pytest.mark.compiled
def test_options_and_mode_of_torch_compile_are_honored() -> None:
    seen: list[Any] = []
    x = torch.randn(3, 4)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    result = torch.compile(model, backend="daceml_train", options={"pass_callback": seen.append})
    torch.testing.assert_close(result(x), model(x))
    assert seen
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="daceml_train", mode="reduce-overhead")(x), model(x))
    for options, sentence in (
        ({"options": {"pipelin": "x"}}, "no option 'pipelin', did you mean 'pipeline'"),
        ({"options": {"random": "never"}}, "random is one of"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=sentence):
            torch.compile(model, backend="daceml_train", **options)(x)
    from daceml_train.driver import backend

    with pytest.raises(dt.Invalid, match="mode is one of .*did you mean 'max-autotune'"):
        backend(torch.fx.symbolic_trace(model), [x], mode="max-autotun")


@pytest.mark.compiled
def test_warnings_as_errors_do_not_make_it_run_as_pytorch_does() -> None:
    lines = (
        "import warnings, torch\nimport torch._dynamo\nwarnings.simplefilter('error')\nimport daceml_train as dt\n"
        "m = dt.optimize(torch.nn.Linear(3, 2))\nm(torch.ones(4, 3)).sum().backward()\n"
        "from daceml_train.driver.module import state_of\nassert state_of(m).backend.breaks == [], state_of(m)\n"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_torch_compile_made_is_compiled_in_its_place() -> None:
    plain = Scorer()
    module = dt.optimize(torch.compile(plain))
    assert isinstance(module, Scorer) and list(module.state_dict()) == list(plain.state_dict())


def test_steps_say_what_they_are_and_that_they_are_not_copied() -> None:
    model = nn.Linear(3, 1)
    step = dt.training_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(step) == "<TrainingStep of Linear, mse_loss, SGD>"
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(dt.Invalid, match="neither copied nor pickled.*state_dict"):
            way(step)
    with pytest.raises(dt.Invalid, match=r"LBFGS.*optimizer.step\(closure\)"):
        dt.training_step(model, nn.functional.mse_loss, torch.optim.LBFGS(model.parameters()))


@pytest.mark.compiled
def test_a_scalar_result_without_a_loss_says_what_to_do() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).square().mean()

    model = Own(3, 1)
    step = dt.training_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(dt.Invalid, match="loss=lambda output: output"):
        step(torch.ones(2, 3))


def test_several_processes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    model = nn.Linear(3, 1)
    with pytest.warns(UserWarning, match="over the 4 processes"):
        dt.training_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
