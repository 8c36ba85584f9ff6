import pytest

from benchmarks.conformance import operators
from benchmarks.conformance.operators import Entry, base_name, page, rule_names


def test_every_rule_has_a_row_in_the_documents() -> None:
    """Run `python -m benchmarks.conformance.operators` after a rule was added."""
    if not operators.PAGE.exists():
        pytest.skip("the page has not been generated")
    table = operators.PAGE.read_text().split("## Without a rule")[0]
    rows = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert rows == set(rule_names())


def test_a_row_says_what_was_seen() -> None:
    seen = Entry(emitted={"mul": None}, calls={"index": None}, files={"indexing": None}, derivative={"own": None})
    seen.by_rule = True
    assert "| `index` | `mul` | `index` | own |  | `indexing` |" in page({"index": seen})
    called = Entry(by_call=True)
    assert "`lgamma` (no derivative)." in page({"lgamma": called})


def test_names() -> None:
    assert base_name("aten.add.Tensor") == "add" and base_name("prims.iota.default") == "prims.iota"
