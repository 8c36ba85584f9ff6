"""Exploration: transform a training graph by hand, one match at a time, and keep what is worth keeping.

The package does not have the name of the public function `daceml_train.explore`: a submodule of that name would shadow
it. `session` is all of it that works without a browser; see there.
"""

import importlib
from typing import TYPE_CHECKING, Any

from daceml_train.exploration.export.page import show_graphs

if TYPE_CHECKING:
    from daceml_train.exploration.session.session import Replay, Session, compare, replay
    from daceml_train.exploration.session.steps import Match, Preview, Step

__all__ = ["Match", "Preview", "Replay", "Session", "Step", "compare", "replay"]


def __getattr__(name: str) -> Any:
    """Import sessions on demand, so that a widget is on the screen before all of the compiler is loaded."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "steps" if name in ("Match", "Preview", "Step") else "session"
    return getattr(importlib.import_module(f"{__name__}.session.{home}"), name)


show_graphs()
