"""Loops of few elements: results are vectorized instead, and what the innermost loop does not change leaves it."""

from __future__ import annotations

import pytest
import torch

from daceml_train.ops.operator import Value, make
from daceml_train.tensor import DType
from tests.codegen.running import Case, check, describe, kernel_of


def short_sum(x: Value, w: Value) -> Value:
    return (x * w).reduce("sum", (2,))


def numbered(x: Value) -> Value:
    (place,) = x.builder.emit(make("iota", shape=(3, 1), dim=0, dtype=DType.int32))
    return place.cast(DType.float32).compare("lt", x).where(x, 0.0).reduce("sum", (0,))


def weighted(x: Value, w: Value) -> Value:
    return (w.unary("exp").unary("log") * x).reduce("sum", (0,))


def case(name: str) -> Case:
    torch.manual_seed(0)
    body, inputs = {
        "short_sum": (short_sum, [torch.randn(16, 520, 2), torch.randn(2)]),
        "numbered": (numbered, [torch.randn(3, 9000)]),
        "weighted": (weighted, [torch.randn(7, 6, 5, 16), torch.randn(7, 6, 5, 1)]),
    }[name]
    return Case(name, kernel_of(body, *map(describe, inputs)), inputs)


def innermost(source: str) -> list[str]:
    """The bodies of the vectorized loops."""
    return [part.split("}")[0] for part in source.split("#pragma omp simd")[1:]]


def test_the_lanes_of_a_short_sum_are_its_results() -> None:
    assert case("short_sum").code.plan.loops.mode == "tiles"


def test_values_that_differ_by_row_only_allow_tiles() -> None:
    assert case("numbered").code.plan.loops.mode == "tiles"


def test_what_is_the_same_for_all_lanes_leaves_the_loop() -> None:
    source = case("weighted").code.source
    assert "vm::exp" in source
    assert not any("vm::exp" in body for body in innermost(source))


@pytest.mark.compiled
def test_values() -> None:
    check([case(name) for name in ("short_sum", "numbered", "weighted")])
