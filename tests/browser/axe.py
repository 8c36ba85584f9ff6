"""axe-core, which finds what keeps people from using a page; it comes from the npm registry, once per run."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "4.14.1"
SERIOUS = ("serious", "critical")


def source(folder: Path) -> str:
    """The script. Skips the test where npm is not installed or reaches no registry."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("axe-core comes through npm, which is not installed")
    packed = folder / f"axe-core-{VERSION}.tgz"
    if not packed.exists():
        done = subprocess.run(
            [npm, "pack", f"axe-core@{VERSION}"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"axe-core cannot be fetched: {done.stderr[-300:]}")
    with tarfile.open(packed) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def violations(page: Any, script: str, inside: str = "html") -> list[str]:
    """What is serious or critical inside an element: the rule, its help, and the elements that break it."""
    page.evaluate(script)
    found = page.evaluate("inside => axe.run(inside, { iframes: false })", inside)
    return [
        f"{one['impact']}: {one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:4]]}"
        for one in found["violations"]
        if one["impact"] in SERIOUS
    ]
