"""The official ONNX cases, imported and run without compiling; `make conformance-onnx` compiles each."""

import warnings
from collections import Counter

import pytest
import torch

from benchmarks.onnx.cases import EXCLUDED, cases, difference, value
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
