"""A session: states, matches, steps, history, measurement, verification. No browser is needed."""

from typing import Any

from daceml_train import renamed


def __getattr__(name: str) -> Any:
    """What the module of this name held before it became a package."""
    return renamed.moved(__name__, name)
