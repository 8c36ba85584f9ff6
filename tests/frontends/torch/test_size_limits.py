"""Sizes that become constants of a program, since their expressions nest remainders."""

import sympy
import torch
import torch.nn.functional as F
from torch.utils._sympy.functions import FloorDiv, Mod

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
