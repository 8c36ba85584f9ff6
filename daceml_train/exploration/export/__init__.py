"""Sessions and graphs as HTML pages that need nothing else."""

from typing import Any

from daceml_train import renamed


def __getattr__(name: str) -> Any:
    """What the module of this name held before it became a package."""
    return renamed.moved(__name__, name)
