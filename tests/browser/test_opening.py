"""How long a large model takes to open, and what can be done meanwhile.

Times are recorded in `opening.json` beside the pictures, and not asserted: they are the machine's as much as ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, ended, ready, start_cell

pytestmark = pytest.mark.browser
Shots = Callable[[Any, str], None]

BERT = """
import time, torch, daceml_train as dt
from torch import nn
from benchmarks.networks.table import sentences
from benchmarks.networks.transformer import Bert
torch.manual_seed(0)
model = Bert({words}, {width}, {layers}, {layers}, 128)
x, y = sentences(4, 128, {words}, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
before = time.process_time()
"""
EXPLORE = "explorer = dt.explore(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer)\nexplorer"
CPU = "session = explorer.session\nprint(time.process_time() - before)"

WATCH = """async (number) => {
  const began = performance.now(), times = {};
  const note = (what) => { times[what] ??= (performance.now() - began) / 1000; };
  while (!times.listed) {
    await new Promise((next) => setTimeout(next, 10));
    const root = document.querySelectorAll('.jp-CodeCell')[number].querySelector('.daceml-explore');
    if (root?.querySelector('.tree .row')) note('modules');
    if (times.modules && !times.clicked) {
      const row = [...root.querySelectorAll('.tree .row')].find((one) => one.ariaExpanded === 'false');
      if (!times.clicking) {
        times.clicking = true;
        times.opening = root.desk.state.opening !== '';
        root.desk.channel.ask({ type: 'open', key: row.dataset.key }).then(() => note('clicked'));
      }
    }
    if (root && root.desk.state.version >= 0) note('captured');
    if (root?.dataset.drawn) { note('drawn'); times.layout = Number(root.dataset.layout) / 1000; }
    if (root?.querySelector('.card .apply')) note('listed');
    if (root?.desk.state.failed) return { failed: root.desk.state.failed };
  }
  return times;
}"""


CHECKS = """async (number) => {
  const root = document.querySelectorAll('.jp-CodeCell')[number].querySelector('.daceml-explore');
  const desk = root.desk, times = {};
  const until = async (what, holds, seconds = 800) => {
    const began = performance.now();
    while (!holds()) {
      const spent = (performance.now() - began) / 1000;
      if (spent > seconds) {
        const { running, message } = { running: root.className, message: root.querySelector('.message')?.textContent };
        throw new Error(`${what}: nothing after ${seconds} s; ${running}; ${message}; ${JSON.stringify(times)}`);
      }
      await new Promise((next) => setTimeout(next, 20));
    }
    return (performance.now() - began) / 1000;
  };
  const idle = (what) => until(`${what} ends`, () => !root.classList.contains('busy'));
  await idle('opening');
  root.querySelector('.card .preview').click();
  times.preview = await until('preview', () => desk.preview);
  for (const kind of ['verify', 'measure']) {
    await idle(`what ran before ${kind}`);
    desk.say('');
    root.querySelector(`button.${kind}`).click();
    const ended = () => desk.state.notes[{ verify: 'verified', measure: 'measured' }[kind]];
    times[kind] = await until(kind, () => desk.partial[kind] || ended() || root.querySelector('.message.bad'));
    times[`${kind}_first`] = desk.partial[kind] ?? ended() ?? root.querySelector('.message').textContent;
    root.querySelector('button.cancel').click();
  }
  await idle('measure');
  return times;
}"""
"""Seconds until a preview, and until the first results of both checks, which are then cancelled."""


SMALL, BASE = {"words": 1000, "width": 128, "layers": 4}, {"words": 30522, "width": 768, "layers": 12}


@pytest.mark.parametrize(
    "size", [pytest.param(SMALL, id="small"), pytest.param(BASE, id="base", marks=pytest.mark.wide)]
)
def test_bert_opens_on_its_modules_while_it_is_captured(
    size: dict[str, int], page: Any, lab: Lab, shots: Shots
) -> None:
    page.set_default_timeout(600_000)
    page.goto(lab.notebook("bert", BERT.format(**size), EXPLORE, CPU, EXPLORE))
    ready(page)
    start_cell(page, 0)
    ended(page, 0)
    found: dict[str, Any] = {}
    for name, number in (("cold", 1), ("warm", 3)):
        start_cell(page, number)
        found[name] = page.evaluate(WATCH, number)
        assert "failed" not in found[name], found
        assert found[name]["opening"], "the modules are shown, and answer, before the graph is there"
        assert found[name]["modules"] < found[name]["captured"]
        ended(page, number)
        shots(page, name)
        if name == "cold":  # the next cell waits for the session
            start_cell(page, 2)
            ended(page, 2)
            output = page.locator(".jp-CodeCell").nth(2).locator(".jp-OutputArea-output")
            found["kernel_seconds"] = float(output.inner_text())
    found["checks"] = page.evaluate(CHECKS, 3)
    shots(page, "checks")
    assert "tensors so far" in found["checks"]["verify_first"], found
    assert "us" in found["checks"]["measure_first"], found
    found["load"] = os.getloadavg()[0]
    folder = Path(os.environ.get("BROWSER_SHOTS") or lab.folder)
    (folder / "opening.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def test_a_model_that_cannot_be_captured_says_so(page: Any, lab: Lab, shots: Shots) -> None:
    broken = """
import torch, daceml_train as dt
from torch import nn
class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return x
"""
    page.goto(
        lab.notebook(
            "broken", broken, "explorer = dt.explore(Broken(), torch.randn(2, 4))\nexplorer", "explorer.session"
        )
    )
    ready(page)
    for number in range(3):
        start_cell(page, number)
        ended(page, number)
    widget = page.locator(".daceml-explore").first
    widget.locator(".message.bad").wait_for()
    assert "not one graph" in widget.locator(".message.bad").inner_text()
    assert widget.locator(".tree .row", has_text="linear").count() == 1
    widget.scroll_into_view_if_needed()
    shots(page, "broken")
    assert "Unsupported" in page.locator(".jp-CodeCell").nth(2).locator(".jp-OutputArea-output").first.inner_text()
