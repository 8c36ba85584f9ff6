"""The page of a search: what it shows, that it grows from records of any process, and that texts are escaped."""

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest

from daceml_train.trials.report import Report
from daceml_train.trials.report_page import LEAVES, grown
from daceml_train.trials.tree import Tree
from tests.trials.net import TRIALS, drops, stages, stored


def record(start: int, end: int, before: str, key: str, worker: str = "a-1", **settings: Any) -> dict[str, Any]:
    entry = {"trial": 0, "start": start, "end": end, "before": before, "key": key, "worker": worker, "at": 5.0 + start}
    return entry | {"seconds": float(end - start), "settings": list(settings.items())}


def asked(trial: int, until: int, key: str, steps: int) -> dict[str, Any]:
    return {"run": "r", "trial": trial, "until": until, "point": key, "requested": steps, "worker": "a-1"}


def report(records: list[dict[str, Any]], values: dict[str, Any] | None = None) -> Report:
    found = values or {}
    return Report.of(Tree("root"), records, "a-1", 0, lambda point: (point[1] in found, found.get(point[1])))


def checked(page: str) -> list[str]:
    """The tags of a page, all of them closed in order."""
    opened: list[str] = []
    seen: list[str] = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            seen.append(tag)
            if tag not in ("meta"):
                opened.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            seen.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Parser().feed(page)
    assert not opened and not {"script", "link", "img"} & set(seen)
    return seen


RECORDS = [
    record(0, 6, "root", "k6", lr=0.1, batch=16),
    record(6, 9, "k6", "k9", lr=0.05, batch=16),
    record(6, 9, "k6", "l9", "b-2", lr=0.01, batch=16),
    asked(0, 9, "k9", 9),
    asked(1, 9, "l9", 9),
]


def test_the_tree_grows_from_records() -> None:
    (root,) = grown([row for row in RECORDS if "key" in row])
    assert root.record["key"] == "k6" and [b.record["key"] for b in root.children] == ["l9", "k9"]


def test_what_a_page_shows() -> None:
    found = report(RECORDS, {"k9": 0.75, "l9": {"accuracy": 0.5, "loss": 1.25}})
    page = found.to_html()
    assert checked(page).count("rect") == 3 + 3  # in the tree and over time
    cards = dict(re.findall(r"<div><b>([^<]*)</b>([^<]*)</div>", page))
    assert {"18": "steps asked for", "12": "steps trained", "6": "steps saved", "1.50": "times fewer"}.items() <= (
        cards.items()
    )
    assert cards["2"] in ("trials", "processes") and ">lr=0.05<" in page and ">lr=0.1<" not in page
    assert "steps 6 to 9: lr=0.01, batch=16\nb-2, 3 s\ntrials 1, value accuracy 0.5, loss 1.25" in page
    assert "<td>0.75</td>" in page and "after 9 steps" in page


def test_texts_are_escaped() -> None:
    page = report([record(0, 6, "root", "k6", "<b>", kind="<script>"), asked(0, 6, "k6", 6)]).to_html()
    checked(page)
    assert "&lt;script&gt;" in page


def test_many_paths_are_cut() -> None:
    many = [record(0, 5, "root", f"k{n}", lr=float(n)) for n in range(LEAVES + 20)]
    page = report(many).to_html()
    assert "and 20 more paths" in page and page.count("<title>steps 0 to 5") == LEAVES + len(many)


def test_nothing_trained() -> None:
    assert "Nothing was trained yet" in report([]).to_html()


@pytest.mark.compiled
def test_a_search_is_saved(tmp_path: Path) -> None:
    """Another process that opens the storage shows the same tree."""
    stored(tmp_path).run_all(TRIALS[:4], (6, 12))
    found = stored(tmp_path).report()
    found.save(tmp_path / "search.html")
    found.save(tmp_path / "search.txt")
    page = (tmp_path / "search.html").read_text()
    checked(page)
    assert page.count("<title>steps 9 to 12") == 2 * 4
    assert (tmp_path / "search.txt").read_text().startswith("48 steps asked for")
    assert found._repr_html_() in page


@pytest.mark.compiled
def test_the_report_of_one_object() -> None:
    found = stages(seed=0)
    found.run_all([drops(0.1, 0.5, 0.5)], 12)
    page = found.report().to_html()
    assert "1</b>trial<" in page and "1</b>process<" in page
