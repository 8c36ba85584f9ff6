"""A capture of an earlier step is used where the trace would be the same, and only there."""

import copy
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import symbolic_convert

import daceml_train as dt
from daceml_train import driver
from daceml_train.driver.step import TrainingStep
from daceml_train.frontends.torch.dynamo import stored_guards
from daceml_train.frontends.torch.dynamo.identities import Identities, digest

SOURCE = """
import functools
import torch
from torch import nn

SCALE = 2.0
TABLE = {"act": torch.tanh, "names": ("a", "b")}


def helper(h):
    return h * SCALE


class Base(nn.Module):
    factor = 3

    def between(self, h):
        return h + 1


class Net(Base):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, width), nn.Linear(width, 1), nn.Dropout(0.0)
        self.act, self.depth, self.names, self.calls = torch.relu, 2, ["a"], 0
        self.residual = False

    def forward(self, x):
        h = self.drop(self.act(self.first(x)))
        for _ in range(self.depth):
            h = helper(self.between(h)) * self.factor
        if len(self.names) > 1:
            h = h - 1
        return self.last(TABLE["act"](h / 10)) + (x.mean() if self.residual else 0)


class Counting(Net):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)
"""


def module(folder: Path, source: str = SOURCE) -> ModuleType:
    """The source as a module that another process would import: under one name, from one file."""
    path = folder / "user_net.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("user_net", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["user_net"] = found
    vars(driver.step).pop("__import_user_net", None)  # TorchDynamo's name for the one before
    symbolic_convert._import_module.cache_clear()
    spec.loader.exec_module(found)
    return found


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    sys.modules.pop("user_net", None)


class Traced:
    """Counts traces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        collect = TrainingStep._collect

        def counted(step, *arguments):
            self.count += 1
            return collect(step, *arguments)

        monkeypatch.setattr(TrainingStep, "_collect", counted)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    return Traced(monkeypatch)


def train(model: nn.Module, folder: Path, rows: int = 5, loss=F.mse_loss, steps: int = 3) -> list[float]:
    """Losses of a step, which are those of eager execution."""
    torch.manual_seed(1)
    x, y = torch.randn(rows, 4), torch.randn(rows, 1)
    eager = copy.deepcopy(model)
    step = dt.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.01), cache=folder)
    theirs = torch.optim.SGD(eager.parameters(), 0.01)
    found = []
    for _ in range(steps):
        theirs.zero_grad()
        expected = loss(eager(x), y)
        expected.backward()
        theirs.step()
        found.append(float(step(x, y)))
        torch.testing.assert_close(torch.tensor(found[-1]), expected.detach(), rtol=1e-4, atol=1e-6)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert getattr(model, "calls", 0) == getattr(eager, "calls", 0)
    return found


def net(user: ModuleType, kind: str = "Net", **changes: object) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(user, kind)()
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def test_an_equal_step_is_not_traced(tmp_path: Path, traced: Traced) -> None:
    user = module(tmp_path)
    first = train(net(user), tmp_path / "cache")
    assert traced.count == 1
    assert train(net(user), tmp_path / "cache") == first
    assert traced.count == 1


def test_the_effects_of_a_stored_capture(tmp_path: Path, traced: Traced) -> None:
    user = module(tmp_path)
    train(net(user, "Counting"), tmp_path / "cache", steps=4)
    count = traced.count
    train(net(user, "Counting"), tmp_path / "cache", steps=4)
    assert traced.count == count


def test_other_sizes(tmp_path: Path, traced: Traced) -> None:
    """The second size is traced for all further ones, in the process that traced and in the next."""

    def steps() -> tuple[int, int]:
        model, before = net(user), traced.count
        step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.0), cache=tmp_path / "cache")
        for rows in (5, 7, 9, 11, 6):
            x, y = torch.randn(rows, 4), torch.randn(rows, 1)
            torch.testing.assert_close(step(x, y), F.mse_loss(model(x), y).detach(), rtol=1e-4, atol=1e-6)
        return traced.count - before, len(step.records)

    user = module(tmp_path)
    assert steps() == (2, 2)
    assert steps() == (0, 2)  # the capture for varying sizes is loaded once


def test_a_number_that_the_graph_reads(tmp_path: Path, traced: Traced) -> None:
    """Another probability of dropout is no other trace."""
    user = module(tmp_path)
    for rate in (0.1, 0.4):
        model = net(user)
        model.drop.p = rate
        step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.01), cache=tmp_path / "cache")
        kept = []
        for _ in range(40):
            step(torch.ones(5, 4), torch.zeros(5, 1))
            kept.append(model.drop.p)
        assert set(kept) == {rate} and step.breaks == []
    assert traced.count == 1


@pytest.mark.parametrize(
    "change",
    [
        {"act": torch.tanh},
        {"act": lambda h: h.sin()},
        {"act": nn.GELU()},
        {"depth": 3},
        {"names": ["a", "b"]},
        {"residual": True},
        {"drop": nn.Identity()},
        {"last": nn.Sequential(nn.Linear(4, 1))},
    ],
    ids=lambda change: "-".join(f"{k}" for k in change) + type(next(iter(change.values()))).__name__,
)
def test_another_attribute(change: dict[str, object], tmp_path: Path, traced: Traced) -> None:
    user = module(tmp_path)
    train(net(user), tmp_path / "cache", steps=1)
    train(net(user, **change), tmp_path / "cache", steps=2)
    assert traced.count == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2.0", "SCALE = 2.5"),
        ("return h * SCALE", "return h + SCALE"),
        ("factor = 3", "factor = 4"),
        ("return h + 1", "return h - 1"),
        ('"act": torch.tanh', '"act": torch.sin'),
        ("for _ in range(self.depth)", "for _ in range(self.depth + 1)"),
        ("class Net(Base):", "class Net(Base):\n    def between(self, h):\n        return h * h\n"),
    ],
)
def test_another_source(old: str, new: str, tmp_path: Path, traced: Traced) -> None:
    assert old in SOURCE
    train(net(module(tmp_path)), tmp_path / "cache", steps=1)
    train(net(module(tmp_path, SOURCE.replace(old, new))), tmp_path / "cache", steps=2)
    assert traced.count == 2


@pytest.mark.parametrize("what", ["SCALE", "helper", "TABLE", "between", "factor", "forward"])
def test_a_patch_that_the_files_do_not_show(what: str, tmp_path: Path, traced: Traced) -> None:
    """As by an option of the user's program: the files are those of the first run."""
    train(net(module(tmp_path)), tmp_path / "cache", steps=1)
    user = module(tmp_path)
    patches = {
        "SCALE": lambda: setattr(user, "SCALE", 0.5),
        "helper": lambda: setattr(user, "helper", lambda h: h - 2),
        "TABLE": lambda: user.TABLE.update(act=torch.sigmoid),
        "between": lambda: setattr(user.Base, "between", lambda self, h: h * 2),
        "factor": lambda: setattr(user.Base, "factor", 1),
        "forward": lambda: setattr(user.Net, "forward", lambda self, x: self.last(self.first(x))),
    }
    patches[what]()
    train(net(user), tmp_path / "cache", steps=2)
    assert traced.count == 2


def test_other_surroundings(tmp_path: Path, traced: Traced) -> None:
    user = module(tmp_path)
    train(net(user), tmp_path / "cache", steps=1)
    evaluated = net(user).eval()
    train(evaluated, tmp_path / "cache", steps=1)
    assert traced.count == 2
    frozen = net(user)
    frozen.first.weight.requires_grad_(False)
    train(frozen, tmp_path / "cache", steps=1)
    assert traced.count == 3
    train(net(user), tmp_path / "cache", steps=1, loss=F.l1_loss)
    assert traced.count == 4
    hooked = net(user)
    hooked.first.register_forward_hook(lambda module, args, result: result * 2)
    train(hooked, tmp_path / "cache", steps=1)
    assert traced.count == 5


def test_shared_parameters(tmp_path: Path, traced: Traced) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.two(self.one(x)))

    torch.manual_seed(0)
    train(Pair(), tmp_path)
    shared = Pair()
    shared.two.weight = shared.one.weight
    train(shared, tmp_path)
    assert traced.count == 2
    again = Pair()
    again.two.weight = again.one.weight
    train(again, tmp_path)
    train(Pair(), tmp_path)
    assert traced.count == 2


def test_later_calls_are_guarded(tmp_path: Path, traced: Traced) -> None:
    user = module(tmp_path)
    train(net(user), tmp_path / "cache", steps=1)
    model = net(user)
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.0), cache=tmp_path / "cache")
    x, y = torch.randn(5, 4), torch.randn(5, 1)
    step(x, y)
    assert traced.count == 1
    for name, value in (("depth", 1), ("act", torch.sin), ("residual", True)):
        setattr(model, name, value)
        torch.testing.assert_close(step(x, y), F.mse_loss(model(x), y).detach(), rtol=1e-4, atol=1e-6)
    model.eval()
    torch.testing.assert_close(step(x, y), F.mse_loss(model(x), y).detach(), rtol=1e-4, atol=1e-6)


def test_damaged_captures_are_traced_again(tmp_path: Path, traced: Traced) -> None:
    user = module(tmp_path)
    train(net(user), tmp_path / "cache", steps=1)
    (path,) = (tmp_path / "cache" / "captures").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    train(net(user), tmp_path / "cache", steps=1)
    assert traced.count == 2


def test_without_comparisons_a_wrong_capture_is_used(
    tmp_path: Path, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would find."""
    train(net(module(tmp_path)), tmp_path / "cache", steps=1)
    monkeypatch.setattr(stored_guards, "_conditions", lambda *arguments: ())
    monkeypatch.setattr(stored_guards, "_content", lambda file: "")
    for path in (tmp_path / "cache" / "captures").iterdir():
        path.unlink()
    train(net(module(tmp_path)), tmp_path / "cache", steps=1)
    with pytest.raises(AssertionError):
        train(net(module(tmp_path, SOURCE.replace("factor = 3", "factor = 4"))), tmp_path / "cache", steps=1)


def test_identities() -> None:
    def made(number: int):
        return lambda x: x + number

    identities = Identities()
    assert identities.of(made(1)) == identities.of(made(2))  # what it holds has guards of its own
    assert digest(compile("x + 1", "a", "eval")) != digest(compile("x + 2", "a", "eval"))
    assert digest(compile("x in {'a', 'b'}", "a", "eval")) == digest(compile("x in {'b', 'a'}", "b", "eval"))
    assert identities.of(object()) is None
    assert identities.of((1, "a")) != identities.of((1, "b"))
    assert identities.of([object()]) is None
    assert identities.of(type("A", (), {"x": 1})) != identities.of(type("A", (), {"x": 2}))
    assert identities.of(type("A", (), {"f": lambda self: 1})) != identities.of(type("A", (), {"f": lambda self: 2}))
    assert identities.of(torch.ones(2)) == identities.of(torch.ones(3))
    assert identities.of(torch.ones(2)) != identities.of(torch.ones(2, requires_grad=True))
    assert identities.of(torch.ones(2)) != identities.of(torch.ones(2, dtype=torch.float64))


class Applying(nn.Module):
    """A model that applies a function of its own, which may refer to another module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_capture_that_does_not_fit_says_nothing(
    tmp_path: Path, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    logging.getLogger("torch._guards").addHandler(handler)
    inner = Doubled()
    for count, function in enumerate((lambda h: inner(h), lambda h: h * 2), 1):
        train(Applying(function), tmp_path / "cache")
        assert traced.count == count
    logging.getLogger("torch._guards").removeHandler(handler)
    assert said == []
