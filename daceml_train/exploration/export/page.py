"""A session or a graph as HTML that needs no kernel, no script and nothing from elsewhere; every text is escaped.

The picture shows the initial view of the modules, the tree all modules with their operators folded. A fragment stays
below 300 kB for graphs of any size: the operators that move the most bytes are listed, the others counted.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from daceml_train.errors import Invalid
from daceml_train.exploration.export.picture import picture
from daceml_train.exploration.views.modules import parameter_bytes
from daceml_train.exploration.views.saved import crossings
from daceml_train.exploration.views.tree import Item
from daceml_train.exploration.views.view import GraphView, view_of
from daceml_train.graph.graph import Graph
from daceml_train.reporting.numbers import bytes_text, counted, flops_text, percent, share
from daceml_train.storage.named_by_user import write_text

if TYPE_CHECKING:
    import torch

    from daceml_train.exploration.session.history import History

OPERATORS = 900
"""The maximum number of listed operators, those that move the most bytes."""
ROWS = 30
NAME = 80
"""The maximum number of characters of a text."""

STYLE = """
.daceml-graph{--ink:#1d2327;--soft:#5b656d;--line:#d9dee2;--paper:#fff;--card:#f6f8f9;--blue:#0072b2;--orange:#d98200;
--green:#009e73;--gain:#0a7d32;--loss:#b3261e;color:var(--ink);background:var(--paper);
font:13px/1.5 system-ui,sans-serif;max-width:980px;padding:8px}
.daceml-graph h1{font-size:20px;margin:0 0 4px}.daceml-graph h2{font-size:15px;margin:20px 0 6px}
.daceml-graph p{margin:3px 0;color:var(--soft)}.daceml-graph .cards{display:flex;flex-wrap:wrap;gap:8px;margin:10px 0}
.daceml-graph .cards div{background:var(--card);border-radius:6px;padding:6px 12px}
.daceml-graph .cards b{display:block;font-size:17px;font-variant-numeric:tabular-nums}
.daceml-graph table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;background:none}
.daceml-graph tr,.daceml-graph td{background:none}.daceml-graph th,.daceml-graph td{text-align:right;padding:2px 8px;
border-bottom:1px solid var(--line)}.daceml-graph th{color:var(--soft);font-weight:600}
.daceml-graph th:first-child,.daceml-graph td:first-child{text-align:left;overflow-wrap:anywhere}
.daceml-graph summary{cursor:pointer;padding:1px 0}.daceml-graph summary:hover{background:var(--card)}
.daceml-graph details{margin-left:14px}.daceml-graph .o{margin-left:30px}.daceml-graph .n{color:var(--soft);float:right;
font-variant-numeric:tabular-nums}.daceml-graph .s{color:var(--soft)}
.daceml-graph .gain{color:var(--gain)}.daceml-graph .loss{color:var(--loss)}
.daceml-graph .scroll{overflow:auto;max-height:640px;border:1px solid var(--line);border-radius:6px}
.daceml-graph svg{display:block;font:11px system-ui,sans-serif}.daceml-graph svg text{fill:var(--ink)}
.daceml-graph svg path{fill:none;stroke:var(--soft);opacity:.6}
.daceml-graph svg rect{fill:var(--card);stroke:var(--line)}
.daceml-graph svg .forward{fill:color-mix(in srgb,var(--blue) 22%,var(--paper));stroke:var(--blue)}
.daceml-graph svg .backward{fill:color-mix(in srgb,var(--orange) 22%,var(--paper));stroke:var(--orange)}
.daceml-graph svg .update{fill:color-mix(in srgb,var(--green) 22%,var(--paper));stroke:var(--green)}
@media (prefers-color-scheme:dark){.daceml-graph{--ink:#e4e8eb;--soft:#9aa5ad;--line:#3a434a;--paper:#171b1e;
--card:#1f262a;--blue:#4ba7dd;--orange:#f0a52e;--green:#3ecfa6;--gain:#5fd38a;--loss:#ff8a80}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def export_html(session: History, path: Path | str) -> Path:
    """Write a session as one page. Returns its path."""
    if not hasattr(session, "subject"):
        raise Invalid(f"export_html takes a session, given {type(session).__name__}", advice="dt.Session(model, x)")
    title = escape(session.subject.name)
    dark = "<style>@media (prefers-color-scheme:dark){body{background:#171b1e}}</style>"
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">{dark}'
        f"</head><body>{session_html(session)}</body></html>\n"
    )
    return write_text(path, text, "the page")


def session_html(session: History) -> str:
    """A session for a notebook or a page: totals, history, picture, tree, saved arrays."""
    results = None if session.subject.kind == "module" else 1
    view = view_of(session.graph, {}, None, results, session.state.traffic)
    return _wrapped("".join(_session_parts(session, view, results)))


def modules_html(model: torch.nn.Module) -> str:
    """A model that is not captured: its modules, and the bytes of their parameters."""
    rows = [
        (escape(_short(path or type(model).__name__)), escape(type(module).__name__), bytes_text(size))
        for path, module in itertools.islice(model.named_modules(), OPERATORS)
        if (size := parameter_bytes(module)) or not path
    ]
    return _wrapped(f"<h1>{escape(type(model).__name__)}</h1>{_table(('module', 'type', 'parameters'), rows)}")


def graph_html(graph: Graph, sizes: Mapping[str, int] | None = None) -> str:
    """A graph alone."""
    view = view_of(graph, sizes)
    head = f"<h1>{escape(_short(graph.name))}</h1>{_cards(_graph_cards(view))}"
    return _wrapped(head + "".join(_graph_parts(view)))


def _wrapped(inside: str) -> str:
    return f'<style>{STYLE}</style><div class="daceml-graph">{inside}</div>'


def _session_parts(session: History, view: GraphView, results: int | None) -> Iterator[str]:
    now, start = session.state, session.start
    yield f"<h1>{escape(_short(session.subject.name))}</h1>"
    saved = share(start.bytes, now.bytes)
    cards = [("moved", bytes_text(now.bytes)), ("at the start", bytes_text(start.bytes)), ("saved", percent(saved))]
    cards += [("peak memory", bytes_text(now.peak)), ("at the start", bytes_text(start.peak))]
    yield _cards([*cards, ("arithmetic", flops_text(now.flops)), ("operators", str(len(now.graph.nodes)))])
    if session.history:
        yield "<h2>History</h2>"
        rows = []
        for step in session.history[-ROWS:]:
            before, after = step.bytes
            kind = "gain" if after < before else "loss" if after > before else "s"
            place = f'<br><span class="s">{escape(_short(step.where))}</span>' if step.where else ""
            change = f'<span class="{kind}">{"+" if after > before else ""}{bytes_text(after - before)}</span>'
            rows.append(
                (f"{step.number}. {escape(_short(str(step.transformation)))}{place}", change, bytes_text(after))
            )
        yield _table(("step", "bytes", "moved after it"), rows)
        if len(session.history) > ROWS:
            yield f"<p>the last {ROWS} of {len(session.history)} steps</p>"
    yield from _graph_parts(view)
    kept = [c for c in crossings(session.graph, {}, results) if not c.rematerialized]
    if kept:
        yield "<h2>What gradients read</h2>"
        yield f"<p>{counted(len(kept), 'array')} of the forward pass, {bytes_text(sum(c.bytes for c in kept))}</p>"
        rows = [
            (
                f'{escape(_short(f"{c.module} {c.producer}".strip()))} <span class="s">{escape(_short(c.type))}</span>',
                escape(_short("; ".join(c.gradients))),
                bytes_text(c.bytes),
            )
            for c in kept[:ROWS]
        ]
        yield _table(("produced by", "read by", "bytes"), rows)


def _graph_cards(view: GraphView) -> list[tuple[str, str]]:
    root = view.tree.root
    return [
        ("moved", bytes_text(root.bytes)),
        ("arithmetic", flops_text(root.flops)),
        ("operators", str(len(view.tree.graph.nodes))),
    ]


def _graph_parts(view: GraphView) -> Iterator[str]:
    yield f'<h2>Picture</h2><div class="scroll" tabindex="0" role="region" aria-label="picture">{picture(view)}</div>'
    yield "<h2>Modules and operators</h2>"
    items = sorted(view.tree.of_node.values(), key=lambda i: -i.bytes)
    shown = {item.key for item in items[:OPERATORS]}
    if len(items) > OPERATORS:
        yield f"<p>of {len(items)} operators, the {OPERATORS} that move the most bytes are listed</p>"
    yield from (part for child in view.tree.root.children for part in _tree(child, shown))


def _tree(item: Item, shown: set[str]) -> Iterator[str]:
    label = f'{escape(_short(item.label))}<span class="n">{bytes_text(item.bytes)}</span>'
    if item.kind == "operator":
        if item.key in shown:
            yield f'<div class="o">{label}</div>'
        return
    yield f'<details><summary>{label} <span class="s">{counted(len(item.nodes), "operator")}</span></summary>'
    for child in item.children:
        yield from _tree(child, shown)
    left = sum(child.kind == "operator" and child.key not in shown for child in item.children)
    if left:
        yield f'<div class="o s">and {left} more</div>'
    yield "</details>"


def _cards(cards: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(label)}</div>" for label, value in cards if value)
    return f'<div class="cards">{cells}</div>'


def _table(heading: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    """A table; headings are escaped here, cells are HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _short(text: str) -> str:
    return text if len(text) <= NAME else f"{text[: NAME - 1]}…"


def show_graphs() -> None:
    """Let notebooks show graphs as `graph_html` does; without a notebook nothing happens."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.display_formatter is not None:
        shell.display_formatter.formatters["text/html"].for_type(Graph, graph_html)
