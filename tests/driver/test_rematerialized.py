"""What is computed twice: across a cut, and within one program."""

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.driver.rematerialized import rematerialized_across, rematerialized_within
from daceml_train.graph.text import parse


def test_across_a_cut() -> None:
    forward = parse("graph f(x: f32[4] input) {\n  %a = exp(%x)\n  %b = neg(%a)\n  return %b\n}")
    backward = parse(
        "graph b(x: f32[4] saved, g: f32[4] cotangent) {\n  %a = exp(%x)\n  %c = mul(%a, %g)\n  return %c\n}"
    )
    (again,) = rematerialized_across(forward, backward)
    assert (again.operators, str(again.tensor)) == ("exp", "f32[4]")


def test_within_a_program() -> None:
    text = "%a = exp(%x)\n  %b = neg(%a)\n  %a2 = exp(%x)\n  %b2 = neg(%a2)\n  %v = view(%x, shape=(2, 2))\n  %w = view(%x, shape=(2, 2))"
    graph = parse(f"graph g(x: f32[4] input) {{\n  {text}\n  return %b, %b2, %v, %w\n}}")
    assert [again.operators for again in rematerialized_within(graph)] == ["exp", "neg"]


@pytest.mark.compiled
def test_the_report_shows_both() -> None:
    model = dt.optimize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)))
    model(torch.randn(3, 4)).sum().backward()
    told = dt.report(model)
    (function,) = told.functions
    assert function.kept
    assert function.recomputed
    assert all(array.bytes for array in function.recomputed)
    assert all(isinstance(level.flops, int) and level.flops for level in function.levels)
    page = told.to_html()
    assert "Rematerialized in the backward pass" in page
    assert "arithmetic after it" in page
