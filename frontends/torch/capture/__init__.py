"""From a module's call to an operator graph: Dynamo's graph, the pre-pass, the trace."""

from typing import Any

from daceml_train import renamed


def __getattr__(name: str) -> Any:
    """What the module of this name held before it became a package."""
    return renamed.moved(__name__, name)
