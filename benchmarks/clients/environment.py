"""The environment of a client: a venv that shares the project's packages, PyTorch among them, and adds its own."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venvs"
ALONE = ("torchvision",)
"""Packages that are installed without what they require: each pins another build of PyTorch."""


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """The Python of the environment of a client, created if it is missing or of other packages.

    Packages of the project's own environment are found after those installed here, and PyTorch is held at the version
    that is tested, so that no other build of it is installed. Raises `subprocess.CalledProcessError` where pip fails.
    """
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "packages"
    shared = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256("\n".join([sys.version, shared, _torch(), *packages]).encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == key:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "shared.pth").write_text(f"{shared}\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={_torch()}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    for package in packages:
        alone = ["--no-deps"] if package.split(">")[0].split("=")[0] in ALONE else []
        subprocess.run([*pip, *alone, package], check=True)
    stamp.write_text(key)
    return python


def _torch() -> str:
    return importlib.metadata.version("torch")


__all__ = ["ROOT", "environment"]
