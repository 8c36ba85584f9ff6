from pathlib import Path

from benchmarks.passes import page

PAGE = Path(__file__).parents[2] / "docs" / "results" / "passes.md"


def test_the_page_is_up_to_date() -> None:
    result = "\n".join(page()) + "\n"
    assert PAGE.read_text(encoding="utf-8") == result, (
        "run .venv/bin/python -m benchmarks.passes > docs/results/passes.md"
    )
