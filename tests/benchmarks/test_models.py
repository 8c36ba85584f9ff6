"""Whole models: the comparison sees what is wrong, a model's process may fail, and a few models train right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import conformance_models
from benchmarks.models.model import Model, without_dropout
from benchmarks.models.outcome import Outcome
from benchmarks.models.sizes import batches, of_other_size
from benchmarks.models.table import MODELS, PROMISED
from benchmarks.models.training import Run, difference, retrace, train, train_with_noise, updates
from benchmarks.models.worker import counted, outcome
from daceml_train.driver import backward_pass


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x))).square().mean()


ROW = Model("small", Small, lambda: {"x": torch.randn(5, 4)}, lambda loss: loss)


def eager(dtype: torch.dtype = torch.float32) -> Run:
    model, batch = ROW.build(dtype)
    return train(ROW, model, model, batch)


def test_every_step_is_compared_from_its_own_parameters() -> None:
    model, batch = ROW.build()
    run = train(ROW, model, model, batch, keep=True)
    assert len(run.starts) == 4
    again, batch = ROW.build()
    found = retrace(ROW, again, batch, run.starts)
    exact = retrace(ROW, ROW.build(torch.float64)[0], ROW.build(torch.float64)[1], run.starts)
    assert difference(Run(run.steps), found, exact) == ""
    assert updates(ROW, run) == ""
    run.starts[2]["fc.weight"] += 1e-3
    assert updates(ROW, run) == "the update of fc.weight in step 1 is off by 1.0e-03"
    parted = retrace(ROW, again, batch, run.starts)
    assert difference(Run(run.steps), parted, exact) == ""
    assert "step 2" in difference(Run(parted.steps), found, exact)


def test_noise_in_eager_execution_allows_as_much_again_and_no_more() -> None:
    run, exact = eager(), eager(torch.float64)
    noisy = [train_with_noise(ROW, seed) for seed in range(2)]
    name = "fc.weight"

    def off(by: float) -> Run:
        found, true = copy.deepcopy(run), exact.steps[2].gradients[name]
        assert true is not None
        found.steps[2].gradients[name] = (true + by).float()
        return found

    true = exact.steps[2].gradients[name]
    shaken = [r.steps[2].gradients[name] for r in noisy]
    assert true is not None and shaken[0] is not None and not torch.equal(shaken[0], shaken[1])  # type: ignore
    assert difference(off(1e-3), run, exact, noisy=noisy).startswith(f"gradient of {name} in step 2")
    noisy[0].steps[2].gradients[name] = (true + 5e-4).float()
    assert difference(off(1e-3), run, exact, noisy=noisy) == ""
    assert difference(off(2e-3), run, exact, noisy=noisy).startswith(f"gradient of {name} in step 2")


def test_what_differs_is_named() -> None:
    run, exact = eager(), eager(torch.float64)
    assert difference(run, run, exact) == ""
    for kind, change in {
        "loss of step 1": lambda r: r.steps[1].loss.mul_(1.001),
        "gradient of fc.weight in step 2: off": lambda r: r.steps[2].gradients["fc.weight"].add_(1),
        "gradient of fc.bias in step 0: there is none": lambda r: r.steps[0].gradients.update({"fc.bias": None}),
        "buffers, norm.num_batches_tracked": lambda r: r.buffers["norm.num_batches_tracked"].add_(1),
        "parameters, norm.weight": lambda r: r.parameters["norm.weight"].add_(0.01),
    }.items():
        wrong = copy.deepcopy(run)
        change(wrong)
        assert difference(wrong, run, exact).startswith(kind)


def test_dropout_is_off() -> None:
    assert without_dropout(Small()).drop.p == 0


def test_the_promise_is_in_the_table() -> None:
    assert all(row.name in MODELS for row in PROMISED)
    assert len(MODELS) > 60


def test_operators_are_counted_once() -> None:
    model, batch = ROW.build()
    total, outside = counted(model, batch)
    assert total == outside == 6  # linear, counting batches, batch_norm, dropout, pow, mean


def test_a_model_that_takes_too_long_or_crashes_is_an_outcome(tmp_path: Path) -> None:
    late = conformance_models.isolated("bert-qa", tmp_path, 0.05)
    assert (late.kind, conformance_models.failed(late)) == ("timed out", True)
    unknown = conformance_models.isolated("no such model", tmp_path, 100)
    assert unknown.kind == "raised" and "KeyError" in unknown.detail


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def isolated(name: str, *_: Any) -> Outcome:
        ran.append(name)
        if len(ran) == 4:
            raise KeyboardInterrupt
        return Outcome(name, "wrong" if len(ran) == 2 else "right", share=1.0)

    for name, replacement in (("RESULTS", tmp_path / "r.json"), ("isolated", isolated), ("commit", lambda: "c0ffee")):
        monkeypatch.setattr(conformance_models, name, replacement)
    monkeypatch.setattr(conformance_models, "write_page", lambda found: None)
    with pytest.raises(KeyboardInterrupt):
        conformance_models.main([])
    names = [row.name for row in PROMISED]
    assert ran == names[:4] and [row.name for row in conformance_models.stored()] == names[:3]
    assert conformance_models.main([]) == 0
    assert ran[4:] == [names[1], *names[3:]]
    monkeypatch.setattr(conformance_models, "commit", lambda: "c0ffee-dirty")
    assert conformance_models.main([]) == 0
    assert ran[-len(names) :] == names


def test_the_page_names_what_fails(tmp_path: Path) -> None:
    found = [Outcome("a", "right", share=1.0), Outcome("b", "right", share=0.5, breaks=["a reason"])]
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- figures: begin -->stale<!-- figures: end -->\nafter\n")
    conformance_models.write_page(found, path)
    text = path.read_text()
    assert "1 of 2 models hold" in text and "- b: a reason" in text and "stale" not in text
    assert text.startswith("before") and text.endswith("after\n")


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-qa", "physics", "equilibrium", "memory"])
def test_a_model_trains_as_in_eager_execution(name: str, tmp_path: Path) -> None:
    found = outcome(MODELS[name], tmp_path)
    known = {"equilibrium": "an autograd.Function with operands that are not tensors"}  # sizes, once they vary
    unknown = [text for text in [*found.breaks, found.whole] if text and known.get(name, "none") not in text]
    assert (found.kind, found.detail, unknown) == ("right", "", [])
    assert found.share == 1.0 and found.native > 0.95


def test_batches_of_another_size() -> None:
    x = torch.arange(6).view(3, 2)
    assert of_other_size({"x": x, "scale": 2.0, "table": torch.ones(4)})["x"].tolist() == [[0, 1], [2, 3]]
    assert of_other_size({"x": x[:2]})["x"].tolist() == [[0, 1], [2, 3], [0, 1]]
    assert [len(given["x"]) for given in batches(ROW, ROW.build()[1], 3)] == [5, 5, 4]

    class Fixed(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(5, 4))

    fixed = Model("fixed", Fixed, ROW.batch, ROW.loss)
    assert [len(given["x"]) for given in batches(fixed, fixed.build()[1], 3)] == [5, 5, 5]


@pytest.mark.compiled
def test_a_cotangent_of_the_first_batchs_size_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that the loss does not use has a cotangent of zeros, of the size at hand."""

    class Returning(Small):
        def forward(self, x: Tensor) -> Any:
            hidden = self.fc(x)
            return {"loss": self.norm(hidden).tanh().square().mean(), "hidden": hidden}

    row = Model("returning", Returning, ROW.batch)
    found = outcome(row, tmp_path)
    assert (found.kind, found.sizes, found.whole, found.dynamic) == ("right", "5, 4", "", "")
    filled = backward_pass.filled

    def stale(graph: Any, number: int, cotangent: Tensor | None, inputs: Any) -> Tensor:
        result = filled(graph, number, cotangent, inputs)
        return result if cotangent is not None else result.new_zeros((5, *result.shape[1:]))

    monkeypatch.setattr(backward_pass, "filled", stale)
    assert outcome(row, tmp_path).kind == "raised"
