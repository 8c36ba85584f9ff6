"""The widget on a page of its own, without a notebook: its scripts, and a session that answers in this process."""

from __future__ import annotations

import base64
import json
from typing import Any

import daceml_train as dt
from daceml_train.exploration.widget import explorer
from daceml_train.exploration.widget.requests import Requests

ADDRESS = "http://widget.test/"
"""Nobody serves it: the page is filled in."""

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>widget</title></head>
<body data-jp-theme-light="true"><main id="place"></main></body></html>"""

SCRIPT = """
window.model = {
  values: { state: {}, height: 620 }, listeners: {},
  get(name) { return this.values[name]; },
  on(name, call) { (this.listeners[name] ??= []).push(call); },
  off(name, call) { this.listeners[name] = (this.listeners[name] ?? []).filter((one) => one !== call); },
  emit(name, ...what) { for (const call of [...(this.listeners[name] ?? [])]) call(...what); },
  take(sent) {
    for (const [kind, what, buffers] of sent) {
      if (kind === 'state') { this.values.state = what; this.emit('change:state'); continue; }
      const bytes = buffers.map((text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer));
      this.emit('msg:custom', what, bytes);
    }
  },
  send(request) { window.kernel(JSON.stringify(request)).then((text) => this.take(JSON.parse(text))); },
};
"""


class Bare:
    """A session's widget on `page`. What it asks is answered at once."""

    def __init__(self, page: Any, session: dt.Session) -> None:
        self.page = page
        self._sent: list[tuple[str, Any, list[str]]] = []
        self.requests = Requests(session, self._send, lambda state: self._sent.append(("state", state, [])))
        page.route(f"{ADDRESS}**", lambda route: route.fulfill(body=PAGE, content_type="text/html"))
        page.goto(ADDRESS)  # DaCe's viewer asks for the address of its page
        page.expose_function("kernel", self._kernel)
        page.add_style_tag(content=explorer.Explorer._css)
        page.evaluate(SCRIPT)
        self.requests.show()
        page.evaluate("sent => model.take(sent)", self._taken())
        source = explorer.Explorer._esm.replace("export default", "window.widget =")
        page.add_script_tag(content=f"(() => {{{source}}})()")
        page.evaluate("widget.render({ model, el: document.getElementById('place') })")
        page.wait_for_selector(".daceml-explore[data-drawn]")
        self.widget = page.locator(".daceml-explore")

    def theme(self, light: bool) -> None:
        """Switch between the light and the dark theme, as JupyterLab does."""
        self.widget.evaluate(
            "(root, light) => { document.body.dataset.jpThemeLight = light; root.desk.theme(); }", str(light).lower()
        )

    def settled(self) -> None:
        """Wait until every request is answered."""
        self.page.wait_for_function("() => !document.querySelector('.daceml-explore').classList.contains('busy')")

    def _send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        self._sent.append(("message", message, [base64.b64encode(one).decode() for one in buffers]))

    def _taken(self) -> list[tuple[str, Any, list[str]]]:
        sent, self._sent = self._sent, []
        return sent

    def _kernel(self, text: str) -> str:
        self.requests.handle(json.loads(text))
        return json.dumps(self._taken())
