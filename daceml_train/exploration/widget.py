"""explore: a session in a notebook. The widget is a thin view over `Session`; what it does is in `widget_requests`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from daceml_train.errors import Invalid
from daceml_train.exploration.session import Session
from daceml_train.exploration.widget_requests import Requests

try:
    import anywidget
    import traitlets
except ImportError as _error:
    raise Invalid(f"the widget needs a package: {_error}", advice="pip install 'daceml_train[notebook]'") from None

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("text.js", "viewer.js", "channel.js", "outline.js", "matches.js", "panels.js", "main.js")


class Explorer(anywidget.AnyWidget):
    """What `explore` returns: the session's graph, its matches and its history, to look at and to click.

    `session` is the session; what is done to it in a cell is shown after `refresh()`.
    """

    _esm = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    _css = (_STATIC / "widget.css").read_text(encoding="utf-8")
    state = traitlets.Dict().tag(sync=True)
    height = traitlets.Int(620).tag(sync=True)

    def __init__(self, session: Session, height: int = 620, threads: bool = True) -> None:
        super().__init__(height=height)
        self.session = session
        self.requests = Requests(session, self.send, self._publish, threads)
        self.requests.show()
        self.on_msg(lambda _, content, buffers: self.requests.handle(content, buffers))

    def _publish(self, state: dict[str, Any]) -> None:
        self.state = state

    def refresh(self) -> None:
        """Show what was done to the session elsewhere."""
        self.requests.show()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a page without scripts for where no widget is to be had."""
        made = super()._repr_mimebundle_(**options)
        bundle = made[0] if isinstance(made, tuple) else made
        if bundle is not None:
            bundle["text/html"] = self.session._repr_html_()
        return made


def explore(model: torch.nn.Module | Session, *inputs: Any, height: int = 620, **options: Any) -> Explorer:
    """A widget for a session of `model`: its training graph, what could be done to it, and what that saves.

    `model` is a module, with inputs and options as `Session` takes them (`loss`, `optimizer`, `pipeline`), or a
    `Session` that is there already. Raises `Invalid` where the packages of a notebook are missing.
    """
    if isinstance(model, Session):
        if inputs or options:
            raise Invalid("a session has its model and inputs already", advice="explore(session)")
        return Explorer(model, height)
    return Explorer(Session(model, *inputs, **options), height)
