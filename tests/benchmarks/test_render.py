from benchmarks.render import page

RESULTS = {
    "date": "2026-01-01 00:00 UTC", "processor": "A processor", "cores": 2, "malloc": "stock",
    "versions": {"torch": "2.13.0"},
    "networks": {
        "mlp": {
            "title": "MLP", "best_pytorch_ms": 10.0,
            "variants": {
                "eager": {"median": 10.0, "lower": 9.0, "upper": 11.0, "faults": 5.0, "disturbed": False},
                "step": {
                    "median": 5.0, "lower": 4.0, "upper": 6.0, "faults": 0.0, "disturbed": True,
                    "cold": {"seconds": 8.0, "stages": {"capture": 2.0, "kernels": 6.0}},
                    "warm": {"seconds": 2.5, "peak_bytes": 3e8},
                },
            },
        },
        "broken": {"title": "Broken", "error": "Traceback\nValueError: no"},
    },
}  # fmt: skip


def test_page() -> None:
    text = "\n".join(page(RESULTS))
    assert "| MLP | 10.0 | 5.0 | 0.50 |  |  |" in text
    assert "| daceml_train.training_step | 5.00 * | 4.00-6.00 | 0.50 | 0 | 300.0 MB | 8.0 | 2.5 |" in text
    assert "Cold start: capture 2.0 s, kernels 6.0 s." in text
    assert "| Broken | not measured | | | | |" in text and "Not measured: ValueError: no" in text
