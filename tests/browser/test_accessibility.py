"""What keeps people from using the widget and the pages: axe-core finds nothing serious, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.cli import main
from daceml_train.reporting.page import styled, whole
from daceml_train.reporting.tables import ROWS, table
from tests.browser.axe import source, violations
from tests.browser.bare import Bare

pytestmark = pytest.mark.browser
Shots = Callable[[Any, str], None]
PANELS = ("matches", "history", "kept", "details", "timeline", "files")


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return source(tmp_path_factory.mktemp("axe"))


@pytest.fixture
def blank(chromium: Any) -> Iterator[Any]:
    """A page without a server, whose scripts must not fail."""
    context = chromium.new_context(viewport={"width": 1400, "height": 800})
    context.set_default_timeout(300_000)
    page, broken = context.new_page(), list[str]()
    page.on("pageerror", lambda error: broken.append(f"{error}\n{error.stack}"))
    yield page
    context.close()
    assert broken == []


@pytest.fixture(scope="module")
def captured() -> dt.Session:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    return dt.Session(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer)


@pytest.fixture
def session(captured: dt.Session) -> dt.Session:
    captured.jump(0)
    return captured


@pytest.mark.parametrize("light", [True, False])
def test_the_widget(blank: Any, session: dt.Session, shots: Shots, axe: str, light: bool) -> None:
    session.apply("fuse_elementwise")
    session.undo()
    bare = Bare(blank, session)
    bare.requests.seconds = {place: 1e-5 * (1 + place % 7) for place in range(len(session.graph.nodes))}
    bare.requests.timed = session.version
    bare.requests.notes = {"version": session.version, "verified": "all right: 1 result", "measured": "now 10 us"}
    blank.evaluate("model.send({ type: 'refresh', id: 'x' })")
    bare.theme(light)
    widget = bare.widget
    assert widget.evaluate("root => root.classList.contains('dark')") == (not light)
    widget.locator("input.refused").check()
    bare.settled()
    widget.locator(".card .preview").first.click()
    widget.locator(".change button").first.wait_for()
    found = {}
    for panel in PANELS:
        if panel == "details":
            widget.locator(".tree .row").last.click()
            bare.settled()
        widget.locator(f".tabs .{panel}").click()
        bare.settled()
        found[panel] = violations(blank, axe, ".daceml-explore")
        shots(blank, f"{panel}-{'light' if light else 'dark'}")
    assert not any(found.values()), found


def test_the_pages(blank: Any, session: dt.Session, shots: Shots, axe: str, tmp_path: Path) -> None:
    x, y = session.subject.inputs
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    report = dt.report(step, lambda: step(x, y), runs=2)
    session.apply("fuse_elementwise")
    session.export_html(tmp_path / "session.html")
    report.save(tmp_path / "before.json")
    fewer = dt.training_step(model, nn.functional.cross_entropy, step.optimizer, pipeline=dt.Pipeline())
    dt.report(fewer, lambda: fewer(x, y), runs=2).save(tmp_path / "after.json")
    paths = [str(tmp_path / name) for name in ("before.json", "after.json")]
    assert main(["diff", *paths, "--html", str(tmp_path / "difference.html")]) == 1
    pages = {name: (tmp_path / f"{name}.html").read_text() for name in ("session", "difference")}
    found = {}
    for scheme in ("light", "dark"):
        blank.emulate_media(color_scheme=scheme)
        for name, text in {"report": report.to_html(), **pages}.items():
            blank.goto("about:blank")  # a page keeps the policies of what was written into it before
            blank.set_content(text)
            assert blank.locator("th button").count() >= 8 or name == "session"
            found[name, scheme] = violations(blank, axe)
            shots(blank, f"{name}-{scheme}")
    assert not any(found.values()), found


def test_tables_are_sorted_and_filtered(blank: Any, shots: Shots) -> None:
    sizes = [f"{(37 * i) % 101} {unit}" for i in range(20) for unit in ("B", "kB", "MB")]
    rows = [(f"kernel {i}", size, "" if i % 7 else "1.5 ms") for i, size in enumerate(sizes)]
    blank.set_content(whole("tables", styled([table(("kernel", "bytes", "time"), rows)]), sortable=True))
    cells = (
        "place => [...document.querySelectorAll('tbody tr:not([hidden])')].map((row) => row.cells[place].textContent)"
    )
    assert blank.evaluate(cells, 0) == [name for name, *_ in rows[:ROWS]]
    blank.get_by_role("button", name="bytes").click()
    factors = {"B": 1, "kB": 1e3, "MB": 1e6}
    value = {size: float(size.split()[0]) * factors[size.split()[1]] for size in sizes}
    largest = sorted(value.values(), reverse=True)
    assert [value[size] for size in blank.evaluate(cells, 1)] == largest[:ROWS]
    blank.get_by_role("button", name="show all").click()
    assert [value[size] for size in blank.evaluate(cells, 1)] == largest
    blank.get_by_role("button", name="bytes").click()
    assert [value[size] for size in blank.evaluate(cells, 1)] == largest[::-1]
    blank.get_by_role("button", name="time").click()
    assert blank.evaluate(cells, 2)[:10] == ["1.5 ms"] * 9 + [""], "rows without a number are last"
    blank.get_by_role("searchbox").fill("kernel 5")
    assert len(blank.evaluate(cells, 0)) == 11 and blank.get_by_role("status").inner_text() == "11 of 60 rows"
    shots(blank, "filtered")


def test_keys(blank: Any, session: dt.Session, shots: Shots) -> None:
    """The loop without a mouse: tabs, a preview in the picture, an application, and undo."""
    bare = Bare(blank, session)
    widget, keyboard = bare.widget, blank.keyboard
    widget.locator(".tabs .matches").focus()
    keyboard.press("ArrowRight")
    assert widget.locator(".tabs [aria-selected='true']").inner_text().startswith("History")
    keyboard.press("ArrowLeft")
    widget.locator(".card").first.focus()
    keyboard.press("p")
    widget.locator(".change .after").wait_for()
    before = widget.evaluate("root => root.desk.drawn")
    widget.locator(".change .after").focus()
    keyboard.press("Enter")
    drawn = "([root, drawn]) => (root.desk.drawn === drawn) === {}"
    blank.wait_for_function(drawn.format("false"), arg=[widget.element_handle(), before])
    assert widget.evaluate("root => root.desk.viewer.come.size") > 0
    shots(blank, "after")
    widget.locator(".change .before").focus()
    keyboard.press("Enter")
    blank.wait_for_function(drawn.format("true"), arg=[widget.element_handle(), before])
    assert widget.evaluate("root => root.desk.viewer.gone.size") > 0
    shots(blank, "before")
    widget.locator(".card").first.focus()
    keyboard.press("a")
    bare.settled()
    assert len(session.history) == 1
    assert widget.locator(".change button").count() == 0, "the preview is of an older graph"
    widget.evaluate("root => root.focus()")
    keyboard.press("u")
    bare.settled()
    assert session.history == ()


def test_where_a_box_is(blank: Any, session: dt.Session, shots: Shots) -> None:
    """The path to the chosen box, its neighbors in sight after a jump, and the small picture of the whole graph."""
    bare = Bare(blank, session)
    widget = bare.widget
    operators = widget.locator(".tree .row[aria-level='3']")
    operators.last.click()
    bare.settled()
    steps = widget.locator(".crumbs button")
    names = steps.all_inner_texts()
    assert len(names) == 3 and steps.last.get_attribute("aria-current") == "location"
    assert names[-1] == operators.last.locator(".name").inner_text()
    steps.first.click()
    bare.settled()
    assert widget.locator(".crumbs button").all_inner_texts() == names[:1]
    sight = "root => { const r = root.desk.viewer.renderer.visible_rect; return r.w * r.h; }"
    widget.locator("button.fit").click()
    blank.wait_for_timeout(300)
    whole = widget.evaluate(sight)
    hidden = "root => root.desk.viewer.renderer.minimap_canvas.style.visibility === 'hidden'"
    blank.wait_for_function(hidden, arg=widget.element_handle())  # all boxes are in sight
    widget.locator(".card button.show").first.click()
    bare.settled()
    blank.wait_for_function("([root, whole]) => { const r = root.desk.viewer.renderer.visible_rect; return r.w * r.h < whole; }",
                            arg=[widget.element_handle(), whole])  # fmt: skip
    seen = widget.evaluate("""root => {
      const { desk } = root, { viewer } = desk, { x, y, w, h } = viewer.renderer.visible_rect, seen = [];
      viewer.renderer.doForAllGraphElements((_g, _i, drawn) => {
        const key = viewer.key(drawn);
        if (key && drawn.x > x && drawn.x < x + w && drawn.y > y && drawn.y < y + h) seen.push(key);
      });
      return seen;
    }""")
    keys = set(bare.requests.state()["matches"][0]["keys"])
    around = {e["source"] for e in bare.requests.state()["view"]["edges"] if e["target"] in keys}
    assert keys <= set(seen) and around and around <= set(seen)
    assert widget.evaluate("root => root.desk.viewer.renderer.minimap_canvas.width") > 40
    blank.wait_for_function(hidden.replace("===", "!=="), arg=widget.element_handle())
    shots(blank, "map-light")
    bare.theme(False)
    shots(blank, "map-dark")


def test_a_pass_is_applied_everywhere_from_its_group(blank: Any, session: dt.Session, shots: Shots) -> None:
    bare = Bare(blank, session)
    before = bare.requests.state()
    group = next(g for g in before["groups"] if g["count"] > 1)
    shown = bare.widget.locator(f".group[data-pass='{group['name']}']")
    if shown.locator(".fold-group").get_attribute("aria-expanded") == "false":
        shown.locator(".fold-group").click()
    assert shown.locator(".module").count() == len(group["modules"])
    shots(blank, "groups")
    shown.locator("button.everywhere").click()
    bare.settled()
    after = bare.requests.state()
    assert after["at"] == 1 and after["history"][0]["name"] == group["name"] and after["history"][0]["matches"] > 1
    shots(blank, "everywhere")
