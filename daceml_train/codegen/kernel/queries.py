"""DaCe's queries about an SDFG that no longer changes, each computed once.

While DaCe generates code, it asks again and again which symbols and arrays an SDFG and its parts use. Each answer walks
the whole SDFG.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dace.sdfg import SDFG
from dace.sdfg.nodes import memoize_nested_used_symbols
from dace.sdfg.state import ControlGraphView, DataflowGraphView

_Answers = dict[Any, Any]
_answers: contextvars.ContextVar[_Answers | None] = contextvars.ContextVar("answers", default=None)


@contextmanager
def computed_once() -> Iterator[None]:
    """Within this context, DaCe computes used symbols and sets of arrays once per SDFG, region, and state.

    SDFGs must not change in it.
    """
    token = _answers.set({})
    try:
        with memoize_nested_used_symbols():
            yield
    finally:
        _answers.reset(token)


def _remember(cls: Any, name: str) -> None:
    """Make a method that returns sets of names look its result up; outside of the context it is as it was."""
    method: Callable[..., Any] = getattr(cls, name)

    @functools.wraps(method)
    def answer(self: Any, *args: Any, **options: Any) -> Any:
        answers = _answers.get()
        if answers is None:
            return method(self, *args, **options)
        question = (name, self, args, tuple(sorted(options.items())))
        if question not in answers:
            answers[question] = method(self, *args, **options)
        found = answers[question]  # callers add to what they get
        return tuple(map(set, found)) if isinstance(found, tuple) else set(found)

    setattr(cls, name, answer)


_remember(ControlGraphView, "used_symbols")
_remember(DataflowGraphView, "used_symbols")
_remember(SDFG, "read_and_write_sets")
