from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.render import FLOORED, page

TIMING = {"lower": 9.0, "upper": 11.0, "faults": 5.0, "disturbed": False}
START = {"seconds": 0.0, "stages": {}, "peak_bytes": 6e8}
RESULTS = {
    "date": "2026-01-01 00:00 UTC",
    "processor": "A processor",
    "cores": 2,
    "versions": {"torch": "2.13.0"},
    "networks": {
        "gpt2": {
            "title": "GPT-2, 4 layers",
            "variants": {
                "eager": {
                    "stock": TIMING | {"median": 10.0},
                    "tuned": TIMING | {"median": 8.0},
                    "cold": START,
                    "warm": START,
                },
                "inductor": {
                    "stock": TIMING | {"median": 12.0},
                    "tuned": TIMING | {"median": 7.0},
                    "cold": START | {"seconds": 20.0},
                    "warm": START | {"seconds": 3.0},
                },
                "step": {
                    "stock": TIMING | {"median": 5.0, "disturbed": True, "faults": 0.0},
                    "cold": START | {"seconds": 8.0, "stages": {"capture": 2.0, "kernels": 6.0}},
                    "warm": {"seconds": 2.5, "stages": {"capture": 2.0, "load": 0.5}, "peak_bytes": 3e8},
                },
            },
        },
        "bert": {
            "title": "BERT, 4 layers",
            "mixed_agreement": 0.7,
            "variants": {
                "eager-bf16": {"stock": TIMING | {"median": 6.0}, "cold": START, "warm": START},
                "step-bf16": {"stock": TIMING | {"median": 4.0}, "cold": START, "warm": START},
            },
        },
        "broken": {"title": "Broken", "error": "Traceback\nValueError: no"},
    },
}


OLDER = RESULTS | {
    "date": "2025-01-01 00:00 UTC",
    "processor": FLOORED,
    "networks": {"gpt2": RESULTS["networks"]["gpt2"]},
}  # type: ignore[index]
BOTH = {FLOORED: OLDER, "A processor, AVX-512": RESULTS}


def test_page() -> None:
    text = "\n".join(page(BOTH))
    assert text.index("## A processor, AVX-512") < text.index(f"## {FLOORED}"), "the newest comes first"
    assert "| GPT-2 | eager | 10.0 | 7.0 | 5.0 | **2.00** | 1.40 |  |  | 0.50 | 8.0 | 20.0 | 2.5 |" in text
    assert text.count("## GPT-2, 4 layers") == 1 and text.count("performance.png") == 1
    assert "| GPT-2 | eager | 10.0 | 7.0 | 5.0 | **2.00** | 1.40 | 142 % |  | 0.50 | 8.0 | 20.0 | 2.5 |" in text
    assert "| daceml_train.training_step | 5.00 * | 9.00-11.00 | 2.00 |  | 0 | 300.0 MB | 8.0 | 2.5 |" in text
    assert "| PyTorch eager | 10.00 | 9.00-11.00 | 1.00 | 8.00 | 5 | 600.0 MB | 0.0 | 0.0 |" in text
    assert "Cold start: capture 2.0 s, kernels 6.0 s." in text
    assert "| cold start ÷ torch.compile's, worst network | 0.25 | 0.40 (gpt2) |" in text
    assert "| seconds of a warm start after capture, worst network | 1 | 0.50 (gpt2) |" in text
    assert "| BERT | eager-bf16 | 6.0 | 4.0 | **1.50** |  | 0.70 |" in text
    assert "| Broken | not measured |" in text and "Not measured: ValueError: no" in text


def test_page_and_picture_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "PAGE", tmp_path / "performance.md")
    render.write(BOTH)
    assert (tmp_path / "performance.md").read_text().endswith("\n")
    assert (tmp_path / "performance.png").read_bytes().startswith(b"\x89PNG")
