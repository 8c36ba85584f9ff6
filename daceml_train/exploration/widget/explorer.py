"""explore: a session in a notebook. The widget is a thin view of `Session`; `widget.requests` has its actions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from daceml_train.errors import Invalid
from daceml_train.exploration.export.page import modules_html
from daceml_train.exploration.widget.opening import Opening, notebook, plain
from daceml_train.exploration.widget.work import Work

if TYPE_CHECKING:
    from daceml_train.exploration.session.session import Session
    from daceml_train.exploration.widget.requests import Requests

try:
    import anywidget
    import traitlets
except ImportError as _error:
    raise Invalid(f"the widget needs a package: {_error}", advice="pip install 'daceml_train[notebook]'") from None

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("text.js", "viewer.js", "channel.js", "outline.js", "matches.js", "timeline.js", "panels.js", "main.js")


class Explorer(anywidget.AnyWidget):
    """The result of `explore`: the session's graph, its matches and its history, to view and to click.

    Changes that a cell makes to its session are shown after `refresh()`.
    """

    _esm = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    _css = (_STATIC / "widget.css").read_text(encoding="utf-8")
    state = traitlets.Dict().tag(sync=True)
    height = traitlets.Int(620).tag(sync=True)

    def __init__(
        self, model: Session | torch.nn.Module, capture: Callable[[], Session] | None = None, height: int = 620
    ) -> None:
        super().__init__(height=height)
        self.work = Work()
        self.requests: Requests | None = None
        self.opening: Opening | None = None
        if not isinstance(model, torch.nn.Module):
            self._ready(model)
        else:
            assert capture is not None
            self.opening = Opening(model, capture, self.send, self._publish, self._ready, self.work)
            self.opening.show()
        self.on_msg(lambda _, content, buffers: self._handle(content, buffers))

    @property
    def session(self) -> Session:
        """The session; waits for a capture in progress and raises its error."""
        if self.requests is None:
            assert self.opening is not None
            return self.opening.session()
        return self.requests.session

    def _ready(self, session: Session, opened: Iterable[str] = ()) -> None:
        from daceml_train.exploration.widget.requests import Requests  # all of the compiler: after the first picture

        self.requests = Requests(session, self.send, self._publish, self.work, opened)
        self.requests.show()

    def _handle(self, request: Mapping[str, Any], buffers: object) -> None:
        if self.requests is not None:
            self.requests.handle(request, buffers)
        elif self.opening is not None and (waiting := self.opening.handle(request, buffers)) is not None:
            self.work.put(functools.partial(self._handle, waiting, buffers), str(waiting.get("type")))

    def _publish(self, state: dict[str, Any]) -> None:
        self.state = state

    def refresh(self) -> None:
        """Show changes that were made to the session elsewhere."""
        if self.requests is not None:
            self.requests.show()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a page without scripts for viewers without widgets."""
        results = super()._repr_mimebundle_(**options)
        bundle = results[0] if isinstance(results, tuple) else results
        if bundle is not None and self.requests is not None:
            bundle["text/html"] = self.requests.session._repr_html_()
        elif bundle is not None and self.opening is not None:
            bundle["text/html"] = modules_html(self.opening.model)
            self.opening.begin()
        return results


def explore(model: torch.nn.Module | Session, *inputs: Any, height: int = 620, **options: Any) -> Explorer:
    """A widget for a session of `model`: its training graph, possible transformations, and their savings.

    `model` is a module, with inputs and options as `Session` takes them (`loss`, `optimizer`, `pipeline`), or an
    existing `Session`. In a notebook the model is captured when the widget is shown or its `session` is requested;
    elsewhere, and if autocast or another mode of PyTorch is on, at once. Raises `Invalid` if the packages for notebooks
    are missing.
    """
    capture = functools.partial(_session, model, inputs, options)
    if isinstance(model, torch.nn.Module) and notebook() is not None and plain():
        return Explorer(model, capture, height)
    return Explorer(capture(), height=height)


def _session(model: torch.nn.Module | Session, inputs: tuple[Any, ...], options: dict[str, Any]) -> Session:
    from daceml_train.exploration.session.session import Session

    if not isinstance(model, Session):
        return Session(model, *inputs, **options)
    if inputs or options:
        raise Invalid("a session already has its model and inputs", advice="explore(session)")
    return model
