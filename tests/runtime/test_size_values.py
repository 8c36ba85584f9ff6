"""What is evaluated for the plan of new sizes: nothing that earlier plans have asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from daceml_train import tensor
from daceml_train.analysis.interpret import interpret
from daceml_train.graph.text import parse
from daceml_train.runtime import size_values
from daceml_train.runtime.size_values import SizeTable, bytes_of, evaluator
from daceml_train.tensor import Dim, DType, symbol
from tests.graph.control_flow import LOOP
from tests.runtime.test_control import executable

S, T = symbol("s0"), symbol("s1")


@pytest.mark.compiled
def test_plans_for_new_sizes_evaluate_no_size_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse(LOOP)
    run, evaluated = executable(graph), list[Dim]()

    def counted(size: Dim, values: Mapping[str, int]) -> int:
        evaluated.append(size)
        return tensor.evaluate(size, values)

    monkeypatch.setattr(size_values, "evaluate", counted)
    for number in range(2, 9):
        inputs = {
            name: np.random.default_rng(number).normal(size=[number if s == S else s for s in entry.tensor.shape])
            for name, entry in graph.inputs.items()
        }
        before = len(evaluated)
        results = run([torch.tensor(x, dtype=torch.float32) for x in inputs.values()])
        for a, b in zip(results, interpret(graph, inputs).outputs, strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-5)
        assert (len(evaluated) > before) == (number == 2), evaluated[before:]
    assert len(run._plans) == 7


def test_one_table_serves_many_sizes() -> None:
    table = SizeTable()
    for sizes in ({"s0": 3, "s1": 4}, {"s0": 5, "s1": 40}, {"s0": 7, "s1": 1}):
        value, s, t = evaluator(sizes, table), sizes["s0"], sizes["s1"]
        assert [value(x) for x in (4, S, S * T + 1, S * T + 1)] == [4, s, s * t + 1, s * t + 1]
        blocks = symbol("blocks")
        assert [value(blocks, 3), value(blocks, 2), value(S * blocks, 6), value(S * blocks)] == [3, 2, 6 * s, s]
        assert value(S * (S + 1) / 2) == s * (s + 1) // 2  # SymPy evaluates it
        assert bytes_of(DType.float64, (S, 3, blocks), value, 2) == 8 * s * 3 * 2
    assert table.symbols == {"s0", "s1", "blocks"}


def test_a_table_keeps_so_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_values, "KEPT_EXPRESSIONS", 8)
    table = SizeTable()
    value = evaluator({"s0": 3}, table)
    assert all(value(S * number) == 3 * number for number in range(2, 40) for _ in range(2))
    assert len(table.positions) == 8
