"""Pages: everything is escaped, nothing is loaded, large models stay small pages; traces and groups of launches."""

import dataclasses
import html
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from daceml_train.errors import Invalid
from daceml_train.reporting import Change, Compiled, Eager, Kept, Launched, Report, grouped
from daceml_train.reporting.numbers import roofline_text
from daceml_train.reporting.tables import MOST, POLICY, ROWS, SCRIPT, table
from daceml_train.reporting.text import on_device
from daceml_train.runtime.roofline import Machine

EVIL = '<script src="https://example.org/x.js">alert(1)</script>&'


def launched(number: int = 0, name: str = "mul add", module: str = "model.layer", **fields: object) -> Launched:
    known = {"bytes": 1000 * (number + 1), "flops": 4000, "seconds": 1e-4 * (number + 1)}
    return Launched(0, "kernel", name, f"k{number}", module, "model.py:3", "forward", **(known | fields))


def compiled(launches: list[Launched], name: str = "graph") -> Compiled:
    levels = (Change("intra_operator", 9000, 8000, (10, 9), 0.1), Change("fusion", 8000, 4000, (9, 4), 0.2))
    memory = tuple(range(100, 100 + len(launches)))
    kept = (Kept("float32[4, 8]", 128, EVIL, EVIL),)
    return Compiled(
        name,
        1,
        9000,
        4000,
        10**9,
        levels,
        (("fusion", levels[1]),),
        len(launches),
        3,
        {"mm": 2},
        ((EVIL, EVIL),),
        {"kernels": 1.0},
        False,
        5000,
        {},
        tuple(launches),
        memory,
        1000,
        kept,
    )


def report(launches: list[Launched], **fields: object) -> Report:
    eager = Eager(16000, 10**9, 40, {"aten.mul.Tensor": 9000, EVIL: 7000})
    known = {"eager": eager, "machine": Machine(EVIL, 2, 1e10, 1e11)}
    return Report("training step", EVIL, (compiled(launches, EVIL),), (EVIL,), **(known | fields))


class Elements(HTMLParser):
    """The elements of a page, and whether they close."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append(tag)
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attrs}
        if tag not in ("meta", "line", "rect", "circle", "polyline", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect", "circle", "polyline", "polygon"):
            assert self.open.pop() == tag


def test_texts_are_escaped_and_nothing_is_loaded() -> None:
    result = report([launched(0, EVIL, EVIL), launched(1, "matmul")])
    page = result.to_html()
    elements = Elements()
    elements.feed(page)
    assert not elements.open
    assert not {"link", "img", "iframe", "object"} & set(elements.seen)
    assert elements.seen.count("script") == 1 and page.count(SCRIPT) == 1 and POLICY in page
    assert "script" not in result._repr_html_().replace("&lt;script", "").replace("&lt;/script", "")
    assert page.count("<svg") == 3, "bars, roofline, memory"
    assert "https://" not in re.sub(r"&quot;https://example.org/x.js&quot;", "", page)
    assert "default-src 'none'" in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme:dark" in page
    for line in itertools.islice(str(result).splitlines(), 1, 4):  # what eager execution moves comes first
        assert f"<p>{html.escape(line)}</p>" in page.partition("Bytes moved")[0]


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_size(count: int) -> None:
    result = report([launched(i, f"mul*{i} add", f"model.blocks.{i}.attention") for i in range(count)])
    assert len(result._repr_html_()) < 300_000
    assert str(result)


def test_rows_after_the_first_are_hidden_and_counted() -> None:
    shown = table(("name", "bytes"), [(f"row {i}", f"{i} B") for i in range(MOST + 5)])
    assert shown.count("<tr hidden>") == MOST - ROWS and shown.count("<tr") == MOST + 1
    assert f"and {MOST + 5 - ROWS} more" in shown and "5 more are in the JSON" in shown
    ordered = table(("pass", "bytes"), [(f"row {i}", f"{i} B") for i in range(50)], sortable=False)
    assert "hidden" not in ordered and "sortable" not in ordered and "more" not in ordered


def test_charts_have_their_numbers_under_the_pointer() -> None:
    page = report([launched(i) for i in range(5)]).to_html()
    titles = re.findall(r"<title>([^<]*)</title>", page.partition("</head>")[2])
    assert "after fusion: 4,000 bytes, 0.25 of PyTorch&#x27;s" in titles
    assert "launch 5: 1.1 kB" in titles and any("of the roofline" in title for title in titles)


def test_without_bytes_or_seconds() -> None:
    """PyTorch moves nothing for a view, and a clock may be too coarse for a short step."""
    page = report([launched(seconds=0.0)], eager=Eager(0, 0, 0, {})).to_html()
    assert "after fusion: 4,000 bytes" in page and "of PyTorch" not in page and "of the roofline" not in page


def test_without_times() -> None:
    result = report([launched(seconds=None)], machine=None, eager=None)
    assert result.to_html().count("<svg") == 2
    assert result.functions[0].seconds is None and "measured: " not in str(result)
    assert "measured: 300 µs in the launches of one call" in str(report([launched(0), launched(1)]))
    assert result.trace()["traceEvents"] == [result.trace()["traceEvents"][0]]


def test_a_device_and_its_cuda_graphs() -> None:
    shape = "256 threads, teams of 32, 2 x 4 lanes each, 528 blocks"
    launches = [
        launched(n, shape=shape if n else "128 threads, teams of 1, 1 x 4 lanes each, 9 blocks") for n in range(3)
    ]
    function = dataclasses.replace(compiled(launches), device=EVIL, autotuned=(2, 1))
    result = Report(
        "training step", "net", (function,), (), None, None, ("9 launches in one CUDA graph, on one stream",)
    )
    line = f"on {EVIL}, blocks of 128 and 256 threads, 2 kernels autotuned, 1 changed"
    assert line in str(result) and "9 launches in one CUDA graph" in str(result)
    page = result.to_html()
    assert html.escape(line) in page and shape in page and "9 launches in one CUDA graph" in page and EVIL not in page


def test_groups() -> None:
    launches = [launched(0), launched(1), launched(2, "matmul", flops=10**7, seconds=None)]
    first, second = grouped(launches, lambda x: x.operators)
    assert (first.name, first.count, first.bytes, first.seconds) == ("mul add", 2, 3000, pytest.approx(3e-4))
    assert (second.name, second.seconds) == ("matmul", None)
    machine = Machine("p", 1, bandwidth=1e7, peak=1e9)
    assert first.roofline(machine) == pytest.approx(1.0)
    assert second.roofline(machine) is None and first.roofline(None) is None


def test_peak() -> None:
    function = compiled([launched(i) for i in range(5)])
    assert function.peak == 1000 + 104


def test_trace() -> None:
    result = report([launched(0), launched(1)])
    told = json.loads(json.dumps(result.trace()))
    complete = [e for e in told["traceEvents"] if e["ph"] == "X"]
    assert [e["dur"] for e in complete] == pytest.approx([100.0, 200.0])
    assert complete[1]["ts"] == pytest.approx(complete[0]["dur"])
    assert complete[0]["args"]["bytes"] == 1000
    assert [e["args"]["arrays"] for e in told["traceEvents"] if e["ph"] == "C"] == [100, 101]


@pytest.mark.parametrize("ending", [".html", ".json", ".txt"])
def test_save(tmp_path, ending: str) -> None:
    path = tmp_path / f"report{ending}"
    report([launched()]).save(path)
    text = path.read_text(encoding="utf-8")
    if ending == ".json":
        assert json.loads(text)["functions"][0]["launches"][0]["operators"] == "mul add"
    assert text.startswith({".html": "<!doctype html>", ".json": "{", ".txt": "training step of"}[ending])


def test_a_report_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="a report is not written as .pdf; give a path that ends in .html or .json"):
        report([launched()]).save(tmp_path / "report.pdf")
    assert not list(tmp_path.iterdir())


def test_more_than_the_roofline_is_from_cache() -> None:
    assert roofline_text(1.5) == "from cache" and roofline_text(0.5) == "50.0 %" and roofline_text(None) == ""


def test_the_device_line_says_which_passes_are_left_out() -> None:
    result = dataclasses.replace(compiled([launched()]), device="an accelerator", left_out=("pack_weights", "fold"))
    sentence = "without passes that are not for it: pack_weights, fold"
    assert sentence in ", ".join(on_device(result))
    report = Report("training step", "Model", (result,), ())
    assert sentence in str(report) and sentence in report.to_html()
