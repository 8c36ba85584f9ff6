"""What keeps people from using the widget and the pages: axe-core finds nothing serious, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from tests.browser.axe import source, violations
from tests.browser.lab import Lab
from tests.browser.test_widget import NETWORK, opened, settled

pytestmark = pytest.mark.browser
Shots = Callable[[Any, str], None]


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return source(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("light", ["true", "false"])
def test_the_widget(page: Any, lab: Lab, shots: Shots, axe: str, light: str) -> None:
    widget = opened(page, lab, f"axe_{light}", NETWORK, "session.apply('fuse_elementwise')", "dt.explore(session)")
    widget.evaluate("(root, light) => { document.body.dataset.jpThemeLight = light; root.desk.theme(); }", light)
    assert widget.evaluate("root => root.classList.contains('dark')") == (light == "false")
    widget.locator(".card .preview").first.click()
    widget.locator(".change button").first.wait_for()
    found = {}
    for panel in ("matches", "history", "kept", "details", "timeline", "files"):
        if panel == "details":
            widget.locator(".tree .row").last.click()
        widget.locator(f".tabs .{panel}").click()
        settled(page, widget)
        found[panel] = violations(page, axe, ".daceml-explore")
        shots(page, f"{panel}-{'light' if light == 'true' else 'dark'}")
    assert not any(found.values()), found


def test_the_pages(page: Any, shots: Shots, axe: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    step = dt.training_step(model, nn.functional.cross_entropy, optimizer)
    report = dt.report(step, lambda: step(x, y), runs=2)
    session = dt.Session(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer)
    session.apply("fuse_elementwise")
    session.export_html(tmp_path / "session.html")
    found = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name, text in (("report", report.to_html()), ("session", (tmp_path / "session.html").read_text())):
            page.set_content(text)
            found[name, scheme] = violations(page, axe)
            shots(page, f"{name}-{scheme}")
    assert not any(found.values()), found


def test_keys(page: Any, lab: Lab, shots: Shots) -> None:
    """The loop without a mouse: tabs, a preview, an application, and undo."""
    widget = opened(page, lab, "keys", NETWORK, "dt.explore(session)")
    widget.locator(".tabs .matches").focus()
    page.keyboard.press("ArrowRight")
    assert widget.locator(".tabs [aria-selected='true']").inner_text().startswith("History")
    page.keyboard.press("ArrowLeft")
    widget.locator(".card").first.focus()
    page.keyboard.press("p")
    widget.locator(".change .after").wait_for()
    before = widget.evaluate("root => root.desk.drawn")
    widget.locator(".change .after").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("([root, drawn]) => root.desk.drawn !== drawn", arg=[widget.element_handle(), before])
    assert widget.evaluate("root => root.desk.viewer.come.size") > 0
    shots(page, "after")
    widget.locator(".change .before").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("([root, drawn]) => root.desk.drawn === drawn", arg=[widget.element_handle(), before])
    assert widget.evaluate("root => root.desk.viewer.gone.size") > 0
    shots(page, "before")
    widget.locator(".card").first.focus()
    page.keyboard.press("a")
    settled(page, widget)
    assert widget.evaluate("root => root.desk.state.at") == 1
    assert widget.locator(".change button").count() == 0, "the preview is of an older graph"
    widget.evaluate("root => root.focus()")
    page.keyboard.press("u")
    settled(page, widget)
    assert widget.evaluate("root => root.desk.state.at") == 0
