"""Overlap: starts come early, waits late, results stay."""

from __future__ import annotations

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret, interpret_ranks
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.text import parse, show
from daceml_train.ops.collective import Start
from daceml_train.sdfg.convert import from_sdfg, to_sdfg
from daceml_train.tensor import Tensor
from daceml_train.transformations.global_movement.overlap import Overlap
from tests.transformations.checking import assert_text, program


def test_collectives_start_before_and_end_after_what_does_not_need_them() -> None:
    before = program(
        "x: f32[4], w: f32[4, 4]",
        """%a = all_reduce(%x, ranks=2)
        %b = neg(%a)
        %c = matmul(%w, %w)
        %d = reduce_scatter(%c, ranks=2, position=1)
        %e = exp(%w)
        %f = exp(%d)""",
        "%b, %e, %f",
    )
    after = Overlap().run(before)
    verify(after)
    assert_text(
        after,
        """\
        %start: f32[4] = start(%x, ranks=2)
        %c: f32[4, 4] = matmul(%w, %w)
        %start_1: f32[2, 4] = start(%c, ranks=2, position=1, kind="reduce_scatter")
        %e: f32[4, 4] = exp(%w)
        %a: f32[4] = await(%start)
        %b: f32[4] = neg(%a)
        %d: f32[2, 4] = await(%start_1, position=1)
        %f: f32[2, 4] = exp(%d)
        return %b, %e, %f
        """,
    )
    rng = np.random.default_rng(0)
    inputs = [{"x": rng.standard_normal(4), "w": rng.standard_normal((4, 4))} for _ in range(2)]
    for ours, theirs in zip(*(interpret_ranks([graph] * 2, inputs) for graph in (after, before)), strict=True):
        for found, expected in zip(ours.outputs, theirs.outputs, strict=True):
            np.testing.assert_array_equal(found, expected)
    for found, expected in zip(*(interpret(graph, inputs[0]).outputs for graph in (after, before)), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert traffic(after).bytes == traffic(before).bytes
    assert show(parse(show(after))) == show(from_sdfg(to_sdfg(after))) == show(after)


def test_a_single_collective_stays() -> None:
    before = program("x: f32[4]", "%a = all_reduce(%x, ranks=2)\n%b = neg(%a)", "%b")
    assert Overlap().run(before) is before


def test_only_some_collectives_are_started() -> None:
    assert Start(4, 0, "all_gather").network_bytes(Tensor((10,))) == 3 * 40
    with pytest.raises(Invalid, match="start begins one of all_reduce, reduce_scatter, all_gather, given broadcast"):
        Start(4, 0, "broadcast").infer(Tensor((10,)))
