"""The widget of a notebook: requests, long work, data, and the page's scripts."""

from typing import Any

from daceml_train import renamed


def __getattr__(name: str) -> Any:
    """What the module of this name held before it became a package."""
    return renamed.moved(__name__, name)
