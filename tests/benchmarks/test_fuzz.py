"""The fuzzer's own parts: cases repeat, shrink to what fails, and wrong numbers are told from rounding."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from benchmarks import fuzz


def test_cases_repeat_and_are_taken_by_pytorch() -> None:
    for seed in range(5):
        case = fuzz.random_case(seed, 5)
        assert case == fuzz.random_case(seed, 5)
        assert case.layers and fuzz._shapes(case) is not None
        compile(case.script(), "script", "exec")


def test_dropping_a_layer_renames_earlier_values() -> None:
    layers = tuple(fuzz.Layer(f"h = {text}") for text in ("h + 1", "h * 2", "h - a1"))
    case = fuzz.Case(0, layers, (4,))
    assert [layer.forward for layer in fuzz._without(case, [0]).layers] == ["h = h * 2", "h = h - a0"]


def test_shrinks_to_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ("self.p0 * h", "h + 1", "h.cumsum(0)", "h * 2", "h.tanh()")
    layers = [fuzz.Layer(f"h = {text}") for text in texts]
    layers[0] = replace(layers[0], init=("self.p0 = nn.Parameter(torch.ones(4))",))
    case = fuzz.Case(0, tuple(layers), (4,), loss="l1_loss", threads=2, without=("DeadCode",))

    def check(case: fuzz.Case) -> fuzz.Verdict:
        return fuzz.Verdict("wrong" if re.search("cumsum", case.model()) else "", [])

    monkeypatch.setattr(fuzz, "check", check)
    shrunk = fuzz.shrunk(case, 10)
    assert [layer.forward for layer in shrunk.layers] == ["h = h.cumsum(0)"]
    assert (shrunk.threads, shrunk.without, shrunk.loss) == (1, (), "mse_loss")


def test_rounding_is_not_wrong_and_a_wrong_number_is() -> None:
    exact = {"gradient": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    eager = {"gradient": exact["gradient"].float()}
    assert not fuzz._wrong({"gradient": eager["gradient"] + 1e-6}, eager, [eager], exact)
    assert fuzz._wrong({"gradient": eager["gradient"] + 1e-3}, eager, [eager], exact)
    assert fuzz._wrong({"gradient": eager["gradient"] * torch.nan}, eager, [eager], exact)
    assert fuzz._wrong({}, eager, [eager], exact)
