"""Files that a user names: a path that is none, or that cannot be written, is the user's to correct."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid


def path_of(given: Any, what: str) -> Path:
    """The path that a user gave for `what`. Raises `Invalid` for anything else, an empty text, a `~` of nobody."""
    if not isinstance(given, str | os.PathLike) or isinstance(os.fspath(given), bytes) or not os.fspath(given):
        raise Invalid(f"{what} is a path, given {given!r}")
    path = Path(given)
    try:
        return path.expanduser() if path.parts[:1] and path.parts[0].startswith("~") else path
    except RuntimeError:
        raise Invalid(f"{what} is {given}, and {path.parts[0]} has no home folder", advice="name it in full") from None


def file_of(given: Any, what: str) -> Path:
    """The path of a file to write. Raises `Invalid` for a folder."""
    path = path_of(given, what)
    if path.is_dir():
        raise Invalid(f"{path} is a folder, and {what} is a file")
    return path


def write_text(given: Any, text: str, what: str) -> Path:
    """Write a file, and return its path. Raises `Invalid` where that is not possible."""
    path = file_of(given, what)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invalid(f"{what} cannot be written: {error}") from None
    return path
