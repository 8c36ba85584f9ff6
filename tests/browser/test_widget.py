"""The widget in a real JupyterLab, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.lab import Lab, run_all

pytestmark = pytest.mark.browser
Shots = Callable[[Any, str], None]
PATIENCE = 600_000
"""Milliseconds until what a click asked for is given up: kernels are compiled meanwhile, on whatever is left of a machine."""

NETWORK = """
import torch, daceml_train as dt
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
model = nn.Sequential(Block(32), Block(32), nn.Linear(32, 10))
x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))
session = dt.Session(model, x, y, loss=nn.functional.cross_entropy, optimizer=torch.optim.Adam(model.parameters()))
"""


KEEP = """root => {
  root.told = [];
  const { progress } = root.desk.channel.events;
  root.desk.channel.events.progress = (message) => { root.told.push(message); progress(message); };
}"""
"""Keeps what the kernel tells about its progress."""


def opened(page: Any, lab: Lab, name: str, *cells: str) -> Any:
    """The first widget of a notebook, drawn and with its matches."""
    page.goto(lab.notebook(name, *cells))
    run_all(page)
    page.wait_for_selector(".daceml-explore[data-drawn]", timeout=PATIENCE)
    page.wait_for_selector(".daceml-explore .card .apply")
    widget = page.locator(".daceml-explore").first
    widget.scroll_into_view_if_needed()
    return widget


def settled(page: Any, widget: Any) -> None:
    """Wait until nothing is under way and what is drawn is the state."""
    page.wait_for_function("root => !root.classList.contains('busy')", arg=widget.element_handle(), timeout=PATIENCE)


def state(widget: Any) -> dict[str, Any]:
    return widget.evaluate("root => { const { sdfg, ...rest } = root.desk.state; return rest; }")


def test_the_loop(page: Any, lab: Lab, shots: Shots) -> None:
    widget = opened(page, lab, "loop", NETWORK, "dt.explore(session)")
    before, drawn = state(widget), widget.evaluate("root => root.desk.drawn")
    assert len(before["view"]["boxes"]) <= 500
    first = widget.locator(".card").first
    first.hover()
    assert widget.evaluate("root => root.desk.viewer.lit.size") > 0
    shots(page, "hover")
    first.get_by_role("button", name="Preview").click()
    widget.locator(".preview table").wait_for()
    shots(page, "preview")

    number = int(first.get_attribute("data-number"))
    chosen = next(match for match in before["matches"] if match["number"] == number)
    widget.locator(".card .apply").first.click()
    settled(page, widget)
    after = state(widget)
    assert after["at"] == 1 and after["totals"]["bytes"] == before["totals"]["bytes"] + chosen["bytes"]
    page.wait_for_function("([root, drawn]) => root.desk.drawn !== drawn", arg=[widget.element_handle(), drawn])
    widget.locator("button.undo").click()
    settled(page, widget)
    assert state(widget)["totals"]["bytes"] == before["totals"]["bytes"]

    for _ in range(2):
        widget.locator(".card .apply").first.click()
        settled(page, widget)
    widget.evaluate(KEEP)
    widget.locator("button.verify").click()
    settled(page, widget)
    widget.locator("button.measure").click()
    widget.locator("pre.measured-so-far").wait_for(timeout=PATIENCE)
    shots(page, "measuring")
    settled(page, widget)
    shots(page, "verified")
    told = widget.evaluate("root => root.told")
    assert any("PyTorch" in one["text"] for one in told if one["kind"] == "verify")
    assert any("tensors so far" in one.get("partial", "") for one in told), "a first comparison comes before the last"
    notes = state(widget)["notes"]
    assert notes["verified"].startswith("all right"), notes
    assert "now" in notes["measured"]
    widget.locator("select.overlay").select_option("time")
    shots(page, "time")
    widget.locator(".tabs .timeline").click()
    assert widget.locator(".lane").count() == 3
    widget.locator(".launch-row").first.click()
    settled(page, widget)
    assert widget.locator(".tree .row.chosen").count() == 1
    shots(page, "timeline")
    widget.locator(".tabs .files").click()
    widget.locator("input.path").fill("loop.json")
    widget.locator("button.save").click()
    settled(page, widget)
    assert "saved" in widget.locator(".message").inner_text()
    saved = state(widget)["totals"]["bytes"]

    again = opened(page, lab, "replayed", NETWORK, "dt.explore(session)")
    again.locator(".tabs .files").click()
    again.locator("input.path").fill("loop.json")
    again.locator("button.replay").click()
    settled(page, again)
    assert state(again)["totals"]["bytes"] == saved and state(again)["at"] == 2
    (lab.folder / "bad.json").write_text(json.dumps({"fusion": ["no_such_pass()"]}))
    again.locator("input.path").fill("bad.json")
    again.locator("button.replay").click()
    settled(page, again)
    assert state(again)["at"] == 2 and again.locator(".message.bad").inner_text()
    shots(page, "replayed")


def test_looking(page: Any, lab: Lab, shots: Shots) -> None:
    """Tree, search, details, code, kept arrays, overlays and keys."""
    widget = opened(page, lab, "looking", NETWORK, "session.apply('fuse_elementwise')", "dt.explore(session)")
    widget.locator(".tree .row", has_text="update").first.dblclick()
    settled(page, widget)
    assert "update" in state(widget)["view"]["open"]
    widget.locator("select.overlay").select_option("bytes")
    shots(page, "bytes")
    widget.locator("input.search").fill("gelu")
    widget.locator(".found button").first.click()
    settled(page, widget)
    widget.locator(".tabs .details").click()
    widget.locator("button.code").click()
    widget.locator("pre.code").wait_for(timeout=PATIENCE)
    assert "kernel_" in widget.locator("pre.code").inner_text()
    assert "nn.functional.gelu" in widget.locator("pre.source").inner_text()
    shots(page, "details")
    widget.locator(".tabs .kept").click()
    widget.locator(".card .toggle").first.click()
    settled(page, widget)
    shots(page, "kept")
    widget.locator(".tabs .history").click()
    widget.locator(".steps li").first.click()
    settled(page, widget)
    assert state(widget)["at"] == 0
    widget.locator(".steps li").first.focus()
    page.keyboard.press("r")
    settled(page, widget)
    assert state(widget)["at"] == 1
    page.keyboard.press("1")
    widget.locator("input.refused").check()
    settled(page, widget)
    widget.locator(".group", has_text=re.compile(r"\d refused")).first.locator(".fold-group").click()
    widget.locator(".card.refused .refusal").first.wait_for()
    shots(page, "refused")


def test_two_widgets_and_a_restart(page: Any, lab: Lab, shots: Shots) -> None:
    cells = (
        NETWORK,
        "dt.explore(session, height=400)",
        "dt.explore(dt.Session(nn.Linear(4, 4), torch.randn(2, 4)), height=300)",
    )
    first = opened(page, lab, "two", *cells)
    page.wait_for_function("document.querySelectorAll('.daceml-explore[data-drawn]').length === 2")
    second = page.locator(".daceml-explore").nth(1)
    before = state(second)
    first.locator(".card .apply").first.click()
    settled(page, first)
    assert state(first)["at"] == 1 and state(second) == before
    shots(page, "both")
    page.locator(".lm-MenuBar-itemLabel", has_text="Kernel").first.click()
    page.locator(".lm-Menu-itemLabel").get_by_text("Restart Kernel…", exact=True).click()
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    page.wait_for_timeout(3000)
    first.locator("button.undo").click()
    first.locator(".message.bad").wait_for(timeout=15_000)
    assert "restarted" in first.locator(".message").inner_text()
    assert state(first)["at"] == 1
    shots(page, "restarted")


def test_text_from_a_model_is_text(page: Any, lab: Lab, shots: Shots) -> None:
    evil = "<img src=x onerror=hacked=1>"
    cells = (
        "import torch, daceml_train as dt\nfrom torch import nn\nmodel = nn.Sequential()\n"
        f"model.add_module({evil!r}, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))\n"
        "model.add_module('<script>hacked=1</script>', nn.Linear(8, 8))\n"
        "session = dt.Session(model, torch.randn(4, 8), torch.randn(4, 8), loss=nn.functional.mse_loss)",
        "dt.explore(session)",
        "session",
    )
    widget = opened(page, lab, "escaping", *cells)
    assert widget.locator(".tree").get_by_text("<img src=x").count() > 0
    widget.locator(".tree .row", has_text="<img").first.click()
    widget.locator(".tabs .details").click()
    page.wait_for_timeout(500)
    shots(page, "text")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    assert widget.evaluate("root => root.desk.viewer.window.document.images.length") == 0


def test_a_graph_of_three_thousand_operators_in_the_dark(page: Any, lab: Lab, shots: Shots) -> None:
    page.emulate_media(color_scheme="dark")
    deep = (
        "import torch, daceml_train as dt\nfrom torch import nn\n"
        "model = nn.Sequential(*[layer for _ in range(190) for layer in (nn.Linear(4, 4), nn.Tanh())])\n"
        "session = dt.Session(model, torch.randn(2, 4), torch.randn(2, 4), loss=nn.functional.mse_loss,\n"
        "                     optimizer=torch.optim.Adam(model.parameters()))\nprint(len(session.graph.nodes))"
    )
    widget = opened(page, lab, "deep", deep, "dt.explore(session)")
    found = state(widget)
    assert found["totals"]["operators"] > 3000
    for row in found["view"]["outline"][:14]:
        if row["opens"] and not row["open"]:
            widget.evaluate("(root, key) => root.desk.channel.ask({ type: 'open', key })", row["key"])
    settled(page, widget)
    assert 100 < len(state(widget)["view"]["boxes"]) <= 500
    page.wait_for_timeout(1500)
    widget.evaluate("root => { document.body.dataset.jpThemeLight = 'false'; root.desk.theme(); }")
    shots(page, "deep")
