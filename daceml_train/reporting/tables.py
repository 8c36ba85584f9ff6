"""Tables of a page, and the script that sorts and filters them; without the script they are plain tables."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROWS = 20
"""The rows that are shown at first; a filter, or a button, shows the others."""
MOST = 300
"""The maximum number of rows of a table; the JSON has them all."""

SCRIPT = (Path(__file__).parent / "static" / "tables.js").read_text(encoding="utf-8").replace("ROWS", str(ROWS))
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
PLAIN = "default-src 'none'; style-src 'unsafe-inline'"
"""The policy of a page without scripts."""
POLICY = f"{PLAIN}; script-src 'sha256-{_HASH}'"
"""The policy of a page: no other script than this one runs, and nothing is loaded."""

STYLE = """
.daceml-report th button{font:inherit;font-weight:600;color:inherit;background:none;border:0;padding:0;cursor:pointer}
.daceml-report th[aria-sort=ascending] button::after{content:" \\2191"}
.daceml-report th[aria-sort=descending] button::after{content:" \\2193"}
.daceml-report input[type=search],.daceml-report p button{font:inherit;color:var(--ink);background:var(--card);
border:1px solid var(--soft);border-radius:4px;padding:1px 6px}
"""


def table(heading: Sequence[str], rows: Sequence[tuple[str, ...]], sortable: bool = True) -> str:
    """A table; headings are escaped here, cells are HTML. Rows after the first `ROWS` are hidden until asked for.

    A table whose rows stand in an order of their own, such as the passes, is not `sortable`, and shows all of them.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    shown = rows[:MOST] if sortable else rows
    body = "".join(
        f"<tr{' hidden' if sortable and place >= ROWS else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for place, row in enumerate(shown)
    )
    kind = ' class="sortable"' if sortable and len(rows) > 1 else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{_more(len(rows), sortable)}"


def _more(count: int, sortable: bool) -> str:
    """What a reader without scripts is told about the other rows; above `MOST`, everybody."""
    if not sortable or count <= ROWS:
        return ""
    rest = f"<p>{count - MOST} more are in the JSON</p>" if count > MOST else ""
    return f'<p class="more-rows">and {count - ROWS} more</p>{rest}'
