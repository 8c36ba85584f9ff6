"""The widget in a real JupyterLab, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.lab import Lab, run_all

pytestmark = pytest.mark.browser

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


def opened(page: Any, lab: Lab, name: str, *cells: str) -> Any:
    page.goto(lab.notebook(name, *cells))
    run_all(page)
    page.wait_for_selector(".daceml-explore[data-drawn]", timeout=40_000)
    page.wait_for_selector(".daceml-explore .card .apply", timeout=30_000)
    return page.locator(".daceml-explore").first


def test_the_loop(page: Any, lab: Lab, shots: Callable[[Any, str], None]) -> None:
    opened(page, lab, "loop", NETWORK, "dt.explore(session)")
    shots(page, "open")
