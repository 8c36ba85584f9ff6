"""A JupyterLab of its own in a folder, and notebooks in it as a page sees them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

TOKEN = "tests"
ROOT = Path(__file__).parents[2]


@dataclass
class Lab:
    """A running server: `folder` is what it serves."""

    address: str
    folder: Path

    def notebook(self, name: str, *cells: str) -> str:
        """Write a notebook of these cells; the address that opens it in a workspace of its own."""
        result = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        result.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(result, self.folder / f"{name}.ipynb")
        return f"{self.address}/doc/tree/{name}.ipynb?token={TOKEN}"


@contextmanager
def server(folder: Path) -> Iterator[Lab]:
    """JupyterLab on a free port of this machine, with settings that keep it off the network."""
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    notebooks = folder / "settings" / "@jupyterlab" / "notebook-extension"
    notebooks.mkdir(parents=True)
    (notebooks / "tracker.jupyterlab-settings").write_text(json.dumps({"autoStartDefaultKernel": True}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ServerApp.token": TOKEN,
        "ServerApp.port": port,
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.open_browser": False,
        "ServerApp.root_dir": folder / "work",
        "ServerApp.allow_root": True,
        "ServerApp.port_retries": 0,
        "LabApp.user_settings_dir": folder / "settings",
        "LabApp.workspaces_dir": folder / "workspaces",
        "LabApp.news_url": "",
        "LabApp.extension_manager": "readonly",
    }
    (folder / "work").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        lab = Lab(f"http://127.0.0.1:{port}", folder / "work")
        try:
            _wait(lab, process, folder / "server.log")
            yield lab
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(lab: Lab, process: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{lab.address}/api/status?token={TOKEN}", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def run_all(page: Any) -> None:
    """Run all cells of the notebook that is shown, and wait until the kernel is idle again."""
    ready(page)
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator(".lm-Menu-itemLabel").get_by_text("Run All Cells", exact=True).click()


def ready(page: Any) -> None:
    """Wait until the notebook that is shown has a kernel that does nothing."""
    page.wait_for_selector(".jp-Notebook", timeout=120_000)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=120_000)
    page.locator(".jp-StatusBar-Widget").get_by_text("| Idle").wait_for()


def start_cell(page: Any, number: int) -> None:
    """Run one cell, and do not wait for it."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.scroll_into_view_if_needed()
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Shift+Enter")


def ended(page: Any, number: int, seconds: float = 300) -> None:
    """Wait until a cell has run."""
    script = r"""number => /\[\d+\]/.test(
        document.querySelectorAll('.jp-CodeCell')[number].querySelector('.jp-InputPrompt').textContent)"""
    page.wait_for_function(script, arg=number, timeout=1000 * seconds)
