"""Exploration: transform a training graph by hand, one match at a time, and keep what is worth keeping.

The package is not called like the public function `daceml_train.explore`: a submodule of that name would hide it.
`session` is all there is to it without a browser; see there.
"""

from daceml_train.exploration.export import show_graphs
from daceml_train.exploration.session import Replay, Session, compare, replay
from daceml_train.exploration.steps import Match, Preview, Step

__all__ = ["Match", "Preview", "Replay", "Session", "Step", "compare", "replay"]

show_graphs()
