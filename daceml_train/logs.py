"""What happens while models compile, through Python's `logging`: `DACEML_TRAIN_LOG=breaks,passes` or a logger's level.

Each kind of event has a logger, `daceml_train.breaks` and so on; an event is one line and names the user's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import warnings
from pathlib import Path

from daceml_train.errors import Invalid, nearest

VARIABLE = "DACEML_TRAIN_LOG"
_PARENT = "daceml_train"

BREAKS = logging.getLogger(f"{_PARENT}.breaks")
"""What runs as PyTorch runs it, and why."""
RECOMPILES = logging.getLogger(f"{_PARENT}.recompiles")
"""What is compiled or bound once more, and what changed."""
GUARDS = logging.getLogger(f"{_PARENT}.guards")
"""What each call compares before a program runs."""
PASSES = logging.getLogger(f"{_PARENT}.passes")
"""What each pass did: matches, operators, bytes, and the lines that it changed."""
KERNELS = logging.getLogger(f"{_PARENT}.kernels")
"""Each kernel, what it computes, and whether it was compiled."""

LOGGERS = {logger.name.rpartition(".")[2]: logger for logger in (BREAKS, RECOMPILES, GUARDS, PASSES, KERNELS)}
_installed: list[str] = [""]


def install() -> None:
    """Let the loggers speak that `$DACEML_TRAIN_LOG` names: on stderr, unless the program has set logging up.

    Raises `Invalid` for a name that no logger has.
    """
    given = os.environ.get(VARIABLE, "")
    if given == _installed[0]:
        return
    names = [name for part in given.split(",") if (name := part.strip())]
    for name in names:
        if name != "all" and name not in LOGGERS:
            close = nearest(name, (*LOGGERS, "all"))
            advice = f"there are {', '.join(LOGGERS)}, and all"
            raise Invalid(f"${VARIABLE} names no log {name!r}{close}", advice=advice)
    _installed[0] = given
    parent = logging.getLogger(_PARENT)
    if names and not parent.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        parent.addHandler(handler)
    for name, logger in LOGGERS.items():
        if name in names or "all" in names:
            logger.disabled = False  # by whoever configured logging since
            logger.setLevel(logging.INFO)


def speaks(logger: logging.Logger) -> bool:
    """Whether somebody listens: what has to be computed for a line is computed for a listener only."""
    return logger.isEnabledFor(logging.INFO)


def event(logger: logging.Logger, text: str) -> None:
    """Say one line."""
    logger.info("%s", " ".join(text.split()))


def warn(message: str) -> None:
    """Warn at the user's line, the innermost one outside of this package and PyTorch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_inside()) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@functools.cache
def _inside() -> tuple[str, ...]:
    """What the paths of files begin with that are not the user's."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    folders = [f"{Path(origin).parent}{os.sep}" for origin in (__file__, torch.origin)]
    return *folders, contextlib.__file__, functools.__file__, "<eval_with_key>", "<string>"
