"""One JupyterLab and one Chromium for all tests of this folder; screenshots of every test go into a folder to look at."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, server


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with server(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=request.config.getoption("browser"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, lab: Lab, request: pytest.FixtureRequest, shots: Callable[[Any, str], None]) -> Iterator[Any]:
    """A page that fails its test if anything but the server is asked, or if a script of ours fails."""
    context = chromium.new_context(viewport={"width": 1600, "height": 1000})
    context.set_default_timeout(180_000)
    asked: list[str] = []
    broken: list[str] = []
    context.on("request", lambda r: asked.append(r.url))
    shown = context.new_page()
    shown.on("pageerror", lambda error: broken.append(f"{error}\n{error.stack}"))
    yield shown
    shots(shown, "end")
    context.close()
    elsewhere = [url for url in asked if not url.startswith((lab.address, "data:", "blob:", "about:"))]
    assert elsewhere == [], "the page asked another machine"
    assert broken == []


@pytest.fixture
def shots(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """`shots(page, name)` keeps a picture in $BROWSER_SHOTS, or in a folder for temporary files."""
    folder = Path(os.environ.get("BROWSER_SHOTS") or Path(tempfile.gettempdir()) / "daceml_train-screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "_", request.node.name).strip("_")

    def keep(shown: Any, name: str) -> None:
        shown.screenshot(path=str(folder / f"{stem}-{name}.png"))

    return keep
