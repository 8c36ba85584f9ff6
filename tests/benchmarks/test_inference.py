"""The page of inference figures, and that a run goes on where it was broken off."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import inference


def found(**medians: float) -> dict[str, Any]:
    rows = {name: {"median": ms, "difference": 1e-7, "disturbed": False} for name, ms in medians.items()}
    return {"load": 0.0, "variants": rows}


def test_the_ratio_is_to_the_best_other_variant() -> None:
    assert inference.ratio(found(eager=9.0, onnxruntime=3.0, frozen=4.0, ours=2.0)) == 1.5


def test_page() -> None:
    busy = found(eager=2.0, ours=4.0)
    busy["variants"]["ours"]["disturbed"] = True
    page = inference.page({"runs": {"mlp 1": found(eager=9.0, ours=2.0), "mlp 16": busy, "gpt 1": {"error": "no"}}})
    assert "| mlp | 1 | 9.00 |  |  |  |  | 2.00 | 4.50 | 1.0e-07 |" in page
    assert "| 0.50 \\* |" in page
    assert "| gpt | 1 | no |" in page


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def apart(name: str, batch: int, steps: int) -> dict[str, Any]:
        asked.append((name, batch))
        return found(eager=2.0, ours=1.0)

    monkeypatch.setattr(inference, "_apart", apart)
    file = tmp_path / "figures.json"
    for _ in range(2):
        assert inference.main(["mlp", "--json", str(file)]) == 0
    assert asked == [("mlp", 1), ("mlp", 16)]
    assert inference.main(["mlp", "--json", str(file), "--again", "--batch", "1"]) == 0
    assert asked[2:] == [("mlp", 1)]
    assert set(json.loads(file.read_text())["runs"]) == {"mlp 1", "mlp 16"}
