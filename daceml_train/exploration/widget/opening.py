"""Opening: what a widget shows and answers while its model is captured, which takes seconds for a large model.

The capture runs in the widget's thread, so that the page can draw the model's modules and load the viewer in the
meantime. It begins when the widget is shown or the session is requested. A notebook's next cell waits for it: no user
code runs during a capture.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from daceml_train.errors import DacemlError, Invalid, message_of
from daceml_train.exploration.views.modules import Modules
from daceml_train.exploration.widget.viewer import viewer_source
from daceml_train.exploration.widget.work import Cancelled, Publish, Send, Work

if TYPE_CHECKING:
    from daceml_train.exploration.session.session import Session

CAPTURING = "capturing the training graph"


class Opening:
    """The capture of a model. `done(session, opened)` takes its result, with the keys that a person opened."""

    def __init__(
        self,
        model: torch.nn.Module,
        capture: Callable[[], Session],
        send: Send,
        publish: Publish,
        done: Callable[[Session, list[str]], None],
        work: Work,
    ) -> None:
        self.model, self.work = model, work
        self._make, self._send, self._publish, self._done = capture, send, publish, done
        self._modules = Modules(model)
        self._lock = threading.RLock()
        self._begun, self._over = False, False
        self._ended = threading.Event()
        self._session: Session | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Start the capture, unless it has begun."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
        shell = notebook()
        if shell is not None:
            shell.events.register("pre_run_cell", self._hold)
        self.work.another().put(build_executor, "building the executor")
        self.work.put(self._capture, "capturing")

    def session(self) -> Session:
        """Wait for the session. Raises the error of the capture."""
        self.begin()
        self._ended.wait()
        if self._session is None:
            raise self._error or Invalid("the capture was cancelled", advice="call explore once more")
        return self._session

    def _capture(self) -> None:
        try:
            session = self._make()
            with self._lock:
                self._over = True  # no state of this class is shown any more
            self._done(session, self._modules.touched)
            self._session = session
        except Cancelled:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
            shell = notebook()
            if shell is not None and self._hold in shell.events.callbacks["pre_run_cell"]:
                shell.events.unregister("pre_run_cell", self._hold)
            if self._session is None:
                self._over = False
                self.show()

    def _hold(self, *_: object) -> None:
        """Let a cell wait. An interruption cancels the capture, and the cell runs."""
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            self.work.cancel()
            self._ended.wait()

    # ---- what is shown --------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """The modules, in the shape of the state that follows."""
        failed = ""
        if self._ended.is_set() and self._session is None:
            failed = (
                message_of(self._error) if self._error is not None else "the capture was cancelled; run the cell again"
            )
        rows = self._modules.rows()
        empty = {
            "boxes": [],
            "ends": [],
            "edges": [],
            "open": list(self._modules.open),
            "outline": rows,
            "bytes": rows[0]["bytes"],
        }
        return {
            "version": -1,
            "name": type(self.model).__name__,
            "totals": {},
            "sdfg": None,
            "view": empty,
            "history": [],
            "at": 0,
            "passes": [],
            "kept": [],
            "timeline": [],
            "notes": {},
            "matches": [],
            "found": 0,
            "listing": not failed,
            "filter": {},
            "opening": "" if failed else CAPTURING,
            "failed": failed,
        }

    def show(self) -> None:
        """Publish the state, unless the session has published its own."""
        with self._lock:
            if not self._over:
                self._publish(self.state())

    def handle(self, request: Mapping[str, Any], buffers: object = None) -> Mapping[str, Any] | None:
        """Answer requests that need no graph. Returns a request that has to wait for the graph."""
        kind, number = str(request.get("type")), request.get("id")
        answer: dict[str, Any] = {"type": "answer", "id": number}
        given: list[bytes] = []
        if kind == "cancel":
            self.work.cancel()
        elif kind == "viewer":
            given = [viewer_source()]
        elif kind in ("open", "close"):
            key = str(request.get("key"))
            (self._modules.opening if kind == "open" else self._modules.closing)(key)
            self.show()
        elif kind == "details" and (told := self._modules.details(str(request.get("key")))) is not None:
            answer["details"] = told
        elif kind not in ("filter", "refresh"):
            if self._ended.is_set():
                self._send({**answer, "error": str(self.state()["failed"])}, [])
                return None
            self._send({"type": "begun", "id": number}, [])
            return request
        self._send(answer, given)
        return None


def build_executor() -> None:
    """Compile the native executor, which `Verify` and `Measure` need, where there is none yet: some ten seconds.

    What needs it tells why it cannot be built.
    """
    from daceml_train.runtime.native_build import executor  # after the first picture

    with contextlib.suppress(DacemlError, OSError):
        executor()


def notebook() -> Any:
    """The shell of the notebook's kernel, or None."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if getattr(shell, "kernel", None) is not None else None


def plain() -> bool:
    """Whether the calling thread has no mode that a capture in another thread would miss."""
    return not (
        torch.overrides._get_current_function_mode_stack()
        or torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch.is_inference_mode_enabled()
        or not torch.is_grad_enabled()
    )
