"""Sizes that become constants of a program, since their expressions nest remainders."""

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._sympy.functions import FloorDiv, Mod

import daceml_train as dt
from daceml_train.frontends.torch.dynamo import size_limits
from daceml_train.frontends.torch.dynamo.tracing import compiled

height, batch = sympy.symbols("h b", integer=True, positive=True)


def padded(size, window):
    return size + Mod(window - Mod(size, window), window)


def grown(size, rounds):
    for _ in range(rounds):
        size = padded(FloorDiv(size, 2), 4)
    return size


def test_only_what_is_under_nested_remainders_becomes_a_constant():
    assert size_limits._nested(sympy.Eq(batch * grown(height, 3), 4)) == {height}
    assert size_limits._nested(sympy.Eq(batch * padded(height, 4), 4)) == set()  # small


def test_sizes_under_strides_stay_symbolic_however_deep_the_network_is():
    size = height
    for _ in range(30):
        size = FloorDiv(size - 1, 2) + 1
    assert size_limits._nested(sympy.Eq(batch * size, 4 * size + 1)) == set()


def windows(x):
    for _ in range(2):
        rows = (4 - x.shape[1] % 4) % 4
        x = F.pad(x, (0, 0, 0, rows))
        x = x.view(x.shape[0], x.shape[1] // 4, 4, -1).flatten(2)[:, :, : x.shape[2]].repeat(1, 3, 1)
    return x.sin()


def test_other_sizes_are_compiled_again_and_right(monkeypatch):
    monkeypatch.setattr(size_limits, "TERMS", 8)
    torch._dynamo.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    function = compiled(windows, backend, dynamic=True)
    for rows, height, counted in ((2, 7, 1), (3, 7, 1), (5, 7, 1), (3, 9, 2), (2, 9, 2)):
        x = torch.randn(rows, height, 6)
        assert torch.equal(function(x), windows(x))
        assert len(compilations) == counted


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return windows(x) * self.scale


@pytest.mark.compiled
def test_the_report_says_which_sizes_are_constants(monkeypatch):
    monkeypatch.setattr(size_limits, "TERMS", 8)
    torch._dynamo.reset()
    model, x = Windows(), torch.randn(2, 7, 6)
    step = dt.training_step(model, lambda y: y.sum(), torch.optim.SGD(model.parameters(), lr=0.1), dynamic=True)
    step(x)
    module = dt.optimize(Windows(), dynamic=True)
    module(x).sum().backward()
    line = "a size of 7 is a constant of the program, since expressions of sizes nest too many remainders"
    for compiled_one in (step, module):
        report = dt.report(compiled_one)
        assert [line] == [text for function in report.functions for text in function.constant_sizes]
        assert line in str(report) and line in report._repr_html_()
