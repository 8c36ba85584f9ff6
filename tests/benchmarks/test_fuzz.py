"""The fuzzer's own parts: cases repeat, shrink to what fails, and wrong numbers are told from rounding."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fuzz import Case, Layer, check, shrink
from benchmarks.fuzz.checking import Verdict, wrong_in
from benchmarks.fuzz.generate import random_case, shapes_of
from benchmarks.fuzz.sweep import Outcome, Run, read, write
from daceml_train.driver import compile as road
from daceml_train.errors import Invalid


def test_cases_repeat_and_are_taken_by_pytorch() -> None:
    for seed in range(5):
        case = random_case(seed, 5)
        assert case == random_case(seed, 5)
        assert case.layers and shapes_of(case) is not None
        compile(case.script(), "script", "exec")


def test_dropping_a_layer_renames_earlier_values() -> None:
    layers = tuple(Layer(f"h = {text}") for text in ("h + 1", "h * 2", "h - a1"))
    case = Case(0, layers, (4,))
    assert [layer.forward for layer in shrink._without(case, [0]).layers] == ["h = h * 2", "h = h - a0"]


def test_shrinks_to_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ("self.p0 * h", "h + 1", "h.cumsum(0)", "h * 2", "h.tanh()")
    layers = [Layer(f"h = {text}") for text in texts]
    layers[0] = replace(layers[0], init=("self.p0 = nn.Parameter(torch.ones(4))",))
    case = Case(0, tuple(layers), (4,), loss="l1_loss", threads=2, without=("DeadCode",))

    def check(case: Case) -> Verdict:
        return Verdict("wrong" if re.search("cumsum", case.model()) else "", [])

    monkeypatch.setattr(shrink, "check", check)
    shrunk = shrink.shrunk(case, 10)
    assert [layer.forward for layer in shrunk.layers] == ["h = h.cumsum(0)"]
    assert (shrunk.threads, shrunk.without, shrunk.loss) == (1, (), "mse_loss")


def test_results_follow_their_layers_and_enter_the_loss() -> None:
    layers = tuple(Layer(f"h = {text}") for text in ("h + 1", "h * 2", "h * h"))
    case = Case(0, layers, (4,), results=((1, True), (2, False)), loss="l1_loss")
    h, first, second = case.built()(torch.ones(3, 4))
    assert float(h.mean()) == 16 and float(first.mean()) == 2 and float(second.mean()) == 4
    assert float(case.objective((h, first, second), h)) == pytest.approx(0.1 * 4)
    assert shrink._without(case, [0]).results == ((0, True), (1, False))
    assert {s.results for s in shrink._smaller(case)} >= {((1, True),), ((2, False),)}


def test_an_internal_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise Invalid("%b updates %a")

    monkeypatch.setattr(road, "lower", fails)
    layer = Layer("h = self.l(h)", ("self.l = nn.Linear(4, 3)",))
    assert "falls back: internal error, %b updates %a" in check(Case(0, (layer,), (4,))).wrong


def test_rounding_is_not_wrong_and_a_wrong_number_is() -> None:
    exact = {"gradient": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    eager = {"gradient": exact["gradient"].float()}
    assert not wrong_in({"gradient": eager["gradient"] + 1e-6}, eager, [eager], exact)
    assert wrong_in({"gradient": eager["gradient"] + 1e-3}, eager, [eager], exact)
    assert wrong_in({"gradient": eager["gradient"] * torch.nan}, eager, [eager], exact)
    assert wrong_in({}, eager, [eager], exact)


def test_nothing_is_compared_after_a_gradient_that_noise_decides() -> None:
    """What is 0 but for rounding has one sign or the other, and so has the gradient of its magnitude."""
    names = ("loss 0", "step 0 gradient p", "loss 1", "step 1 gradient p", "parameter p")
    exact = {name: torch.tensor([1.0], dtype=torch.float64) for name in names}
    eager = {name: value.float() for name, value in exact.items()}
    flipped = eager | {"step 0 gradient p": -eager["step 0 gradient p"]}
    departed = eager | {name: eager[name] * 1.5 for name in names[2:]}
    assert not wrong_in(departed, eager, [flipped], exact)
    assert "loss 1" in wrong_in(departed, eager, [eager], exact)
    assert "loss 0" in wrong_in(departed | {"loss 0": eager["loss 0"] * 1.5}, eager, [flipped], exact)


def test_runs_go_on_from_their_results(tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    assert read(file) == read(None) == []
    run = Run({"models": 3}, {"torch": "2"}, 7, 7)
    for outcome in (Outcome(8, "compiled"), Outcome(7, "rejected"), Outcome(9, "wrong", "far", ("a break",), 1.5)):
        run.add(outcome)
    write(file, [run])
    assert read(file) == [run]
    assert (run.next, run.accepted, run.wrong, run.seed_of) == (10, 2, {9: "far"}, {"a break": 9})
