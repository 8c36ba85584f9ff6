"""The official ONNX cases, imported and run without compiling; `make conformance-onnx` compiles each."""

import warnings
from collections import Counter

import pytest
import torch

from benchmarks.onnx.cases import EXCLUDED, RIGHT, cases, difference, run, value
from daceml_train.errors import Unsupported
from daceml_train.frontends.onnx import load

pytest.importorskip("onnx")


@pytest.mark.slow
def test_every_official_node_case_is_right_or_refused():
    counts, wrong = Counter(), []
    for case in cases("node"):
        try:
            module = load(case.model)
        except Unsupported:
            counts["refused"] += 1
            continue
        for inputs, outputs in case.data_sets:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                result = module(*map(value, inputs))
            for got, want in zip([result] if len(outputs) == 1 else result, map(value, outputs), strict=True):
                if message := difference(got, want, case.rtol, case.atol, values=case.name not in EXCLUDED):
                    wrong.append(f"{case.name}: {message}")
        counts["run"] += 1
    assert not wrong
    assert counts["run"] >= 1650, counts


@pytest.mark.compiled
def test_sizes_that_an_operand_has_do_not_divide_the_graph(tmp_path):
    names = {
        "test_reduce_sum_do_not_keepdims_example",  # axes are an operand of the model: a list that is read from data
        "test_expand_dim_changed",  # a shape is
        "test_attention_4d_gqa_expanded",  # shapes are computed on the host
    }
    chosen = [case for case in cases("node") if case.name in names]
    assert len(chosen) == len(names)
    for case in chosen:
        outcome = run(case, "node", str(tmp_path))
        assert (outcome.kind, outcome.graphs, outcome.breaks) == (RIGHT, 1, 0), outcome
