"""A session on ViT-S: from the cell to a kept pipeline, in few clicks.

Clicks, bytes, and times are recorded in `session.json` beside the pictures. Times are not asserted: they are the
machine's as much as ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, ended, ready, start_cell
from tests.browser.test_widget import PATIENCE, settled, state

pytestmark = pytest.mark.browser
Shots = Callable[[Any, str], None]
MOST = 12
"""Clicks."""

VIT = """
import torch, daceml_train as dt
from torch import nn
from benchmarks.networks.transformer import VisionTransformer
torch.manual_seed(0)
model = VisionTransformer()
x, y = torch.randn(1, 3, 224, 224), torch.randint(0, 1000, (1,))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
"""
EXPLORE = "dt.explore(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer)"


def test_vit_s_from_a_cell_to_a_kept_pipeline(page: Any, lab: Lab, shots: Shots) -> None:
    page.set_default_timeout(PATIENCE)
    page.goto(lab.notebook("vit", VIT, EXPLORE))
    ready(page)
    start_cell(page, 0)
    ended(page, 0)
    start_cell(page, 1)
    clicks = ["run the cell"]
    page.wait_for_selector(".daceml-explore .group .everywhere", timeout=PATIENCE)
    widget = page.locator(".daceml-explore").first
    widget.scroll_into_view_if_needed()
    shots(page, "opened")
    start = state(widget)["totals"]["bytes"]

    def click(what: str, selector: str) -> None:
        widget.locator(selector).first.click()
        clicks.append(what)
        settled(page, widget)

    for _ in range(3):  # a user who takes what saves most, and then all that training does by default
        group = next((g for g in state(widget)["groups"] if g["bytes"] < 0 and g["count"] > 1), None)
        if group is None:
            break
        click(f"{group['name']} everywhere", f".group[data-pass='{group['name']}'] .everywhere")
    click("Apply the default pipeline", "button.default-pipeline")
    shots(page, "applied")
    click("Verify", "button.verify")
    click("Measure", "button.measure")
    shots(page, "measured")
    notes = state(widget)["notes"]
    widget.locator("input.path").fill("vit.json")
    click("Save steps", "button.save")
    shots(page, "kept")
    found = {"clicks": clicks, "bytes": [start, state(widget)["totals"]["bytes"]], **notes, "load": os.getloadavg()[0]}
    folder = Path(os.environ.get("BROWSER_SHOTS") or lab.folder)
    (folder / "session.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    assert len(clicks) <= MOST
    assert notes["verified"].startswith("all right")
    assert found["bytes"][1] < start
    assert (lab.folder / "vit.json").exists()
