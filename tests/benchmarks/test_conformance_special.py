"""The sweep over special values: what it must find, and operators on which it must find nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.conformance.samples import label
from benchmarks.conformance.special import entries
from benchmarks.conformance.special_run import STAGES, swept


def found(stage: str, name: str, cache: Path) -> list[str]:
    (chosen,) = (s for s in STAGES if s.name == stage)
    (op,) = (op for op in entries(chosen.dtype) if label(op) == name)
    return swept(chosen, op, str(cache)).wrong


@pytest.mark.parametrize("name", ["clamp", "clamp_min", "clamp_max", "nn.functional.hardtanh", "nn.functional.relu6"])
def test_bounds_in_the_interpreter(name: str, tmp_path: Path) -> None:
    assert found("interpreted-float64", name, tmp_path) == []


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["clamp"])
def test_bounds_in_kernels(name: str, tmp_path: Path) -> None:
    assert found("compiled-float32", name, tmp_path) == []


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
    assert any("instead of nan" in said for said in found("interpreted-float64", "clamp", tmp_path))
