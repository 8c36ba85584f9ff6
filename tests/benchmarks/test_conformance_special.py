"""The sweep over special values: what it must find, and operators on which it must find nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conformance import special_run
from benchmarks.conformance.bits import Distance, Limit, distance
from benchmarks.conformance.compare import Results
from benchmarks.conformance.samples import label
from benchmarks.conformance.special import entries, special_samples
from benchmarks.conformance.special_isolated import results
from benchmarks.conformance.special_run import STAGES, swept


def found(stage: str, name: str, cache: Path) -> list[str]:
    (chosen,) = (s for s in STAGES if s.name == stage)
    (op,) = (op for op in entries(chosen.dtype) if label(op) == name)
    return swept(chosen, op, str(cache)).wrong


MENDED = """
clamp clamp_min clamp_max addcmul addcdiv special.xlog1py special.entr nn.functional.hardtanh nn.functional.relu6
nn.functional.mish nn.functional.prelu nn.functional.smooth_l1_loss nn.functional.huber_loss
nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss nn.functional.multilabel_soft_margin_loss
"""


@pytest.mark.parametrize("name", MENDED.split())
def test_bounds_and_losses_in_the_interpreter(name: str, tmp_path: Path) -> None:
    assert found("interpreted-float64", name, tmp_path) == []


def test_a_graph_without_operands(tmp_path: Path) -> None:
    assert found("interpreted-int64", "ones", tmp_path) == []


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["clamp", "fmod", "nn.functional.elu", "nn.functional.logsigmoid", "addcdiv"])
def test_bounds_and_signs_of_zeros_in_kernels(name: str, tmp_path: Path) -> None:
    assert found("compiled-float32", name, tmp_path) == []


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_powers_of_integers_in_kernels(dtype: str, tmp_path: Path) -> None:
    assert found(f"compiled-{dtype}", "pow", tmp_path) == []


def test_the_sweep_finds_a_clamp_that_forgets_nan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from daceml_train.frontends.torch.rules.translate import RULES

    def clamp(t: Any, x: Any, min: Any = None, max: Any = None) -> Any:
        for kind, bound in (("lt", min), ("gt", max)):
            if bound is not None:
                value = t.value(bound, x.dtype)
                x = t.emit("where", t.emit(kind, x, value), value, x)
        return x

    monkeypatch.setitem(RULES, "aten.clamp.default", clamp)
    monkeypatch.setitem(RULES, "aten.clamp.Tensor", clamp)
    assert any("instead of nan" in message for message in found("interpreted-float64", "clamp", tmp_path))


def test_the_sweep_finds_a_sign_of_zero_that_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from daceml_train.ops.functions import FUNCTIONS

    monkeypatch.setitem(FUNCTIONS, "max", lambda a, b: np.maximum(a, b) + 0.0)
    assert any("its sign" in message for message in found("interpreted-float64", "clamp", tmp_path))


def ends_the_process(*operands: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_sample_that_ends_the_process_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others of its entry are compared, and so are the entries after it."""
    (stage,) = (s for s in STAGES if s.name == "interpreted-float64")
    ops = [op for op in entries(stage.dtype) if op.name in ("abs", "acos")]
    plain = [len(list(special_samples(op, stage.dtype, True))) for op in ops]
    run = special_run._case

    def case(op: Any, number: int, *more: Any) -> Any:
        return ends_the_process() if (op.name, number) == ("abs", 1) else run(op, number, *more)

    monkeypatch.setattr(special_run, "_case", case)
    first, second = results([(stage, op) for op in ops], str(tmp_path))
    assert (first.samples, second.samples) == (plain[0] - 1, plain[1])
    assert first.reasons == {"eager execution ends the process with signal 11": 1}
    assert not first.wrong and not second.wrong


def test_distances_tell_kinds_of_numbers_and_signs_apart() -> None:
    def worst(ours: list[float], eager: list[float], limit: Limit) -> Distance:
        a, b = (Results([torch.tensor(x, dtype=torch.float64)], [], [], []) for x in (ours, eager))
        return distance(a, [b], limit)

    big, inf, nan = 1.7976931348623157e308, float("inf"), float("nan")
    assert worst([big], [inf], Limit(64)).wrong and worst([nan], [inf], Limit(64)).wrong
    assert not worst([nan], [inf], Limit(nonfinite=True)).wrong
    assert worst([-0.0], [0.0], Limit()).wrong and worst([-0.0], [0.0], Limit(signs=False)).signs == 1
    assert worst([1.0 + 2**-51], [1.0], Limit()).wrong and worst([1.0 + 2**-51], [1.0], Limit(2)).ulps == 2
    assert not worst([1e-17, 1.0], [2e-17, 1.0], Limit(0, 1)).wrong and worst([1e-17], [2e-17], Limit(4)).wrong
