import html
import json
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.driver.records import Record
from daceml_train.errors import Invalid
from daceml_train.passes.pipeline import PassRecord
from daceml_train.reporting import Report, bytes_text, number, share
from daceml_train.reporting.collect import reasons
from daceml_train.reporting.functions import functions_of
from daceml_train.reporting.numbers import flops_text, seconds_text
from daceml_train.tensor import symbol


def record(name: str = "model", joint: int = 1000, halves: tuple[int, int] = (600, 300)) -> list[Record]:
    """A forward pass that was cut from `joint` bytes and its backward pass, as the driver notes them."""
    before, after = halves
    forward = Record(name, bytes_captured=2000, kernels=2, distinct_kernels=2, calls={"mm": 1})
    forward.seconds = {"kernels": 1.0}
    forward.passes = [
        PassRecord("forward", "common_subexpressions", 700, 690, 10, 9, 0.1),
        PassRecord("intra_operator", "simplify", 2000, joint, 30, 20, 0.1),
        PassRecord("fusion", "fuse_elementwise", before, before // 2, 12, 4, 0.1),
    ]
    backward = Record(f"{name} backward", kernels=1, distinct_kernels=1, calls={"mm": 2})
    backward.passes = [PassRecord("fusion", "fuse_elementwise", after, after // 2, 9, 3, 0.1)]
    return [forward, backward]


def test_forward_and_backward_are_shown_together() -> None:
    (function,) = functions_of(record())
    assert (function.programs, function.kernels, dict(function.calls)) == (2, 3, {"mm": 3})
    assert [(level.name, level.before, level.after) for level in function.levels] == [
        ("intra_operator", 2000, 1000),
        ("partition into forward and backward", 1000, 900),
        ("fusion", 900, 450),
    ]
    assert (function.captured, function.moved, function.saved) == (2000, 450, 1 - 450 / 2000)
    fused = [change for level, change in function.passes if level == "fusion"]
    assert [(f.before, f.after, f.operators) for f in fused] == [(900, 450, (21, 7))]


def test_two_functions_stay_apart() -> None:
    assert [f.programs for f in functions_of([*record("a"), *record("b")])] == [2, 2]
    assert [f.programs for f in functions_of([record("a")[0], record("a")[0]])] == [1, 1]


def test_text() -> None:
    results = record()
    results[0].fallbacks = [("aten.cumsum.default", "model.py:12")]
    text = str(Report("module", "Net", functions_of(results), ("a reason",)))
    assert re.search("one kernel or call per operator +2.0 kB", text)
    assert "after fusion" in text and "450 B" in text and "77.5 %" in text
    assert "aten.cumsum.default at model.py:12" in text
    assert "runs in PyTorch, because\n  a reason" in text
    assert "common_subexpressions" not in text, "passes over the forward pass alone have another unit"


def test_reasons_are_said_once_and_without_hints() -> None:
    message = "Data-dependent branching\n  Explanation: a tensor decides.\n  Hint: file an issue."
    assert reasons([message, message]) == ("Data-dependent branching Explanation: a tensor decides.",)


def test_symbolic_bytes_are_shown_at_known_sizes() -> None:
    batch = symbol("s0")
    assert number(4 * batch, {"s0": 8}) == 32
    assert number(4 * batch, {}) == "4*s0"
    assert share("4*s0", 2) is None
    assert bytes_text("4*s0") == "4*s0 B"


@pytest.mark.parametrize(
    ("shown", "count", "text"),
    [
        (bytes_text, 0, "0 B"),
        (bytes_text, 999, "999 B"),
        (bytes_text, 1500, "1.5 kB"),
        (bytes_text, 999_960, "1.0 MB"),
        (bytes_text, 38_400_000, "38.4 MB"),
        (bytes_text, 2.5e12, "2500.0 GB"),
        (seconds_text, 0.0, "0 µs"),
        (seconds_text, 3.21e-3, "3.21 ms"),
        (seconds_text, 0.9996, "1 s"),
        (seconds_text, 1234.5, "1,234 s"),
        (flops_text, 999_700_000, "1 GFLOP"),
        (flops_text, 2_000, "2 kFLOP"),
        (flops_text, 2e15, "2,000 TFLOP"),
    ],
)
def test_numbers_with_units(shown: Callable[[float], str], count: float, text: str) -> None:
    assert shown(count) == text


def test_other_objects_are_refused() -> None:
    with pytest.raises(Invalid, match="report takes what `optimize` or `training_step` returned, given Linear"):
        dt.report(nn.Linear(2, 2))
    with pytest.raises(Invalid, match="given what torch.compile made of Linear with the backend 'inductor'"):
        dt.report(torch.compile(nn.Linear(2, 2)))
    with pytest.raises(Invalid, match="given the class Linear; call report on that object"):
        dt.report(nn.Linear)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_before_the_first_call() -> None:
    model = mlp()
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for compiled in (dt.optimize(model), step):
        assert "nothing is compiled yet: the first call compiles" in str(dt.report(compiled))
        assert "nothing is compiled yet" in dt.report(compiled)._repr_html_()
    assert dt.report(step, ranks=4, link=dt.Link(alpha=1e-5, bandwidth=1e9)).scaling is None


@pytest.mark.compiled
def test_what_torch_compile_returned() -> None:
    torch._dynamo.reset()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2

    model, x = mlp(), torch.randn(3, 8)
    for compiled, name in (
        (torch.compile(model, backend="daceml_train", options={"jobs": 1}), "Sequential"),
        (torch.compile(double, backend="daceml_train"), "double"),
    ):
        assert "nothing is compiled yet" in str(dt.report(compiled))
        compiled(x)
        found = dt.report(compiled, lambda compiled=compiled: compiled(x), runs=1)
        assert (found.kind, found.name) == ("module", name) and len(found.functions) == 1
        assert str(found).startswith(f"module of {name}")
        assert any(launch.seconds for launch in found.functions[0].launches)


@pytest.mark.compiled
def test_training_step() -> None:
    model = mlp()
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.randn(5, 8), torch.randint(0, 4, (5,)))
    report = dt.report(step)
    (function,) = report.functions
    assert not report.breaks
    assert isinstance(function.moved, int) and isinstance(function.captured, int)
    assert 0 < function.moved < function.captured
    assert function.programs == 1 and function.kernels >= function.distinct_kernels > 0
    assert function.calls["mm"] == 5, "a product per layer forward, and three backward"
    assert sum(function.calls.values()) == 6, "and the check that every target is a class"
    assert function.arena > 0
    assert "training step of Sequential, SGD" in str(report)
    assert "<table" in report._repr_html_()
    told = json.loads(report.to_json())
    assert told["functions"][0]["moved"] == function.moved


@pytest.mark.compiled
def test_module_of_varying_sizes() -> None:
    model = dt.optimize(mlp())
    for batch in (5, 6, 7):
        model(torch.randn(batch, 8)).sum().backward()
    report = dt.report(model)
    assert [f.programs for f in report.functions] == [2, 2]
    fixed, varying = report.functions
    assert not fixed.sizes and 7 in varying.sizes.values()
    assert "float32[5, 16]" in (saved := {kept.array for kept in fixed.kept})
    assert "float32[5, 4]" not in saved, "results that the backward pass does not read"
    assert isinstance(varying.moved, int)
    assert "at the sizes last used" in str(report)


@pytest.mark.compiled
def test_measured() -> None:
    """Every launch has a time; phases, memory and kept arrays fit the step; eager execution is counted."""
    model, plain = mlp(), mlp()
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = torch.randn(5, 8), torch.randint(0, 4, (5,))

    def eager() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()

    eager()
    report = dt.report(step, lambda: step(x, y), eager=eager, runs=2)
    (function,) = report.functions
    assert report.machine is not None and report.eager is not None
    assert all(launch.seconds for launch in function.launches)
    assert {launch.phase for launch in function.launches} == {"forward", "backward", "update"} - (
        set() if any(x.phase == "backward" for x in function.launches) else {"backward"}
    )
    assert sum(launch.bytes for launch in function.launches) == function.moved
    assert function.moved < report.eager.bytes
    assert len(function.memory) == len(function.launches)
    assert function.inputs >= sum(p.numel() * 4 for p in model.parameters())
    assert "float32[5, 16]" in {kept.array for kept in function.kept}
    assert step.records[0].executable.timing is None, "nobody measures any more"
    _title, theirs, ours, left, *_ = str(report).splitlines()
    assert theirs.startswith("PyTorch's own kernels move") and ours.startswith("moved here: ")
    parts = [float(part) for part in re.findall(r"([\d.]+) %", left)]
    assert len(parts) == 3 and abs(sum(parts) - 100) < 0.2 and "library calls" in left


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x > 0].square().mean()


@pytest.mark.compiled
def test_the_report_names_graph_breaks_and_their_lines() -> None:
    torch._dynamo.reset()
    module, whole = dt.optimize(Masked()), dt.optimize(nn.Linear(4, 4))
    module(torch.randn(6, 4)).backward()
    with pytest.raises(TypeError):
        dt.optimize(nn.Linear(4, 4))({"x": 1})  # whose trace is not that of the next module
    whole(torch.randn(6, 4)).sum().backward()
    report = dt.report(module)
    (reason,) = report.graph_breaks
    assert "test_collect.py:" in reason and reason in str(report)
    assert html.escape(reason) in report._repr_html_() and "No graph breaks" not in report._repr_html_()
    assert dt.report(whole).graph_breaks == () and "No graph breaks" in dt.report(whole)._repr_html_()
